"""`format("dmq")`: topics as tables and streams of Spark, and what a task of a read does.

Spark makes a `DmqDataSource` where it needs one, asks it for a reader or a writer, and pickles those for the executors.
So nothing that is pickled holds a connection. A task fetches a piece and gives it out as Arrow batches (`read_piece`).
Spark keeps the offsets of a stream in its checkpoint, as the JSON of `dmq.pipeline.source.offsets`; the broker keeps
nothing of a stream, so that a commit has nothing to do.

What always holds: options and columns are checked before a broker is asked; a read without matching messages has no
rows, and is not an error. Offsets rise from micro-batch to micro-batch, and are equal when nothing came. Under
Trigger.AvailableNow nothing is read that came after the query began, so that it ends. A queue or topic that appears is
read from its beginning; one that was deleted and created again is an error, or read from its beginning without
`failOnDataLoss`. A loss is noticed before Spark writes the offsets of a batch into its checkpoint, so that a batch
that cannot be read does not get there. Of a piece exactly the wanted offsets are given, each once. What is gone or
damaged ends the task, or, where the user does not mind (`failOnDataLoss` false), is passed over with a warning. Memory
of a task is bound by two answers of the broker and what they expand to, in steps of `BATCH_BYTES`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from dmq.errors import Damaged, DMQError, OffsetGone, UnknownTopic
from dmq.event_log import EventLog
from dmq.pipeline.decode.journal_reader import ClusterReader, JournalReader, shard_reader
from dmq.pipeline.decode.rows import raw_sizes
from dmq.pipeline.decode.units import UnitRows, decode_fetched, decode_peeked
from dmq.pipeline.source.columns import check_schema, default_schema, record_batch, table_columns
from dmq.pipeline.source.filters import FilterBounds, bounds_of
from dmq.pipeline.source.offsets import StreamOffsets, offsets_dict, parse_offsets
from dmq.pipeline.source.options import SourceOptions, source_options, with_headers
from dmq.pipeline.source.partition_plan import JournalPiece, Piece, QueueRange, share_out
from dmq.pipeline.source.resolver import Resolver
from dmq.protocol.read import TOPICS_MAX

__all__ = [
    "BatchReader",
    "DmqDataSource",
    "PiecePartition",
    "StreamReader",
    "TriggerDelay",
    "read_partition",
    "read_piece",
]


class PiecePartition(InputPartition):
    """One task's part of a read."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


@functools.cache
def _settle() -> None:
    """Once in a process: what imports made is no longer looked at when garbage is collected.

    Spark's workers collect all garbage after every task, and the next task waits for it: some 30 ms, most of them for
    modules, classes and functions, which live as long as the process.
    """
    gc.freeze()


