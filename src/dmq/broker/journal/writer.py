"""The broker's writer: the one owner of the store, on the event loop.

Everything that is submitted in one turn of the loop is written together; a thread serves only the waiting for the disk
(`fdatasync`, checkpoint files). While one flush runs, the next units gather: group commit over all connections. A flush
that one client alone waits for, on a quick disk, is done at once, on the loop (`FlushPolicy`): the way to a thread and
back would only add to it, and there is nothing to gather. The loop also waits for the disk
where a segment begins (`append`) or goes (`retain`), and for files to be removed after a checkpoint.

Events that nobody waits for (settles, for the most part) and that a full disk did not take are kept, up to a bound, and
written when there is space again; until then no event is written before them, since order matters among events.

What always holds: a submission's callback is called exactly once, on the loop, when its unit is visible or when it
failed; what waits is bounded, and beyond the bound `submit` raises `Busy`; the disk is looked at every second. The
writer of a shard's leader (`shard_writer`) is one of these that waits for its followers as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from dmq.broker.journal.arrivals import Arrivals
from dmq.broker.journal.disk import DiskThreads
from dmq.broker.runtime.runtime import Histogram
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DiskFull, DMQError, NotConnected, NotLeader, StorageError, StoreFailed
from dmq.event_log import EventLog
from dmq.model import Durability
from dmq.net.connection import WriteCoalescer
from dmq.storage.journal.journal import FlushPolicy
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.state.events import Event
from dmq.storage.store import FlushTicket, MessageStore
from dmq.storage.upkeep.checkpointer import CheckpointPlan

__all__ = ["LOOP_BYTES", "JournalWriter", "Submission", "nobody_waits"]

log = EventLog(__name__)

_TICK_SECONDS: Final = 0.25
_RETAIN_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0  # how often the disk is looked at, whether anything is written or not
_CARRIED_MAX: Final = 512  # records written again at a time: the loop waits for them
# Acks by the thousand share a unit; a broker that is killed has forgotten no more of them than came in this long.
_LAZY_SECONDS: Final = 0.005
_LAZY_MAX: Final = 256
# So many turns with one request of a producer each, one after another, show that requests come one by one. Then
# all but every sixteenth are written as they come: that one has a turn, which shows whether others come beside it.
_LONE_TURNS_MIN: Final = 8
_LOOK_MASK: Final = 15
_STORED: Final = int(Durability.STORED)
LOOP_BYTES: Final = 512 << 10  # that wait while the loop flushes, at most: more takes a quick disk long, too
_UNWRITTEN_MAX: Final = 100_000  # events that wait for space on a full disk

Done = Callable[[list[Placement], DMQError | None], None]


def _ignore(_: object) -> None:
    """Until the broker is wired."""


def _size_of(items: Iterable[Batch | Event]) -> int:
    return sum(len(item.data) for item in items if isinstance(item, Batch))


def nobody_waits(placements: list[Placement], error: DMQError | None) -> None:
    """For what is settled: if it cannot be written, it is handed out again after a restart, at least once."""
    if isinstance(error, BrokerStopping | NotLeader | NotConnected):
        log.debug("events came too late", error=error)
    elif error is not None:
        log.error("events could not be written", once_for=(), error=error)


class Submission:
    """Items that belong together, and who waits for them.

    `done` is called exactly once, on the loop: with the placements when they are visible, or with an error.
    """

    __slots__ = ("atomic", "durability", "items", "size")
    is_lone: bool = True  # one client waits for it, not several
    is_sent: bool = False  # by a producer, as one request
    is_early: bool = False  # in a shard it is done when it is written, not when it is committed
    touched: Collection[tuple[str, int]] = ()  # topics and queues, where placements do not say them

    def __init__(
        self, items: Sequence[Batch | Event], durability: Durability, size: int = 0, *, atomic: bool = False
    ) -> None:
        self.items = items
        self.durability = durability
        self.size = size
        self.atomic = atomic

    @property
    def is_nobodys(self) -> bool:
        """Nobody waits for it."""
        return False

    def done(self, placements: list[Placement], error: DMQError | None) -> None:
        raise NotImplementedError


class _Called(Submission):
    """One whose caller is told by a function."""

    __slots__ = ("_done",)

    def __init__(
        self, items: Sequence[Batch | Event], durability: Durability, done: Done, size: int, atomic: bool
    ) -> None:
        super().__init__(items, durability, size, atomic=atomic)
        self._done = done

    @property
    def is_nobodys(self) -> bool:
        return self._done is nobody_waits

    @property
    def events(self) -> list[Event]:
        return [item for item in self.items if not isinstance(item, Batch)]

    def done(self, placements: list[Placement], error: DMQError | None) -> None:
        self._done(placements, error)


class StraightTurn(Protocol):
    """What was taken on the straight path in this turn; see `dmq.broker.publish.straight_path`."""

    def write(self) -> int:
        """Write all of it: how many messages."""
        ...

    def submissions(self) -> list[Submission]:
        """All of it, for the general way; nothing is left."""
        ...


class _NoStraightTurn:
    """Until the broker is wired."""

    def write(self) -> int:
        return 0

    def submissions(self) -> list[Submission]:
        return []


class Answering(Protocol):
    """The connection of a producer."""

    def send_sealed(self, whole: bytes) -> None: ...

    def send_now(self, whole: bytes) -> None: ...


class TurnProbe:
    """How long it takes until the requests of a turn are answered.

    One turn in eight is measured, and stands for those since the last one: a lone write should not pay for a clock.

    Attributes:
        waits: of turns with requests, from when the first was taken until all were answered.
        began: when the turn began that is measured; 0 while none is.
        end: where it ends in the journal; 0 before it is written.
    """

    __slots__ = ("_measured", "began", "end", "turns", "waits")

    def __init__(self) -> None:
        self.waits = Histogram()
        self.turns = self._measured = self.end = 0
        self.began = 0.0

    def answered(self, now: float) -> None:
        self.waits.observe(now - self.began, self.turns - self._measured)
        self._measured = self.turns
        self.began, self.end = 0.0, 0


class JournalWriter:
    """The writer of one store.

    Parameters:
        store: opened with `checkpoint_inline=False`.
        outbox: held while answers are made, so that those of one turn go out together.
        arrivals: woken when more has become visible.

    Attributes:
        on_visible: told which (topic, queue) pairs have new messages.
        is_heard: whether anybody has to be told of new messages in a topic.
        on_failed: told once when the store failed for good.
    """

    _is_alone: bool = True  # no other broker has to have what is written
    _lazy_times: int = 1  # how much longer than alone what nobody waits for gathers
    _passing: tuple[type[DMQError], ...] = (DiskFull,)  # what events of nobody who waits are kept for

    def __init__(
        self, store: MessageStore, clock: Clock, waiting_bytes_max: int, outbox: WriteCoalescer, arrivals: Arrivals
    ) -> None:
        self.store = store
        self._clock = clock
        self._waiting_bytes_max = waiting_bytes_max
        self._outbox = outbox
        self._arrivals = arrivals
        self._visibility = store.visibility
        self.on_visible: Callable[[set[tuple[str, int]]], None] = _ignore
        self.is_heard: Callable[[str], bool] = bool
        self.on_failed: Callable[[DMQError], None] = _ignore
        self._loop = asyncio.get_running_loop()
        self._disk = DiskThreads(self._loop, monotonic=clock.monotonic)
        self.straight: StraightTurn = _NoStraightTurn()
        self._late_answer: tuple[Answering, bytes, tuple[str, int]] | None = None
        self._submitted: list[Submission] = []
        self._lazy: list[Event] = []  # of nobody who waits: written in a few milliseconds, or before any other event
        self._waiting: deque[tuple[int, Submission, list[Placement]]] = deque()  # written, not visible yet
        self.waiting_bytes = 0
        self._unwritten: list[Event] = []  # of nobody who waits; the disk was full
        self._obstacle: DMQError | None = None  # why they were not written
        self._turn_planned = False
        self._late_turn_planned = False
        self._flushing = False
        self._checkpointing = False
        self._failed = False
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._flushed_at = self._checkpointed_at = self._retained_at = self._looked_at = clock.monotonic()
        self._checkpoint_error = ""  # of the last one, so that the same is not logged every time
        self._was_crowded = store.space.is_crowded
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        self._flush_policy = FlushPolicy()
        self.flushes = 0
        self.units = 0
        self.probe = TurnProbe()
        self.lone_turns = 0
        """How many turns in a row had one request of a producer."""

    # --- submitting -------------------------------------------------------------------------------------------------

    def submit(
        self,
        items: Sequence[Batch | Event],
        durability: Durability,
        done: Done,
        *,
        size: int = 0,
        atomic: bool = False,
    ) -> None:
        """Hand over items; they are written at the end of this turn of the loop.

        Raises:
            Busy: too much is waiting.
        """
        if self._lazy:
            self._take_lazy()  # order matters among events, and there may be some here
        self.put(_Called(items, durability, done, size, atomic=atomic))

    def put(self, submission: Submission) -> None:
        """`submit`, for a submission that has a class of its own.

        Raises:
            Busy: too much is waiting.
        """
        size = submission.size
        if size and self.waiting_bytes and self.waiting_bytes + size > self._waiting_bytes_max:
            raise Busy(
                f"{self.waiting_bytes} bytes wait to be written, which is all that may: try again shortly",
                retry_after_ms=50,
            )
        self.waiting_bytes += size
        self._put_first(submission)
        if not self._turn_planned:
            self._plan_turn()

    def _put_first(self, submission: Submission) -> None:
        if self._turn_planned and not self._submitted:
            # What was taken on the straight path goes the general way with it: a turn takes one way as a whole.
            self._submitted += self.straight.submissions()
        self._submitted.append(submission)

    def put_lone(self, size: int) -> bool:
        """Plan a turn for a message of so many bytes on the straight path; False if it is to be submitted."""
        if self._submitted or (self.waiting_bytes and self.waiting_bytes + size > self._waiting_bytes_max):
            return False
        self.waiting_bytes += size
        if not self._turn_planned:
            self._plan_turn()
        return True

    def is_now(self, durability: int) -> bool:
        """Whether a request on the straight path is written as it comes.

        Parameters:
            durability: that was asked for. In a shard, one that need only be written has a turn, which answers it.
        """
        if self.lone_turns < _LONE_TURNS_MIN or self._turn_planned or self._waiting or self.is_closed:
            return False
        turns = self.lone_turns = self.lone_turns + 1
        if not turns & _LOOK_MASK or not (self._is_alone or durability > _STORED):
            return False
        probe = self.probe
        if not probe.turns & 7 and not probe.began:
            probe.began = self._clock.monotonic()
        return True

    def turn_now(self, size: int) -> None:
        """Have the turn of a message of so many bytes now: it has to be flushed before it is answered."""
        self.waiting_bytes += size
        self.probe.turns += 1
        self.lone_turns -= 1  # the turn counts itself
        self._idle.clear()
        self._turn()

    def answer_now(self, connection: Answering, answer: bytes, touched: tuple[str, int]) -> None:
        """A request is written without a turn: answer. What is told to others as well waits for `end_now`."""
        if not self.is_heard(touched[0]) and not self._arrivals.waiting:
            connection.send_now(answer)
        else:
            self._late_answer = (connection, answer, touched)

    def end_now(self) -> None:
        """And it is applied, too: serve those who wait for what is in its queue now."""
        probe = self.probe
        probe.turns += 1
        if self._late_answer is not None:
            (connection, answer, touched), self._late_answer = self._late_answer, None
            self._outbox.is_held = True
            try:
                connection.send_sealed(answer)
                self._arrivals.wake()
                self.on_visible({touched})
            finally:
                self._outbox.release()
        if probe.began:
            probe.answered(self._clock.monotonic())

    @property
    def has_submissions(self) -> bool:
        """Whether anything was submitted for this turn."""
        return bool(self._submitted)

    def _plan_turn(self) -> None:
        self._turn_planned = True
        probe = self.probe
        probe.turns += 1
        if probe.turns & 7 == 1 and not probe.began:
            probe.began = self._clock.monotonic()
        self._idle.clear()
        self._loop.call_soon(self._turn)

    def write_lazily(self, events: Sequence[Event]) -> None:
        """Write events that nobody waits for in a few milliseconds, together: no message waits for them."""
        lazy = self._lazy
        lazy += events
        if len(lazy) >= _LAZY_MAX:
            self.hurry()
        elif lazy and not self._late_turn_planned:
            self._idle.clear()
            self._late_turn_planned = True
            self._loop.call_later(self._lazy_times * _LAZY_SECONDS, self._turn_late)

    def _take_lazy(self) -> None:
        events, self._lazy = self._lazy, []
        self._put_first(_Called(events, Durability.STORED, nobody_waits, 0, atomic=False))

    def write_soon(self, events: Iterable[Event]) -> None:
        """Write events with the next unit; no caller waits for them."""
        items = [*events]
        if items:
            self.submit(items, Durability.STORED, nobody_waits)

    async def write(self, items: Sequence[Batch | Event], *, atomic: bool = False) -> list[Placement]:
        """Write items with the next unit; durable and visible when this is over.

        Parameters:
            atomic: all of them in one unit, or none.

        Raises:
            DMQError: they could not be written.
        """
        written: asyncio.Future[list[Placement]] = self._loop.create_future()

        def done(placements: list[Placement], error: DMQError | None) -> None:
            if not written.done():
                written.set_exception(error) if error is not None else written.set_result(placements)

        self.submit(items, Durability.FLUSHED, done, size=_size_of(items), atomic=atomic)
        return await written

    def write_together(self, items: Sequence[Batch | Event], done: Callable[[DMQError | None], None]) -> None:
        """Write items in one unit, flushed.

        Raises:
            Busy: too much is waiting.
        """
        self.submit(items, Durability.FLUSHED, lambda _, error: done(error), size=_size_of(items), atomic=True)

    def hurry(self) -> None:
        """What was to be written lazily is written at the end of this turn of the loop after all."""
        if self._lazy:
            self._take_lazy()
            if not self._turn_planned:
                self._turn_planned = True
                self._idle.clear()
                self._loop.call_soon(self._turn)

    def _turn_late(self) -> None:
        self._late_turn_planned = False
        if self._lazy:
            self._take_lazy()
        if self._submitted and not self._turn_planned:
            self._turn()

    def _turn(self) -> None:
        """Write what was submitted, or what was taken on the straight path."""
        self._turn_planned = False
        if self.is_closed:
            self._submitted += self.straight.submissions()
        submitted, self._submitted = self._submitted, []
        if self.is_closed:
            for submission in submitted:
                self._fail(submission, BrokerStopping("the broker has stopped: nothing is written any more"))
            self._idle.set()
            return
        if self._unwritten:
            submitted = self._refuse_events(submitted)
        if submitted:
            self._write_submitted(submitted)
            sent = sum(submission.is_sent for submission in submitted)
            if sent:
                self.lone_turns = self.lone_turns + 1 if sent == 1 else 0
        else:
            self.lone_turns = self.lone_turns + 1 if self.straight.write() == 1 else 0
        if self.probe.began and not self.probe.end:
            self.probe.end = self.store.queries.end
        self._advance()
        if self._lazy and self._waiting and not self._unwritten:
            # The next flush takes them with it: a send that was answered as flushed tells that acks before it are too.
            events, self._lazy = self._lazy, []
            self.write_each([_Called(events, Durability.STORED, nobody_waits, 0, atomic=False)], Durability.STORED)
        self._work_on()

    def _write_submitted(self, submitted: list[Submission]) -> None:
        """Write what was submitted: what need not be flushed first, since it need not wait."""
        for durability in (Durability.STORED, Durability.FLUSHED):
            asked = [s for s in submitted if s.durability is durability]
            if asked:
                self._write_asked(asked, durability)

    def _write_asked(self, asked: list[Submission], durability: Durability) -> None:
        together = [s for s in asked if not s.atomic]
        if together:
            self.write_each(together, durability)
        if len(together) < len(asked):
            for submission in asked:
                if submission.atomic:
                    self._write_whole(submission)

    def write_each(self, together: Sequence[Submission], durability: Durability) -> None:
        """Write what has nothing to do with each other: who is at fault is told so, and harms no other."""
        items: Sequence[Batch | Event] = (
            together[0].items if len(together) == 1 else [item for submission in together for item in submission.items]
        )
        try:
            outcomes = self.store.append_each(items, durability)
        except DMQError as error:
            self.not_written(together, durability, error)
            return
        self.units += 1
        at = 0
        waiting = self._waiting
        for submission in together:
            count = len(submission.items)
            if count == 1 and isinstance(outcome := outcomes[at], Placement):
                waiting.append((outcome.unit_end, submission, [outcome]))
            else:
                self._wait(submission, outcomes[at : at + count])
            at += count

    def not_written(self, together: Sequence[Submission], durability: Durability, error: DMQError) -> None:
        """Not all of them could be written."""
        if len(together) > 1:
            self._write_apart(together, durability, error)
        else:
            self._fail(together[0], error)

    def wait_for(self, unit_end: int, submission: Submission) -> None:
        """A submission was written as one unit: it is done when that is visible."""
        self.units += 1
        self._waiting.append((unit_end, submission, []))

    def _write_whole(self, submission: Submission) -> None:
        try:
            placements = self.store.append(submission.items, submission.durability, atomic=True)
        except DMQError as error:
            self._fail(submission, error)
            return
        self.units += 1
        self._wait(submission, [*placements])

    def _write_apart(self, together: Sequence[Submission], durability: Durability, error: DMQError) -> None:
        """The disk filled up among them: each gets its own answer."""
        placed: dict[int, Placement] = error.detail.get("placed", {})
        at = 0
        for submission in together:
            indexes = range(at, at + len(submission.items))
            at += len(submission.items)
            if all(index in placed for index in indexes):
                self._wait(submission, [placed[index] for index in indexes])
            else:
                self.write_each([submission], durability)

    def _wait(self, submission: Submission, outcomes: list[Placement | DMQError]) -> None:
        placements = []
        end = 0
        for outcome in outcomes:
            if isinstance(outcome, DMQError):
                self._fail(submission, outcome)
                return
            placements.append(outcome)
            if outcome.unit_end > end:
                end = outcome.unit_end
        self._waiting.append((end, submission, placements))

    def _fail(self, submission: Submission, error: DMQError) -> None:
        if isinstance(error, self._passing) and isinstance(submission, _Called) and submission.is_nobodys:
            self._keep(submission, error)
        else:
            self._end(submission, [], error)

    # --- a full disk ------------------------------------------------------------------------------------------------

    def _keep(self, submission: _Called, error: DMQError) -> None:
        """Keep events that nobody waits for until they can be written."""
        if len(self._unwritten) >= _UNWRITTEN_MAX:
            self._end(submission, [], error)
            return
        if not self._unwritten:
            self._obstacle = error
            if isinstance(error, DiskFull):
                log.error("settles wait in memory until the disk has space", error=error)
            else:
                log.warning("settles wait in memory until the shard takes writes", once_for=(), error=error)
        self._unwritten += submission.events

    def _refuse_events(self, submitted: list[Submission]) -> list[Submission]:
        """Refuse what has events, or keep it: those that wait for space come first. Returns the others."""
        error = self._obstacle
        assert error is not None
        others = []
        for submission in submitted:
            if all(isinstance(item, Batch) for item in submission.items):
                others.append(submission)
            else:
                self._fail(submission, error)
        return others

    def _write_unwritten(self) -> None:
        """Write the events that were kept, if they can be written now."""
        kept, self._unwritten = self._unwritten, []
        try:
            self.store.append(kept, Durability.STORED)
        except DiskFull as error:
            self._obstacle = error
            self._unwritten = kept[len(error.detail.get("placed", ())) :]
            return
        except DMQError as error:
            log.error("events could not be written", error=error)
            return
        log.warning("settles that waited are written", events=len(kept))
        self._obstacle = None

    def _look(self, now: float) -> None:
        self._looked_at = now
        try:
            self.store.look()
        except StoreFailed as error:
            self._give_up(error)
            return
        if self._unwritten and not self._failed:
            self._write_unwritten()
        if self.store.space.is_crowded and not self._was_crowded:
            self._retained_at = now - _RETAIN_SECONDS  # what is past the retention goes at once
        self._was_crowded = self.store.space.is_crowded

    def _end(self, submission: Submission, placements: list[Placement], error: DMQError | None) -> None:
        self.waiting_bytes -= submission.size
        try:
            submission.done(placements, error)
        except Exception:  # a defect of one must not stop the writing of all
            log.exception("an answer failed", once_for=())

    # --- becoming visible -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Answer everything that is visible by now, and tell it to others, with one write for each connection."""
        visible, waiting = self._visibility.visible, self._waiting
        is_shown = bool(waiting) and waiting[0][0] <= visible
        if is_shown:
            self._outbox.is_held = True
        try:
            touched = self._answer(visible) if is_shown else set()
            end = self.probe.end
            if end and end <= visible:
                self.probe.answered(self._clock.monotonic())
            if touched:
                if self._arrivals.waiting:
                    self._arrivals.wake()
                self.on_visible(touched)
        finally:
            if is_shown:
                self._outbox.release()
        if not (waiting or self._submitted or self._lazy or self._turn_planned):
            self._idle.set()

    def _answer(self, visible: int) -> set[tuple[str, int]]:
        """Answer everything that is visible; the topics and queues that have more messages by that."""
        waiting = self._waiting
        touched: set[tuple[str, int]] = set()
        # A resend's first copy may be visible long since, so order is by arrival, and the first that waits stops all
        # behind it only as long as its own flush takes.
        while waiting and waiting[0][0] <= visible:
            _, submission, placements = waiting.popleft()
            touched.update(submission.touched)
            for placement in placements:
                if placement.topic:
                    touched.add((placement.topic, placement.queue))
            self._end(submission, placements, None)
        return touched

    def _work_on(self) -> None:
        """Start what the disk is needed for, one thing at a time."""
        if self._failed or self._flushing:
            return
        if self._waiting:
            self._start_flush()
        elif self.store.checkpoint_due and not self._checkpointing:
            self._start_checkpoint()

    def _start_flush(self) -> None:
        is_lone = None if self._checkpointing else self._loop_serves()
        try:
            ticket = self.store.begin_flush()
        except DMQError as error:
            self._give_up(error)
            return
        self._flushing = True
        self.flushes += 1
        began = self._clock.monotonic()
        if is_lone is None or not self._flush_policy.is_for_loop(began, is_lone=is_lone):
            self._disk.run(ticket.run, partial(self._finish_flush, ticket))
            return
        failure: BaseException | None = None
        try:
            ticket.run()
        except Exception as error:
            failure = error
        self._finish_flush(ticket, failure, began)

    def _loop_serves(self) -> bool | None:
        """Whether a flush by the loop would serve a lone request, or several; None if a thread has to flush."""
        waiting = self._waiting
        return True if len(waiting) == 1 and waiting[0][1].is_lone and self.waiting_bytes <= LOOP_BYTES else None

    def _finish_flush(self, ticket: FlushTicket, error: BaseException | None, began: float | None = None) -> None:
        """A flush is done, or has failed; it is one of the loop's if it is known when it began."""
        self._flushing = False
        now = self._clock.monotonic()
        self._flush_policy.flushed(self._disk.took if began is None else now - began, now, on_loop=began is not None)
        try:
            if error is not None and not isinstance(error, StorageError):
                error = StorageError(f"flushing failed: {error}")
            self.store.finish_flush(ticket, error)
        except DMQError as failure:
            self._give_up(failure)
            return
        self._flushed_at = self._clock.monotonic()
        self._show()
        self._work_on()

    def _show(self) -> None:
        """More is flushed: answer who waited for that."""
        self._advance()

    def _start_checkpoint(self) -> None:
        try:
            plan = self.store.begin_checkpoint()
        except DMQError as error:
            self._give_up(error) if self.store.has_failed else log.error("checkpoint failed", once_for=(), error=error)
            return
        self._checkpointed_at = self._clock.monotonic()
        if plan is None:
            return
        self._checkpointing = True
        self._disk.run(plan.write, partial(self._finish_checkpoint, plan))

    def _finish_checkpoint(self, plan: CheckpointPlan, error: BaseException | None) -> None:
        self._checkpointing = False
        try:
            self.store.finish_checkpoint(plan, error)
        except DMQError as failure:
            error = failure
        self._tell_checkpoint("" if error is None else str(error))
        self._work_on()

    def _tell_checkpoint(self, error: str) -> None:
        if error and not self._checkpoint_error:
            log.error("checkpoint failed", error=error)
        self._checkpoint_error = error

    def _give_up(self, error: DMQError) -> None:
        """The store failed: nobody is acknowledged any more."""
        waiting, self._waiting = self._waiting, deque()
        for _, submission, _ in waiting:
            self._fail(submission, error)
        self._idle.set()
        if not self._failed:
            self._failed = True
            self.on_failed(error)

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._look(now)
        self._keep_up(now)

    def _keep_up(self, now: float) -> None:
        """What time alone makes due: flush what was only stored, checkpoint, retention."""
        if self._failed or self._flushing or self._checkpointing:
            return
        settings = self.store.settings
        try:
            if self.store.queries.flushed < self.store.queries.end and now - self._flushed_at >= settings.flush_seconds:
                self._start_flush()
            elif self._is_checkpoint_time(now):
                self._start_checkpoint()
            elif self.store.is_retaining or now - self._retained_at >= _RETAIN_SECONDS:
                self._retain(now)
        except DMQError as error:
            log.error("upkeep failed", once_for=(), error=error)

    def _retain(self, now: float) -> None:
        self._retained_at = now
        self.store.retain(_CARRIED_MAX)

    def _is_checkpoint_time(self, now: float) -> bool:
        # On a full disk the room that is left is for settles and admin commands.
        seconds = self.store.settings.checkpoint_seconds
        return (
            self.store.is_ahead_of_checkpoint
            and now - self._checkpointed_at >= seconds
            and not self.store.space.is_full
        )

    async def drain(self) -> None:
        """Wait until everything submitted is answered."""
        await self._idle.wait()
        while self._flushing or self._checkpointing:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Write what waits and close the store; later submissions fail with `BrokerStopping`."""
        if self.is_closed:
            return
        await self.drain()
        while not self._idle.is_set():  # more came while the disk was at work
            await self.drain()
        if self._unwritten and not self._failed:
            self._write_unwritten()
        self.is_closed = True
        self._ticker.cancel()
        self._disk.close()
        self.store.close()
