"""The lone unit: messages that came one by one, each of another producer, as one unit.

The storage half of a broker's straight path. It gives the bytes and the unit that `unit_draft` and `unit_builder` give
for a batch of one for each message, without the objects between. It chooses and never decides: whatever is more than a
new message for a queue that exists is `Unusual`, and the general way says what becomes of it.

What always holds: nothing is changed here; a unit that is laid out may be thrown away.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from crc32c import crc32c

from dmq.compiled import find
from dmq.records.layout import FLAGS_AT, IPV6, JOURNAL_OFFSET_AT, RELATIVE_MAX, SENT, STAMPED, TAG_AT
from dmq.storage.journal.unit import CRC_FROM, HEADER, ROW, UNIT_MAGIC, UNIT_VERSION, Header, Row, Unit
from dmq.storage.state.state import State

__all__ = ["Lone", "Sender", "UnitHead", "Unusual", "lay_out"]


class Unusual(Exception):
    """The general way is to be taken.

    Parameters:
        reason: in a word, for the metric.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Sender(NamedTuple):
    """Where a producer is.

    Attributes:
        address, port: as units keep it.
        client: as records carry it, six bytes.
        is_ipv6: `client` cannot say it.
    """

    address: bytes
    port: int
    client: bytes
    is_ipv6: bool


class UnitHead(NamedTuple):
    """What the header of a unit says besides its content."""

    flags: int
    epoch: int
    start: int
    stored_at_ms: int
    flushed_through: int
    journal_id: int
    server: bytes


# A message: topic, queue, record, hash of its key or 0, producer id, epoch, sequence, when it was received, sender.
Lone: TypeAlias = tuple[str, int, bytes, int, int, int, int, int, Sender]

_HEAD: Final = struct.Struct(HEADER.format + "I" + ROW.format[1:])  # header, the one length, the one row
_KEY: Final = struct.Struct(">IQ")
_CRC: Final = struct.Struct(">I")
_CRC_AT: Final = 4
_pack_head: Final = _HEAD.pack
_pack_header: Final = HEADER.pack
_pack_row: Final = ROW.pack
_pack_key: Final = _KEY.pack
_pack_crc: Final = _CRC.pack_into
_unpack_sent: Final = SENT.unpack_from
_pack_stamp: Final = STAMPED.pack_into
_new: Final = tuple.__new__  # a call of a tuple's class costs twice as much


def lay_out(lones: list[Lone], state: State, assigned: dict[int, int], head: UnitHead) -> Unit:
    """Give each message its place, and lay all of them out as one unit.

    Parameters:
        assigned: the next offsets of queues whose last units are not applied yet.

    Raises:
        Unusual: a message is not new, or has no queue.
        StaleEpoch, SequenceConflict: a message cannot be taken. The general way says so to its producer alone.
    """
    rows = [_place_one(lones[0], state, assigned)] if len(lones) == 1 else _place(lones, state, assigned)
    return _lay_out(lones, rows, head)


def lay_out_compiled(loop: Callable[..., Any], lones: list[Lone], rows: list[Row], head: UnitHead) -> Unit:
    """The unit by the compiled loop."""
    buffer, crc, offsets, sizes, indexes, hashes, tags = loop(lones, rows, head, UNIT_VERSION)
    flags, epoch, start, stored_at_ms, flushed_through, journal_id, _ = head
    count = len(lones)
    header = _new(Header, (
        UNIT_MAGIC, crc, UNIT_VERSION, flags, epoch, start, len(buffer), count, count, len(hashes), 0, 0,
        stored_at_ms, flushed_through, journal_id,
    ))  # fmt: skip
    return Unit(header, buffer, rows, (offsets, sizes, indexes, hashes, []), tags=tags)


