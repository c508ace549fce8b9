"""Stand-ins: records that can be read, for records that cannot.

What always holds: a stand-in passes the check of a batch, whatever the bytes are that it stands for. One for a record
whose body stands in a block has the pointer for its body, since the block is what cannot be read.
"""

from __future__ import annotations

from typing import Final

from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.attributes import Attributes, encode_attributes
from dmq.records.builder import build_record, record_head
from dmq.records.check import is_text, kinds_of
from dmq.records.compression import decompress
from dmq.records.move import DeadReason, shorten
from dmq.records.view import RecordView

__all__ = ["placeholder", "stand_in"]

_NOTHING: Final = Attributes()
_MAGIC: Final = layout.U16.pack(layout.MAGIC)


def stand_in(raw: bytes, says: Attributes = _NOTHING, *, flags: int = 0, is_sealed: bool = True) -> bytes:
    """A record that can be read, for one that cannot or fails its checksums: with its place and times, its body, and
    what of its names and attributes can be read. A body that cannot be found is the whole record.

    Parameters:
        says: attributes in place of its own of these kinds.
        flags: to be set.
        is_sealed: the checksum of the body is right.
    """
    padded = raw.ljust(layout.RECORD_BYTES_MIN, b"\0")
    _, _, had, tag_hash, priority, *_ = layout.FIXED.unpack_from(padded)
    body, names, entries = raw, [b"", b"", b""], dict[tuple[int, bytes], bytes]()
    try:
        view = RecordView(layout.U32.pack(len(raw)) + _MAGIC + raw[layout.FLAGS_AT :])
        names = [*view.name_bytes]
        body, entries = view.raw_body, _entries_of(view.attribute_bytes)
    except RecordCorrupt:
        pass
    flags |= had & (layout.ORDERED | layout.IPV6)
    if (attrs.MESSAGE_ID, b"") in entries:
        flags |= had & (layout.MOVED | layout.REPLAYED)
    if had & layout.COMPRESSED and _expands(body, entries):
        flags |= layout.COMPRESSED
    else:
        entries.pop((attrs.COMPRESSION, b""), None)
    added = encode_attributes(says)
    for kind, _ in attrs.read_entries(added):
        entries.pop((kind, b""), None)
    kept = b"".join(attrs.entry(kind, value) for (kind, _), value in entries.items())
    if len(kept) + len(added) > layout.ATTRIBUTES_BYTES_MAX:
        kept = b""
    record = bytearray(
        build_record(
            record_head(flags & ~layout.IPV6, tag_hash, min(priority, layout.PRIORITY_MAX)),
            sent_at_ms=layout.U64.unpack_from(padded, layout.SEND_TIME_AT)[0],
            body=body,
            body_crc=crc32c(body) if is_sealed else ~crc32c(body) & 0xFFFF_FFFF,
            names=b"".join(bytes((len(name),)) + name for name in map(_as_text, names)),
            attributes=kept + added,
        )
    )
    record[layout.FLAGS_AT] = flags
    for first, last in ((layout.JOURNAL_OFFSET_AT, layout.SEND_TIME_AT), (layout.RECEIVE_TIME_AT, layout.CRC_AT)):
        record[first:last] = padded[first:last]
    return bytes(record)


def placeholder(raw: bytes, reason: str) -> bytes:
    """A stand-in for people who look at messages: marked as none of a user's, with the reason."""
    return stand_in(raw, Attributes(reason=shorten(reason), reason_code=DeadReason.CORRUPT), flags=layout.SYSTEM)


def _entries_of(raw: bytes) -> dict[tuple[int, bytes], bytes]:
    """What can be read of attributes, by kind and key of a property, in their order."""
    found: dict[tuple[int, bytes], bytes] = {}
    at, end = 0, len(raw)
    while end - at >= attrs.ENTRY.size:
        kind, size = attrs.ENTRY.unpack_from(raw, at)
        value = raw[at + attrs.ENTRY.size : at + attrs.ENTRY.size + size]
        at += attrs.ENTRY.size + size
        if at > end:
            break
        if kinds_of(attrs.entry(kind, value)) >= 0:
            key = value[1 : 1 + value[0]] if kind == attrs.PROPERTY else b""
            found.setdefault((kind, key), value)
    return found


def _expands(body: bytes, entries: dict[tuple[int, bytes], bytes]) -> bool:
    said = attrs.decode_attributes(b"".join(attrs.entry(kind, value) for (kind, _), value in entries.items()))
    try:
        decompress(said.codec, said.raw_size or 0, body, layout.RAW_BYTES_MAX)
    except RecordCorrupt:
        return False
    return True


def _as_text(name: bytes) -> bytes:
    """A name that is text; what of it is not text is replaced."""
    text = name if is_text(name) else name.decode("utf-8", "replace").encode()
    return (
        text if len(text) <= layout.NAME_BYTES_MAX else text[: layout.NAME_BYTES_MAX].decode("utf-8", "ignore").encode()
    )
