"""The header of a frame: one struct per command and direction, as a MessagePack array.

What always holds: the order of fields is part of the protocol. A newer version adds fields at the end, each with a
default, and nothing is moved, renamed in meaning or taken away. So an older side reads what it knows and skips the
rest, and a newer one fills what an older peer left out. A field that must not be skipped comes with a feature, which a
client uses only if the hello's answer has it; see docs/internals/protocol.md.

Types are closed: numbers have ranges, choices are enums, names and lists have a maximum, so that what was decoded can
be used without another look, and a hostile header of one megabyte cannot become a gigabyte.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dmq.errors import InvalidRequest

__all__ = [
    "U32",
    "UNREADABLE",
    "Amount",
    "Bits",
    "Header",
    "Id",
    "Name",
    "OptionalName",
    "Queue",
    "Text",
    "encode_header",
    "header_error",
]

TEXT_MAX: Final = 4096
_PLACE: Final = re.compile(r"\$\[(\d+)\]")  # where in a header something is wrong, as msgspec says it
LIST_MAX: Final = 65_536

# msgspec takes bounds only up to 2**63-1, and MessagePack ends at 2**64-1 by itself.
U64 = Annotated[int, Meta(ge=0)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Bits = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Amount = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # an offset, a count or a time that numpy may take as int64
Queue = Annotated[int, Meta(ge=0, le=255)]  # 255 is ANY_QUEUE where a command says so
Name = Annotated[str, Meta(min_length=1, max_length=255)]
OptionalName = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]  # MessageId.to_bytes()


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all headers. Itself the empty header, of commands that say nothing more."""


_encoder: Final = msgspec.msgpack.Encoder()
encode_header: Final = _encoder.encode
"""The bytes of a header."""

EMPTY: Final = encode_header(Header())


UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What a decoder raises for bytes that are not the header it expects."""


def header_error(decoder: msgspec.msgpack.Decoder[Any], command: int, error: Exception) -> InvalidRequest:
    """The error to raise for a header that cannot be read.

    Parameters:
        decoder: of the struct that was expected.
        command: of the frame.
        error: one of `UNREADABLE`.
    """
    said = _PLACE.sub(lambda found: _field(decoder.type, int(found[1])), str(error), count=1)
    return InvalidRequest(f"the header of a frame with command {command:#06x} cannot be read: {said}")


def _field(kind: Any, index: int) -> str:
    """The name of a header's field, for people."""
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return names[index] if index < len(names) else f"$[{index}]"


def check_detail(value: Any) -> Any:
    """The value if MessagePack can carry it, else its text: an error must always get through."""
    if value is None or isinstance(value, bool | float | str | bytes):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [check_detail(item) for item in value]
    if isinstance(value, dict):
        return {str(key): check_detail(item) for key, item in value.items()}
    return str(value)
