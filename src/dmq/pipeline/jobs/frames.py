"""The archive's tables as Spark sees them: files with a schema that is given, so no jar is needed.

Spark reads files of this machine itself. Those of an object store come through Arrow, on the executors
(`dmq.pipeline.jobs.table_files`); Spark does not tell such a source which columns a query needs, so a job says so.

What always holds: a frame is made of the files that were live when it was made, whatever is committed later; a table
without files is a frame without rows, with the same columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dmq.pipeline.object_store import scheme_of
from dmq.pipeline.tables import SCHEMAS
from dmq.records.layout import MOVED, REPLAYED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from dmq.pipeline.archive.table_store import Table

__all__ = ["OFFERED_AT", "file_frame", "frame", "frame_of", "spark_schema"]

# From when a broker had to store a message: when it was sent. One that was delayed, committed or replayed counts from
# when it left the schedule, the half messages or the archive: waiting for that is no latency.
OFFERED_AT: Final = f"CASE WHEN flags & {MOVED | REPLAYED} <> 0 THEN received_at ELSE sent_at END"


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
    from dmq.pipeline.jobs.table_files import TableFiles, register

    register(spark)
    reader = spark.read.format(TableFiles.name()).schema(found)
    return reader.option("files", json.dumps([*files])).load()
