"""How a consumer of a blocking program waits and reports: in the threads of its callers. Thread-safe.

What always holds: a thread that waits for a message reads the connection itself if no other thread does, so that there
is no thread between a lone message and its handler. Reports leave at once when there is nothing else to do, and
together otherwise.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from dmq.client.connection.connection import Connection
from dmq.client.connection.joint_turn import JointTurn
from dmq.client.connection.pool import Pool
from dmq.client.connection.router import Router
from dmq.client.connection.threads import Trace, Waiter
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Turn
from dmq.client.consumer.subscription import ALL, Subscription, Subscriptions

__all__ = ["Subscriber"]

# A busy consumer reports so often that another thread would only be in its way; a slow one does not wait long.
COMPANY_SECONDS: Final = 0.005
# Reports about a batch leave with the next pull; so long they wait for one that does not come.
NEXT_PULL_SECONDS: Final = 0.02
# Whose work, if it is left half done, has a consumer start anew.
_HOLDERS: Final = (
    "ConsumerCore", "LeaseBook", "Prefetch", "Screening", "DuplicateWindow", "Intervals", "Told", "Delivery", "Puller",
)  # fmt: skip
_LOOK_SECONDS: Final = 1.0  # a thread that waits looks again at least so often


class Subscriber:
    """The waiting threads of one consumer, and its reports; the hand-written part of `dmq.client.consumer.consumer`.

    Parameters:
        number: of the subscription, unique within the client.
    """

    def __init__(self, options: ConsumerOptions, number: int, router: Router, core: ConsumerCore) -> None:
        self._router = router
        self._core = core
        self._flushing = threading.RLock()  # a thread that sends may have to read, and hear of more to send
        self._must_flush = False
        self._waiters: dict[int, Waiter] = {}  # by thread
        self._reader = Waiter()  # of a thread that reads on, which is nudged and never woken
        self._reads_on = 0  # that thread
        self._calls = 0  # of all who wait: the connections may be others
        self._attended: list[Connection] = []
        self.on_start_anew: Callable[[], None] = lambda: None
        self.subscriptions: Final = Subscriptions(options, number, router, core, subscriber=self)
        router.parts.add(self)
        core.on_reports = self._report
        core.on_free = lambda: self.wake(nudge=True)

    def wait(
        self,
        is_done: Callable[[], object],
        seconds: float = _LOOK_SECONDS,
        *,
        is_for_message: bool = False,
        at: Subscription[Pool] | None = None,
    ) -> None:
        """Wait until something is there, reading meanwhile if no other thread does; returns after so long anyway.

        Parameters:
            is_for_message: it is a message to hand out, and not an answer.
            at: with the broker that is to send it; the only one if left out.
        """
        if is_for_message and self.subscriptions.is_divided:
            self._wait_at_all(is_done, seconds)
            return
        me, waiter = threading.get_ident(), Waiter()
        self._waiters[me] = waiter
        try:
            one = at or self.subscriptions.only
            link = None if one is None else one.pool.current()
            if link is None:
                if not is_done():
                    waiter.wait(seconds)
            else:
                connection = link
                connection.until(
                    waiter,
                    lambda: is_done() or connection.is_closed,
                    time.monotonic() + seconds,
                    is_patient=is_for_message,
                    is_lender=is_for_message and self._core.is_quick,
                )
        finally:
            del self._waiters[me]

    def read_on(self, limit: int, is_over: Callable[[], object]) -> Turn | None:
        """`wait` for messages by a thread that may lead at once, as one that lent the lead and is back: the turn that a
        push began, if nothing else waits. None if the thread is to look, or to wait, as any other.

        Parameters:
            limit: how many messages it takes at most.
        """
        core, one = self._core, self.subscriptions.only
        connection = None if one is None or core.ended is not None else one.pool.current()
        if (
            one is None or connection is None or core.prefetched[0] or one.book.has_reports
            or not connection.turns.resume()
        ):  # fmt: skip
            return None
        me = threading.get_ident()
        self._reads_on = me
        try:
            self._waiters[me] = self._reader
            # One that takes queues by a strategy gives back what was on its way from others.
            core.reader_limit = 0 if core.options.strategy else limit
            one.starve()
            deadline = time.monotonic() + _LOOK_SECONDS
            while not (core.begun or core.waiting or core.ended or is_over() or connection.is_closed):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                connection.receive(left)
        except BaseException:  # of a signal's handler
            self._let_begun_wait()
            raise
        finally:
            core.reader_limit, turn, core.begun = 0, core.begun, None
            self._reads_on = 0
            connection.turns.lend(is_lent=core.is_quick)
            self._waiters.pop(me, None)
        return turn

    def _let_begun_wait(self) -> None:
        """The thread that read on does not come to what it began: others may."""
        core = self._core
        core.reader_limit, turn, core.begun = 0, core.begun, None
        if turn is not None:
            core.end_turn(turn)

    def _wait_at_all(self, is_done: Callable[[], object], seconds: float) -> None:
        """Wait for a message from any of several brokers, reading all of them."""
        calls = self._calls
        links = [link for one in self.subscriptions if (link := one.pool.current()) is not None]
        turn = JointTurn(links)
        me = threading.get_ident()
        self._waiters[me] = turn.waiter
        try:
            turn.until(
                lambda: is_done() or self._calls != calls,
                time.monotonic() + seconds,
                is_lender=self._core.is_quick,
            )
        finally:
            del self._waiters[me]

    def wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many waiting threads look again. The one that reads is this one, and looks by itself."""
        if count >= ALL:
            self._calls += 1
        me = threading.get_ident()
        if me in self._waiters:
            count -= 1
        for thread, waiter in tuple(self._waiters.items()):
            if count <= 0:
                break
            if thread != me:
                waiter.wake()
                count -= 1
        if nudge:
            for one in self.subscriptions:
                connection = one.pool.current()
                if connection is not None:
                    connection.nudge()

    def attend(self, link: Connection) -> None:
        """Have pushes read from now on though nobody waits at this link."""
        if link not in self._attended:
            self._attended = [other for other in self._attended if not other.is_closed] + [link]
            link.hold()

    def _report(self, is_urgent: bool) -> None:
        if is_urgent:
            self.flush()
        elif not self._core.is_report_due:
            self._core.is_report_due = True
            wait = NEXT_PULL_SECONDS if self._core.has_company else COMPANY_SECONDS
            self._router.call_later(wait, self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._core.is_report_due = False
        self.flush()
        self._core.look()

    def flush(self) -> None:
        """Send the reports. A thread that finds another at it leaves the rest to that one."""
        self._must_flush = True
        while self._must_flush and self._flushing.acquire(False):
            try:
                self._must_flush = False
                self.subscriptions.report()
            finally:
                self._flushing.release()

    def mend(self, trace: Trace) -> None:
        """An exception out of a signal's handler ended a call of this thread: it waits and reports no more."""
        self._waiters.pop(threading.get_ident(), None)
        if self._reads_on == threading.get_ident():
            self._reads_on = 0
            self._let_begun_wait()
        with contextlib.suppress(RuntimeError):  # it is not this thread's
            while True:
                self._flushing.release()
        self._core.is_report_due = False
        if not trace.is_in_wait and any(map(trace.passed_any, _HOLDERS)):
            self._core.start_anew()
            self.on_start_anew()
        self.wake(nudge=True)
        self.flush()

    def flush_last(self) -> None:
        """Send the last reports, after those that another thread is about to send."""
        with self._flushing:
            self.flush()
