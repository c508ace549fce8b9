"""The sink of `format("dmq")`: rows of a DataFrame or a stream become messages.

Spark makes a writer in the driver, where options and columns are checked, and calls its `write` once for each partition
on the executors. `write_rows` is what a task does, without Spark. The rows of a partition are stored when `write`
returns, so that nothing is left for `commit`.

What always holds: when `write_rows` returns, every row is stored as its durability says; rows that an earlier attempt
has stored are not stored again if they come in the same order; no row is left out. A stream writes under the id of its
query, which its checkpoint keeps, or under `dmq.producer.id`, and numbers its rows by micro-batch; a batch write does
so under `dmq.producer.id`, or an id of its own for this one write. So a task, a micro-batch or a job that is repeated
with the same rows in the same order stores none of them twice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import dmq
from dmq.client.client import Client
from dmq.client.producer.lane_sender import LaneBatch, LaneSender
from dmq.client.producer.routes import Route
from dmq.clock import SystemClock
from dmq.errors import DMQError, InvalidSettings, MessageTooLarge, SequenceConflict, TimedOut
from dmq.model import MessageId, place_queue, place_shard
from dmq.pipeline.decode.journal_reader import Patience
from dmq.pipeline.sink.encoder import Encoder, Place, runs
from dmq.pipeline.sink.options import SinkOptions, check_columns, sink_options
from dmq.pipeline.sink.resume import BATCH_ROWS_MAX, Course, NumberedRows, Writer, courses
from dmq.pipeline.sink.row_blocks import blocks
from dmq.protocol import Command, decode_response, pack_batch, unpack_records
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply, ProducerState, ProducerStates, ProducerStatesReply
from dmq.protocol.read import Find
from dmq.records import Compressor, RecordView

__all__ = [
    "BatchWriter",
    "PartitionWritten",
    "RowsWritten",
    "StreamWriter",
    "batch_writer",
    "stream_writer",
    "write_rows",
]


_HEADER_BYTES: Final = 4096


class RowsWritten(NamedTuple):
    """What became of a partition's rows."""

    rows: int
    skipped: int  # of them, stored by an attempt before


def write_rows(batches: Iterable[pa.RecordBatch], writer: Writer, options: SinkOptions) -> RowsWritten:
    """Write rows, and wait until they are stored.

    Parameters:
        batches: with the columns of `dmq.pipeline.sink.options.COLUMNS`.
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
