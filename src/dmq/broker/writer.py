"""The broker's writer: the one owner of the store, on the event loop.

Everything that is submitted in one turn of the loop is written together; a thread serves only the waiting for the disk
(`fdatasync`, checkpoint files). While one flush runs, the next units gather: group commit over all connections.

What always holds: a submission's callback is called exactly once, on the loop, when its unit is visible or when it
failed; what waits is bounded, and beyond the bound `submit` raises `Busy`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dmq.clock import Clock
from dmq.errors import Busy, DMQError, StorageError
from dmq.storage.appending import Batch, Placement
from dmq.storage.events import Event
from dmq.storage.store import MessageStore
from dmq.storage.visibility import Durability

__all__ = ["JournalWriter", "Submission"]

log = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.25
_RETAIN_SECONDS: Final = 10.0

Done = Callable[[list[Placement], DMQError | None], None]


class Submission:
    """Items that belong together, and who waits for them."""

    __slots__ = ("atomic", "done", "durability", "items", "size")

    def __init__(
        self, items: Sequence[Batch | Event], durability: Durability, done: Done, size: int, atomic: bool
    ) -> None:
        self.items = items
        self.durability = durability
        self.done = done
        self.size = size
        self.atomic = atomic


class JournalWriter:
    """See the module.

    Parameters:
        store: opened with `checkpoint_inline=False`.
        on_visible: told which (topic, queue) pairs have new messages.
        on_failed: told once when the store failed for good.
    """

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        waiting_bytes_max: int,
        on_visible: Callable[[set[tuple[str, int]]], None],
        on_failed: Callable[[DMQError], None],
    ) -> None:
        self.store = store
        self._clock = clock
        self._waiting_bytes_max = waiting_bytes_max
        self._on_visible = on_visible
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="dmq-disk")
        self._submitted: list[Submission] = []
        self._waiting: deque[tuple[int, Submission, list[Placement]]] = deque()  # written, not visible yet
        self.waiting_bytes = 0
        self._turn_planned = False
        self._flushing = False
        self._checkpointing = False
        self._failed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._flushed_at = self._checkpointed_at = self._retained_at = clock.monotonic()
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        self.flushes = 0
        self.units = 0

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
        if size and self.waiting_bytes and self.waiting_bytes + size > self._waiting_bytes_max:
            raise Busy(
                f"{self.waiting_bytes} bytes wait to be written, which is all that may: try again shortly",
                retry_after_ms=50,
            )
        self.waiting_bytes += size
        self._submitted.append(Submission(items, durability, done, size, atomic))
        self._idle.clear()
        if not self._turn_planned:
            self._turn_planned = True
            self._loop.call_soon(self._turn)

    def catch_up(self) -> None:
        """Write what was submitted so far: whoever writes to the store itself must not come before it."""
        if self._submitted:
            self._turn()

    def _turn(self) -> None:
        """Write what was submitted: what need not be flushed first, since it need not wait."""
        self._turn_planned = False
        submitted, self._submitted = self._submitted, []
        for durability in (Durability.STORED, Durability.FLUSHED):
            together = [s for s in submitted if s.durability == durability and not s.atomic]
            if together:
                self._write(together, durability)
            for submission in submitted:
                if submission.durability == durability and submission.atomic:
                    self._write([submission], durability, atomic=True)
        self._advance()
        self._work_on()

    def _write(self, together: list[Submission], durability: Durability, *, atomic: bool = False) -> None:
        items = [item for submission in together for item in submission.items]
        try:
            placements = self.store.append(items, durability, atomic=atomic)
        except DMQError as error:
            if len(together) > 1:
                self._write_apart(together, durability, error)
            else:
                self._fail(together[0], error)
            return
        self.units += 1
        at = 0
        for submission in together:
            mine = placements[at : at + len(submission.items)]
            at += len(submission.items)
            self._wait(submission, mine)

    def _write_apart(self, together: list[Submission], durability: Durability, error: DMQError) -> None:
        """One of them is at fault, or the disk filled up among them: each gets its own answer."""
        placed: dict[int, Placement] = error.detail.get("placed", {})
        at = 0
        for submission in together:
            indexes = range(at, at + len(submission.items))
            at += len(submission.items)
            if all(index in placed for index in indexes):
                self._wait(submission, [placed[index] for index in indexes])
            else:
                self._write([submission], durability)

    def _wait(self, submission: Submission, placements: list[Placement]) -> None:
        end = max(placement.unit_end for placement in placements)
        self._waiting.append((end, submission, placements))

    def _fail(self, submission: Submission, error: DMQError) -> None:
        self._end(submission, [], error)

    def _end(self, submission: Submission, placements: list[Placement], error: DMQError | None) -> None:
        self.waiting_bytes -= submission.size
        try:
            submission.done(placements, error)
        except Exception:  # a defect of one must not stop the writing of all
            log.exception("an answer failed")

    # --- becoming visible -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Answer everything that is visible by now."""
        visible = self.store.visible
        waiting = self._waiting
        touched: set[tuple[str, int]] = set()
        # A resend's first copy may be visible long since, so order is by arrival, and the first that waits stops all
        # behind it only as long as its own flush takes.
        while waiting and waiting[0][0] <= visible:
            _, submission, placements = waiting.popleft()
            for placement in placements:
                if placement.topic:
                    touched.add((placement.topic, placement.queue))
            self._end(submission, placements, None)
        if touched:
            self._on_visible(touched)
        if not waiting and not self._submitted:
            self._idle.set()

    def _work_on(self) -> None:
        """Start what the disk is needed for, one thing at a time."""
        if self._failed or self._flushing:
            return
        if self._waiting:
            self._start_flush()
        elif self.store.checkpoint_due and not self._checkpointing:
            self._start_checkpoint()

    def _start_flush(self) -> None:
        try:
            ticket = self.store.begin_flush()
        except DMQError as error:
            self._give_up(error)
            return
        self._flushing = True
        self.flushes += 1

        def finished(error: BaseException | None) -> None:
            self._flushing = False
            try:
                if error is not None and not isinstance(error, StorageError):
                    error = StorageError(f"flushing failed: {error}")
                self.store.finish_flush(ticket, error)
            except DMQError as failure:
                self._give_up(failure)
                return
            self._flushed_at = self._clock.monotonic()
            self._advance()
            self._work_on()

        self._in_thread(ticket.run, finished)

    def _start_checkpoint(self) -> None:
        try:
            plan = self.store.begin_checkpoint()
        except DMQError as error:
            self._give_up(error) if self.store.has_failed else log.error("checkpoint failed: %s", error)
            return
        self._checkpointed_at = self._clock.monotonic()
        if plan is None:
            return
        self._checkpointing = True

        def finished(error: BaseException | None) -> None:
            self._checkpointing = False
            if error is not None:
                log.error("checkpoint failed", extra={"error": str(error)})
            try:
                self.store.finish_checkpoint(plan, error)
            except DMQError as failure:
                log.error("checkpoint failed", extra={"error": str(failure)})
            self._work_on()

        self._in_thread(plan.write, finished)

    def _in_thread(self, work: Callable[[], None], finished: Callable[[BaseException | None], None]) -> None:
        future = self._loop.run_in_executor(self._threads, work)
        future.add_done_callback(lambda done: finished(done.exception()))

    def _give_up(self, error: DMQError) -> None:
        """The store failed: nobody is acknowledged any more."""
        waiting, self._waiting = self._waiting, deque()
        for _, submission, _ in waiting:
            self._fail(submission, error)
        self._idle.set()
        if not self._failed:
            self._failed = True
            self._on_failed(error)

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        if self._failed or self._flushing or self._checkpointing:
            return
        now = self._clock.monotonic()
        settings = self.store.settings
        try:
            if self.store.flushed < self.store.end and now - self._flushed_at >= settings.flush_seconds:
                self._start_flush()
            elif self.store.is_ahead_of_checkpoint and now - self._checkpointed_at >= settings.checkpoint_seconds:
                self._start_checkpoint()
            elif now - self._retained_at >= _RETAIN_SECONDS:
                self._retained_at = now
                self.store.retain()
        except DMQError as error:
            log.error("upkeep failed", extra={"error": str(error)})

    async def drain(self) -> None:
        """Wait until everything submitted is answered."""
        await self._idle.wait()
        while self._flushing or self._checkpointing:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Write what waits and close the store."""
        await self.drain()
        self._ticker.cancel()
        self._threads.shutdown(wait=True)
        self.store.close()
