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
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from dmq.broker.schedule.release_unit import ReleaseUnit
from dmq.errors import DMQError
from dmq.storage.delay.wheel import Delay
from dmq.storage.state.events import DelaysDone, pack_offsets

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["DELAY_MAX_MS", "Delays", "fragments_of", "schedule_queue"]

log = logging.getLogger(__name__)

# Two years, and a day for clocks that differ.
DELAY_MAX_MS: Final = (2 * 366 + 1) * 86_400_000
# Queues of the schedule topic. A fragment is a queue modulo `store.fragment`, so that a batch that comes again finds
# the queue of the first one also when the setting was changed meanwhile.
_QUEUES: Final = 255
_MOVE_MESSAGES: Final = 1024
_MOVE_BYTES: Final = 2 << 20
_UNDER_WAY_MAX: Final = 4
_PAUSE_MS: Final = 1000


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

    def __init__(self, broker: Broker) -> None:
        settings = broker.store.settings
        self.fired = 0
        self.cancelled = 0
        self.dead = 0
        self.unreadable = 0
        self.is_building = False  # one unit at a time is made, so that a turn of the loop is short
        self._workers = deque(
            _Worker(broker, self, fragments_of(number, settings.thread_count, settings.fragment))
            for number in range(settings.thread_count)
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


class _Worker:
    """Some fragments of the wheel."""

    def __init__(self, broker: Broker, delays: Delays, fragments: range) -> None:
        self._broker = broker
        self._delays = delays
        self._fragments = fragments
        self._paused_until_ms = 0
        self.under_way = 0

    def tick(self, now_ms: int) -> None:
        broker = self._broker
        if (
            self.under_way >= _UNDER_WAY_MAX
            or now_ms < self._paused_until_ms
            or broker.is_stopping
            or broker.store.has_failed
        ):
            return
        taken = broker.store.take_due(now_ms, _MOVE_MESSAGES, self._fragments)
        fitting = first_part(taken, _MOVE_BYTES)
        if fitting < len(taken):
            broker.store.release_due([delay.offset for delay in taken[fitting:]])
            del taken[fitting:]
        if taken:
            self._delays.is_building = True
            self.under_way += 1
            ended = self._ended_by([delay.offset for delay in taken])
            broker.run(self._move(taken, ended), ended)

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
                self._broker.store.release_due(offsets)
                self._paused_until_ms = self._broker.now_ms + _PAUSE_MS
                level = logging.INFO if isinstance(error, DMQError) and error.retriable else logging.ERROR
                log.log(level, "delayed messages wait", extra={"count": len(offsets), "error": str(error)})
            self._delays.tick(self._broker.now_ms)

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

        self._broker.write_together(items, written)
        self._delays.tick(self._broker.now_ms)

    async def _build(self, taken: list[Delay]) -> tuple[list[Delay], ReleaseUnit]:
        """The unit that moves them, and which of them it moves."""
        broker = self._broker
        gathered, lost = await broker.reads.ask(lambda: broker.store.queries.gather([delay.offset for delay in taken]))
        if lost:
            # Kept as handed out: the journal's damage is reported, and a copy of it may be restored.
            self._delays.unreadable += len(lost)
            log.error("delayed messages cannot be read", extra={"offsets": lost[:8], "count": len(lost)})
            taken = [delay for delay in taken if delay.offset not in frozenset(lost)]
        order = {delay.offset: rank for rank, delay in enumerate(sorted(taken))}
        unit = ReleaseUnit(broker, broker.clock.now_ms(), "its topic was deleted before it was due")
        for part in gathered:
            unit.add(part, order)
        return taken, unit
