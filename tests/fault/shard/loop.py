"""Virtual time: an event loop for each simulated process, and one schedule for all of them.

A loop runs one turn when the schedule says so, on one thread. Real asyncio code runs in it unchanged: tasks, futures,
timeouts and sleeps; nothing ever blocks.

What always holds: with one seed, two runs are the same; time goes forwards; a turn takes some time, so a task that
spins does not stop the world.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections.abc import Callable
from typing import Any

from dmq.testing.disk.faults import CrashNow
from tests.fault.shard.clock import MachineClock

__all__ = ["Schedule", "VirtualLoop"]

_TURN_SECONDS = 40e-6
_HITCH_SECONDS = 0.03  # now and then, as garbage collection and other processes make it
_HITCH_CHANCE = 1 / 700


class _NoSelector:
    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one process.

    Attributes:
        name: of its process.
        is_paused: its turns are not run.
        ready_at: when, in true time, its last turn is over.
    """

    def __init__(self, clock: MachineClock) -> None:
        super().__init__()
        self._machine_clock = clock
        self._selector = _NoSelector()
        self._clock_resolution = 1e-6
        self.is_paused = False
        self.ready_at = 0.0
        self.failures: list[str] = []
        self.name = ""
        self.after_turn: Callable[[], None] | None = None
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._machine_clock.monotonic()

    def next_at(self) -> float:
        """When it has something to do."""
        if self.is_paused:
            return float("inf")
        internals: Any = self
        if internals._ready:
            return self.ready_at
        if not internals._scheduled:
            return float("inf")
        return max(self.ready_at, self._machine_clock.true_of(internals._scheduled[0]._when))

    def turn(self) -> None:
        events._set_running_loop(self)
        try:
            internals: Any = self
            internals._run_once()
        finally:
            events._set_running_loop(None)

    def bury(self) -> list[asyncio.Task[Any]]:
        """The process is dead: its tasks never go on. Keep what is returned: what is collected runs its last words."""
        tasks: list[Any] = [*asyncio.all_tasks(self)]
        for task in tasks:
            task._log_destroy_pending = False
        internals: Any = self
        internals._ready.clear()
        internals._scheduled.clear()
        self.is_paused = True
        return tasks

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), CrashNow):  # the machine is off, and its process will be dead, too
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # --- what BaseEventLoop leaves to its children --------------------------------------------------------------------

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise AssertionError("a simulated process has no threads")


class Schedule:
    """True time, and what happens when: events of the world, and turns of loops."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 1000.0
        self.turns = 0
        self._rng = rng
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.loops: list[VirtualLoop] = []
        self.running = ""  # whose turn it is

    def time(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in so many seconds, outside of any loop."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self, until: float, is_over: Callable[[], bool] | None = None) -> None:
        """Let time pass until then, or until something is so."""
        while True:
            at, loop = self._events[0][0] if self._events else float("inf"), None
            for one in self.loops:
                its = one.next_at()
                if its < at:
                    at, loop = its, one
            if at > until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, at)
            if loop is None:
                heapq.heappop(self._events)[2]()
            else:
                self._turn(loop)
            if is_over is not None and is_over():
                return

    def _turn(self, loop: VirtualLoop) -> None:
        self.turns += 1
        self.running = loop.name
        loop.turn()
        self.running = ""
        if loop.after_turn is not None:
            loop.after_turn()
        chance = self._rng.random()
        loop.ready_at = self.now + (chance * 700 * _HITCH_SECONDS if chance < _HITCH_CHANCE else _TURN_SECONDS)
