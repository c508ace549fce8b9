"""The writer of a shard's leader: a journal writer that waits for its followers as well.

What is written becomes visible when it is committed: when every in-sync member has it flushed. So everything goes to
the followers at once, and is flushed here meanwhile. A producer that asked for `stored` is answered before that.
Where a segment has to end, or segments to go, turns wait until all that is written is committed. Events that nobody
waits for (settles) wait in memory while too few members are in sync, as on a full disk; all else is refused.

What always holds: without the right to serve nothing is answered and nothing written; what was not written is refused
with the leadership's error (`NotLeader`, `NotEnoughReplicas`), which says that nothing was done; the callers of what
was written and is not committed when we cease to lead, or when our store fails, get `NotConnected`, so that their
connections end without an answer. After `drop` nothing touches the store, except for threads that `join` waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Final

from dmq.broker.journal.arrivals import Arrivals
from dmq.broker.journal.writer import LOOP_BYTES, JournalWriter, Submission
from dmq.clock import Clock
from dmq.errors import BrokerStopping, DiskFull, DMQError, NotConnected, NotEnoughReplicas, NotLeader, StoreFailed
from dmq.event_log import EventLog
from dmq.net.connection import WriteCoalescer
from dmq.shard.service import Leadership
from dmq.storage.journal.unit_draft import Placement
from dmq.storage.store import FlushTicket, MessageStore
from dmq.storage.upkeep.checkpointer import CheckpointPlan

__all__ = ["ShardWriter", "unanswered"]

log = EventLog(__name__)

_HELD_SECONDS: Final = 0.002
_PATIENT_SECONDS: Final = 0.2  # until settles alone are flushed; the followers have them at once


def unanswered() -> NotConnected:
    """The error of a request that gets no answer: its connection ends, and the client asks the next leader."""
    return NotConnected("this member ceased to lead before the request was done: repeat it to the next leader")


class _Shown(Submission):
    """What is left of a submission that was done early: where messages become visible by it."""

    __slots__ = ("touched",)

    def __init__(self, touched: Collection[tuple[str, int]]) -> None:
        self.size = 0
        self.touched = touched

    def done(self, placements: list[Placement], error: DMQError | None) -> None: ...


class ShardWriter(JournalWriter):
    """The writer of one leader's store.

    Parameters:
        leadership: of the member that leads; good for as long as the writer is.
    """

    _is_alone = False
    _lazy_times = 4  # consumers ask shards in turn, and so each gets acks a few at a time
    _passing = (DiskFull, NotEnoughReplicas, NotLeader)

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        waiting_bytes_max: int,
        outbox: WriteCoalescer,
        arrivals: Arrivals,
        leadership: Leadership,
    ) -> None:
        super().__init__(store, clock, waiting_bytes_max, outbox, arrivals=arrivals)
        self._leadership = leadership
        self._is_held = False  # by a hand-over
        self._sent = 0  # up to where the leadership knows what was written
        self._is_turn_waiting = False  # until what is written is committed, or the hand-over is off
        self._is_hurried = False  # somebody waits for settles after all
        self._patient_flush: asyncio.TimerHandle | None = None

    # --- writing ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self.is_closed:
            super()._turn()
        elif self._may_write():
            self._write_turn()

    def _write_turn(self) -> None:
        self._is_turn_waiting = False
        last = self._waiting[-1] if self._waiting else None
        super()._turn()
        self._answer_early(last)

    def _may_write(self) -> bool:
        """Whether a turn may be written now; if not, it waits, or its callers are refused and nothing is written."""
        try:
            self._leadership.check_writable()
        except DMQError as error:
            self._refuse_turn(error)
            return False
        if self._is_held or self.store.wants_quiet:
            self._turn_planned = self._is_turn_waiting = True
            self._work_on()
            return False
        if self._unwritten and not isinstance(self._obstacle, DiskFull):
            self._write_unwritten()
        return True

    def _refuse_turn(self, error: DMQError) -> None:
        self._turn_planned = self._is_turn_waiting = False
        submitted, self._submitted = [*self._submitted, *self.straight.submissions()], []
        self._outbox.is_held = True
        try:
            for submission in submitted:
                self._fail(submission, error)
            self._advance()
        finally:
            self._outbox.release()

    def _fail(self, submission: Submission, error: DMQError) -> None:
        # The followers may have it, whose disks are sound: the next leader knows, and nobody has to look for himself.
        super()._fail(submission, unanswered() if isinstance(error, StoreFailed) else error)

    def _write_unwritten(self) -> None:
        if self._is_writable():
            super()._write_unwritten()
            self._leadership.wrote()

    def _is_writable(self) -> bool:
        try:
            self._leadership.check_writable()
        except DMQError:
            return False
        return not (self._is_held or self._failed or self.is_closed)

    def _answer_early(self, last: tuple[int, Submission, list[Placement]] | None) -> None:
        """Answer producers that wait for no more than that their messages are written.

        Parameters:
            last: what waited last before this turn.
        """
        waiting = self._waiting
        early = []
        for at in range(len(waiting) - 1, -1, -1):
            if waiting[at] is last:
                break
            if waiting[at][1].is_early:
                early.append(at)
        if not early:
            return
        self._outbox.is_held = True
        try:
            for at in reversed(early):
                end, submission, placements = waiting[at]
                touched = {*submission.touched, *((p.topic, p.queue) for p in placements if p.topic)}
                waiting[at] = end, _Shown(touched), []
                self._end(submission, placements, None)
        finally:
            self._outbox.release()

    # --- becoming visible -------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """More may have become visible, or the right to serve is back: answer what can be answered."""
        if self.is_closed:
            return
        self._advance()
        if self._is_turn_waiting:
            self._begin_waiting_turn()

    def _begin_waiting_turn(self) -> None:
        """Write the turn that waited, if what it waited for has come; segments that are to go do so before it."""
        queries = self.store.queries
        if self._is_held or queries.visible < queries.end or not self._is_writable():
            return
        if not (self._flushing or self._checkpointing):
            try:
                self._retain(self._clock.monotonic())
            except DMQError as error:
                log.error("upkeep failed", once_for=(), error=error)
        # Whatever was carried forward before it is committed together with it.
        self._write_turn()

    def _advance(self) -> None:
        waiting = self._waiting
        if waiting and waiting[0][0] > self.store.queries.visible:
            return  # as after most writes and flushes: the followers are not done
        if self._leadership.may_serve():  # if not, the next tick asks again
            super()._advance()

    def _show(self) -> None:
        self._leadership.flushed()
        self.committed()

    def _finish_flush(self, ticket: FlushTicket, error: BaseException | None, began: float | None = None) -> None:
        if self.is_closed:
            self._flushing = False  # the store is another's now
        else:
            super()._finish_flush(ticket, error, began)

    def _finish_checkpoint(self, plan: CheckpointPlan, error: BaseException | None) -> None:
        if self.is_closed:
            self._checkpointing = False
            return
        super()._finish_checkpoint(plan, error)
        self._show()

    def _loop_serves(self) -> bool | None:
        """The loop flushes for all that wait, if that is quick: the followers take about as long, and then it has
        gathered what came meanwhile. But who asked for no more than that it is written does not wait for it."""
        waiting = self._waiting
        if self.waiting_bytes > LOOP_BYTES or any(one[1].is_early for one in waiting):
            return None
        return len(waiting) == 1

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def _work_on(self) -> None:
        """Nothing is visible before it is flushed; and a checkpoint must not wait for a pause, which load has not."""
        if self.is_closed:
            return
        queries = self.store.queries
        end = queries.end
        if end > self._sent:
            self._sent = end
            self._leadership.wrote()  # first: the followers write and flush while we do
        if self._flushing or queries.flushed == end:
            return
        self._checkpoint_if_due()
        if self._failed:
            return
        if not self._is_patient():
            self._start_flush()
        elif self._patient_flush is None:
            self._patient_flush = self._loop.call_later(_PATIENT_SECONDS, self._flush_late)

    def _checkpoint_if_due(self) -> None:
        if self.store.checkpoint_due and not (self._checkpointing or self._is_held or self._failed):
            self._start_checkpoint()

    def _is_patient(self) -> bool:
        """Whether all that is to be flushed are settles that nobody waits for: a flush costs more than all else that
        they cost."""
        if self._is_hurried or self._is_held or self._is_turn_waiting or not self._waiting:
            return False
        return self._waiting[-1][1].is_nobodys and all(one[1].is_nobodys for one in self._waiting)

    def _flush_late(self) -> None:
        self._patient_flush = None
        self._is_hurried = True
        self._work_on()

    def _start_flush(self) -> None:
        self._is_hurried = False
        super()._start_flush()

    def hurry(self) -> None:
        self._is_hurried = True
        super().hurry()
        if self._patient_flush is not None and not self._turn_planned:
            self._work_on()

    def _keep_up(self, now: float) -> None:
        """A leader that may not serve, or that hands over, leaves the store alone."""
        if self.is_closed or not self._leadership.may_serve():
            return
        self.committed()
        if self._is_turn_waiting and not self._is_held:
            self._turn()  # which is refused if too few are in sync by now
        self._work_on()
        if not self._flushing:
            self._checkpoint_if_due()
        if self._is_writable():
            super()._keep_up(now)

    def _retain(self, now: float) -> None:
        super()._retain(now)
        self._leadership.wrote()
        self._leadership.flushed()

    # --- handing over, and ceasing to lead --------------------------------------------------------------------------

    async def hold(self) -> None:
        """Write what was submitted, then nothing more until `resume`; over when all that is written is flushed."""
        if self._lazy:
            self._take_lazy()
        if self._submitted or self._turn_planned:
            self._turn()
        self._is_held = True
        while not (self.is_closed or self._failed):
            queries = self.store.queries
            if not self._flushing and not self._checkpointing and queries.flushed == queries.end:
                return
            self._work_on()
            await asyncio.sleep(_HELD_SECONDS)

    def resume(self) -> None:
        """Write again."""
        self._is_held = False
        if self._is_turn_waiting and not self.is_closed:
            self._turn()

    def drop(self, refusal: DMQError) -> None:
        """We do not lead any more: nothing is written or answered from now on.

        Parameters:
            refusal: for those whose request was not written. Whether what was written and is not committed stays is
                the next leader's affair: who waits for that is not answered.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._ticker.cancel()
        waiting, self._waiting = self._waiting, deque()
        submitted = [*self._submitted, *self.straight.submissions()]
        self._submitted, self._lazy, self._unwritten = [], [], []
        unknown = unanswered()
        for _, submission, _ in waiting:
            self._end(submission, [], unknown)
        for submission in submitted:
            self._end(submission, [], refusal)
        self._idle.set()

    def join(self) -> None:
        """Wait, blocking, until no thread uses the store any more."""
        self._disk.close()

    async def close(self) -> None:
        raise BrokerStopping("a leader's store is its member's: drop the writer")
