"""The sink of `format("dmq")`: rows of a DataFrame or a stream become messages.

Spark makes a writer in the driver, where options and columns are checked, and calls its `write` once for each partition
on the executors. A partition's rows are stored when `write` returns, so that there is nothing left to do in `commit`.

What always holds: a stream writes under the id of its query, which its checkpoint keeps, or `dmq.producer.id`, and
numbers its rows by micro-batch; a batch write does so under `dmq.producer.id`, or an id of its own for this one write.
So a task, a micro-batch or a job that is repeated with the same rows in the same order stores none of them twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from dmq.errors import InvalidSettings
from dmq.pipeline.resuming import BATCH_ROWS_MAX, Writer
from dmq.pipeline.sink_options import SinkOptions, check_columns, sink_options
from dmq.pipeline.writing import write_rows

__all__ = ["BatchWriter", "PartitionWritten", "StreamWriter", "batch_writer", "stream_writer"]

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
