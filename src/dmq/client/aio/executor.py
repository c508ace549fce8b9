"""The executor on an event loop: tasks that run an asyncio consumer's handlers; the twin of
`dmq.client.consumer.executor`.

What always holds: as there. A handler that raises CancelledError has failed like any other, unless its task was
cancelled; only KeyboardInterrupt and SystemExit of a coroutine go on to the loop. A handler that is a plain function
runs in a thread, at most as many at a time as there are workers; a `run` that is cancelled cancels its handlers, and
what they had goes back as not tried.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from dmq.client.aio.message import AioMessage, OpenedAioMessage
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.executor import ORDERED_TURN_MAX, STOP_SIGNALS, TURN_MAX, pace_of
from dmq.client.consumer.handler import RateLimit, begin_handling, check_policy, check_pool, judge, tell_failure
from dmq.client.consumer.message import messages_of
from dmq.client.consumer.prefetch import Turn
from dmq.errors import DMQError
from dmq.token_bucket import TokenBucket

__all__ = ["AioExecutor"]

R = TypeVar("R")


class AioSource(Protocol):
    """The consumer whose messages are handled."""

    is_closing: bool

    async def _await(self, take: Callable[[], R], is_over: Callable[[], object] = ...) -> R | None: ...

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
            ended = [*self._tasks]
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
            core.handlers = core.pace = 1
            core.room = None
        if self._error is not None and not self._consumer.is_closing:
            raise self._error
        for task in ended:
            self._check_end(task)

    def _check_end(self, task: asyncio.Task[None]) -> None:
        """A task that did not end by itself ended the others: that must not look like a consumer that was closed.

        Raises:
            DMQError: it was cancelled, and not by `run`.
        """
        if not task.cancelled():
            task.result()
        elif not self._consumer.is_closing:
            raise DMQError(
                "a task that runs handlers was cancelled, so no more messages are handled: cancel what awaits run() "
                "instead, or close the consumer"
            )

    async def _work(self) -> None:
        core, limit = self._core, 1
        try:
            while not self._stopping.is_set():
                turn = await self._take(ORDERED_TURN_MAX if core.options.ordered else limit)
                if turn is None:
                    break
                began = time.monotonic()
                try:
                    done = await self._turn(turn)
                finally:
                    core.end_turn(turn)
                if self._threads is None:  # a thread has one message at a time
                    core.pace = pace = pace_of(time.monotonic() - began, done)
                    limit = min(pace, TURN_MAX)
                await asyncio.sleep(0)  # a handler that never waits must not keep the loop to itself
        except DMQError as error:
            self._error = self._error or error
        finally:
            self._stopping.set()
            self._consumer._wake()

    async def _take(self, limit: int) -> Turn | None:
        self._idle += 1
        try:
            return await self._consumer._await(lambda: self._core.begin_turn(limit), self._stopping.is_set)
        finally:
            self._idle -= 1

    async def _turn(self, turn: Turn) -> int:
        """Handle messages one after another; returns how many were begun.

        What is behind a message whose handler waits for something goes to another task.
        """
        core, delivery, now = self._core, turn.delivery, self._core.now
        is_ordered, has_threads = core.options.ordered, self._threads is not None
        if len(turn.indexes) > 1 or core.waiting:
            asyncio.get_running_loop().call_soon(self._share, turn)  # runs as soon as this task waits
        done = 0
        for message in messages_of(delivery, turn.indexes, AioMessage, OpenedAioMessage):
            if done >= turn.stop:
                break
            if self._bucket is not None:
                await self._pause(self._bucket)
            if self._stopping.is_set() or self._consumer.is_closing:
                core.untake(turn.rest)
                return done
            if delivery.deadline <= now():
                core.forget(turn.rest)
                return done
            place = delivery, turn.indexes[done]
            try:
                try:
                    if has_threads:
                        raised = await self._call_in_thread(message, place)
                    else:
                        await self._handler(message)
                        raised = None
                except BaseException as error:
                    if _ends_task(error):
                        raise
                    raised = error
                if raised is not None:
                    await self._failed(place, raised)
            except BaseException:
                core.untake(turn.rest)
                raise
            turn.done = done = done + 1
            if is_ordered and place[1] in delivery.failed:
                core.forget(turn.rest)  # they went back to the broker behind it
                break
        return done

    def _share(self, turn: Turn) -> None:
        """The task of a turn waits: have others look at the messages behind the one that it is at."""
        core = self._core
        if turn.stop > turn.done + 1 and not core.options.ordered:
            core.shorten(turn)
        if core.waiting:
            self._consumer._wake()

    async def _pause(self, bucket: TokenBucket) -> None:
        """Wait until the next handler may start."""
        pause = bucket.wait(1, time.monotonic())
        if pause:
            try:
                await asyncio.wait_for(self._stopping.wait(), pause)
            except TimeoutError:
                pass

    async def _call_in_thread(self, message: AioMessage, place: tuple[Delivery, int]) -> BaseException | None:
        """Have a thread call the handler; what it raised."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call_here, message, place)

    def _call_here(self, message: AioMessage, place: tuple[Delivery, int]) -> BaseException | None:
        """In a thread, which may have been waited for. An error is returned: a future does not carry every kind."""
        try:
            if self._core.without_expired([place]):
                self._handler(message)
        except BaseException as error:
            return error
        return None

    async def _failed(self, place: tuple[Delivery, int], error: BaseException) -> None:
        """A handler raised: call it again, or say what becomes of its message."""
        message: AioMessage = AioMessage(*place)
        tries = 1
        raised: BaseException | None = error
        while True:
            verdict = judge(raised, tries, self._local_retries)
            if verdict.is_error:
                tell_failure(message, raised)
            if verdict.is_again and not self._core.without_expired([place]):
                return
            if not verdict.is_again or message.is_settled:
                verdict.settle(message)
                return
            tries += 1
            raised = None
            try:
                if self._threads is not None:
                    raised = await self._call_in_thread(message, place)
                else:
                    await self._handler(message)
            except BaseException as again:
                if _ends_task(again):
                    raise
                raised = again


def _ends_task(error: BaseException) -> bool:
    """Whether it is not the handler that failed, but its task that is to end."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0  # else something was cancelled that the handler waited for
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
