"""Event search: the events of the journal that concern one message.

Pure code over units as they stand in the journal. Events are not indexed, so the caller reads units from the message
on and hands in as many as it likes; most messages are settled shortly after they were stored.

What always holds: a unit that fails its checksum says nothing; events come in the order of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dmq.errors import RecordCorrupt
from dmq.storage.journal.unit import HEADER_BYTES, ROW, ROW_BYTES, Header, Unit, is_intact, parse_unit, read_header
from dmq.storage.state.derived import event_of
from dmq.storage.state.events import (
    DelaysDone,
    Event,
    PositionSet,
    Settled,
    TransactionEnded,
    TransactionsEnded,
    unpack_offsets,
)

__all__ = ["SeenEvent", "Wanted", "covers", "find_events"]


class Wanted(NamedTuple):
    """What the events must be about."""

    places: Mapping[tuple[int, int], Sequence[int]]  # by topic id and queue, the offsets it has there
    journal_offsets: frozenset[int]  # of records in the schedule
    message_id: bytes


class SeenEvent(NamedTuple):
    """An event, and when it was stored."""

    stored_at_ms: int
    event: Event


def covers(event: Settled, offset: int) -> bool:
    """Whether an event settles an offset of its queue."""
    at = offset - event.start
    if not 0 <= at < event.count:
        return False
    return not event.bitmap or (at >> 3 < len(event.bitmap) and bool(event.bitmap[at >> 3] >> (at & 7) & 1))


def find_events(raw: bytes | memoryview, wanted: Wanted) -> list[SeenEvent]:
    """The events of whole units, one after another, that concern the message.

    What a position was set to is among them whatever its queue holds of the message: it may pass over it.
    """
    found: list[SeenEvent] = []
    at = 0
    while (header := read_header(raw, at)) is not None and at + header.length <= len(raw):
        part = memoryview(raw)[at : at + header.length]
        at += header.length
        if not _has_events(header, part) or not is_intact(header, part):
            continue
        try:
            unit = parse_unit(header, part)
            found += [SeenEvent(header.stored_at_ms, event) for event in _events(unit) if _concerns(event, wanted)]
        except RecordCorrupt:
            continue
    return found


def _has_events(header: Header, part: memoryview) -> bool:
    """Whether any batch of the unit is one of events; most units of a busy journal have none."""
    start = HEADER_BYTES + 4 * header.records
    rows = ROW.iter_unpack(part[start : start + ROW_BYTES * header.batches])
    return any(row[4] == 0 for row in rows)


def _events(unit: Unit) -> Iterator[Event]:
    first = 0
    for row in unit.rows:
        if row.topic_id == 0:
            for index in range(first, first + row.records):
                yield event_of(unit, index)
        first += row.records


def _concerns(event: Event, wanted: Wanted) -> bool:
    match event:
        case Settled(_, topic_id, queue):
            return any(covers(event, offset) for offset in wanted.places.get((topic_id, queue), ()))
        case PositionSet(_, topic_id, queue):
            return (topic_id, queue) in wanted.places
        case DelaysDone(offsets):
            return bool(wanted.journal_offsets) and not wanted.journal_offsets.isdisjoint(
                unpack_offsets(offsets).tolist()
            )
        case TransactionEnded(message_id):
            return message_id == wanted.message_id
        case TransactionsEnded(message_ids):
            step = range(0, len(message_ids), 16)
            return any(message_ids[at : at + 16] == wanted.message_id for at in step)
    return False
