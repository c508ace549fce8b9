"""Bodies: from a Python object to the bytes of a message, and back.

Bytes stay as they are; text becomes UTF-8; msgspec structs, dataclasses and Pydantic models become JSON, because any
consumer in any language can read it and a person can too.

What always holds: what cannot become a body raises `InvalidMessage` that names its type, before anything is sent; what
was encoded from a type is decoded to an equal object of that type. Pydantic is never imported here: an object that has
its methods brings it along.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from dmq.errors import InvalidMessage

__all__ = ["decode_body", "encode_body"]

T = TypeVar("T")

_encode_json: Final = msgspec.json.Encoder().encode


def encode_body(body: object) -> bytes:
    """The bytes of a body.

    Raises:
        InvalidMessage: the object is of a type that has no form as a body, or holds something that has none.
    """
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"a text body cannot be written as UTF-8: {error.reason} at {error.start}") from error
    kind = type(body)
    try:
        dump = getattr(kind, "model_dump_json", None)
        if dump is not None:
            text: str = dump(body)
            return text.encode()
        if isinstance(body, msgspec.Struct) or (dataclasses.is_dataclass(body) and not isinstance(body, type)):
            return _encode_json(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"a {kind.__qualname__} cannot be written as JSON: {error}", type=kind.__name__) from error
    raise InvalidMessage(
        f"a body is bytes, text, a msgspec struct, a dataclass or a Pydantic model, not {kind.__qualname__}: encode it "
        "first, for example with msgspec.json.encode",
        type=kind.__name__,
    )


def decode_body(type_: type[T], body: bytes) -> T:
    """The object that a body holds, of the type asked for.

    Raises:
        InvalidMessage: the body does not hold one.
    """
    try:
        if type_ is bytes:
            return body  # type: ignore[return-value]
        if type_ is str:
            return body.decode()  # type: ignore[return-value]
        validate = getattr(type_, "model_validate_json", None)
        if validate is not None:
            made: T = validate(body)
            return made
        decoded: T = _decoder(type_).decode(body)  # type: ignore[arg-type]
        return decoded
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        name = getattr(type_, "__qualname__", str(type_))
        raise InvalidMessage(f"the body is no {name}: {error}", type=name) from error


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)
