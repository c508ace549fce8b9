"""Group commit: one thread owns the store, many wait for it.

While the disk works on one flush, everything that arrives gathers; when it is done, all of it goes out as few units
and one flush. So a lone batch waits for its own flush only, and a flood needs a fraction of a flush each.

What always holds: a future is done once its batch is visible, which means its durability is reached, or has failed
with the error that says why; batches for one queue are written in the order they were submitted in, and those written
are told so in that order; `submit` blocks, or refuses, while `waiting_bytes_max` are already waiting; what else is
asked of the store, by `call`, happens between two commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, LimitReached, NotEnoughReplicas, StorageError, StoreClosed
from dmq.event_log import EventLog
from dmq.model import Durability
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.store import MessageStore

__all__ = ["GroupCommit"]

log = EventLog(__name__)

_TICK_SECONDS: Final = 0.25

_Waiting = tuple[Batch, Durability, "Future[Placement]"]
_Call = tuple[Callable[[], Any], "Future[Any]"]

T = TypeVar("T")


class GroupCommit:
    """The owner of a store, for callers from many threads. Close it before the store."""

    def __init__(self, store: MessageStore, *, waiting_bytes_max: int = 64 << 20, clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._waiting: list[_Waiting] = []
        self._calls: list[_Call] = []
        self._waiting_bytes = 0
        self._waiting_bytes_max = waiting_bytes_max
        self._closing = False
        self._changed = threading.Condition()
        self.flushes = 0
        self._ticked_at = self._clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="dmq-group-commit", daemon=True)
        self._thread.start()

    def submit(
        self,
        batch: Batch,
        durability: Durability = Durability.FLUSHED,
        *,
        wait: bool = True,
        on_done: Callable[[Future[Placement]], None] | None = None,
    ) -> Future[Placement]:
        """Hand over a batch; the future gets its placement.

        Parameters:
            wait: block while too much is waiting.
            on_done: called with the future by the store's thread, in the order the batches were written in.

        Raises:
            LimitReached: too much is waiting, and `wait` was False.
            NotEnoughReplicas: `REPLICATED` was asked for.
            StoreClosed: `close` was called.
        """
        if durability > Durability.FLUSHED:
            raise NotEnoughReplicas("this store has no replicas to wait for: ask for durability 'flushed'")
        future: Future[Placement] = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        with self._changed:
            while self._waiting and self._waiting_bytes + len(batch.data) > self._waiting_bytes_max:
                if not wait:
                    raise LimitReached(f"{self._waiting_bytes} bytes are waiting to be written: try again shortly")
                if self._closing:
                    break
                self._changed.wait()
            if self._closing:
                raise StoreClosed("the store is closing: nothing more is taken")
            self._waiting.append((batch, durability, future))
            self._waiting_bytes += len(batch.data)
            self._changed.notify_all()
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the store's thread call a function between two commits; the future gets what it returns.

        Raises:
            StoreClosed: `close` was called.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise StoreClosed("the store is closing: nothing more is taken")
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Write what is waiting, call what is to be called, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._calls and not self._closing:
                    self._changed.wait(_TICK_SECONDS)
                taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
                calls, self._calls = self._calls, []
                closing = self._closing
                self._changed.notify_all()
            try:
                if taken:
                    # From here on they cannot be cancelled any more.
                    self._commit([item for item in taken if item[2].set_running_or_notify_cancel()])
                for function, future in calls:
                    _call(function, future)
                if closing and not taken and not calls:
                    return
                self._tick_if_due()
            except BaseException as error:
                self._give_up(error, taken, calls)
                raise

    def _give_up(self, error: BaseException, taken: list[_Waiting], calls: list[_Call]) -> None:
        """A defect: nobody may wait for a thread that is gone."""
        with self._changed:
            self._closing = True
            left: list[Future[Any]] = [item[2] for item in (*taken, *self._waiting)]
            left += [item[1] for item in (*calls, *self._calls)]
            self._waiting, self._calls = [], []
            self._changed.notify_all()
        failure = StoreClosed(f"the store's thread ended with {error!r}: this is a defect, please report it")
        for future in left:
            if not future.done():
                future.set_exception(failure)

    def _commit(self, taken: list[_Waiting]) -> None:
        """Write everything that was waiting: the stored first, since they need not wait for the flush.

        But not past a batch for the same queue that does.
        """
        first: list[_Waiting] = []
        second: list[_Waiting] = []
        held: set[tuple[str, int]] = set()
        for item in taken:
            queue = (item[0].topic, item[0].queue)
            if item[1] == Durability.STORED and queue not in held:
                first.append(item)
            else:
                held.add(queue)
                second.append(item)
        if first:
            self._write(first, Durability.STORED)
        if second:
            self._write(second, Durability.FLUSHED)

    def _write(self, group: list[_Waiting], durability: Durability) -> None:
        placed: dict[int, Placement] = {}
        try:
            placed = dict(enumerate(self._store.append([batch for batch, _, _ in group], durability)))
        except StorageError as error:
            # The disk's affair, so everybody's; but some may have been written before.
            placed = error.detail.get("placed", {})
            for index, (_, _, future) in enumerate(group):
                if index not in placed:
                    future.set_exception(error)
        except DMQError as error:
            if len(group) == 1:
                group[0][2].set_exception(error)
                return
            # One of them is at fault, and nothing was written: each gets its own answer.
            for index, (batch, _, future) in enumerate(group):
                try:
                    placed[index] = self._store.append([batch], durability)[0]
                except DMQError as own:
                    future.set_exception(own)
        self._finish([(group[index][2], place) for index, place in placed.items()])

    def _finish(self, placed: list[tuple[Future[Placement], Placement]]) -> None:
        """Flush if need be, and tell those who wait."""
        failure: StorageError | None = None
        try:
            if placed and self._store.queries.visible < max(place.unit_end for _, place in placed):
                self.flushes += 1
                self._store.flush()
        except StorageError as error:
            failure = error
        for future, place in placed:
            if failure is None or place.unit_end <= self._store.queries.visible:
                future.set_result(place)
            else:
                future.set_exception(failure)

    def _tick_if_due(self) -> None:
        now = self._clock.monotonic()
        if now - self._ticked_at < _TICK_SECONDS or self._store.has_failed:
            return
        self._ticked_at = now
        try:
            self._store.tick()
        except DMQError as error:
            log.error("upkeep failed", once_for=(), error=error)  # the next write raises it


def _call(function: Callable[[], Any], future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = function()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
