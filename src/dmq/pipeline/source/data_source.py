"""`format("dmq")`: topics as tables and streams of Spark.

Spark makes a `DmqDataSource` where it needs one, asks it for a reader or a writer, and pickles those for the executors.
So nothing that is pickled holds a connection. Spark keeps the offsets of a stream in its checkpoint, as the JSON of
`dmq.pipeline.source.offsets`; the broker keeps nothing of a stream, so that a commit has nothing to do.

What always holds: options and columns are checked before a broker is asked; a read without matching messages has no
rows, and is no error. Offsets rise from micro-batch to micro-batch, and are equal when nothing came. Under
Trigger.AvailableNow nothing is read that came after the query began, so that it ends. A queue or topic that appears is
read from its beginning; one that was deleted and created again is an error, or read from its beginning without
`failOnDataLoss`. A loss is noticed before Spark writes the offsets of a batch into its checkpoint, so that a batch
that cannot be read does not get there.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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

from dmq.pipeline.decode.cluster_reader import ClusterReader
from dmq.pipeline.source.columns import check_schema, default_schema
from dmq.pipeline.source.filters import FilterBounds, bounds_of
from dmq.pipeline.source.offsets import StreamOffsets, offsets_dict, parse_offsets
from dmq.pipeline.source.options import SourceOptions, source_options, with_headers
from dmq.pipeline.source.partition_plan import Piece, share_out
from dmq.pipeline.source.partition_reader import read_piece
from dmq.pipeline.source.resolver import Resolver

__all__ = ["BatchReader", "DmqDataSource", "PiecePartition", "StreamReader", "TriggerDelay", "read_partition"]


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
