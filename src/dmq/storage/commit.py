"""Group commit: one thread owns the store, many wait for it.

While the disk works on one flush, everything that arrives gathers; when it is done, all of it goes out as few units
and one flush. So a lone batch waits for its own flush only, and a flood needs a fraction of a flush each.

What always holds: a future is done once its batch is visible, which means its durability is reached, or has failed
with the error that says why; `submit` blocks, or refuses, while `waiting_bytes_max` are already waiting.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Final

from dmq.errors import DMQError, LimitReached, StorageError, StoreClosed
from dmq.storage.appending import Batch, Placement
from dmq.storage.store import MessageStore
from dmq.storage.visibility import Durability

__all__ = ["GroupCommit"]

_TICK_SECONDS: Final = 0.25

_Waiting = tuple[Batch, Durability, "Future[Placement]"]


class GroupCommit:
    """The owner of a store, for callers from many threads. Close it before the store."""

    def __init__(self, store: MessageStore, *, waiting_bytes_max: int = 64 << 20) -> None:
        self._store = store
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._waiting_bytes_max = waiting_bytes_max
        self._closing = False
        self._changed = threading.Condition()
        self.flushes = 0
        self._thread = threading.Thread(target=self._run, name="dmq-group-commit", daemon=True)
        self._thread.start()

    def submit(
        self, batch: Batch, durability: Durability = Durability.FLUSHED, *, wait: bool = True
    ) -> Future[Placement]:
        """Hand over a batch; the future gets its placement.

        Raises:
            LimitReached: too much is waiting, and `wait` was False.
            StoreClosed: `close` was called.
        """
        future: Future[Placement] = Future()
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

    def close(self) -> None:
        """Write what is waiting, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(_TICK_SECONDS)
                taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
                closing = self._closing
                self._changed.notify_all()
            if taken:
                self._commit(taken)
            elif closing:
                return
            else:
                self._tick()

    def _commit(self, taken: list[_Waiting]) -> None:
        """Write everything that was waiting: the stored first, since they need not wait for the flush."""
        for durability in (Durability.STORED, Durability.FLUSHED):
            group = [item for item in taken if item[1] == durability]
            if group:
                self._write(group, durability)

    def _write(self, group: list[_Waiting], durability: Durability) -> None:
        placed: list[tuple[Future[Placement], Placement]] = []
        try:
            placements = self._store.append([batch for batch, _, _ in group], durability)
            placed = [(future, place) for (_, _, future), place in zip(group, placements, strict=True)]
        except DMQError as error:
            if len(group) == 1:
                group[0][2].set_exception(error)
                return
            # One of them is at fault, or the disk filled up between them: each gets its own answer. What was
            # written before the error is recognised by its producer's sequence and not written again.
            for batch, _, future in group:
                try:
                    placed.append((future, self._store.append([batch], durability)[0]))
                except DMQError as own:
                    future.set_exception(own)
        self._finish(placed, durability)

    def _finish(self, placed: list[tuple[Future[Placement], Placement]], durability: Durability) -> None:
        try:
            if placed and self._store.visible < max(place.unit_end for _, place in placed):
                self.flushes += 1
                self._store.flush()
        except StorageError as error:
            for future, _ in placed:
                future.set_exception(error)
            return
        for future, place in placed:
            future.set_result(place)

    def _tick(self) -> None:
        try:
            self._store.tick()
        except DMQError:
            pass  # whoever writes next is told
