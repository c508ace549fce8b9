"""The archive's tables as Spark sees them: plain Parquet files with a schema that is given, so no jar is needed.

What always holds: a frame is made of the files that were live when it was made, whatever is committed later; a table
without files is a frame without rows, with the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final

from dmq.pipeline.tables import SCHEMAS
from dmq.records.layout import MOVED, REPLAYED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from dmq.pipeline.archive.table_store import Table

__all__ = ["OFFERED_AT", "frame", "frame_of", "spark_schema"]

# From when a broker had to store a message: when it was sent. One that was delayed, committed or replayed counts from
# when it left the schedule, the half messages or the archive: waiting for that is no latency.
OFFERED_AT: Final = f"CASE WHEN flags & {MOVED | REPLAYED} <> 0 THEN received_at ELSE sent_at END"


def spark_schema(name: str) -> StructType:
    """The columns of a table, in Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(SCHEMAS[name])


def frame(spark: SparkSession, table: Table, dts: Iterable[date] | None = None) -> DataFrame:
    """The rows of some days of a table; None is all."""
    return frame_of(spark, table.name, table.files(None if dts is None else set(dts)))


def frame_of(spark: SparkSession, name: str, files: Sequence[str]) -> DataFrame:
    """The rows of some files of a table."""
    schema = spark_schema(name)
    if files:
        return spark.read.schema(schema).parquet(*files)
    # Not createDataFrame: that would start a Python worker to carry nothing.
    columns = [f"CAST(NULL AS {field.dataType.simpleString()}) AS `{field.name}`" for field in schema.fields]
    return spark.range(0).selectExpr(*columns)
