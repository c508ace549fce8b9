"""The sink of `format("dmq")`: rows of a DataFrame or a stream become messages.

Spark makes a writer in the driver, where options and columns are checked before anything is sent, and calls its `write`
once for each partition on the executors. `write_rows` is what a task does, without Spark. The rows of a partition are
stored when `write` returns, so that nothing is left for `commit`.

What always holds: when `write_rows` returns, every row is stored as its durability says; rows that an earlier attempt
has stored are not stored again if they come in the same order; no row is left out. A stream writes under the id of its
query, which its checkpoint keeps, or under `dmq.producer.id`, and numbers its rows by micro-batch; a batch write does
so under `dmq.producer.id`, or an id of its own for this one write. So a task, a micro-batch or a job that is repeated
with the same rows in the same order stores none of them twice. A column that is not known, or of a type that cannot be
sent, is an error that names it and says what to do.

Resuming a write: what of a partition's rows a queue has from an attempt before.

For each place (a queue of a topic) a partition has a producer id of its own, made of its name, and numbers the rows
that go there. The broker knows the last number, so an attempt that begins again skips as many rows. It may do so only
if they are the same rows. The last record of each batch carries a mark, a `Digest` of all rows of the place until then;
rows that would be skipped are held until it has been compared. If it differs they are sent after all, under another
producer id: then some rows are there twice, and none is missing.

What always holds: a row is skipped only if the same row is stored; a place's numbers rise, and have no gaps within a
micro-batch. The same rows in the same order give the same digest, in however many pieces they come; a row more, less,
other or elsewhere gives another one.
"""

from __future__ import annotations

import hashlib
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import dmq
from dmq.client.client import Client
from dmq.client.producer.numbered_sender import ANSWER_SECONDS, LaneBatch, LaneSender
from dmq.client.producer.routes import Route
from dmq.clock import SystemClock
from dmq.errors import (
    DMQError,
    InvalidMessage,
    InvalidSettings,
    LimitReached,
    MessageTooLarge,
    SequenceConflict,
    TimedOut,
)
from dmq.event_log import EventLog
from dmq.model import DURABILITIES, Durability, MessageId, check_name, place_queue, place_shard
from dmq.pipeline.decode.journal_reader import Patience, server_url
from dmq.pipeline.sink.encoder import Encoder, Place, blocks, divide, runs
from dmq.pipeline.spark_options import (
    ANSWER_OPTION,
    RETRIES_OPTION,
    SERVERS,
    TIMEOUT_OPTION,
    flag,
    known_options,
    patience_option,
    servers,
)
from dmq.protocol import Command, decode_response, pack_batch, unpack_records
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply, ProducerState, ProducerStates, ProducerStatesReply
from dmq.protocol.read import Find
from dmq.records import Compressor, RecordView

__all__ = [
    "BATCH_ROWS_MAX",
    "COLUMNS",
    "BatchWriter",
    "Course",
    "Digest",
    "PartitionWritten",
    "RowsWritten",
    "SinkOptions",
    "StreamWriter",
    "Writer",
    "batch_writer",
    "check_columns",
    "courses",
    "producer_id",
    "sink_options",
    "stream_writer",
    "write_rows",
]

_NAMES: Final = (
    SERVERS, "topic", "durability", "ordered", "app", "compression", "dmq.producer.id", TIMEOUT_OPTION,
    ANSWER_OPTION, RETRIES_OPTION,
)  # fmt: skip
# What Spark itself leaves among the options of a writer.
_OF_SPARK: Final = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})
PATIENCE: Final = Patience(120.0, ANSWER_SECONDS)
_DURABILITIES: Final = ("stored", "flushed", "replicated")
_COMPRESSIONS: Final = ("auto", "none", "lz4", "zstd")