def lay_out_plain(lones: list[Lone], rows: list[Row], head: UnitHead) -> Unit:
    """The same in plain Python."""
    count = len(lones)
    sizes = [len(lone[2]) for lone in lones]
    hashes = [lone[3] for lone in lones if lone[3]]
    keyed = len(hashes)
    indexes = [index for index, lone in enumerate(lones) if lone[3]] if keyed else []
    flags, epoch, start, stored_at_ms, flushed_through, journal_id, server = head
    at = HEADER.size + count * (4 + ROW.size) + 12 * keyed
    length = at + sum(sizes)
    fields = (
        UNIT_MAGIC, 0, UNIT_VERSION, flags, epoch, start, length, count, count, keyed, 0, 0,
        stored_at_ms, flushed_through, journal_id,
    )  # fmt: skip
    if count == 1:
        data = lones[0][2]
        first = _pack_head(*fields, sizes[0], *rows[0])
        buffer = bytearray().join((first, _pack_key(0, hashes[0]), data) if keyed else (first, data))
    else:
        tables = [_pack_header(*fields), struct.pack(f">{count}I", *sizes)]
        tables += [_pack_row(*row) for row in rows]
        if keyed:
            tables.append(struct.pack(f">{keyed}I{keyed}Q", *indexes, *hashes))
        tables += [lone[2] for lone in lones]
        buffer = bytearray().join(tables)
    offsets, tags = [], []
    for lone, row, size in zip(lones, rows, sizes, strict=True):
        received_at_ms, sender = lone[7], lone[8]
        tag, sent_at_ms = _unpack_sent(buffer, at + TAG_AT)
        received, stored = received_at_ms - sent_at_ms, stored_at_ms - sent_at_ms
        if not (0 <= received <= RELATIVE_MAX and 0 <= stored <= RELATIVE_MAX):
            received, stored = min(max(received, 0), RELATIVE_MAX), min(max(stored, 0), RELATIVE_MAX)
        _pack_stamp(
            buffer, at + JOURNAL_OFFSET_AT, start + at, row[5], row[8], sender[2], server, sent_at_ms, received, stored
        )
        if sender[3]:
            buffer[at + FLAGS_AT] |= IPV6
        offsets.append(start + at)
        tags.append(tag)
        at += size
    crc = crc32c(memoryview(buffer)[CRC_FROM:])
    _pack_crc(buffer, _CRC_AT, crc)
    header = _new(Header, (UNIT_MAGIC, crc, *fields[2:]))
    return Unit(header, buffer, rows, (offsets, sizes, indexes, hashes, []), tags=tags)


_lone_bytes: Final = find("lone_bytes")
_lay_out: Final = lay_out_plain if _lone_bytes is None else partial(lay_out_compiled, _lone_bytes)


def _place_one(lone: Lone, state: State, assigned: dict[int, int]) -> Row:
    """The row of a message, with its place in its queue."""
    name, queue, _, _, producer_id, epoch, sequence, _, sender = lone
    topic: Any = state.topics.get(name)
    if topic is None or queue >= topic.config.queues:
        raise Unusual("topic")
    topic_id = topic.id
    key = topic_id << 8 | queue
    if producer_id and state.producers.look(producer_id, epoch, key, sequence, count=1) is not None:
        raise Unusual("resend")
    first = assigned[key] if key in assigned else state.next.get(key, 0)
    return _new(Row, (producer_id, epoch, sequence, 1, topic_id, queue, 0, 0, first, sender[0], sender[1], 0))


def _place(lones: Sequence[Lone], state: State, assigned: dict[int, int]) -> list[Row]:
    """The rows of several messages: no two of them are a producer's for one queue."""
    following = assigned.copy()
    fresh: set[tuple[int, int]] = set()
    rows: list[Row] = []
    for lone in lones:
        row = _place_one(lone, state, following)
        producer_id, key = row[0], row[4] << 8 | row[5]
        if producer_id:
            if (producer_id, key) in fresh:
                raise Unusual("resend")
            fresh.add((producer_id, key))
        following[key] = row[8] + 1
        rows.append(row)
    return rows
