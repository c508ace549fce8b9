"""Retention: which of the oldest segments may go, and what must be carried forward before they do.

`segments_to_drop` is pure. What always holds: segments go oldest first and whole; the last one stays; what is still
wanted of a segment (pending delays, open transactions, unsettled messages of topics that are carried for a group)
stands at the tail, flushed, before the segment goes. Carrying forward may take many calls: each looks anew at what it
writes, so what has ended meanwhile is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from dmq.errors import Damaged
from dmq.event_log import EventLog
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, MessageId
from dmq.records.attributes import Attributes
from dmq.records.hashes import id_hash, key_hash
from dmq.records.move import moved_record
from dmq.settings import StoreSettings
from dmq.storage.delay.wheel import Delay
from dmq.storage.files import DiskUsage
from dmq.storage.journal.journal import Journal
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import SNAPSHOT
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.read.reader import Found, Reader
from dmq.storage.state.derived import Derived
from dmq.storage.state.events import DelaysDone, Event, Outcome, Settled, pack_offsets
from dmq.storage.state.positions import Position
from dmq.storage.state.state import queue_key

log = EventLog(__name__)

__all__ = ["Going", "SegmentAge", "carried_forward", "going_segments", "protected_offset", "segments_to_drop"]


class SegmentAge(NamedTuple):
    """A segment that is not the last: its range, and when its last unit was stored at the latest."""

    start: int
    end: int
    newest_ms: int


class Going(NamedTuple):
    """The oldest segments, about to go: how many, where they begin and end, and where each queue begins after."""

    segments: int
    start: int
    kept_from: int
    firsts: dict[int, int]


def going_segments(
    journal: Journal, derived: Derived, settings: StoreSettings, disk: DiskUsage, now_ms: int
) -> Going | None:
    """What retention asks to drop now; None for nothing."""
    ages = [SegmentAge(before.start, after.start, after.stored_at_ms) for before, after in pairwise(journal.segments)]
    if not ages:
        return None
    protected = protected_offset(derived, settings, journal.end)
    count = segments_to_drop(ages, journal.tail.size, now_ms, settings, disk=disk, protected=protected)
    # A delayed record that was handed out is about to be delivered: were it carried forward too, it would come twice.
    handed_out = derived.wheel.oldest_handed_out()
    while count and handed_out is not None and journal.segments[count].start > handed_out:
        count -= 1
    if not count:
        return None
    kept_from = journal.segments[count].start
    unit = Scanner(journal).unit_at(kept_from)
    if unit is None or not unit.header.flags & SNAPSHOT:
        log.error("retention stopped: the next segment's snapshot is damaged", offset=kept_from)
        return None
    segment = journal.segments[count]
    if unit.header.stored_at_ms != segment.stored_at_ms:
        # Its header was read unchecked when the store was opened: what follows from that time is decided anew.
        segment.stored_at_ms = unit.header.stored_at_ms
        return going_segments(journal, derived, settings, disk, now_ms=now_ms)
    return Going(count, journal.start, kept_from, derived.firsts_of(derived.snapshot_in(unit)))


def segments_to_drop(
    segments: Sequence[SegmentAge],
    tail_bytes: int,
    now_ms: int,
    settings: StoreSettings,
    disk: DiskUsage,
    protected: int,
) -> int:
    """How many of the oldest segments go.

    Parameters:
        segments: all but the last, oldest first.
        tail_bytes: size of the last.
        protected: journal offset from which everything is still wanted by somebody; above the force mark of the disk
            even that goes.
    """
    oldest_ms = None if settings.retention_hours is None else now_ms - settings.retention_hours * 3_600_000
    total = tail_bytes + sum(segment.end - segment.start for segment in segments)
    used = disk.total - disk.free
    count = 0
    for segment in segments:
        size = segment.end - segment.start
        too_old = oldest_ms is not None and segment.newest_ms < oldest_ms
        too_much = settings.retention_bytes is not None and total > settings.retention_bytes
        crowded = used > settings.disk_clean * disk.total
        forced = used > settings.disk_force * disk.total
        if not forced and (segment.end > protected or not (too_old or too_much or crowded)):
            break
        count += 1
        total -= size
        used -= size
    return count


def protected_offset(derived: Derived, settings: StoreSettings, end: int) -> int:
    """The journal offset from which everything is kept for a group or for the archive."""
    protected = end
    if settings.keep_unarchived:
        protected = min(protected, derived.state.archived)
    if settings.keep_unconsumed:
        for positions in derived.state.positions.groups().values():
            for (topic_id, queue), position in positions.items():
                key = queue_key(topic_id, queue)
                at = max(position.floor, derived.state.first.get(key, 0))
                if at < derived.state.next.get(key, 0):
                    columns = next(iter(derived.queues.columns(key, at, at + 1)))
                    protected = min(protected, int(columns.offsets[0]))
    return protected


DELAYS_AT_ONCE: Final = 1 << 16


def carried_forward(
    derived: Derived, reader: Reader, going: Going, delays: list[Delay], now_ms: int
) -> Iterator[list[Batch | Event]]:
    """What must be written again before segments go; each list belongs into one unit.

    Parameters:
        delays: those that were pending there when somebody looked, the first one last; taken out one by one.
    """
    start, end = going.start, going.kept_from
    while delays:
        delay = delays.pop()
        is_pending = start <= delay.offset < end and derived.wheel.is_pending(delay.due_ms, delay.offset)
        found = _readable(reader, delay.offset) if is_pending else None
        if found is not None:
            done = DelaysDone(pack_offsets([delay.offset]), "carried")
            yield [_copy(found, SCHEDULE_TOPIC, now_ms, due_ms=delay.due_ms), done]
    for raw_id, half in list(derived.state.transactions.items()):
        if start <= half.journal_offset < end:
            found = _readable(reader, half.journal_offset)
            if found is not None and found.message_id == MessageId.from_bytes(raw_id):
                yield [_copy(found, HALF_TOPIC, now_ms)]
    for topic in list(derived.state.topics_by_id.values()):
        group = topic.config.carry_for
        if group is None:
            continue
        for queue in range(topic.config.queues):
            key = queue_key(topic.id, queue)
            position = derived.state.positions.get(group, topic.id, queue)
            for offset in _unsettled(position, derived.state.first.get(key, 0), going.firsts.get(key, 0)):
                columns = next(iter(derived.queues.columns(key, offset, offset + 1)))
                found = _readable(reader, int(columns.offsets[0])) if columns.lengths[0] else None
                if found is not None:
                    # Settled with its copy: should the segment stay after all, it is not carried again.
                    settled = Settled(
                        group, topic.id, queue, offset, count=1, outcome=Outcome.CARRIED, settled_at_ms=now_ms
                    )
                    yield [_copy(found, topic.name, now_ms), settled]


def _unsettled(position: Position | None, start: int, end: int) -> Iterator[int]:
    """Offsets of a queue in [start, end) that a group has not settled."""
    at = start if position is None else max(start, position.floor)
    for low, high in () if position is None else position.ranges:
        yield from range(at, min(low, end))
        at = max(at, high)
    yield from range(at, end)


def _readable(reader: Reader, offset: int) -> Found | None:
    try:
        return reader.record_at(offset)
    except Damaged:
        return None  # already counted as damage; there is nothing left to carry


def _copy(found: Found, topic: str, now_ms: int, due_ms: int | None = None) -> Batch:
    """The record again, for the same queue, under its own id."""
    before = found.record.attributes
    record = moved_record(
        found.record,
        topic,
        sent_at_ms=now_ms,
        message_id=found.message_id,
        says=Attributes(
            due_at_ms=due_ms,
            target_topic=before.target_topic,
            target_queue=before.target_queue,
            attempt=before.attempt,
            group=before.group,
            reason=before.reason,
            reason_code=before.reason_code,
        ),
    )
    hashes = [id_hash(found.message_id)]
    if before.key is not None:
        hashes.append(key_hash(before.key))
    return Batch(
        topic=topic,
        queue=found.record.queue,
        data=record,
        lengths=[len(record)],
        hash_index=[0] * len(hashes),
        hashes=hashes,
        dues=[] if due_ms is None else [due_ms],
        moved=True,
    )
