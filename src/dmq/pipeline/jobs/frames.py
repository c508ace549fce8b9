"""The archive's tables for Spark: their files as frames, and as a data source that executors read and write through.

Spark reads files of this machine itself, with a schema that is given, so no jar is needed. Its own reader and writer go
through Hadoop's file systems, which know no object store without a jar. So there Spark is given a source of ours: a
list of files to read, or a table's folder to write into, through Arrow, in any store. Spark does not tell such a source
which columns a query needs, so a job says so. Executors write what Spark has worked out into the table's folder under
the files' final names and describe them, so that no row passes through the driver; small results come as Arrow instead.
Private to the jobs.

What always holds: a frame is made of the files that were live when it was made, whatever is committed later; a table
without files is a frame without rows, with the same columns. A file is written under its final name, holds rows of one
`dt` and is no larger than `FILE_BYTES` and a row group; it belongs to the table once a commit names it. What a task
that failed or a killed run has written no commit names, and the job `retain` deletes it. Memory of a task is bounded by
a row group and one batch of Spark.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from dmq.pipeline.archive.parquet import (
    DT,
    FILE_BYTES,
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    DayFile,
    Layout,
    Written,
    write_days,
)
from dmq.pipeline.object_store import open_parquet, scheme_of, store_errors
from dmq.pipeline.tables import SCHEMAS
from dmq.records.layout import MOVED, REPLAYED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from dmq.pipeline.archive.table_store import Table

__all__ = [
    "BLOOM",
    "GROUP_ROWS",
    "OFFERED_AT",
    "SORT",
    "STAGING",
    "FilePartition",
    "TableFiles",
    "batches_of",
    "decode_manifest",
    "file_frame",
    "frame",
    "frame_of",
    "register",
    "spark_schema",
    "staged",
    "sweep",
    "write_batches",
]


# From when a broker had to store a message: when it was sent. One that was delayed, committed or replayed counts from
# when it left the schedule, the half messages or the archive: waiting for that is not latency.
OFFERED_AT: Final = f"CASE WHEN flags & {MOVED | REPLAYED} <> 0 THEN received_at ELSE sent_at END"
_BATCH_ROWS: Final = 8192
_PARTITIONS_MAX: Final = 512


def spark_schema(name: str) -> StructType:
    """The columns of a table, in Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(SCHEMAS[name])


def frame(
    spark: SparkSession, table: Table, dts: Iterable[date] | None = None, columns: Sequence[str] | None = None
) -> DataFrame:
    """The rows of some days of a table; None is all."""
    return frame_of(spark, table.name, table.files(None if dts is None else set(dts)), columns)


def frame_of(spark: SparkSession, name: str, files: Sequence[str], columns: Sequence[str] | None = None) -> DataFrame:
    """The rows of some files of a table, in some of its columns; None is all."""
    schema = SCHEMAS[name]
    return file_frame(spark, files, schema if columns is None else pa.schema([schema.field(one) for one in columns]))


def file_frame(spark: SparkSession, files: Sequence[str], schema: pa.Schema) -> DataFrame:
    """The rows of some Parquet files of one store, in columns that they have."""
    from pyspark.sql.pandas.types import from_arrow_schema

    found = from_arrow_schema(schema)
    if not files:
        # Not createDataFrame: that would start a Python worker to carry nothing.
        columns = [f"CAST(NULL AS {field.dataType.simpleString()}) AS `{field.name}`" for field in found.fields]
        return spark.range(0).selectExpr(*columns)
    if scheme_of(files[0]) == "file":
        return spark.read.schema(found).parquet(*files)
    register(spark)
    reader = spark.read.format(TableFiles.name()).schema(found)
    return reader.option("files", json.dumps([*files])).load()


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


STAGING: Final = "_staging"
_STALE: Final = timedelta(days=1)

# In what order the rows of a file lie, by table; what is looked up in it by value; and how many rows a row group has,
# where it is not as in others.
SORT: Final[dict[str, tuple[str, ...]]] = {
    "message": ("topic", "queue", "queue_offset"),
    "copy": ("topic", "queue", "queue_offset"),
    "consume_event": ("message_id", "group", "at"),
    "key_index": ("bucket", "hash", "key"),
    "key_directory": ("hash", "file"),
    "trace": ("message_id", "group"),
    "rollup_part": ("kind", "minute", "topic", "group", "app"),
    "metrics_1m": ("minute", "topic", "group", "app"),
    "position_daily": ("topic", "group", "broker", "queue"),
    "dead_letter_part": ("topic", "group", "reason", "error"),
    "dead_letter_daily": ("topic", "group", "reason"),
    "reconcile_diff": ("problem", "topic", "send_id", "group"),
}
BLOOM: Final[dict[str, tuple[str, ...]]] = {"message": ("key",), "trace": ("message_id",)}
GROUP_ROWS: Final[dict[str, int]] = {"key_index": 16_384}  # of every file a group is read


def collected(table: Table, rows: DataFrame) -> list[Written]:
    """Write a small result: it passes through the driver, and makes one file a day."""
    arrow = rows.toArrow().cast(SCHEMAS[table.name])
    return write_days(arrow, table.folder, sort_by=SORT[table.name])


def staged(table: Table, rows: DataFrame, files: int = 1) -> list[Written]:
    """Write a result of any size; it belongs to the table once the files are committed.

    Parameters:
        rows: with the table's columns; of any days.
        files: how many files about, over all days.
    """
    order = SORT[table.name]
    ordered = rows.select(*(_quoted(name) for name in SCHEMAS[table.name].names))
    if files > 1:
        ordered = ordered.repartitionByRange(files, DT, *map(_quoted, order))
    else:
        ordered = ordered.coalesce(1)
    ordered = ordered.sortWithinPartitions(DT, *map(_quoted, order))
    layout = Layout(order, BLOOM.get(table.name, ()), GROUP_ROWS.get(table.name, ROW_GROUP_ROWS))
    register(rows.sparkSession)
    with tempfile.TemporaryDirectory(prefix="dmq-") as place:
        manifest = Path(place) / "manifest.json"
        writer = ordered.write.format(TableFiles.name()).mode("append")
        writer.options(folder=table.uri, layout=json.dumps(layout), manifest=str(manifest)).save()
        return decode_manifest(manifest.read_text())


def sweep(table: Table) -> None:
    """Delete what runs that were killed have left, once it is old enough to be nobody's."""
    table.folder.below(STAGING).sweep(_STALE)


def _quoted(name: str) -> str:
    return f"`{name}`"
