"""Moving many messages at once: `moved_record` for a run of records that were never moved, a few microseconds each.

For what is delayed or prepared and leaves in bulk. What always holds: every record that comes out has the very bytes
that `moved_record(…, is_placed=False)` would have made of it under the topic it already names.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import InvalidMessage
from dmq.model import MessageId
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.columns import decode_columns
from dmq.records.layout import Buffer
from dmq.records.move import NOT_COPIED, moved_record
from dmq.records.view import RecordView

__all__ = ["moved_many"]

_FEW: Final = 8
_U16: Final = layout.U16.pack
_HEAD: Final = np.dtype(
    [
        ("length", ">u4"),
        ("magic", ">u2"),
        ("flags", "u1"),
        ("tag_hash", ">u2"),
        ("priority", "u1"),
        ("stamp", f"V{layout.STAMP.size}"),
        ("sent", ">u8"),
        ("times", f"V{layout.TIMES.size}"),
        ("crc", ">u8"),
        ("body_size", ">u4"),
    ]
)
_SIGNED: Final = np.dtype([("magic", ">u2"), ("flags", "u1"), ("tag_hash", ">u2"), ("priority", "u1"), ("sent", ">u8")])
# Entries that a user sends and a move copies as they are; attributes with any other are looked at one by one.
_PLAIN: Final = frozenset((attrs.KEY, attrs.TAG, attrs.EXPIRES_AT, attrs.COMPRESSION, attrs.PROPERTY))


def moved_many(
    buffer: Buffer,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    producer_id: int,
    sequences: npt.NDArray[np.uint64],
    sent_at_ms: int,
) -> list[bytes]:
    """Copies of records of one producer and one topic, for that topic, with the broker's fields zero.

    Parameters:
        buffer: where they stand.
        starts, lengths: where in it.
        producer_id, sequences: their ids.
        sent_at_ms: the copies' send time.

    Raises:
        InvalidMessage: attributes of one would not fit.
        RecordCorrupt: one cannot be read.
    """
    if len(starts) < _FEW:
        return [
            _moved_one(buffer, start, producer_id, sequence, sent_at_ms=sent_at_ms)
            for start, sequence in zip(starts.tolist(), sequences.tolist(), strict=True)
        ]
    columns = decode_columns(buffer, starts, lengths)
    flags = columns.flags & np.uint8(0xFF & ~layout.IPV6) | np.uint8(layout.MOVED)
    topic = bytes(buffer[int(columns.topic_at[0]) : int(columns.app_at[0]) - 1])
    origins = _origins(columns, topic, producer_id, sequences)
    added_size = origins.itemsize
    added = origins.tobytes()
    signed = np.empty(len(starts), _SIGNED)
    signed["magic"], signed["flags"], signed["sent"] = layout.MAGIC, flags, sent_at_ms
    signed["tag_hash"], signed["priority"] = columns.tag_hash, columns.priority
    heads_signed = signed.tobytes()
    view = bytes(buffer)
    pieces: list[bytes] = []
    crcs: list[int] = []
    grown: list[int] = []
    raw = kept = b""
    head_at = added_at = 0
    for body_at, names_at, attributes_at, size in zip(
        columns.body_at.tolist(),
        (columns.topic_at - 1).tolist(),
        columns.attributes_at.tolist(),
        columns.attributes_size.tolist(),
        strict=True,
    ):
        before = view[attributes_at : attributes_at + size]
        if before != raw:  # those of neighbours are often the same
            raw, kept = before, _kept(before)
        total = added_size + len(kept)
        if total > layout.ATTRIBUTES_BYTES_MAX:
            raise InvalidMessage(f"a moved record's attributes would take {total} bytes, over 65,535")
        more = _U16(total) + added[added_at : added_at + added_size] + kept
        names = view[names_at : attributes_at - 2]
        crcs.append(crc32c(more, crc32c(names, crc32c(heads_signed[head_at : head_at + _SIGNED.itemsize]))))
        grown.append(total - size)
        pieces.append(view[body_at:names_at] + names + more)
        head_at += _SIGNED.itemsize
        added_at += added_size
    heads = np.zeros(len(starts), _HEAD)
    for name in ("magic", "flags", "tag_hash", "priority", "sent"):
        heads[name] = signed[name]
    heads["length"] = columns.length.astype(np.int64) + np.array(grown)
    heads["crc"] = np.array(crcs, np.uint64) << np.uint64(32) | columns.crc & np.uint64(0xFFFF_FFFF)
    heads["body_size"] = columns.body_size
    fixed = heads.tobytes()
    step = _HEAD.itemsize
    return [fixed[at : at + step] + piece for at, piece in zip(range(0, len(fixed), step), pieces, strict=True)]


def _moved_one(buffer: Buffer, start: int, producer_id: int, sequence: int, sent_at_ms: int) -> bytes:
    record = RecordView(buffer, start)
    return moved_record(
        record, record.topic, sent_at_ms=sent_at_ms, message_id=MessageId(producer_id, sequence), is_placed=False
    )


def _kept(raw: bytes) -> bytes:
    """Of a record's attributes, those that a first move copies."""
    at, end, seen = 0, len(raw), 0
    while at < end - 2:
        kind = raw[at]
        if kind not in _PLAIN or (kind != attrs.PROPERTY and seen >> kind & 1):
            break
        seen |= 1 << kind
        at += 3 + (raw[at + 1] << 8 | raw[at + 2])
    if at == end:
        return raw
    return b"".join(attrs.entry(kind, value) for kind, value in attrs.read_entries(raw) if kind not in NOT_COPIED)


def _origins(columns: Any, topic: bytes, producer_id: int, sequences: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """The attributes that a first move adds, for each record, in the order of their kinds."""
    kind = np.dtype(
        [
            ("id_head", "V3"),
            ("producer", ">u8"),
            ("sequence", ">u8"),
            ("topic", f"V{3 + len(topic)}"),
            ("sent_head", "V3"),
            ("sent", ">u8"),
            ("offset_head", "V3"),
            ("offset", ">u8"),
        ]
    )
    table = np.empty(len(sequences), kind)
    table["id_head"] = np.void(attrs.ENTRY.pack(attrs.MESSAGE_ID, 16))
    table["producer"] = producer_id
    table["sequence"] = sequences
    table["topic"] = np.void(attrs.entry(attrs.ORIGINAL_TOPIC, topic))
    table["sent_head"] = np.void(attrs.ENTRY.pack(attrs.ORIGINAL_SEND_TIME, 8))
    table["sent"] = columns.send_time_ms
    table["offset_head"] = np.void(attrs.ENTRY.pack(attrs.ORIGINAL_JOURNAL_OFFSET, 8))
    table["offset"] = columns.journal_offset
    return table
