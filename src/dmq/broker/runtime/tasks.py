"""Coroutines that a broker has under way.

What always holds: a coroutine that fails calls its `failed` once and harms no other; one that is cancelled because the
broker stops calls it with `BrokerStopping`, or with the error that all are dropped with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dmq.errors import BrokerStopping, DMQError
from dmq.event_log import EventLog

__all__ = ["Tasks", "Work"]

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
