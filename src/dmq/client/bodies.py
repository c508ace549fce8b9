"""Bodies: from a Python object to the bytes of a message, and back.

Bytes stay as they are; text becomes UTF-8; msgspec structs, dataclasses and Pydantic models become JSON, because any
consumer in any language can read it and a person can too.

What always holds: what cannot become a body raises `InvalidMessage` that names its type, before anything is sent; what
was encoded from a type is decoded to an equal object of that type. Pydantic is imported only where one of its models
is asked for: whoever has one has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

import msgspec

from dmq.errors import InvalidMessage, InvalidSettings

__all__ = ["check_type", "decode_body", "encode_body"]

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
        decoded: T = _decoder(type_)(body)  # type: ignore[arg-type]
        return decoded
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"the body is no {_name(type_)}: {_in_words(error)}", type=_name(type_)) from error


def check_type(type_: Any) -> Any:
    """The type, if bodies can be of it; None is bytes.

    Raises:
        InvalidSettings: there is no way to make one from a body.
    """
    if type_ is None or type_ in (bytes, str) or hasattr(type_, "model_validate_json"):
        return type_
    try:
        is_known = _has_model(type_) or not isinstance(msgspec.inspect.type_info(type_), msgspec.inspect.CustomType)
        _decoder(type_)
    except (TypeError, NameError):  # a name in an annotation may be nobody's
        is_known = False
    if not is_known:
        raise InvalidSettings(
            f"type is a msgspec struct, a dataclass, a Pydantic model, or made of them as in list[Order], not {type_!r}"
        )
    return type_


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> Callable[[bytes], Any]:
    if _has_model(type_):
        from pydantic import TypeAdapter  # whoever has a model has it

        validate: Callable[[bytes], Any] = TypeAdapter(type_).validate_json
        return validate
    return msgspec.json.Decoder(type_).decode


def _has_model(type_: Any) -> bool:
    """Whether a Pydantic model stands within it, as in list[Order] or Order | Refund."""
    return any(hasattr(part, "model_validate_json") or _has_model(part) for part in get_args(type_))


def _name(type_: Any) -> str:
    return str(type_) if get_args(type_) else getattr(type_, "__qualname__", str(type_))


def _in_words(error: Exception) -> str:
    """What is wrong, on one line: Pydantic says it in many, and in a list as well."""
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    first = details()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
