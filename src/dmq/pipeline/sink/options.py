"""The options and columns of a write with `format("dmq")`, checked before anything is sent.

What always holds: a column that is not known, or of a type that cannot be sent, is an error that names it and says what
to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import types

from dmq.client.producer.lane_sender import ANSWER_SECONDS
from dmq.errors import InvalidMessage, InvalidSettings
from dmq.model import DURABILITIES, Durability, check_name
from dmq.pipeline.decode.journal_reader import Patience, server_url
from dmq.pipeline.spark_options import (
    ANSWER_OPTION,
    RETRIES_OPTION,
    SERVERS,
    TIMEOUT_OPTION,
    flag,
    known_options,
    patience_option,
    servers,
)

__all__ = ["COLUMNS", "SinkOptions", "check_columns", "sink_options"]

_NAMES: Final = (
    SERVERS, "topic", "durability", "ordered", "app", "compression", "dmq.producer.id", TIMEOUT_OPTION,
    ANSWER_OPTION, RETRIES_OPTION,
)  # fmt: skip
# What Spark itself leaves among the options of a writer.
_OF_SPARK: Final = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})
PATIENCE: Final = Patience(120.0, ANSWER_SECONDS)
_DURABILITIES: Final = ("stored", "flushed", "replicated")
_COMPRESSIONS: Final = ("auto", "none", "lz4", "zstd")

_TEXT: Final = (types.StringType,)
_BYTES: Final = (types.StringType, types.BinaryType)
_WHOLE: Final = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write."""

    url: str
    topic: str | None = None
    durability: Durability = Durability.FLUSHED
    ordered: bool = False
    app: str = "spark"
    compression: str = "auto"
    producer_id: str | None = None
    patience: Patience = PATIENCE


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read the options.

    Raises:
        InvalidSettings: one is missing, unknown or makes no sense.
        InvalidName: a topic or an app cannot be called so.
    """
    given = known_options(options, _NAMES, _OF_SPARK, "writing to")
    url = server_url(servers(given))
    topic = given.get("topic")
    return SinkOptions(
        url,
        None if topic is None else check_name(topic, "topic"),
        DURABILITIES[_one_of("durability", given.get("durability", "flushed"), _DURABILITIES)],
        flag("ordered", given, default=False),
        app=check_name(given.get("app", "spark"), "app"),
        compression=_one_of("compression", given.get("compression", "auto"), _COMPRESSIONS),
        producer_id=given.get("dmq.producer.id") or None,
        patience=patience_option(given, PATIENCE),
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise InvalidSettings(f"option {name!r} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
    return value.lower()


# --- columns ----------------------------------------------------------------------------------------------------------


def _is(*kinds: type[types.DataType]) -> Callable[[types.DataType], bool]:
    return lambda kind: isinstance(kind, kinds)


def _is_headers(kind: types.DataType) -> bool:
    if isinstance(kind, types.MapType):
        return isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _BYTES)
    if not isinstance(kind, types.ArrayType) or not isinstance(kind.elementType, types.StructType):
        return False
    pair = kind.elementType
    return (
        [name.lower() for name in pair.fieldNames()] == ["key", "value"]
        and isinstance(pair.fields[0].dataType, _TEXT)
        and isinstance(pair.fields[1].dataType, _BYTES)
    )


COLUMNS: Final[dict[str, tuple[Callable[[types.DataType], bool], str]]] = {
    "value": (_is(*_BYTES), "binary or string"),
    "key": (_is(*_BYTES), "string or binary"),
    "topic": (_is(*_TEXT), "string"),
    "partition": (_is(*_WHOLE), "int"),
    "tag": (_is(*_TEXT), "string"),
    "business_id": (_is(*_TEXT), "string"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>> or map<string,string>"),
    "priority": (_is(*_WHOLE), "int"),
    "delay": (_is(*_WHOLE, types.FloatType, types.DoubleType), "double or int, in seconds"),
}


def check_columns(schema: types.StructType, options: SinkOptions) -> None:
    """Whether rows of this schema can be sent.

    Raises:
        InvalidMessage: a column is missing, unknown or of another type.
        InvalidSettings: the rows have no topic.
    """
    names = [name.lower() for name in schema.fieldNames()]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise InvalidMessage(
            f"columns {', '.join(unknown)} cannot be written: select {', '.join(COLUMNS)}, of which only value must be "
            "there"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidMessage(f"columns {', '.join(twice)} occur more than once: leave one of each")
    if "value" not in names:
        raise InvalidMessage("there is no column value, which becomes the body: select one as value")
    for name, field in zip(names, schema.fields, strict=True):
        fits, wanted = COLUMNS[name]
        if not fits(field.dataType):
            raise InvalidMessage(f"column {name} is {field.dataType.simpleString()}: cast it to {wanted}")
    if "topic" not in names and options.topic is None:
        raise InvalidSettings("the rows have no topic: give option 'topic', or a column topic")
    if options.ordered and "business_id" not in names:
        raise InvalidMessage("option 'ordered' needs a column business_id: rows with the same one stay in order")
