"""What every room of a broker runs on, handed to the rooms together: its clock, its readiness and its tasks.

`SteadyClock` is broker time: the wall clock at the start plus the time since, also that in which the machine was
suspended.

What always holds: `now_ms` never runs backwards, whatever happens to the machine's wall clock. Leases, delays and
expiries are measured with it; stamps in records are taken from `wall`.

`Readiness` says whether a broker takes new work: it runs, is drained, or is stopping; in a shard, it must have the
right to serve.

What always holds: a stopping broker never runs again; a drained one may. Both finish the work that is under way.

`Tasks` are the coroutines that a broker has under way.

What always holds: a coroutine that fails calls its `failed` once and harms no other; one that is cancelled because the
broker stops calls it with `BrokerStopping`, or with the error that all are dropped with.

A `Histogram` has fixed buckets: how long things took, at the cost of a few additions for a whole batch.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from dmq.clock import Clock
from dmq.errors import BrokerStopping, DMQError
from dmq.event_log import EventLog
from dmq.shard.service import Leadership

__all__ = ["SECONDS", "Histogram", "Readiness", "Runtime", "Tasks", "Work"]


class Runtime(NamedTuple):
    """What a room runs on; made on the event loop."""

    clock: SteadyClock
    readiness: Readiness
    tasks: Tasks

    @classmethod
    def on(cls, wall: Clock, leadership: Leadership | None = None) -> Runtime:
        """A new one that begins now."""
        return cls(SteadyClock(wall), Readiness(leadership), Tasks())


class SteadyClock:
    """The time of one broker.

    Parameters:
        wall: the machine's clocks.
    """

    __slots__ = ("_boottime", "_started_at", "_started_ms", "wall")

    def __init__(self, wall: Clock) -> None:
        self.wall = wall
        self._boottime = wall.boottime
        self._started_ms = wall.now_ms()
        self._started_at = wall.boottime()

    @property
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._started_ms + int((self._boottime() - self._started_at) * 1000)

    @property
    def behind_ms(self) -> int:
        """How far it is behind the wall clock, which was set since the start; below 0 if it is ahead."""
        return self.wall.now_ms() - self.now_ms

    @property
    def suspended(self) -> float:
        """For how many seconds the machine was suspended, since some fixed moment."""
        return self._boottime() - self.wall.monotonic()


class Readiness:
    """The state of one broker; every room asks it before it begins something.

    Parameters:
        leadership: in a shard, the one that the broker was made for.
    """

    __slots__ = ("is_draining", "is_stopping", "leadership")

    def __init__(self, leadership: Leadership | None = None) -> None:
        self.is_stopping = False
        self.is_draining = False
        self.leadership = leadership

    @property
    def is_running(self) -> bool:
        """Whether new work is taken, and anything handed out."""
        if self.is_stopping or self.is_draining:
            return False
        return self.leadership is None or self.leadership.may_serve()

    @property
    def state(self) -> str:
        """In one word, for clients and people."""
        if self.is_stopping:
            return "stopping"
        return "drained" if self.is_draining else "running"

    def check_running(self) -> None:
        """Raises BrokerStopping where no new work is taken, NotLeader where the right to serve is gone."""
        self.check_open()
        if self.is_draining:
            raise BrokerStopping("the broker is drained: use another one, or this one when it is back in use")
        if self.leadership is not None:
            self.leadership.check_serving()

    def check_open(self) -> None:
        """Raises BrokerStopping where the broker is stopping."""
        if self.is_stopping:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")


log = EventLog(__name__)

Work = Coroutine[Any, Any, None]


class Tasks:
    """The coroutines of one broker."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped_by: DMQError | None = None

    def run(
        self, work: Work, failed: Callable[[BaseException], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Let a coroutine go on by itself.

        Parameters:
            failed: called if it does not come to its end.
            ended: called before that, and also when it did come to its end.
        """
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            ended()
            if task.cancelled():
                failed(
                    self._dropped_by
                    or BrokerStopping("the broker stopped before this was done: ask another one, or this one later")
                )
                return
            error = task.exception()
            if error is not None:
                if not isinstance(error, DMQError):
                    log.error("a command failed", once_for=(), exc_info=error)
                failed(error)

        task.add_done_callback(done)

    async def drop(self, error: DMQError) -> None:
        """Cancel all of them; each fails with this error, unless what it waited for has failed already."""
        self._dropped_by = error
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, seconds: float) -> None:
        """Wait for all of them, then cancel those that are late."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0, 3600.0)


class Histogram:
    """Counts by bucket.

    Parameters:
        bounds: the upper bounds of the buckets, rising; beyond the last there is one more.

    Attributes:
        counts: by bucket, not cumulative.
        sum: of everything observed.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many things took so long each."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        """By upper bound as Prometheus writes it, how many were not above it."""
        found, below = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found
