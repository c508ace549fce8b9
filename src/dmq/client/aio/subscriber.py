"""How a consumer on an event loop waits and reports.

What always holds: tasks wait and reports are sent on the loop alone, whichever thread acks: handlers that are plain
functions run in threads. Reports of one turn of the loop leave together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from dmq.client.aio.connection import AioConnection, check_loop
from dmq.client.aio.pool import AioPool
from dmq.client.aio.router import AioRouter
from dmq.client.aio.waiter import TaskWaiter
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.subscription import ALL, Subscription, Subscriptions

__all__ = ["AioSubscriber"]


class AioSubscriber:
    """The waiting tasks of one consumer, and its reports: what `dmq.client.consumer.subscriber` is for threads.

    Parameters:
        number: of the subscription, unique within the client.
    """

    def __init__(self, options: ConsumerOptions, number: int, router: AioRouter, core: ConsumerCore) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._waiters: set[TaskWaiter] = set()
        self.subscriptions: Final = Subscriptions(options, number, router, core, subscriber=self)
        core.on_reports = self._report
        core.on_free = lambda: self.wake(nudge=True)

    async def wait(
        self,
        is_done: Callable[[], object],
        seconds: float | None = None,
        *,
        is_for_message: bool = False,
        at: Subscription[AioPool] | None = None,
    ) -> None:
        """Wait until something happened, at most so long.

        Parameters:
            is_done: not asked: on a loop nothing happens between the caller's look and this.
            is_for_message, at: not asked: the loop reads.
        """
        check_loop(self._loop)
        waiter = TaskWaiter()
        self._waiters.add(waiter)
        try:
            await waiter.wait(seconds)
        finally:
            self._waiters.discard(waiter)

    def wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many waiting tasks look again."""
        for waiter in [*self._waiters][:count]:
            waiter.wake()
            self._waiters.discard(waiter)

    def attend(self, link: AioConnection) -> None:
        """Nothing: the loop reads all connections."""

    def _report(self, is_urgent: bool) -> None:
        is_here = threading.get_ident() == self._loop_thread
        if is_urgent and is_here:
            self.flush()
        elif not self._core.is_report_due:
            self._core.is_report_due = True
            if is_here:
                self._loop.call_soon(self.flush)
            else:
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Send the reports."""
        self._core.is_report_due = False
        self.subscriptions.report()

    flush_last = flush