def read_partition(partition: InputPartition, schema: StructType, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The rows of one partition; none of the empty one that Spark makes where there is nothing to read."""
    _settle()
    if isinstance(partition, PiecePartition):
        arrow = to_arrow_schema(schema, timezone="UTC")
        yield from read_piece(options, partition.piece, arrow)


class _FilterTaker:
    """`BatchReader.pushFilters`, offered so that a session in which filters are not pushed down does not mind.

    There Spark refuses a reader that has its own `pushFilters`, and knows one by the function behind the method: so
    this shows the one of the base class. Where filters are pushed down, Spark just calls it.
    """

    def __init__(self, reader: BatchReader) -> None:
        self.__func__ = DataSourceReader.pushFilters
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.take_filters(filters)


class BatchReader(DataSourceReader):
    """Reads what is there at one moment. Made in the driver, pickled, used once for each partition."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._bounds = FilterBounds()

    @property
    def pushFilters(self) -> Any:  # noqa: N802
        return _FilterTaker(self)

    def take_filters(self, filters: list[Filter]) -> list[Filter]:
        """Leave out what these drop anyway; all of them are Spark's still to apply."""
        self._bounds = bounds_of(filters)
        return filters

    def partitions(self) -> list[InputPartition]:
        with ClusterReader(self._options.servers, timeout=self._options.patience) as reader:
            pieces = Resolver(reader, self._options).batch(self._bounds)
        return [PiecePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schema, self._options)


class DmqDataSource(DataSource):
    """Registered with `spark.dataSource.register(DmqDataSource)`, or found by its name."""

    @classmethod
    def name(cls) -> str:
        return "dmq"

    def schema(self) -> StructType:
        """Kafka's columns, for reads that do not name their own."""
        return default_schema(with_headers=with_headers(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = source_options(self.options, is_stream=False)
        check_schema(schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = source_options(self.options, is_stream=True)
        check_schema(schema)
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from dmq.pipeline.sink.data_writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        from dmq.pipeline.sink.data_writer import stream_writer

        return stream_writer(self.options, schema, overwrite)


class TriggerDelay:
    """Whether a micro-batch waits until enough messages have come, as `minOffsetsPerTrigger` asks for.

    The first one does not, nor one that has waited for `maxTriggerDelay`.
    """

    def __init__(self, options: SourceOptions, now: Callable[[], float] = time.monotonic) -> None:
        self._least = options.offsets_per_trigger_min
        self._seconds = options.trigger_delay
        self._now = now
        self._last = -math.inf

    def holds(self, waiting: int) -> bool:
        """Whether that many messages are too few to begin now; if not, the time counts anew."""
        if self._least is None:
            return False
        if waiting < self._least and self._now() - self._last < self._seconds:
            return True
        self._last = self._now()
        return False


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's side keeps a connection while the query runs; pickled, it goes without."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: StreamOffsets | None = None  # how far an AvailableNow query reads
        self._reader: ClusterReader | None = None
        self._delay = TriggerDelay(options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def _resolver(self) -> Resolver:
        if self._reader is None:
            self._reader = ClusterReader(self._options.servers, timeout=self._options.patience)
        return Resolver(self._reader, self._options)

    # Spark's names, and dicts where it has JSON.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        starts = self._resolver().starts()
        if self._target is not None:  # which was taken before: what came since is not read, nor passed over
            target = self._target.places
            starts = starts._replace(
                places={place: min(offset, target[place]) for place, offset in starts.places.items() if place in target}
            )
        return offsets_dict(starts)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._resolver().ends()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most, least = self._options.offsets_per_trigger, self._options.offsets_per_trigger_min
        if most is not None:  # the minimum is looked at as well: Spark hands over one limit only
            return ReadMaxRows(most)
        return ReadAllAvailable() if least is None else ReadMinRows(least)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        resolver = self._resolver()
        begun = resolver.adopted(parse_offsets(start, "the checkpoint"))
        ends = resolver.ends() if self._target is None else self._target
        starts = resolver.existing_starts(begun, ends)
        if self._target is None and not isinstance(limit, ReadAllAvailable):
            waiting = sum(max(0, end - starts.get(place, 0)) for place, end in ends.places.items())
            if self._delay.holds(waiting):
                return start
        if isinstance(limit, ReadMaxRows):
            ends = ends._replace(places=share_out(starts, ends.places, limit.max_rows))
        return offsets_dict(ends)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return offsets_dict(self._resolver().ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        resolver = self._resolver()
        begun, ended = (resolver.adopted(parse_offsets(offsets, "the checkpoint")) for offsets in (start, end))
        return [PiecePartition(piece) for piece in resolver.pieces(begun, ended)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schema, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint has it."""

    def stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


log = EventLog(__name__)

BATCH_BYTES: Final = 64 << 20
PEEK_MESSAGES: Final = 32_768
_OFFSET_MAX: Final = np.iinfo(np.int64).max
_BODIES: Final = frozenset(("body", "body_crc"))


def read_piece(options: SourceOptions, piece: Piece, schema: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, with the columns of an Arrow schema."""
    columns = table_columns(schema.names)
    with shard_reader(options.servers, piece.shard, timeout=options.patience) as reader:
        if isinstance(piece, JournalPiece):
            found = _of_journal(reader, piece, columns, options.fail_on_data_loss)
        else:
            found = _of_queue(reader, piece.range, columns, options.fail_on_data_loss)
        for rows in found:
            for part in _in_steps(rows):
                yield record_batch(part, schema, piece.shard)


def _in_steps(rows: UnitRows) -> Iterator[UnitRows]:
    """The rows, in parts whose bodies do not grow beyond all bounds when they are expanded."""
    if not len(rows):
        return
    if not rows.columns & _BODIES or (len(rows.buffer) <= BATCH_BYTES and not rows.is_compressed().any()):
        yield rows
        return
    ends = np.cumsum(raw_sizes(rows))
    if int(ends[-1]) <= BATCH_BYTES:
        yield rows
        return
    step = (ends - 1) // BATCH_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(rows)]
    for first, last in itertools.pairwise(cuts):
        yield rows.select(slice(first, last))


# --- ranges of the journal --------------------------------------------------------------------------------------------


def _of_journal(
    reader: JournalReader, piece: JournalPiece, columns: frozenset[str], strict: bool
) -> Iterator[UnitRows]:
    def leave_out(error: Damaged) -> None:
        if strict:
            raise error
        log.warning("data was lost", reason=error.message)

    screen = _Screen(piece)
    # Of more topics than a request can name everything is fetched.
    asked = screen.topic_ids if len(screen.topic_ids) <= TOPICS_MAX else []
    at = piece.start
    while at < piece.end:
        try:
            for fetched in reader.units(at, piece.end, with_first=True, topic_ids=asked):
                again = partial(reader.fetch_checked, topic_ids=asked)
                for rows in decode_fetched(fetched, leave_out, again=again, wanted=screen.topic_ids, columns=columns):
                    yield screen.wanted(rows)
                at = fetched.end
            return
        except OffsetGone as error:
            at = _read_on(error, error.detail.get("first", 0), at, strict)
        except Damaged as error:
            at = _read_on(error, error.detail.get("end", 0), at, strict)


def _read_on(error: DMQError, following: int, at: int, strict: bool) -> int:
    """Where to read on after data was lost.

    Raises:
        DMQError: it may not be lost, or nothing says where to read on.
    """
    if strict or following <= at:
        raise type(error)(
            f"{error.message}: set failOnDataLoss to false to read what is left", **error.detail
        ) from error
    log.warning("data was lost", reason=error.message)
    return following


class _Screen:
    """Which rows of a journal are wanted: by their place in it, and by topic, queue and offset."""

    def __init__(self, piece: JournalPiece) -> None:
        self._piece = piece
        whole = piece.whole_keys()
        keys = np.concatenate((whole, np.array([part.key for part in piece.ranges], np.int64)))
        first = np.array([0] * len(whole) + [part.start for part in piece.ranges], np.int64)
        last = np.array([_OFFSET_MAX] * len(whole) + [part.end for part in piece.ranges], np.int64)
        order = np.argsort(keys)
        self._keys, self._from, self._until = keys[order], first[order], last[order]
        self.topic_ids: list[int] = np.unique(keys >> 8).tolist()

    def wanted(self, rows: UnitRows) -> UnitRows:
        """Those rows that are wanted."""
        batches = rows.batches
        keys = batches.topic_id.astype(np.int64) << 8 | batches.queue
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_read = self._keys[place] == keys
        low = np.where(is_read, self._from[place], 0)[rows.batch]
        high = np.where(is_read, self._until[place], 0)[rows.batch]
        offset, at = rows.queue_offset(), rows.journal_offset()
        mask = (offset >= low) & (offset < high) & (at >= self._piece.start) & (at < self._piece.end)
        return rows if mask.all() else rows.select(mask)


# --- one queue --------------------------------------------------------------------------------------------------------


def _of_queue(reader: JournalReader, part: QueueRange, columns: frozenset[str], strict: bool) -> Iterator[UnitRows]:
    at = part.start
    while at < part.end:
        try:
            peeked = reader.peek(part.topic, part.queue, at, min(PEEK_MESSAGES, part.end - at))
            peeked.check_incarnation(part.topic, part.topic_id)
        except UnknownTopic as error:  # deleted since the piece was planned
            at = _read_on(error, part.end, at, strict)
        except OffsetGone as error:
            # Without a first offset nothing of this incarnation is left.
            at = _read_on(error, error.detail.get("first", part.end), at, strict)
        except Damaged as error:
            at = _read_on(error, error.detail.get("next", 0), at, strict)
        else:
            if peeked.end_offset <= at:
                raise OffsetGone(f"queue {part.queue} of {part.topic} ends at {at}, before {part.end}", next=at)
            yield decode_peeked(peeked, part.topic_id, part.queue, columns)
            at = peeked.end_offset
