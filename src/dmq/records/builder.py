"""One record from its parts, for those that are not encoded with a batch: moved ones, and stand-ins.

What always holds: the broker's fields are zero, as in a batch; both checksums are right if the body's is.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from dmq.errors import InvalidMessage, MessageTooLarge
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.layout import Buffer

__all__ = ["build_record", "name_bytes", "others_crc", "record_head"]

HEAD: Final = struct.Struct(">I51sQI")  # length · bytes 4..54 · CRC · body size
BLANK_STAMP: Final = bytes(layout.STAMP.size)
BLANK_TIMES: Final = bytes(layout.TIMES.size)
LENGTH_MAX: Final = 0xFFFF_FFFF


def record_head(flags: int, tag_hash: int, priority: int) -> bytes:
    """What a record begins with behind its length, up to the broker's fields."""
    return layout.CLIENT_PART.pack(layout.MAGIC, flags, tag_hash, priority)


def build_record(
    head: bytes,
    *,
    sent_at_ms: int,
    body: bytes | memoryview,
    body_crc: int,
    names: bytes,
    attributes: bytes,
) -> bytes:
    """One record from its parts.

    Parameters:
        head: from `record_head`.
        names: topic, app and business id, each behind its length byte.
    """
    tail = names + layout.U16.pack(len(attributes)) + attributes
    length = HEAD.size + len(body) + len(tail)
    if length > LENGTH_MAX:
        raise MessageTooLarge(f"a record takes {length} bytes; at most {LENGTH_MAX} are possible", size=length)
    sent = layout.U64.pack(sent_at_ms)
    crc = others_crc(head, sent, tail) << 32 | body_crc
    head = head + BLANK_STAMP + sent + BLANK_TIMES
    return b"".join((HEAD.pack(length, head, crc, len(body)), body, tail))


def others_crc(head: Buffer, sent: Buffer, tail: Buffer) -> int:
    """CRC-32C of what the client wrote beside the body: bytes 4..9, the send time, and all after the body."""
    return crc32c(tail, crc32c(sent, crc32c(head)))


def name_bytes(what: str, name: str) -> bytes:
    """A name behind its length byte.

    Raises:
        InvalidMessage: it is longer than 255 bytes of UTF-8, or no text.
    """
    raw = attrs.utf8(what, name)
    if len(raw) > layout.NAME_BYTES_MAX:
        raise InvalidMessage(f"{what} takes {len(raw)} bytes of UTF-8; at most {layout.NAME_BYTES_MAX} are allowed")
    return bytes((len(raw),)) + raw
