"""Threads of a blocking client: waiting, callbacks, alarms, and what happens to a client in a forked child.

Two processes on one socket would take each other's answers, and two producers with one name would be taken for one that
repeats itself, so that the broker would store the messages of only one of them. So a child never uses its parent's
connection.

What always holds:
- A wake-up that comes before the wait is not lost. Alarms never run early.
- An exception out of a signal's handler leaves no lock taken, and no thread that everybody believes to run.
- Callbacks of a user run on the notifier's thread only: a slow one delays other callbacks and never the connection
  (D-07), and one that raises is logged.
- In a child, every call of a client raises `NotConnected`, which says to connect again; closing it does nothing; the
  parent notices nothing of it.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Protocol
from weakref import WeakSet

from dmq.clock import Clock
from dmq.errors import NotConnected
from dmq.event_log import EventLog

__all__ = ["Alarms", "Forkable", "Notifier", "Trace", "Waiter", "end_in_children"]

log = EventLog(__name__)


class Forkable(Protocol):
    """Something that belongs to one process."""

    def forked(self, reason: NotConnected) -> None:
        """We are in a child: only this thread is here, and any lock may be held for ever."""


_living: WeakSet[Forkable] = WeakSet()


def end_in_children(thing: Forkable) -> None:
    """Have it told in each child."""
    _living.add(thing)


def _end() -> None:
    for thing in [*_living]:
        thing.forked(NotConnected("this client belongs to the process that was forked: connect again in this one"))


os.register_at_fork(after_in_child=_end)


FOREVER: Final = threading.TIMEOUT_MAX


class Trace:
    """Where an exception out of a signal's handler has hit: such a handler runs between any two steps of a call."""

    def __init__(self, error: BaseException) -> None:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith("dmq."):
                frames.append(trace.tb_frame)
            trace = trace.tb_next
        self._names = [frame.f_code.co_qualname for frame in frames]
        self._passed = {id(frame.f_locals.get("self")) for frame in frames}

    def passed(self, *things: object) -> bool:
        """Whether a method of one of these was under way."""
        return any(id(thing) in self._passed for thing in things)

    def passed_any(self, kind: str) -> bool:
        """Whether a method of anything of a class with this name was under way."""
        return any(name.startswith(f"{kind}.") for name in self._names)

    @property
    def is_in_wait(self) -> bool:
        """Whether it only ended a wait: nothing was half done."""
        return bool(self._names) and self._names[-1] in _WAITS


_WAITS: Final = ("Waiter.wait", "Wire.poll", "PollWaiter.poll")


class Waiter:
    """One thread that waits to be woken: a semaphore that counts to one, a tenth of the price of an Event."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """End the wait, or the next one if nobody waits now."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it was woken already

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most so long; False if nobody woke us."""
        return self._lock.acquire(timeout=max(0.0, min(seconds, FOREVER)))


class Notifier:
    """One thread that runs callbacks in the order they were given; started by the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = threading.Lock()  # held by the thread
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it called; after the close, it is called here."""
        with self._lock:
            if not self._closed:
                self._queue.put((function, arguments))
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
                return
        _call(function, arguments)

    def _run(self) -> None:
        if self._running.acquire(False):  # else an interrupted call started one already
            while (task := self._queue.get()) is not None:
                _call(*task)

    def close(self, timeout: float) -> None:
        """Run what was given, then stop; do not wait longer than this, nor for oneself."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
    except Exception:
        name = getattr(function, "__qualname__", repr(function))
        log.exception("a callback raised", once_for=name, callback=name)


class Alarms:
    """One thread that calls functions when their time has come; started by the first. They must not block."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        # Taken by itself: an exception in the middle of a condition's own `__enter__`, which is Python, would keep it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running = threading.Lock()  # held by the thread
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have it called after so long; never after the close."""
        due = self._clock.monotonic() + max(0.0, seconds)
        with self._lock:
            if self._closed:
                return
            heapq.heappush(self._heap, (due, next(self._numbers), function))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            elif self._heap[0][0] == due:
                self._changed.notify()

    def _run(self) -> None:
        if not self._running.acquire(False):  # an interrupted call started one already
            return
        while True:
            with self._lock:
                while not self._closed:
                    wait = self._heap[0][0] - self._clock.monotonic() if self._heap else FOREVER
                    if wait <= 0:
                        break
                    self._changed.wait(min(wait, FOREVER))
                if self._closed:
                    return
                function = heapq.heappop(self._heap)[2]
            _call(function, ())

    def close(self) -> None:
        """Call nothing any more."""
        with self._lock:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
