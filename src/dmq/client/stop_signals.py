"""Stop signals: SIGTERM and SIGINT end every `run` of a process gracefully.

A signal is the process's, so what catches it is one for all: the consumers of all loops and threads register here. The
handlers are set by the first `run` in the main thread, and are as they were before once the last one there has ended.

What always holds: the first signal stops all that run, and puts the handlers back: a second one does what it did
before, which mostly ends the program at once. A handler that the program set itself stays. A forked child has nothing
to stop.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dmq.event_log import EventLog

__all__ = ["STOP_SIGNALS", "StopSignals"]

log = EventLog(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Whom the signals of a process stop."""

    def __init__(self) -> None:
        self._stops: dict[object, Callable[[], object]] = {}
        self._before: dict[int, Any] = {}
        self._main: set[object] = set()  # those of the main thread
        self._process = 0

    def add(self, key: object, stop: Callable[[], object], *, is_forced: bool = False) -> None:
        """Have a signal call `stop`, in a thread of its own.

        Parameters:
            is_forced: also if the program has a handler for SIGTERM itself.
        """
        self._stops[key] = stop
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        self._main.add(key)
        for number in _SIGNALS:
            found = signal.getsignal(number)
            if number not in self._before and (_is_default(found) or (is_forced and number == signal.SIGTERM)):
                self._process = os.getpid()
                self._before[number] = found
                signal.signal(number, self._caught)

    def remove(self, key: object) -> None:
        """It has ended."""
        self._stops.pop(key, None)
        if key in self._main:
            self._main.discard(key)
            if not self._main:
                self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._caught:  # else the program has set another one meanwhile
                signal.signal(number, handler)

    def _caught(self, number: int, frame: object) -> None:
        self._restore()
        if os.getpid() != self._process or not self._stops:
            os.kill(os.getpid(), number)  # what it does without us
            return
        # Locks that a stop needs may be held by what was interrupted: so not in this thread.
        stops = [*self._stops.values()]
        threading.Thread(target=_stop_all, args=(signal.Signals(number).name, stops), name="dmq-stop").start()


def _stop_all(name: str, stops: list[Callable[[], object]]) -> None:
    log.info("signal: finishing what runs", signal=name, consumers=len(stops))
    for stop in stops:
        try:
            stop()
        except RuntimeError:
            pass  # its loop has ended


def _is_default(handler: Any) -> bool:
    """Whether nobody has set a handler: nobody at all, Python for SIGINT, or `asyncio.run` for SIGINT."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return isinstance(handler, partial) and getattr(handler.func, "__module__", "") == "asyncio.runners"


STOP_SIGNALS: Final = StopSignals()
"""Those of this process."""
