"""A stream of `format("dmq")`: micro-batches from places to places.

Spark keeps where a query is, in its checkpoint, as the JSON of `dmq.pipeline.places`; nothing of a stream is kept at
the broker, so that committing has nothing to do.

What always holds: places rise from micro-batch to micro-batch, and are equal when nothing came. Under
Trigger.AvailableNow nothing is read that came after the query began, so that it ends. A queue or topic that appears is
read from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from dmq.pipeline.journal_reading import JournalReader
from dmq.pipeline.options import SourceOptions
from dmq.pipeline.places import Places, places_dict, places_from
from dmq.pipeline.planning import share_out
from dmq.pipeline.resolving import Resolver
from dmq.pipeline.source import PiecePartition, read_partition

__all__ = ["StreamReader"]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's side keeps a connection while the query runs; pickled, it goes without."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: Places | None = None  # how far an AvailableNow query reads
        self._reader: JournalReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def _resolver(self) -> Resolver:
        if self._reader is None:
            self._reader = JournalReader(self._options.servers)
        return Resolver(self._reader, self._options)

    # Spark's names, and dicts where it has JSON.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        starts = self._resolver().starts()
        if self._target is not None:  # which was taken before: what came since is not read, nor passed over
            target = self._target
            starts = {place: min(offset, target[place]) for place, offset in starts.items() if place in target}
        return places_dict(starts)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._resolver().ends()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit = self._options.offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begun = places_from(start, "the checkpoint")
        ends = dict(self._resolver().ends() if self._target is None else self._target)
        self._resolver().check_gone(begun, ends)
        if isinstance(limit, ReadMaxRows):
            ends = share_out(begun, ends, limit.max_rows)
        return places_dict(ends)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return places_dict(self._resolver().ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun, ended = places_from(start, "the checkpoint"), places_from(end, "the checkpoint")
        return [PiecePartition(piece) for piece in self._resolver().pieces(begun, ended)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schema, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint has it."""

    def stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