_TEXT: Final = (types.StringType,)
_BYTES: Final = (types.StringType, types.BinaryType)
_WHOLE: Final = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write."""

    url: str
    topic: str | None = None
    durability: Durability = Durability.FLUSHED
    ordered: bool = False
    app: str = "spark"
    compression: str = "auto"
    producer_id: str | None = None
    patience: Patience = PATIENCE


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read the options.

    Raises:
        InvalidSettings: one is missing, unknown or makes no sense.
        InvalidName: a topic or an app cannot be called so.
    """
    given = known_options(options, _NAMES, _OF_SPARK, "writing to")
    url = server_url(servers(given))
    topic = given.get("topic")
    return SinkOptions(
        url,
        None if topic is None else check_name(topic, "topic"),
        DURABILITIES[_one_of("durability", given.get("durability", "flushed"), _DURABILITIES)],
        flag("ordered", given, default=False),
        app=check_name(given.get("app", "spark"), "app"),
        compression=_one_of("compression", given.get("compression", "auto"), _COMPRESSIONS),
        producer_id=given.get("dmq.producer.id") or None,
        patience=patience_option(given, PATIENCE),
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise InvalidSettings(f"option {name!r} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
    return value.lower()


# --- columns ----------------------------------------------------------------------------------------------------------


def _is(*kinds: type[types.DataType]) -> Callable[[types.DataType], bool]:
    return lambda kind: isinstance(kind, kinds)


def _is_headers(kind: types.DataType) -> bool:
    if isinstance(kind, types.MapType):
        return isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _BYTES)
    if not isinstance(kind, types.ArrayType) or not isinstance(kind.elementType, types.StructType):
        return False
    pair = kind.elementType
    return (
        [name.lower() for name in pair.fieldNames()] == ["key", "value"]
        and isinstance(pair.fields[0].dataType, _TEXT)
        and isinstance(pair.fields[1].dataType, _BYTES)
    )


COLUMNS: Final[dict[str, tuple[Callable[[types.DataType], bool], str]]] = {
    "value": (_is(*_BYTES), "binary or string"),
    "key": (_is(*_BYTES), "string or binary"),
    "topic": (_is(*_TEXT), "string"),
    "partition": (_is(*_WHOLE), "int"),
    "tag": (_is(*_TEXT), "string"),
    "business_id": (_is(*_TEXT), "string"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>> or map<string,string>"),
    "priority": (_is(*_WHOLE), "int"),
    "delay": (_is(*_WHOLE, types.FloatType, types.DoubleType), "double or int, in seconds"),
}


def check_columns(schema: types.StructType, options: SinkOptions) -> None:
    """Whether rows of this schema can be sent.

    Raises:
        InvalidMessage: a column is missing, unknown or of another type.
        InvalidSettings: the rows have no topic.
    """
    names = [name.lower() for name in schema.fieldNames()]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise InvalidMessage(
            f"columns {', '.join(unknown)} cannot be written: select {', '.join(COLUMNS)}, of which only value must be "
            "there"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidMessage(f"columns {', '.join(twice)} occur more than once: leave one of each")
    if "value" not in names:
        raise InvalidMessage("there is no column value, which becomes the body: select one as value")
    for name, field in zip(names, schema.fields, strict=True):
        fits, wanted = COLUMNS[name]
        if not fits(field.dataType):
            raise InvalidMessage(f"column {name} is {field.dataType.simpleString()}: cast it to {wanted}")
    if "topic" not in names and options.topic is None:
        raise InvalidSettings("the rows have no topic: give option 'topic', or a column topic")
    if options.ordered and "business_id" not in names:
        raise InvalidMessage("option 'ordered' needs a column business_id: rows with the same one stay in order")


_HEADER_BYTES: Final = 4096


class RowsWritten(NamedTuple):
    """What became of a partition's rows."""

    rows: int
    skipped: int  # of them, stored by an attempt before


def write_rows(batches: Iterable[pa.RecordBatch], writer: Writer, options: SinkOptions) -> RowsWritten:
    """Write rows, and wait until they are stored.

    Parameters:
        batches: with the columns of `dmq.pipeline.sink.data_writer.COLUMNS`.
        writer: who writes.

    Raises:
        DMQError: not all are stored; an attempt with the same writer goes on from there.
    """
    with dmq.connect(options.url, app=options.app, timeout=options.patience.whole_seconds) as client:
        return _Partition(client, writer, options).write(batches)


class _Broker:
    """`BrokerMemory` over a client, and the routes of topics."""

    def __init__(self, client: Client, patience: Patience) -> None:
        self._router = client._router
        self._patience = patience
        self._routes: dict[str, Route] = {}

    def route(self, topic: str) -> Route:
        route = self._routes.get(topic)
        if route is None and not self._router.is_single:
            route = self._routes[topic] = Route.of_slots(self._router.learn(topic, self._patience.whole_seconds))
        if route is None:
            frame = self._patience.ask(self._router.pool_for(topic), Command.TOPIC_DESCRIBE, TopicDescribe(topic))
            route = self._routes[topic] = Route.of(decode_response(frame).info.config, time.monotonic())
        return route

    def states(self, topic: str, producer_ids: list[int], is_delayed: bool) -> list[ProducerState]:
        asked = ProducerStates(topic, producer_ids, is_delayed)
        found: list[ProducerState] = []
        for pool in self._router.pools_of(topic):  # an id is known to one shard, since it is of one place
            reply: ProducerStatesReply = decode_response(self._patience.ask(pool, Command.PRODUCER_STATES, asked))
            found += reply.producers
        return found

    def mark(self, place: Place, producer_id: int, sequence: int) -> int | None:
        asked = Find(message_id=MessageId(producer_id, sequence).to_bytes(), max_messages=1)
        pool = self._router.pool_for(place.topic, place.queue)
        frame = self._patience.ask(pool, Command.FIND, asked)
        lengths, data = unpack_records(frame.body, len(decode_response(frame).found))
        return RecordView(data, 0, int(lengths[0])).attributes.mark if len(lengths) else None


class _Partition:
    """One call of `write_rows`."""

    def __init__(self, client: Client, writer: Writer, options: SinkOptions) -> None:
        self._client = client
        self._writer = writer
        self._options = options
        self._broker = _Broker(client, options.patience)
        self._sender = LaneSender(
            client._router,
            options.patience.whole_seconds,
            on_stored=_check_new,
            on_late=self._late,
            answer_seconds=options.patience.answer_seconds,
        )
        compressor = None if options.compression == "none" else Compressor(options.compression)  # type: ignore[arg-type]
        self._encoder = Encoder(options.app, options.ordered, compressor)
        self._clock = SystemClock()
        self._courses: dict[Place, Course] = {}

    def write(self, batches: Iterable[pa.RecordBatch]) -> RowsWritten:
        options, count = self._options, 0
        for block in blocks(batches, options.topic, ordered=options.ordered):
            count += block.rows.num_rows
            for place, rows in runs(
                block, self._writer.partition, options.topic, options.ordered, route_of=self._broker.route
            ):
                for numbered in self._course(place).take(rows):
                    self._send(place, numbered)
        for place, course in self._courses.items():
            for numbered in course.ended():
                self._send(place, numbered)
        self._sender.drain()
        return RowsWritten(count, sum(course.skipped for course in self._courses.values()))

    def _course(self, place: Place) -> Course:
        course = self._courses.get(place)
        if course is None:
            queues = [place.queue] if place.is_delayed else self._broker.route(place.topic).all_places
            places = [place._replace(queue=queue) for queue in queues]
            self._courses |= courses(self._writer, places, self._broker)
            course = self._courses[place]
        return course

    def _send(self, place: Place, numbered: NumberedRows) -> None:
        limits = self._client._router.home.connection().limits
        made, dues = self._encoder.encode(
            place, numbered.rows, numbered.mark, self._clock.now_ms(), body_bytes_max=limits.body_bytes_max
        )
        body = pack_batch(made, dues)
        if sum(map(len, body)) + _HEADER_BYTES > limits.frame_bytes_max:
            raise MessageTooLarge(
                f"{made.count} rows for topic {place.topic!r} take more than the {limits.frame_bytes_max} bytes of a "
                "request: send smaller headers, or raise broker.frame_bytes_max"
            )
        flags = (ProduceFlag.NAMED if self._writer.is_named else 0) | (ProduceFlag.DUES if dues else 0)
        header = Produce(
            place.topic, place_queue(place.queue), made.count, len(made.hashes), producer_id=numbered.producer_id,
            producer_epoch=numbered.epoch, first_sequence=numbered.first_sequence,
            durability=self._options.durability, flags=flags,
        )  # fmt: skip
        self._sender.send(header, body, place_shard(place.queue))

    def _late(self, batch: LaneBatch) -> DMQError:
        why = "" if batch.last_error is None else f" ({batch.last_error.message})"
        return TimedOut(
            f"{batch.header.count} rows for topic {batch.header.topic!r} were not stored within "
            f"{self._options.patience.whole_seconds:g} s{why}; raise option 'dmq.timeout' or 'dmq.retries', or look at "
            "the broker"
        )


def _check_new(batch: LaneBatch, reply: ProduceReply) -> None:
    """Refuse what another writer has stored under our numbers, since its rows may be others.

    Raises:
        SequenceConflict: the batch was there before it was sent.
    """
    if reply.is_duplicate and not batch.is_unanswered:
        raise SequenceConflict(
            f"another attempt of the same task writes to topic {batch.header.topic!r} at the same time: this one "
            "stops, and is tried again by Spark"
        )


_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"


@dataclass
class PartitionWritten(WriterCommitMessage):
    """What became of the rows of one partition."""

    rows: int
    skipped: int


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame. Made in the driver, pickled, used once for each partition."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._own_name = f"write {uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        context = _task()
        name = self._options.producer_id
        # Within `foreachBatch` Spark says which micro-batch it is; with a name that lasts, that is worth knowing.
        batch_id = context.getLocalProperty(_BATCH_ID) if name else None
        writer = Writer(
            f"batch {name}" if name else self._own_name, context.partitionId(), _base(batch_id), name is not None
        )
        return PartitionWritten(*write_rows(iterator, writer, self._options))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream. Made in the driver, pickled, used once for each partition of each micro-batch."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        context = _task()
        batch_id, query_id = context.getLocalProperty(_BATCH_ID), context.getLocalProperty(_QUERY_ID)
        name = self._options.producer_id or query_id
        if batch_id is None or name is None:
            raise InvalidSettings("Spark does not say which query this is: give option 'dmq.producer.id'")
        writer = Writer(f"stream {name}", context.partitionId(), _base(batch_id), True)
        return PartitionWritten(*write_rows(iterator, writer, self._options))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is left to do: the rows are stored."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is stored stays, and is skipped when the micro-batch is tried again."""


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> BatchWriter:
    """The writer of `df.write.format("dmq")`.

    Raises:
        InvalidSettings, InvalidName: an option makes no sense.
        InvalidMessage: the columns cannot be sent.
    """
    return BatchWriter(_checked(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> StreamWriter:
    """The writer of `df.writeStream.format("dmq")`. Raises as `batch_writer`."""
    return StreamWriter(_checked(options, schema, overwrite))


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkOptions:
    chosen = sink_options(options)
    if overwrite:
        raise InvalidSettings("a topic cannot be overwritten: use mode('append'), or outputMode('append' or 'update')")
    check_columns(schema, chosen)
    return chosen


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "write runs in a task"
    return context


def _base(batch_id: str | None) -> int:
    return 0 if batch_id is None else int(batch_id) * BATCH_ROWS_MAX


log = EventLog(__name__)


class Digest:
    """Over all rows so far: a CRC for each part of each column, since such a one just goes on with more bytes."""

    def __init__(self) -> None:
        self._crcs: dict[str, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Go on with more rows, of the same columns."""
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            for part, raw in _parts(column):
                key = f"{name} {part}"
                self._crcs[key] = crc32c(raw, self._crcs.get(key, 0))

    @property
    def value(self) -> int:
        """64 bits for all of it."""
        text = b"".join(key.encode() + struct.pack(">I", crc) for key, crc in sorted(self._crcs.items()))
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _parts(column: pa.Array) -> Iterator[tuple[str, Any]]:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
        sizes = np.diff(bounds)
        if column.null_count:
            sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
        yield "sizes", sizes.data
        if data is not None:
            yield "data", memoryview(data)[bounds[0] : bounds[-1]]
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield "data", np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).data
    else:  # headers, which are few where they are
        yield "text", "".join(map(repr, column.to_pylist())).encode(errors="surrogatepass")


BATCH_ROWS_MAX: Final = 1 << 32
"""Rows that a micro-batch may have for one place and partition: the numbers of the next one begin there."""
HELD_BYTES_MAX: Final = 512 << 20
_ASKED_MAX: Final = 1024
_GENERATIONS: Final = 4  # asked for at once: there hardly ever is a second


class Writer(NamedTuple):
    """Who writes: the same again when the same rows come again."""

    name: str
    partition: int
    base: int  # the number of its first row in each place
    is_named: bool  # remembered by the broker for ever


class BrokerMemory(Protocol):
    """What a broker remembers of earlier attempts."""

    def states(self, topic: str, producer_ids: list[int], is_delayed: bool) -> list[ProducerState]: ...

    def mark(self, place: Place, producer_id: int, sequence: int) -> int | None:
        """The mark of a stored message; None if it is gone or has none."""
        ...


class NumberedRows(NamedTuple):
    """Rows to send under these numbers."""

    producer_id: int
    epoch: int
    first_sequence: int
    rows: pa.RecordBatch
    mark: int


def producer_id(writer: Writer, place: Place, generation: int) -> int:
    """The id under which a partition writes to a place; another generation where one could not be gone on with."""
    text = "\0".join(map(str, (writer.name, writer.partition, *place, generation)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1


def courses(writer: Writer, places: list[Place], memory: BrokerMemory) -> dict[Place, Course]:
    """What a partition writes to these places of one topic, with what attempts before have stored.

    Raises:
        UnknownTopic: the topic does not exist.
    """
    newest: dict[Place, tuple[int, ProducerState]] = {}
    left, generation = places, 0
    at_once = max(1, min(_GENERATIONS, _ASKED_MAX // len(places)))
    while left:
        asked = {
            producer_id(writer, place, number): (place, number)
            for number in range(generation, generation + at_once)
            for place in left
        }
        for state in memory.states(places[0].topic, [*asked], places[0].is_delayed):
            place, number = asked[state.producer_id]
            newest[place] = number, state
        generation += at_once
        left = [place for place in left if newest.get(place, (0,))[0] == generation - 1]
    return {place: Course(writer, place, *newest.get(place, (0, None)), memory=memory) for place in places}


class Course:
    """One place as one partition writes to it.

    Parameters:
        generation: of the producer id in use.
        state: what the broker remembers of it.
    """

    def __init__(
        self, writer: Writer, place: Place, generation: int, state: ProducerState | None, *, memory: BrokerMemory
    ) -> None:
        self._writer = writer
        self._place = place
        self._generation = generation
        self._epoch = 0
        self._seen = 0  # rows so far
        self._stored = 0  # rows that are stored, as far as was said
        self._mark: int | None = None  # of them
        self._digest = Digest()
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self.skipped = 0
        if state is not None:
            self._resume(state, memory)

    @property
    def producer_id(self) -> int:
        return producer_id(self._writer, self._place, self._generation)

    def _resume(self, state: ProducerState, memory: BrokerMemory) -> None:
        # Of an anonymous producer, a new epoch would begin with new numbers.
        self._epoch = state.producer_epoch + 1 if self._writer.is_named else state.producer_epoch
        base = self._writer.base
        end = max((row.next_sequence for row in state.queues), default=0)
        if end > base + BATCH_ROWS_MAX:
            self._begin_anew("a later micro-batch was written under this name: was the checkpoint removed?")
        elif end > base:
            self._stored = end - base
            self._mark = memory.mark(self._place, self.producer_id, end - 1)

    def take(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        """More rows for the place: what to send now.

        Raises:
            LimitReached: there are more rows than can be numbered, or held.
        """
        missing = self._stored - self._seen
        if missing > 0:
            before, rows = rows.slice(0, missing), rows.slice(missing)
            yield from self._compare(before)
        if rows.num_rows:
            yield from self._number(rows)

    def ended(self) -> Iterator[NumberedRows]:
        """There are no more rows: what to send after all."""
        if self._seen < self._stored:  # there were more the last time
            yield from self._send_all()

    def _compare(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes > HELD_BYTES_MAX:
            raise LimitReached(
                f"an attempt before stored over {HELD_BYTES_MAX >> 20} MiB of a partition in one queue, which is more "
                "than can be compared with its rows: write more and smaller partitions, or another 'dmq.producer.id'",
                limit=HELD_BYTES_MAX,
            )
        self._digest.add(rows)
        self._seen += rows.num_rows
        if self._seen == self._stored:
            if self._digest.value == self._mark:
                self.skipped = self._stored
                self._held, self._held_bytes = [], 0
            else:
                yield from self._send_all()

    def _send_all(self) -> Iterator[NumberedRows]:
        self._begin_anew("its rows came in another order than before, or are others")
        held, self._held, self._held_bytes = self._held, [], 0
        for rows in held:
            yield from self._number(rows)

    def _begin_anew(self, why: str) -> None:
        log.warning(
            "rows are sent again, and may be there twice",
            reason=why,
            topic=self._place.topic,
            partition=self._writer.partition,
            producer=self._writer.name,
        )
        self._generation += 1
        self._epoch = self._seen = self._stored = 0
        self._digest = Digest()

    def _number(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        if self._seen + rows.num_rows > BATCH_ROWS_MAX:
            raise LimitReached(f"a partition has over {BATCH_ROWS_MAX} rows for one queue: write more partitions")
        for piece in divide(rows):
            self._digest.add(piece)
            first = self._writer.base + self._seen
            self._seen += piece.num_rows
            yield NumberedRows(self.producer_id, self._epoch, first, piece, mark=self._digest.value)
