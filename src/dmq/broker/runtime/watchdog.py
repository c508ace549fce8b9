"""The watchdog: a thread that sees when the event loop, or a leader's flush, stands still, and says so.

A member whose loop stands still must lose its session in the registry, so that another one can lead. The beats of a
name server's client are made by the loop, so they end with it; a registry whose client has a thread of its own is to be
told by `on_still`.

What always holds: it only looks, takes no lock that the loop holds, and logs once for each time that it stands still.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final

from dmq.event_log import EventLog

__all__ = ["Watchdog"]

log = EventLog(__name__)

_LOOK_SECONDS: Final = 0.25
_FRAMES_MAX: Final = 12


class Watchdog:
    """Watches one event loop; made on its thread.

    Parameters:
        is_alive: asked several times a second, in another thread.
        on_still: called there each time that it is not alive any more.
    """

    def __init__(
        self,
        is_alive: Callable[[], bool],
        on_still: Callable[[], None] = lambda: None,
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._is_alive = is_alive
        self._on_still = on_still
        self._look_seconds = look_seconds
        self._watched = threading.get_ident()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dmq-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        was_alive = True
        while not self._stopping.wait(self._look_seconds):
            is_alive = self._is_alive()
            if was_alive and not is_alive:
                log.error(
                    "the event loop, or a flush of the journal, stands still: if this member leads, another one will",
                    where=self._where(),
                )
                self._on_still()
            elif is_alive and not was_alive:
                log.warning("the event loop goes on")
            was_alive = is_alive

    def _where(self) -> str:
        """What the loop's thread is doing, innermost last."""
        frame = sys._current_frames().get(self._watched)
        found = traceback.extract_stack(frame)[-_FRAMES_MAX:] if frame is not None else []
        return " > ".join(f"{one.name}:{one.lineno}" for one in found)
