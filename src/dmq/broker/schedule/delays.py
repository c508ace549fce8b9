"""Delayed messages (D-14, D-18, R-10): into the schedule, and out of it when they are due.

A delayed message is a record of the topic `%SCHEDULE%`. One that a producer sent is kept as it came and names its
topic itself; one that was moved here (a retry) names its target in its attributes.

Workers share the fragments of the wheel out among themselves. Each takes what is due, reads it, and writes one unit
that holds the copies for their topics and the mark that the originals are done.

What always holds: a message is pending until that unit is written, and is not pending afterwards, so it is neither
lost nor doubled wherever the broker dies; none leaves before it is due by the broker's time; a worker does a bounded
amount of work in a turn of the loop, and has few units under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.broker.schedule.release_unit import ReleaseUnit, topic_since
from dmq.errors import DMQError, InvalidMessage, UnknownMessage
from dmq.event_log import EventLog
from dmq.model import SCHEDULE_TOPIC, SYSTEM_PREFIX, MessageId
from dmq.protocol.admin import DelayInfo
from dmq.storage.delay.wheel import Delay
from dmq.storage.read.record_group import Gathered
from dmq.storage.state.events import DelaysDone, pack_offsets

__all__ = ["DELAY_MAX_MS", "Delays", "fragments_of", "schedule_queue"]

log = EventLog(__name__)

# Two years, and a day for clocks that differ.
DELAY_MAX_MS: Final = (2 * 366 + 1) * 86_400_000
# Queues of the schedule topic. A fragment is a queue modulo `store.fragment`, so that a batch that comes again finds
# the queue of the first one also when the setting was changed meanwhile.
_QUEUES: Final = 255
_MOVE_MESSAGES: Final = 1024
_MOVE_BYTES: Final = 2 << 20
_UNDER_WAY_MAX: Final = 4
_PAUSE_MS: Final = 1000
_SCANNED_MAX: Final = 10_000  # pending messages that one listing looks at
_PAGE: Final = 1000


def schedule_queue(producer_id: int, queue: int = 0) -> int:
    """The queue of the schedule topic for what one producer sends to queues of one number, whatever their topic.

    A batch that comes again must find the queue of the first one, and those of one producer must rise within it.
    """
    return (producer_id + queue) % _QUEUES


def fragments_of(worker: int, workers: int, fragments: int) -> range:
    """Which fragments a worker owns: 8 among 2 are 0-3 and 4-7."""
    return range(worker * fragments // workers, (worker + 1) * fragments // workers)


def first_part(delays: Sequence[Delay], bytes_max: int) -> int:
    """How many of them fit a unit; one always does."""
    if sum([delay.length for delay in delays]) <= bytes_max:
        return len(delays)
    total = 0
    for index, delay in enumerate(delays):
        total += delay.length
        if total > bytes_max and index:
            return index
    return len(delays)


class Delays:
    """All workers of a broker, and what they have done."""

    def __init__(self, journal: Journal, runtime: Runtime, catalog: Catalog) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._runtime = runtime
        settings = journal.store.settings
        self.fired = 0
        self.cancelled = 0
        self.dead = 0
        self.unreadable = 0
        self.is_building = False  # one unit at a time is made, so that a turn of the loop is short
        self._workers = deque(
            _Worker(
                self,
                journal,
                runtime,
                catalog,
                fragments=fragments_of(number, settings.thread_count, settings.fragment),
            )
            for number in range(settings.thread_count)
        )

    def check_due(self, latest_ms: int) -> None:
        """Raises InvalidMessage if a message would wait for too long."""
        if latest_ms > self._runtime.clock.now_ms + DELAY_MAX_MS:
            raise InvalidMessage(
                f"a message of the batch is due at {latest_ms} ms since 1970, over two years from now: choose an "
                "earlier time",
                due_ms=latest_ms,
            )

    def tick(self, now_ms: int) -> None:
        """Time has passed: begin to move what is due, the workers in turn."""
        for _ in range(len(self._workers)):
            if self.is_building:
                return
            self._workers.rotate(-1)
            self._workers[-1].tick(now_ms)

    def figures(self) -> dict[str, int]:
        """What is counted."""
        return {
            "delays_fired": self.fired,
            "delays_cancelled": self.cancelled,
            "delays_dead": self.dead,
            "delays_unreadable": self.unreadable,
        }

    # --- looking and taking back ------------------------------------------------------------------------------------

    async def pending(self, after: tuple[int, int], limit: int, topic: str) -> tuple[list[DelayInfo], tuple[int, int]]:
        """Pending messages in the order they are due, and where the next page begins; (0, 0): there is none.

        Parameters:
            after: (due time, journal offset), where the page before ended.
            topic: only those for this topic; retries only where their topic is asked for. "" is any topic of a user.
        """
        found: list[DelayInfo] = []
        scanned = 0
        while len(found) < limit and scanned < _SCANNED_MAX:
            wanted = min(_PAGE, limit - len(found))
            page, infos = await self._reads.ask(partial(self.page, after, wanted, topic))
            scanned += len(page)
            found += infos
            if page:
                after = (page[-1].due_ms, page[-1].offset)
            if len(page) < wanted:
                return found, (0, 0)
        return found, after

    def page(self, after: tuple[int, int], limit: int, topic: str) -> tuple[list[Delay], list[DelayInfo]]:
        """Some pending messages as `pending` has them, and all that were looked at; may need the disk."""
        page = self._queries.delays_after(after[0], after[1], limit)
        parts, _ = self._queries.gather([delay.offset for delay in page])
        infos: dict[int, DelayInfo] = {}
        dues = {delay.offset: delay.due_ms for delay in page}
        for part in parts:
            for index, offset in enumerate(part.offsets.tolist()):
                target = _target(part, index)
                if target != topic and (topic or target.startswith(SYSTEM_PREFIX)):
                    continue
                if target.startswith(SYSTEM_PREFIX) or self._is_for(part, index, target):
                    infos[offset] = DelayInfo(part.message_id(index).to_bytes(), target, dues[offset], offset)
        return page, [infos[delay.offset] for delay in page if delay.offset in infos]

    def _is_for(self, part: Gathered, index: int, target: str) -> bool:
        """Whether the topic that a pending message was sent to is still there; if not, it becomes a dead letter."""
        offset = int(part.offsets[index])
        if part.is_moved:
            offset = part.record(index).attributes.original_journal_offset or 0
        return topic_since(self._queries, target, offset) is not None

    async def cancel(self, message_id: MessageId) -> None:
        """Take back a message that is not due yet: written as done, and never delivered.

        Raises:
            UnknownMessage: no such message waits.
            BrokerStopping: the broker takes no new work.
        """
        self._runtime.readiness.check_running()
        offset = await self._reads.ask(lambda: self._claim(message_id))
        if offset is None:
            raise UnknownMessage(
                f"no message {message_id} is waiting to be delivered: check the id; it may be delivered or cancelled",
                id=str(message_id),
            )
        try:
            await self._writer.write([DelaysDone(pack_offsets([offset]), "cancelled")])
        except BaseException:
            self._store.release_due([offset])
            raise
        self.cancelled += 1

    def _claim(self, message_id: MessageId) -> int | None:
        """The journal offset of the pending record of a message, taken so that no worker delivers it."""
        queries = self._queries
        places = [found.journal_offset for found in queries.find(message_id=message_id, topic=SCHEDULE_TOPIC)]
        parts, _ = queries.gather(places)
        for part in parts:
            for index, offset in enumerate(part.offsets.tolist()):
                # A retry belongs to its group: cancelling it would lose the message for that group only.
                if (
                    _target(part, index).startswith(SYSTEM_PREFIX)
                    or not len(part.dues)
                    or part.message_id(index) != message_id
                ):
                    continue
                if self._store.claim_delay(int(part.dues[index]), offset):
                    return int(offset)
        return None


def _target(part: Gathered, index: int) -> str:
    """The topic that a pending message is for."""
    record = part.record(index)
    if not part.is_moved:
        return record.topic
    said = record.attributes
    return said.target_topic or said.original_topic or record.topic


class _Worker:
    """Some fragments of the wheel."""

    def __init__(self, delays: Delays, journal: Journal, runtime: Runtime, catalog: Catalog, fragments: range) -> None:
        self._delays = delays
        self._journal = journal
        self._store = journal.store
        self._queries = journal.queries
        self._runtime = runtime
        self._catalog = catalog
        self._fragments = fragments
        self._paused_until_ms = 0
        self._mending: list[int] = []  # taken, and to be tried again when another member may have sent their bytes
        self._mending_until_ms = 0
        self.under_way = 0

    def tick(self, now_ms: int) -> None:
        if (
            self.under_way >= _UNDER_WAY_MAX
            or now_ms < self._paused_until_ms
            or self._runtime.readiness.is_stopping
            or self._store.has_failed
        ):
            return
        if self._mending and now_ms >= self._mending_until_ms:
            self._store.release_due(self._mending)
            self._mending, self._mending_until_ms = [], now_ms + _PAUSE_MS
        taken = self._store.take_due(now_ms, _MOVE_MESSAGES, self._fragments)
        fitting = first_part(taken, _MOVE_BYTES)
        if fitting < len(taken):
            self._store.release_due([delay.offset for delay in taken[fitting:]])
            del taken[fitting:]
        if taken:
            self._delays.is_building = True
            self.under_way += 1
            ended = self._ended_by([delay.offset for delay in taken])
            self._runtime.tasks.run(self._move(taken, ended), ended)

    def _ended_by(self, offsets: list[int]) -> Callable[[BaseException | None], None]:
        """What is called, once, when a move is written or cannot be."""
        is_over = False

        def ended(error: BaseException | None) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self.under_way -= 1
            if error is not None:
                # They stay pending. A disk that is full or a writer that is busy will not be better at once.
                self._store.release_due(offsets)
                self._paused_until_ms = self._runtime.clock.now_ms + _PAUSE_MS
                tell = log.info if isinstance(error, DMQError) and error.retriable else log.error
                tell("delayed messages wait", once_for=str(error), count=len(offsets), error=error)
            self._delays.tick(self._runtime.clock.now_ms)

        return ended

    async def _move(self, taken: list[Delay], ended: Callable[[BaseException | None], None]) -> None:
        await asyncio.sleep(0)  # a turn of the loop of its own, so that others come in between
        try:
            taken, unit = await self._build(taken)
            items = await unit.items()
        finally:
            self._delays.is_building = False
        if not taken:
            ended(None)
            return
        items.append(DelaysDone(pack_offsets([delay.offset for delay in taken])))

        def written(error: DMQError | None) -> None:
            if error is None:
                self._delays.fired += unit.moved
                self._delays.dead += unit.dead
            ended(error)

        self._journal.writer.write_together(items, written)
        self._delays.tick(self._runtime.clock.now_ms)

    async def _build(self, taken: list[Delay]) -> tuple[list[Delay], ReleaseUnit]:
        """The unit that moves them, and which of them it moves."""
        offsets = [delay.offset for delay in taken]
        gathered, lost = await self._journal.reads.ask(lambda: self._queries.gather(offsets))
        if lost and self._queries.may_be_mended(lost[0], lost[0] + 1):
            self._mending += lost
            log.warning(
                "delayed messages wait: the journal cannot be read at them for now", once_for=(), count=len(lost)
            )
            taken = [delay for delay in taken if delay.offset not in frozenset(lost)]
        elif lost:
            # Kept as handed out: the journal's damage is reported, and a copy of it may be restored.
            self._delays.unreadable += len(lost)
            log.error("delayed messages cannot be read", once_for=(), offsets=lost[:8], count=len(lost))
            taken = [delay for delay in taken if delay.offset not in frozenset(lost)]
        order = {delay.offset: rank for rank, delay in enumerate(sorted(taken))}
        sent_at_ms = self._runtime.clock.wall.now_ms()
        unit = ReleaseUnit(self._queries, self._catalog, sent_at_ms, "its topic was deleted before it was due")
        for part in gathered:
            unit.add(part, order)
        return taken, unit
