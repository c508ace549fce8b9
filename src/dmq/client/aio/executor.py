"""The executor on an event loop: tasks that run an asyncio consumer's handlers; the twin of
`dmq.client.consumer.executor`.

What always holds: as there. A handler that is a plain function runs in a thread, at most as many at a time as there are
workers; a `run` that is cancelled cancels its handlers, and what they had goes back as not tried.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from dmq.client.aio.message import AioMessage
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.executor import ORDERED_TURN_MAX
from dmq.client.consumer.handler import RateLimit, begin_handling, check_policy, check_pool, judge, tell_failure
from dmq.client.stop_signals import STOP_SIGNALS
from dmq.errors import DMQError
from dmq.token_bucket import TokenBucket

__all__ = ["AioExecutor"]


class AioSource(Protocol):
    """The consumer whose messages are handled."""

    is_closing: bool

    async def _take(
        self, limit: int, is_over: Callable[[], object] = ..., *, is_turn: bool = ...
    ) -> list[tuple[Delivery, int]]: ...

    def stop(self) -> None: ...

    def _wake(self, count: int = ..., *, nudge: bool = ...) -> None: ...


class AioExecutor:
    """One `AioConsumer.run`."""

    def __init__(
        self,
        consumer: AioSource,
        core: ConsumerCore,
        handler: Callable[[AioMessage], Any],
        workers: int,
        policy: str | RateLimit,
        local_retries: int,
    ) -> None:
        check_pool(handler, workers, local_retries)
        self._policy = check_policy(policy)
        self._consumer = consumer
        self._core = core
        self._handler = handler
        self._workers = workers
        self._local_retries = local_retries
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = 0
        self._stopping = asyncio.Event()
        self._bucket = (
            TokenBucket(policy.per_second, time.monotonic(), policy.burst) if isinstance(policy, RateLimit) else None
        )
        self._error: DMQError | None = None
        # A callable object with an async __call__ is a coroutine function too.
        call = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
        self._threads = None if inspect.iscoroutinefunction(call) else ThreadPoolExecutor(workers, "dmq-worker")
        self.finished: Final = asyncio.Event()

    def is_mine(self) -> bool:
        """Whether the calling task is one that runs handlers here."""
        return asyncio.current_task() in self._tasks

    async def run(self) -> None:
        """Run handlers until the consumer closes.

        Raises:
            DMQError: why there will be no more messages.
        """
        core = self._core
        told = begin_handling(self._handler, core.options.group)
        if inspect.isawaitable(told):
            await told
        core.is_running = True
        if self._policy == "reject":
            core.room = lambda: self._idle
        core.handlers = count = self._workers + (self._policy == "caller-runs")
        loop = asyncio.get_running_loop()
        STOP_SIGNALS.add(self, lambda: loop.call_soon_threadsafe(self._consumer.stop))
        try:
            self._tasks |= {asyncio.create_task(self._work()) for _ in range(count)}
            await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise
        finally:
            self._tasks.clear()
            STOP_SIGNALS.remove(self)
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            core.is_running = False
            core.handlers = 1
            core.room = None
        if self._error is not None and not self._consumer.is_closing:
            raise self._error

    async def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                taken = await self._take()
                if not taken:
                    break
                try:
                    await self._turn(taken)
                finally:
                    self._core.end_turn(taken)
                await asyncio.sleep(0)  # a handler that never waits must not keep the loop to itself
        except DMQError as error:
            self._error = self._error or error
        finally:
            self._stopping.set()
            self._consumer._wake()

    async def _take(self) -> list[tuple[Delivery, int]]:
        self._idle += 1
        try:
            return await self._consumer._take(
                ORDERED_TURN_MAX if self._core.options.ordered else 1, self._stopping.is_set, is_turn=True
            )
        finally:
            self._idle -= 1

    async def _turn(self, taken: list[tuple[Delivery, int]]) -> None:
        """Handle messages one after another."""
        for at, (delivery, index) in enumerate(taken):
            if not await self._may_start():
                self._core.untake(taken[at:])
                return
            if not self._core.without_expired([(delivery, index)]):
                continue
            try:
                await self._handle((delivery, index))
            except BaseException:
                self._core.untake(taken[at:])
                raise
            if self._core.options.ordered and self._core.has_failed(delivery, index):
                self._core.forget(taken[at + 1 :])  # they went back to the broker behind it
                return

    async def _may_start(self) -> bool:
        if self._bucket is not None:
            pause = self._bucket.wait(1, time.monotonic())
            if pause:
                try:
                    await asyncio.wait_for(self._stopping.wait(), pause)
                except TimeoutError:
                    pass
        return not self._stopping.is_set() and not self._consumer.is_closing

    async def _call(self, message: AioMessage, place: tuple[Delivery, int]) -> None:
        if self._threads is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._call_here, message, place)
        else:
            await self._handler(message)

    def _call_here(self, message: AioMessage, place: tuple[Delivery, int]) -> None:
        """In a thread, which may have been waited for."""
        if self._core.without_expired([place]):
            self._handler(message)

    async def _handle(self, place: tuple[Delivery, int]) -> None:
        message = AioMessage(*place)
        tries = 0
        while True:
            error: Exception | None = None
            tries += 1
            try:
                await self._call(message, place)
            except Exception as raised:
                error = raised
            verdict = judge(error, tries, self._local_retries)
            if verdict.is_error:
                tell_failure(message, error)
            if verdict.is_again and not self._core.without_expired([place]):
                return
            if not verdict.is_again or message.is_settled:
                verdict.settle(message)
                return
