"""Shapes: what records have in common whatever their body, key and time. Made once, and remembered.

What always holds: a shape that was made fits every limit together with a key of its size; a shape comes from the memory
only if every choice behind it is the same, types included, so that what is refused once is refused always.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from crc32c import crc32c

from dmq.errors import InvalidMessage
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.builder import name_bytes
from dmq.records.hashes import tag_hash

__all__ = ["Shape", "make_shape", "names_of", "remembered_shape"]

_REMEMBERED: Final = 4096
_TAG_MAX: Final = 255  # longer ones are not remembered: the memory stays small


class Shape(NamedTuple):
    """The bytes of a record that do not depend on its body, key and time."""

    front: bytes  # bytes 4..9
    front_crc: int  # CRC-32C of them
    tail: bytes  # everything between the body and the key


@lru_cache(1024)
def names_of(topic: str, app: str) -> bytes:
    """Topic and app, each behind its length byte."""
    return name_bytes("topic", topic) + name_bytes("app", app)


def make_shape(
    names: bytes,
    flags: int,
    tag: str | None,
    business_id: str | None,
    priority: int,
    ordered: bool,
    key_size: int,
    codec: int = 0,
    raw_size: int = 0,
    extra: bytes = b"",
    properties: Mapping[str, str] | None = None,
) -> Shape:
    """The shape of a message.

    Parameters:
        names: from `names_of`.
        key_size: in bytes; -1 without a key.
        codec: what the body is compressed with; 0 if it is not.
        raw_size: of the body before.
        extra: attributes of our own.

    Raises:
        InvalidMessage: a value breaks a rule, or there is too much of them together.
    """
    if type(priority) is not int or not 0 <= priority <= layout.PRIORITY_MAX:
        raise InvalidMessage(f"priority is 0 to {layout.PRIORITY_MAX}, not {priority!r}")
    user = b"" if tag is None else attrs.text_entry(attrs.TAG, "tag", tag)
    if properties:
        user += attrs.property_entries(properties)
    key_bytes = key_size + attrs.ENTRY.size if key_size >= 0 else 0
    if len(user) + key_bytes > layout.USER_ATTRIBUTES_BYTES_MAX:
        raise attrs.too_large_together(len(user) + key_bytes)
    if ordered:
        flags |= layout.ORDERED
    if codec:
        flags |= layout.COMPRESSED
        user += attrs.compression_entry(codec, raw_size)
    user += extra
    size = len(user) + key_bytes
    if size > layout.CLIENT_ATTRIBUTES_BYTES_MAX:
        limit = layout.CLIENT_ATTRIBUTES_BYTES_MAX
        raise InvalidMessage(f"attributes take {size} bytes; at most {limit} may be sent")
    tail = names + name_bytes("business id", business_id or "") + layout.U16.pack(size) + user
    if key_size >= 0:
        tail += attrs.ENTRY.pack(attrs.KEY, key_size)
    front = layout.CLIENT_PART.pack(layout.MAGIC, flags, 0 if tag is None else tag_hash(tag), priority)
    return Shape(front, crc32c(front), tail)


_remember: Final = lru_cache(_REMEMBERED, typed=True)(make_shape)


def remembered_shape(
    names: bytes,
    flags: int,
    tag: str | None,
    business_id: str | None,
    priority: int,
    ordered: bool,
    key_size: int,
    codec: int = 0,
    raw_size: int = 0,
) -> Shape:
    """`make_shape` for what occurs again and again: no properties, nothing of our own.

    Raises:
        InvalidMessage: as `make_shape`.
    """
    try:
        if tag is None or len(tag) <= _TAG_MAX:
            return _remember(names, flags, tag, business_id, priority, ordered, key_size, codec, raw_size)
    except TypeError:
        pass  # something that cannot be remembered, nor sent: below is told why
    return make_shape(names, flags, tag, business_id, priority, ordered, key_size, codec, raw_size)
