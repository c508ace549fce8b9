"""The end of batches: who waits is told, callbacks run, and room in the window comes back. No sockets, no threads.

What always holds: a batch ends once; the producer's lock is never held while anything is called back; a batch that has
callbacks keeps its room in the window until they have run, so that slow ones push back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

from dmq.client.accumulator import Accumulator, Batch, Lane
from dmq.client.links import Lines, Link
from dmq.errors import DMQError
from dmq.protocol.producing import ProduceReply

__all__ = ["Settling"]

log = logging.getLogger(__name__)


class Settling:
    """The part of a sender that ends batches."""

    def __init__(self, accumulator: Accumulator, lines: Lines) -> None:
        self.lock: Final = threading.Lock()  # guards the accumulator and what is here
        self._accumulator = accumulator
        self._lines = lines
        self._under_way: dict[Batch, Link] = {}

    def pump(self, lane: Lane) -> None:
        """Send what is ready to go in a lane."""
        raise NotImplementedError

    def _end(self, batch: Batch, reply: ProduceReply | None, error: DMQError | None, *, is_alone: bool = False) -> None:
        if batch.is_done:
            return
        callbacks = batch.end(reply, error)
        batch.body = None
        with self.lock:
            self._under_way.pop(batch, None)
            lanes = self._accumulator.finished(batch)
            waiters = [] if callbacks else self._accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()
        if callbacks:
            self._lines.notify(self._call_back, batch, callbacks)
        if not is_alone:  # else nobody waited for it, and whoever sent it sends the next one too
            for lane in lanes:
                self.pump(lane)

    def _call_back(self, batch: Batch, callbacks: list[Callable[[], Any]]) -> Awaitable[None] | None:
        """Run a batch's callbacks; its room in the window is free afterwards, so that slow callbacks push back.

        Returns what is still to be awaited, where callbacks are coroutine functions.
        """
        waiting = []
        for callback in callbacks:
            try:
                result = callback()
            except Exception:
                log.exception("a delivery callback raised", extra={"topic": batch.topic})
            else:
                if result is not None and isawaitable(result):
                    waiting.append(result)
        if waiting:
            return self._await_callbacks(batch, waiting)
        self._release(batch)
        return None

    async def _await_callbacks(self, batch: Batch, waiting: list[Awaitable[Any]]) -> None:
        for awaitable in waiting:
            try:
                await awaitable
            except Exception:
                log.exception("a delivery callback raised", extra={"topic": batch.topic})
        self._release(batch)

    def _release(self, batch: Batch) -> None:
        with self.lock:
            waiters = self._accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()
