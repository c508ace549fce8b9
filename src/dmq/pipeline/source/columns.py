"""The columns of `format("dmq")`: Kafka's, and those of ours that a schema may ask for.

What always holds: a schema that names another column, or one of ours with another type, is refused with a list of what
there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dmq.errors import InvalidSettings
from dmq.model import place_of
from dmq.pipeline.binary_values import HEADERS_MARK, KEY_MARK, KEY_PREFIX, binary_key, given_headers
from dmq.pipeline.decode import rows as made
from dmq.pipeline.decode.arrow import numbers
from dmq.pipeline.decode.units import UnitRows

__all__ = ["ALL_COLUMNS", "check_schema", "column_kind", "default_schema", "record_batch", "table_columns"]

_LOG_APPEND_TIME: Final = 1  # Kafka's number for "the broker gave the timestamp"


class _Column(NamedTuple):
    """A column of Spark's: its type, the column of the archive it is made of, and how."""

    kind: DataType
    table_column: str
    make: Callable[[UnitRows, int], pa.Array]  # of rows and the shard that they are of


def _of_rows(make: Callable[[UnitRows], pa.Array]) -> Callable[[UnitRows, int], pa.Array]:
    return lambda rows, shard: make(rows)


def _same(name: str, kind: DataType) -> _Column:
    return _Column(kind, name, _of_rows(made.COLUMNS[name]))


def _shard(rows: UnitRows, shard: int) -> pa.Array:
    return numbers(np.full(len(rows), shard, np.int32), pa.int32())


def _partition(rows: UnitRows, shard: int) -> pa.Array:
    return numbers(place_of(0, shard) + rows.queue().astype(np.int32), pa.int32())


def _timestamp_type(rows: UnitRows, shard: int) -> pa.Array:
    return numbers(np.full(len(rows), _LOG_APPEND_TIME, np.int32), pa.int32())


def _keys(rows: UnitRows) -> pa.Array:
    """Keys as bytes; those that the sink had to write as text are the bytes that it was given."""
    keys = made.keys(rows)
    may_be = pc.starts_with(keys, KEY_PREFIX).fill_null(False).to_numpy(zero_copy_only=False)
    if not may_be.any():
        return keys
    properties = made.COLUMNS["headers"](rows.for_columns("headers").select(may_be)).to_pylist()
    values = keys.to_pylist()
    for row, pairs in zip(np.flatnonzero(may_be).tolist(), properties, strict=True):
        if any(pair["key"] == KEY_MARK for pair in pairs or ()):
            values[row] = binary_key(values[row])
    return pa.array(values, pa.binary())


def _headers(rows: UnitRows) -> pa.Array:
    """The properties, or the headers that the sink was given."""
    headers = made.COLUMNS["headers"](rows)
    names = headers.flatten().field("key")
    if not pc.any(pc.is_in(names, pa.array([KEY_MARK, HEADERS_MARK]))).as_py():
        return headers
    values = headers.to_pylist()
    for row, pairs in enumerate(values):
        found = given_headers([(pair["key"], pair["value"]) for pair in pairs or ()])
        values[row] = None if found is None else [{"key": name, "value": value} for name, value in found]
    return pa.array(values, headers.type)


_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_KAFKA: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
_COLUMNS: Final[dict[str, _Column]] = {
    "key": _Column(BinaryType(), "key", _of_rows(_keys)),
    "value": _Column(BinaryType(), "body", _of_rows(made.COLUMNS["body"])),
    "topic": _same("topic", StringType()),
    "partition": _Column(IntegerType(), "queue", _partition),
    "offset": _Column(LongType(), "queue_offset", _of_rows(made.COLUMNS["queue_offset"])),
    "timestamp": _Column(TimestampType(), "stored_at", _of_rows(made.COLUMNS["stored_at"])),
    "timestampType": _Column(IntegerType(), "flags", _timestamp_type),
    "headers": _Column(_HEADERS, "headers", _of_rows(_headers)),
    "tag": _same("tag", StringType()),
    "business_id": _same("business_id", StringType()),
    "app": _same("app", StringType()),
    "priority": _same("priority", IntegerType()),
    "message_id": _same("message_id", StringType()),
    "sent_at": _same("sent_at", TimestampType()),
    "received_at": _same("received_at", TimestampType()),
    "stored_at": _same("stored_at", TimestampType()),
    "queue": _same("queue", IntegerType()),
    "journal_offset": _same("journal_offset", LongType()),
    "flags": _same("flags", IntegerType()),
    "client": _same("client", StringType()),
    "body_crc": _same("body_crc", LongType()),
    "shard": _Column(IntegerType(), "queue", _shard),
}
ALL_COLUMNS: Final = tuple(_COLUMNS)


def default_schema(*, with_headers: bool) -> StructType:
    """Kafka's columns."""
    names = (*_KAFKA, "headers") if with_headers else _KAFKA
    return StructType([StructField(name, _COLUMNS[name].kind) for name in names])


def check_schema(schema: StructType) -> None:
    """Whether the columns can be read.

    Raises:
        InvalidSettings: one is not known, or is of another type.
    """
    for field in schema.fields:
        column = _COLUMNS.get(field.name)
        if column is None:
            raise InvalidSettings(f"column {field.name!r} is unknown when reading from dmq: there are {_known()}")
        if _plain(field.dataType) != _plain(column.kind):
            raise InvalidSettings(
                f"column {field.name!r} is {column.kind.simpleString()}, not {field.dataType.simpleString()}: "
                "read it so, and cast it afterwards"
            )


def _plain(kind: DataType) -> str:
    """The type without what may be null in it."""
    return kind.simpleString()


def _known() -> str:
    return ", ".join(f"{name} {column.kind.simpleString()}" for name, column in _COLUMNS.items())


def column_kind(name: str) -> DataType:
    """A column's type."""
    return _COLUMNS[name].kind


def table_columns(names: Sequence[str]) -> frozenset[str]:
    """The archive's columns that these are made of, for the decoder."""
    return frozenset(_COLUMNS[name].table_column for name in names)


def record_batch(rows: UnitRows, schema: Any, shard: int = 0) -> pa.RecordBatch:
    """Rows of a shard with exactly the columns and types of an Arrow schema."""
    arrays = []
    for field in schema:
        array = _COLUMNS[field.name].make(rows, shard)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
