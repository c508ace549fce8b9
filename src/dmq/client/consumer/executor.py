"""The executor: threads that run a blocking consumer's handlers (A-01, A-07), and the signals that end every `run`.

There is no queue between the consumer and its workers: the prefetch is the bounded buffer, and a worker that has
nothing to do waits for messages itself. So a message changes threads as seldom as possible, and a full pool pushes back
to the broker by leaving its credit unused.

What always holds: a message is acked after its handler; whatever a handler raises, the message is settled and the
worker lives on; no handler starts with a message whose lease is over, also not again after an error; of an ordered
group, messages of one queue run one after another, whatever became of their leases, and after one that failed none of
its lease; a stop finishes what runs and gives the rest back.

Stop signals: SIGTERM and SIGINT end every `run` of a process gracefully. A signal is the process's, so what catches it
is one for all: the consumers of all loops and threads register here. The handlers are set by the first `run` in the
main thread, and are as they were before once the last one there has ended.

What always holds: the first signal stops all that run, and puts the handlers back: a second one does what it did
before, which mostly ends the program at once. A handler that the program set itself stays. A forked child has nothing
to stop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.handler import RateLimit, begin_handling, check_policy, check_pool, judge, tell_failure
from dmq.client.consumer.message import OpenedMessage, ReceivedMessage, messages_of
from dmq.client.consumer.prefetch import Turn
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.token_bucket import TokenBucket

__all__ = ["ORDERED_TURN_MAX", "STOP_SIGNALS", "TURN_MAX", "Executor", "StopSignals", "pace_of"]

R = TypeVar("R")

# A worker takes as many messages at a time as run in about this long: quick handlers share the cost of taking, and
# behind a slow one nothing waits that another worker could do.
TURN_SECONDS: Final = 0.001
TURN_MAX: Final = 512
PACE_MAX: Final = 10_000
ORDERED_TURN_MAX: Final = 1000


def pace_of(seconds: float, done: int) -> int:
    """How many messages a handler gets done in a turn, after one that took so long for so many."""
    return max(1, min(PACE_MAX, int(TURN_SECONDS * max(1, done) / seconds) if seconds > 0 else PACE_MAX))


class Reader(Protocol):
    """What waits and reports for that consumer."""

    def read_on(self, limit: int, is_over: Callable[[], object]) -> Turn | None: ...


class Source(Protocol):
    """The consumer whose messages are handled."""

    is_closing: bool

    @property
    def _subscriber(self) -> Reader: ...

    def _await(self, take: Callable[[], R], is_over: Callable[[], object] = ...) -> R | None: ...

    def stop(self) -> None: ...

    def _wake(self, count: int = ..., *, nudge: bool = ...) -> None: ...


class Executor:
    """One `Consumer.run`."""

    def __init__(
        self,
        consumer: Source,
        core: ConsumerCore,
        handler: Callable[[ReceivedMessage], Any],
        workers: int,
        policy: str | RateLimit,
        local_retries: int,
    ) -> None:
        check_pool(handler, workers, local_retries)
        self._policy = check_policy(policy)
        self._consumer = consumer
        self._core = core
        self._read_on = consumer._subscriber.read_on
        self._handler = handler
        self._workers = workers
        self._local_retries = local_retries
        self._threads: set[int] = set()
        self._idle = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._is_stopping = False  # the same, at hand
        self._bucket = (
            TokenBucket(policy.per_second, time.monotonic(), policy.burst) if isinstance(policy, RateLimit) else None
        )
        self._error: DMQError | None = None
        self.finished: Final = threading.Event()

    def is_mine(self) -> bool:
        """Whether the calling thread is one that runs handlers here."""
        return threading.get_ident() in self._threads

    def run(self) -> None:
        """Run handlers until the consumer closes.

        Raises:
            DMQError: why there will be no more messages.
        """
        core = self._core
        begin_handling(self._handler, core.options.group)
        threads = [
            threading.Thread(target=self._work, name=f"dmq-worker-{number}", daemon=True)
            for number in range(self._workers)
        ]
        try:
            core.is_running = True
            core.handlers = self._workers + (self._policy == "caller-runs")
            if self._policy == "reject":
                core.room = self._room
            STOP_SIGNALS.add(self, self._close, is_forced=True)
            for thread in threads:
                thread.start()
            self._threads.add(threading.get_ident())
            if self._policy == "caller-runs":
                self._work(is_caller=True)
            while not self._stopping.wait(0.5):
                if self._consumer.is_closing:
                    break
        finally:
            self._stop()
            for thread in threads:
                if thread.is_alive():  # a signal's handler may have raised before all were: such a one ends by itself
                    thread.join()
            self._threads.discard(threading.get_ident())
            STOP_SIGNALS.remove(self)
            core.is_running = False
            core.handlers = core.pace = 1
            core.room = None
        if self._error is not None and not self._consumer.is_closing:
            raise self._error

    def _room(self) -> int:
        return self._idle

    def _close(self) -> None:
        self._consumer.stop()
        self._stop()

    def _stop(self) -> None:
        self._is_stopping = True
        self._stopping.set()
        self._consumer._wake(nudge=True)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _work(self, *, is_caller: bool = False) -> None:
        self._threads.add(threading.get_ident())
        limit = 1
        try:
            while not self._is_stopping:
                turn = self._take(ORDERED_TURN_MAX if self._core.options.ordered else limit)
                if turn is None:
                    break
                began = time.monotonic()
                try:
                    done = self._turn(turn, is_caller)
                finally:
                    self._core.end_turn(turn)
                self._core.pace = pace = pace_of(time.monotonic() - began, done)
                limit = min(pace, TURN_MAX)
        except DMQError as error:
            self._error = self._error or error
        finally:
            self._stop()
            if not is_caller:
                self._threads.discard(threading.get_ident())

    def _take(self, limit: int) -> Turn | None:
        with self._lock:
            self._idle += 1
        try:
            turn = None if self._is_over() else self._read_on(limit, self._is_over)
            return turn or self._consumer._await(lambda: self._core.begin_turn(limit), lambda: self._is_stopping)
        finally:
            with self._lock:
                self._idle -= 1

    def _is_over(self) -> bool:
        return self._is_stopping or self._consumer.is_closing

    def _turn(self, turn: Turn, is_caller: bool) -> int:
        """Handle messages one after another; returns how many were begun."""
        core, handler, consumer, now = self._core, self._handler, self._consumer, self._core.now
        is_ordered, bucket, delivery = core.options.ordered, self._bucket, turn.delivery
        done = 0
        for message in messages_of(delivery, turn.indexes, ReceivedMessage, OpenedMessage):
            if done >= turn.stop:
                break
            if bucket is not None:
                self._pause(bucket)
            if self._is_stopping or consumer.is_closing:
                core.untake(turn.rest)
                return done
            if delivery.deadline <= now():  # the process stood still, or those before took long
                core.forget(turn.rest)
                return done
            try:
                handler(message)
            except BaseException as error:
                try:
                    self._failed((delivery, turn.indexes[done]), error, is_caller)
                except BaseException:
                    core.untake(turn.rest)
                    raise
            turn.done = done = done + 1
            if is_ordered and turn.indexes[done - 1] in delivery.failed:
                core.forget(turn.rest)  # they went back to the broker behind it
                return done
        return done

    def _pause(self, bucket: TokenBucket) -> None:
        """Wait until the next handler may start."""
        with self._lock:
            pause = bucket.wait(1, time.monotonic())
        if pause:
            self._stopping.wait(pause)

    def _failed(self, place: tuple[Delivery, int], error: BaseException, is_caller: bool) -> None:
        """A handler raised: call it again, or say what becomes of its message."""
        message = ReceivedMessage(*place)
        tries = 1
        raised: BaseException | None = error
        while True:
            if is_caller and raised is not None and not isinstance(raised, Exception):
                raise raised  # a program that is being interrupted, not a handler that failed
            verdict = judge(raised, tries, self._local_retries)
            if verdict.is_error:
                tell_failure(message, raised)
            if verdict.is_again and not self._core.without_expired([place]):
                return
            if not verdict.is_again or message.is_settled:
                verdict.settle(message)
                return
            tries += 1
            try:
                self._handler(message)
            except BaseException as again:
                raised = again
            else:
                raised = None


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
