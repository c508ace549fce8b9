"""What all derived files have in common: a frame with a checksum, written to be found whole or not at all.

    0  4    magic · 4  u16 version · 6  u16 zero · 8  u32 CRC-32C of what follows · 12  u32 payload length · payload

What always holds: nothing here is the truth. A derived file that is missing or wrong raises `DerivedDamaged`, and the
store builds all of them anew from the journal.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from dmq.errors import StorageError
from dmq.storage.files import Files
from dmq.storage.pool import FilePool

__all__ = ["FRAME_BYTES", "DerivedDamaged", "frame", "read_exactly", "unframe", "write_framed"]

_FRAME: Final = struct.Struct(">4sHHII")
FRAME_BYTES: Final = _FRAME.size
VERSION: Final = 1


class DerivedDamaged(StorageError):
    """A derived file is missing or wrong; caught by the store, which then rebuilds."""

    code = "DERIVED_DAMAGED"


def frame(magic: bytes, payload: bytes) -> bytes:
    """The payload in its frame."""
    sized = struct.pack(">I", len(payload)) + payload
    return struct.pack(">4sHHI", magic, VERSION, 0, crc32c(sized)) + sized


def unframe(magic: bytes, data: bytes, path: str) -> bytes:
    """The payload of a frame at the head of `data`; more may follow it.

    Raises:
        DerivedDamaged: it is not what was written.
    """
    if len(data) < FRAME_BYTES:
        raise DerivedDamaged(f"{path} is too short")
    found, version, zero, crc, length = _FRAME.unpack_from(data)
    if found != magic or version != VERSION or zero or len(data) < FRAME_BYTES + length:
        raise DerivedDamaged(f"{path} has a wrong head")
    if crc32c(memoryview(data)[12 : FRAME_BYTES + length]) != crc:
        raise DerivedDamaged(f"{path} fails its checksum")
    return data[FRAME_BYTES : FRAME_BYTES + length]


def read_exactly(pool: FilePool, path: str, position: int, size: int) -> bytes:
    """Bytes that must be there.

    Raises:
        DerivedDamaged: they are not.
    """
    try:
        data = pool.read(path, position, size)
    except FileNotFoundError:
        raise DerivedDamaged(f"{path} is missing") from None
    if len(data) != size:
        raise DerivedDamaged(f"{path} is too short")
    return data


def read_framed(pool: FilePool, path: str, magic: bytes) -> bytes:
    """The payload of a framed file's head."""
    head = read_exactly(pool, path, 0, FRAME_BYTES)
    length = _FRAME.unpack(head)[4]
    if length > pool.get(path).size() - FRAME_BYTES:
        raise DerivedDamaged(f"{path} is too short")
    return unframe(magic, head + read_exactly(pool, path, FRAME_BYTES, length), path)


def write_framed(files: Files, path: str, magic: bytes, payload: bytes) -> None:
    """Write a whole file and flush it; making its name durable is the caller's."""
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (frame(magic, payload),))
        file.sync()
    finally:
        file.close()
