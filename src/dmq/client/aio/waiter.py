"""Tasks that wait to be woken: what `dmq.client.connection.threads.Waiter` is for a thread."""

from __future__ import annotations

import asyncio
import math
from collections import deque

__all__ = ["SharedWaiter", "TaskTurns", "TaskWaiter"]


class TaskWaiter:
    """One task that waits, once."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """End the waiting; safe to call twice."""
        if not self._future.done():
            self._future.set_result(True)

    async def wait(self, seconds: float | None) -> bool:
        """Wait until woken, at most for so many seconds; False if nobody woke us."""
        if seconds is None:
            return await self._future
        # Half the price of asyncio.timeout, which could also cancel what it waits for.
        timer = self._future.get_loop().call_later(max(0.0, seconds), self._expire)
        try:
            return await self._future
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if not self._future.done():
            self._future.set_result(False)


class SharedWaiter:
    """Many tasks that wait for the same, each at most for a time of its own.

    They have one timer, for the one whose time is over first: a timer for each would be a sixth of what a send costs.
    """

    __slots__ = ("_due", "_loop", "_timer", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, asyncio.Future[bool]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # of the timer, on the loop's clock

    def wake(self) -> None:
        """End the waiting of all; safe to call twice."""
        self._set_timer(math.inf)
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(True)

    def wait(self, seconds: float | None) -> asyncio.Future[bool]:
        """Wait until all are woken, at most for so many seconds; False if nobody woke us."""
        future: asyncio.Future[bool] = self._loop.create_future()
        due = math.inf if seconds is None else self._loop.time() + max(0.0, seconds)
        self._waiting.append((due, future))
        if due < self._due:
            self._set_timer(due)
        return future

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due == math.inf else self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        """Tell those whose time is over."""
        now = self._due
        late = [future for due, future in self._waiting if due <= now]
        self._waiting = [(due, future) for due, future in self._waiting if due > now and not future.done()]
        self._timer = None
        self._set_timer(min((due for due, _ in self._waiting), default=math.inf))
        for future in late:
            if not future.done():
                future.set_result(False)


class TaskTurns:
    """Tasks that pass one after the other, in the order in which they came; those of one name wait for each other."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[TaskWaiter]] = {}  # behind the task whose turn it is; no entry: nobody's turn

    def is_free(self, name: str) -> bool:
        """Whether `enter` would not wait."""
        return name not in self._waiting

    async def enter(self, name: str, seconds: float | None) -> bool:
        """Wait for a turn, at most for so many seconds; `leave` ends it. False if it did not come."""
        waiting = self._waiting.get(name)
        if waiting is None:
            self._waiting[name] = deque()
            return True
        waiter = TaskWaiter()
        waiting.append(waiter)
        has_turn = False
        try:
            has_turn = await waiter.wait(seconds)
        finally:
            if not has_turn:
                try:
                    waiting.remove(waiter)
                except ValueError:  # cancelled when it was its turn already
                    self.leave(name)
        return has_turn

    def leave(self, name: str) -> None:
        """End a turn. What the task does before its next `await` still comes before the next turn."""
        waiting = self._waiting[name]
        if waiting:
            waiting.popleft().wake()
        else:
            del self._waiting[name]
