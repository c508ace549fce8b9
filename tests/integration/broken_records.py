"""Records that no good client sends, and directories in which an earlier version stored them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import numpy as np
from crc32c import crc32c

from dmq.records import layout
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.storage.files import Files
from dmq.storage.journal.unit import CHECKED, CRC_FROM, parse_unit, read_header

_ENTRY: Final = struct.Struct(">BH")
SENT_AT_MS: Final = 1_700_000_000_000


def record(topic: str, attributes: bytes = b"", *, app: bytes = b"raw", body: bytes = b"hello", flip: int = 0) -> bytes:
    """A record with any bytes as its attributes and app, and one byte turned."""
    names = name_bytes("topic", topic) + bytes((len(app),)) + app + b"\0"
    head = record_head(0, 0, 4)
    raw = bytearray(
        build_record(head, sent_at_ms=SENT_AT_MS, body=body, body_crc=crc32c(body), names=names, attributes=attributes)
    )
    raw[flip] ^= 1 if flip else 0
    return bytes(raw)


def key(text: bytes, size: int | None = None) -> bytes:
    """The attribute of a key, which may lie about its size."""
    return _ENTRY.pack(1, len(text) if size is None else size) + text


BROKEN: Final[dict[str, Callable[[str], bytes]]] = {
    "the size of an attribute": lambda topic: record(topic, key(b"k", 300)),
    "a key that is not text": lambda topic: record(topic, key(b"\xff\xfe")),
    "an app that is not text": lambda topic: record(topic, app=b"\xff"),
    "an attribute twice": lambda topic: record(topic, key(b"k") * 2),
    "a bit of the body": lambda topic: record(topic, flip=layout.BODY_AT),
    "a bit of the key": lambda topic: record(topic, key(b"k-1"), flip=-1),
}


def spoil(files: Files, change: Callable[[bytes], bytes | None]) -> int:
    """Give stored records other bytes of the same length, in units as an earlier version wrote them: unchecked, intact.

    Parameters:
        change: gets a record as it stands there; None leaves it.

    Returns how many were changed.
    """
    changed = 0
    for name in files.listdir("journal"):
        file = files.open(f"journal/{name}", write=True)
        data = bytearray(file.read(0, file.size()))
        at = 0
        while (header := read_header(data, at)) is not None:
            unit = parse_unit(header, memoryview(bytes(data[at : at + header.length])))
            struct.pack_into(">H", data, at + 10, header.flags & ~CHECKED)
            for offset, length in zip(
                np.asarray(unit.offsets).tolist(), np.asarray(unit.lengths).tolist(), strict=True
            ):
                place = at + offset - unit.start
                now = change(bytes(data[place : place + length]))
                if now is not None:
                    assert len(now) == length
                    data[place : place + length] = now
                    changed += 1
            struct.pack_into(">I", data, at + 4, crc32c(bytes(data[at + CRC_FROM : at + header.length])))
            at += header.length
        file.write(0, [bytes(data)])
        file.sync()
        file.close()
    return changed
