"""Keys and header values that are not text, and headers that occur twice: how Spark's sink and source carry them. Pure.

Keys and properties of a message are texts, each property once. What Spark has beyond that travels as text: a key of
other bytes as `base64:` and its base64, with the property `dmq.key`; headers as the property `dmq.headers`, which has
all of them, and beside it those that are plain texts. Consumers see these properties; the source puts everything back.

What always holds: what the sink took, the source gives; what another producer sent is given as it is.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

__all__ = ["HEADERS_MARK", "KEY_MARK", "KEY_PREFIX", "Pair", "as_key", "as_properties", "binary_key", "given_headers"]

KEY_MARK: Final = "dmq.key"
HEADERS_MARK: Final = "dmq.headers"
KEY_PREFIX: Final = b"base64:"

Pair: TypeAlias = tuple[str, bytes | None]

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]])


def as_key(raw: bytes) -> tuple[str, bool]:
    """The text of a key, and whether it needs the mark."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return (KEY_PREFIX + base64.b64encode(raw)).decode(), True


def binary_key(text: bytes) -> bytes:
    """The key of a message that has the mark; the text itself if it is not one of the sink's."""
    try:
        return base64.b64decode(text.removeprefix(KEY_PREFIX), validate=True)
    except binascii.Error:
        return text


def as_properties(pairs: Sequence[Pair]) -> dict[str, str]:
    """The properties of a message with these headers; a null is an empty text."""
    found: dict[str, str] = {}
    is_plain = True
    for name, value in pairs:
        try:
            text = (value or b"").decode()
        except UnicodeDecodeError:
            is_plain = False
            continue
        is_plain = is_plain and name not in found
        found[name] = text
    if not is_plain:
        found[HEADERS_MARK] = base64.b64encode(_encode(pairs)).decode()
    return found


def given_headers(pairs: Sequence[Pair]) -> list[Pair] | None:
    """The headers that the sink took, of a message's properties; None if there was none."""
    for name, value in pairs:
        if name == HEADERS_MARK:
            try:
                return _decoder.decode(base64.b64decode(value or b"", validate=True))
            except (binascii.Error, msgspec.MsgspecError):
                break  # another producer likes the name
    return [pair for pair in pairs if pair[0] != KEY_MARK] or None
