"""Files of tables as a data source of Spark: executors read and write them through Arrow, in any store.

Spark's own reader and writer go through Hadoop's file systems, which know no object store without a jar. So Spark is
given this source: a list of files to read, or a table's folder to write into. Private to the jobs.

What always holds: a file is written under its final name, holds rows of one `dt` and is no larger than `FILE_BYTES` and
a row group; it belongs to the table once a commit names it. What a task that failed has written no commit names, and
the job `retain` deletes it. Memory of a task is bounded by a row group and one batch of Spark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.parquet import DT, FILE_BYTES, ROW_GROUP_BYTES, DayFile, Layout, Written
from dmq.pipeline.object_store import open_parquet, store_errors

__all__ = ["FilePartition", "TableFiles", "batches_of", "decode_manifest", "register", "write_batches"]

_BATCH_ROWS: Final = 8192
_PARTITIONS_MAX: Final = 512


class TableFiles(DataSource):
    """Options: `files`, a JSON list of addresses, to read; `folder`, `layout` and `manifest`, to write."""

    @classmethod
    def name(cls) -> str:
        return "dmq_table_files"

    def reader(self, schema: StructType) -> FileReader:
        return FileReader(json.loads(self.options["files"]), schema)

    def writer(self, schema: StructType, overwrite: bool) -> FileWriter:
        sort_by, bloom, rows = json.loads(self.options["layout"])
        layout = Layout(tuple(sort_by), tuple(bloom), rows)
        return FileWriter(self.options["folder"], layout, Path(self.options["manifest"]))


def register(spark: SparkSession) -> None:
    """Make the source known to a session, in this thread."""
    spark.dataSource.register(TableFiles)
    # A writer looks the name up in the session of its thread; one that was not made there is not known there.
    SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class FilePartition(InputPartition):
    """Files that one task reads."""

    files: tuple[str, ...]


class FileReader(DataSourceReader):
    """Made in the driver; `read` is called on an executor, once for each partition."""

    def __init__(self, files: Sequence[str], schema: StructType) -> None:
        self._files = files
        self._schema = to_arrow_schema(schema, timezone="UTC")

    def partitions(self) -> list[InputPartition]:
        count = max(1, min(len(self._files), _PARTITIONS_MAX))
        return [FilePartition(tuple(self._files[index::count])) for index in range(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, FilePartition)
        for uri in partition.files:
            yield from batches_of(uri, self._schema)


def batches_of(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file in some columns; a column that was added to the table later is null."""
    with store_errors(uri), open_parquet(uri) as file:
        there = set(file.schema_arrow.names)
        columns = [name for name in schema.names if name in there]
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
            arrays = [
                batch.column(field.name).cast(field.type)
                if field.name in there
                else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class FilesWritten(WriterCommitMessage):
    """What a task wrote."""

    files: tuple[Written, ...]


class FileWriter(DataSourceArrowWriter):
    """Made in the driver; `write` is called on an executor for each partition, `commit` in a process beside the driver.

    Parameters:
        manifest: a file of the driver's machine, for what the tasks have written: this object is not the one that the
            job has.
    """

    def __init__(self, folder: str, layout: Layout, manifest: Path) -> None:
        self._folder = folder
        self._layout = layout
        self._manifest = manifest

    def write(self, iterator: Iterator[pa.RecordBatch]) -> FilesWritten:
        return FilesWritten(tuple(write_batches(iterator, Folder.at(self._folder), self._layout)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        found = [file for message in messages if isinstance(message, FilesWritten) for file in message.files]
        draft = self._manifest.with_suffix(".draft")
        draft.write_text(json.dumps([[*file[:4], file.dt.isoformat(), file.written_at_ms] for file in found]))
        os.replace(draft, self._manifest)


def decode_manifest(text: str) -> list[Written]:
    """What the tasks of a write have written."""
    return [
        Written(path, rows, size, stats, dt=date.fromisoformat(dt), written_at_ms=at)
        for path, rows, size, stats, dt, at in json.loads(text)
    ]


def write_batches(
    batches: Iterable[pa.RecordBatch], folder: Folder, layout: Layout, file_bytes: int = FILE_BYTES
) -> list[Written]:
    """Write rows that are in the order of `dt` as files of a table."""
    rows = _DayFiles(folder, layout, file_bytes)
    for batch in batches:
        for part in _by_day(batch):
            rows.add(part)
    return rows.close()


def _by_day(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The stretches of a batch that are of one day."""
    start = 0
    while start < batch.num_rows:
        day = batch.column(DT)[start]
        end = start + pc.sum(pc.equal(batch.column(DT).slice(start), day)).as_py()
        yield batch.slice(start, end - start)
        start = end


class _DayFiles:
    """The file that is open, and the row group that gathers for it."""

    def __init__(self, folder: Folder, layout: Layout, file_bytes: int) -> None:
        self._folder = folder
        self._layout = layout
        self._file_bytes = file_bytes
        self._done: list[Written] = []
        self._file: DayFile | None = None
        self._day: date | None = None
        self._gathered: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        day = batch.column(DT)[0].as_py()
        if day != self._day:
            self._end_file()
            self._day = day
        while batch.num_rows:
            left = self._layout.row_group_rows - self._rows
            self._gathered.append(batch.slice(0, left))
            self._rows += self._gathered[-1].num_rows
            self._bytes += self._gathered[-1].nbytes
            batch = batch.slice(left)
            if self._rows >= self._layout.row_group_rows or self._bytes >= ROW_GROUP_BYTES:
                self._end_group()

    def close(self) -> list[Written]:
        self._end_file()
        return self._done

    def _end_group(self) -> None:
        if not self._gathered:
            return
        table = pa.Table.from_batches(self._gathered)
        self._gathered, self._rows, self._bytes = [], 0, 0
        if self._file is None:
            assert self._day is not None
            self._file = DayFile(self._folder, self._day, table.schema, self._layout)
        self._file.write(table)
        if self._file.bytes >= self._file_bytes:
            self._close_file()

    def _end_file(self) -> None:
        self._end_group()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._done.append(self._file.written)
            self._file = None
