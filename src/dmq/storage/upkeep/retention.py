"""Retention: which of the oldest segments may go, and what must be carried forward before they do.

A segment goes when it is past the retention (`store.retention_hours`, `store.retention_bytes`) and is not held: no
group that exists has anything to consume there (`store.keep_unconsumed`), and the archive has taken it
(`store.keep_unarchived`). Only `store.disk_force`, which has no default, makes segments go that are held or young.

What always holds: segments go oldest first and whole; the last one stays; what is still wanted of a segment (pending
delays, open transactions, unsettled messages of topics that are carried for a group) stands at the tail, flushed,
before the segment goes. Carrying forward may take many calls: each looks anew at what it writes, so what has ended
meanwhile is left. Messages that go unconsumed are counted and logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from dmq.errors import Damaged
from dmq.event_log import EventLog
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, SYSTEM_PREFIX, MessageId
from dmq.records.attributes import Attributes
from dmq.records.hashes import id_hash, key_hash
from dmq.records.move import moved_record
from dmq.records.stand_in import stand_in
from dmq.records.view import RecordView
from dmq.settings import StoreSettings, format_size
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

__all__ = ["Going", "Hold", "Retention", "SegmentAge", "carried_forward", "segments_past", "segments_to_force"]

HOLDS_MAX: Final = 16
_LOSSES_MAX: Final = 10_000  # (group, topic, queue) whose unconsumed messages are counted apart
_TOLD_MAX: Final = 10
_HOLD_TOLD_MS: Final = 3_600_000


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
    is_forced: bool = False


class Hold(NamedTuple):
    """A group that has not consumed something of the oldest segment, although that is past the retention."""

    group: str
    topic_id: int
    queue: int


def segments_past(segments: Sequence[SegmentAge], tail_bytes: int, now_ms: int, settings: StoreSettings) -> int:
    """How many of the oldest segments are past the retention, by age or by size.

    Parameters:
        segments: all but the last, oldest first.
        tail_bytes: size of the last.
    """
    oldest_ms = _oldest_ms(settings, now_ms)
    total = tail_bytes + sum(segment.end - segment.start for segment in segments)
    count = 0
    for segment in segments:
        too_old = oldest_ms is not None and segment.newest_ms < oldest_ms
        too_much = settings.retention_bytes is not None and total > settings.retention_bytes
        if not (too_old or too_much):
            break
        count += 1
        total -= segment.end - segment.start
    return count


def segments_to_force(segments: Sequence[SegmentAge], settings: StoreSettings, disk: DiskUsage) -> int:
    """How many of the oldest segments go, held or not, to bring the disk below the force mark."""
    if settings.disk_force is None:
        return 0
    used = disk.used
    count = 0
    for segment in segments:
        if used <= settings.disk_force * disk.total:
            break
        count += 1
        used -= segment.end - segment.start
    return count


def _oldest_ms(settings: StoreSettings, now_ms: int) -> float | None:
    return None if settings.retention_hours is None else now_ms - settings.retention_hours * 3_600_000


class Retention:
    """The retention of one journal, who holds it up, and what it has dropped.

    Attributes:
        holds: groups that hold the oldest segment, which is past the retention; at most `HOLDS_MAX` of them.
        held_bytes: what is past the retention and held, in bytes of the journal.
        dropped: messages of users' topics that went, since the store was opened.
        lost: those of them that groups had not consumed, counted for each group.
        losses: `lost` by group and queue, up to a bound.
        lost_at_ms: when the last of them went.
    """

    def __init__(self, journal: Journal, settings: StoreSettings) -> None:
        self._journal = journal
        self._settings = settings
        self._known: tuple[int, dict[int, int]] | None = None  # a segment's start, and where queues begin there
        self._hold_told_ms: int | None = None
        self.holds: list[Hold] = []
        self.held_bytes = 0
        self.dropped = 0
        self.lost = 0
        self.losses: dict[Hold, int] = {}
        self.lost_at_ms = 0

    def is_past(self, stored_at_ms: int, now_ms: int) -> bool:
        """Whether what was stored then is past the retention by its age."""
        oldest_ms = _oldest_ms(self._settings, now_ms)
        return oldest_ms is not None and stored_at_ms < oldest_ms

    def going(self, derived: Derived, disk: DiskUsage, now_ms: int) -> Going | None:
        """What is to be dropped now; None for nothing."""
        journal = self._journal
        while True:
            past, count, is_forced = self._count(derived, disk, now_ms)
            # A delayed record that was handed out is about to be delivered: carried forward too, it would come twice.
            handed_out = derived.wheel.oldest_handed_out()
            while count and handed_out is not None and journal.segments[count].start > handed_out:
                count -= 1
            self._look_at_holds(derived, past, now_ms)
            if not count:
                return None
            segment = journal.segments[count]
            unit = Scanner(journal).unit_at(segment.start)
            if unit is None or not unit.header.flags & SNAPSHOT:
                log.error("retention stopped: the next segment's snapshot is damaged", offset=segment.start)
                return None
            if unit.header.stored_at_ms == segment.stored_at_ms:
                firsts = derived.firsts_of(derived.snapshot_in(unit))
                return Going(count, journal.start, segment.start, firsts, is_forced=is_forced)
            # Its header was read unchecked when the store was opened: what follows from that time is decided anew.
            segment.stored_at_ms = unit.header.stored_at_ms

    def _count(self, derived: Derived, disk: DiskUsage, now_ms: int) -> tuple[int, int, bool]:
        """How many segments are past the retention, how many go, and whether some go by force."""
        journal = self._journal
        ages = [
            SegmentAge(before.start, after.start, before.newest_ms or after.stored_at_ms)
            for before, after in pairwise(journal.segments)
        ]
        past = segments_past(ages, journal.tail.size, now_ms, self._settings) if ages else 0
        count = past
        if self._settings.keep_unarchived:
            while count and journal.segments[count].start > derived.state.archived:
                count -= 1
        count = self._unheld(derived, count)
        forced = segments_to_force(ages, self._settings, disk)
        return past, max(count, forced), forced > count

    # --- who holds segments -----------------------------------------------------------------------------------------

    def _unheld(self, derived: Derived, count: int) -> int:
        """How many of so many oldest segments no group holds.

        A pass over all positions is made only when a segment goes, or when all groups that held the oldest one let go.
        """
        if not count or not self._settings.keep_unconsumed:
            self.holds = []
            return count
        nearest = self._firsts(derived, 1)
        if nearest is None:
            return 0
        self.holds = [hold for hold in self.holds if self._is_held(derived, hold, nearest)]
        if self.holds or (found := _holds(derived, nearest, HOLDS_MAX)):
            self.holds = self.holds or found
            return 0
        low, high, middle = 1, count, count  # as a rule no group holds any of them
        while low < high:
            firsts = self._firsts(derived, middle)
            if firsts is None or _holds(derived, firsts, 1):
                high = middle - 1
            else:
                low = middle
            middle = (low + high + 1) // 2
        return low

    def _firsts(self, derived: Derived, count: int) -> dict[int, int] | None:
        """Where queues begin once so many segments are gone; None if that cannot be read."""
        start = self._journal.segments[count].start
        if self._known is None or self._known[0] != start:
            unit = Scanner(self._journal).unit_at(start)
            if unit is None or not unit.header.flags & SNAPSHOT:
                log.error("retention stopped: the next segment's snapshot is damaged", offset=start)
                return None
            self._known = start, derived.firsts_of(derived.snapshot_in(unit))
        return self._known[1]

    @staticmethod
    def _is_held(derived: Derived, hold: Hold, firsts: dict[int, int]) -> bool:
        position = derived.state.positions.get(hold.group, hold.topic_id, hold.queue)
        return position is not None and _unconsumed(derived, hold, position, firsts) > 0

    def _look_at_holds(self, derived: Derived, past: int, now_ms: int) -> None:
        segments = self._journal.segments
        self.held_bytes = segments[past].start - segments[0].start if self.holds else 0
        if not self.holds or (self._hold_told_ms is not None and now_ms - self._hold_told_ms < _HOLD_TOLD_MS):
            return
        self._hold_told_ms = now_ms
        names = {topic.id: topic.name for topic in derived.state.topics_by_id.values()}
        groups = sorted({f"{hold.group} in {names.get(hold.topic_id, hold.topic_id)}" for hold in self.holds})
        log.warning(
            "retention waits for groups that have not consumed; delete those that nobody uses",
            held=format_size(self.held_bytes),
            groups=", ".join(groups),
        )

    def dropped_from(self, group: str, topic_id: int, queue: int, position: Position, *, first: int) -> int:
        """How many messages of a queue went before a group had consumed them, as far as is known.

        After a restart those are known that the group has not come to yet.
        """
        gap = 0 if position.floor >= first else _between(position, position.floor, first)
        return max(gap, self.losses.get(Hold(group, topic_id, queue), 0))

    # --- what is dropped --------------------------------------------------------------------------------------------

    def tell(self, going: Going, derived: Derived, now_ms: int) -> None:
        """Count and log what is about to go; all of it that is wanted was carried forward."""
        state = derived.state
        names = {topic.id: topic.name for topic in state.topics_by_id.values()}
        by_topic: dict[str, int] = {}
        for key, first in going.firsts.items():
            name = names.get(key >> 8, SYSTEM_PREFIX)
            if not name.startswith(SYSTEM_PREFIX) and first > (before := state.first.get(key, 0)):
                by_topic[name] = by_topic.get(name, 0) + first - before
        messages = sum(by_topic.values())
        self.dropped += messages
        log.info("segments dropped", count=going.segments, messages=messages, journal_start=going.kept_from)
        if not going.is_forced and self._settings.keep_unconsumed:
            return
        lost: dict[tuple[str, str], int] = {}
        for hold in _holds(derived, going.firsts):
            position = state.positions.get(*hold)
            assert position is not None
            count = _unconsumed(derived, hold, position, going.firsts)
            pair = names[hold.topic_id], hold.group
            lost[pair] = lost.get(pair, 0) + count
            if hold in self.losses or len(self.losses) < _LOSSES_MAX:
                self.losses[hold] = self.losses.get(hold, 0) + count
        if lost:
            self._tell_lost(going, lost, now_ms)

    def _tell_lost(self, going: Going, lost: dict[tuple[str, str], int], now_ms: int) -> None:
        total = sum(lost.values())
        self.lost += total
        self.lost_at_ms = now_ms
        most = sorted(lost.items(), key=lambda item: -item[1])
        shown = [f"{count} of {topic} for {group}" for (topic, group), count in most[:_TOLD_MAX]]
        if len(most) > _TOLD_MAX:
            shown.append(f"and more for {len(most) - _TOLD_MAX} others")
        setting = f"disk_force = {self._settings.disk_force}" if going.is_forced else "keep_unconsumed = false"
        log.warning(
            "retention dropped messages that groups had not consumed",
            messages=total,
            of=", ".join(shown),
            because=f"store.{setting}",
        )


def _holds(derived: Derived, firsts: dict[int, int], limit: int | None = None) -> list[Hold]:
    """Groups that have something to consume below these offsets.

    100,000 positions cost some 10 ms while none holds, and 3 µs more for each that does.
    """
    found: list[Hold] = []
    topics = derived.state.topics_by_id
    for group, positions in derived.state.positions.groups().items():
        for (topic_id, queue), position in positions.items():
            if position.floor >= firsts.get(topic_id << 8 | queue, 0):
                continue
            hold, topic = Hold(group, topic_id, queue), topics.get(topic_id)
            if topic is None or topic.config.carry_for == group:
                continue  # its unsettled messages are carried forward
            if _unconsumed(derived, hold, position, firsts):
                found.append(hold)
                if len(found) == limit:
                    return found
    return found


def _unconsumed(derived: Derived, hold: Hold, position: Position, firsts: dict[int, int]) -> int:
    """How many messages below these offsets are kept, and not settled by a group in a queue."""
    key = queue_key(hold.topic_id, hold.queue)
    start, end = max(position.floor, derived.state.first.get(key, 0)), firsts.get(key, 0)
    if start >= end:
        return 0
    return _between(position, start, end)


def _between(position: Position, start: int, end: int) -> int:
    """How many messages from one offset to another are not settled."""
    settled = sum(min(high, end) - max(low, start) for low, high in position.ranges if high > start and low < end)
    return end - start - settled


DELAYS_AT_ONCE: Final = 1 << 16


def carried_forward(
    derived: Derived, reader: Reader, going: Going, delays: list[Delay], *, lost: list[int], now_ms: int
) -> Iterator[list[Batch | Event]]:
    """What must be written again before segments go; each list belongs into one unit.

    Parameters:
        delays: those that were pending there when somebody looked, the first one last; taken out one by one.
        lost: gets the journal offsets of those that cannot be read.
    """
    start, end = going.start, going.kept_from
    while delays:
        delay = delays.pop()
        is_pending = start <= delay.offset < end and derived.wheel.is_pending(delay.due_ms, delay.offset)
        found = _readable(reader, delay.offset, lost) if is_pending else None
        if found is not None:
            done = DelaysDone(pack_offsets([delay.offset]), "carried")
            yield [_copy(found, SCHEDULE_TOPIC, now_ms, due_ms=delay.due_ms), done]
    for raw_id, half in list(derived.state.transactions.items()):
        if start <= half.journal_offset < end:
            found = _readable(reader, half.journal_offset, lost)
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
                found = _readable(reader, int(columns.offsets[0]), lost) if columns.lengths[0] else None
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


def _readable(reader: Reader, offset: int, lost: list[int]) -> Found | None:
    try:
        return reader.record_at(offset)
    except Damaged:
        lost.append(offset)  # counted as damage
        return None


def _copy(found: Found, topic: str, now_ms: int, due_ms: int | None = None) -> Batch:
    """The record again, for the same queue, under its own id."""
    before = found.record.attributes
    # The stand-in of one that cannot be read stays under a wrong checksum, so that it goes to nobody as a message.
    source = RecordView(stand_in(bytes(found.record.buffer), is_sealed=False)) if found.corrupt else found.record
    record = moved_record(
        source,
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
