"""Which open transactions are asked about, and when (R-09). Pure code: events in, actions out.

A live producer of its group is asked about a half message that is neither committed nor rolled back: for the first time
a while after it was stored, then at intervals, so many times; after that the transaction is given up. Time comes in as
`now_ms`, the broker's own, which does not run backwards.

What always holds: a transaction that has ended is never asked about; an open one has exactly one next moment, except
while its giving up is under way; it is asked about `checks_max` times before it is given up, whether a producer is
there to answer or not. Counts live in memory: after a restart of the broker they begin anew, and the first check comes
no sooner than after a fresh start, so that producers have time to come back.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

__all__ = ["Action", "TransactionChecks"]

_SPARE_ENTRIES: Final = 1024


class Action(NamedTuple):
    """Ask about a transaction for the `attempt`-th time; 0 is to give it up."""

    message_id: bytes
    attempt: int


class _Open:
    __slots__ = ("attempts", "due_ms")

    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        self.attempts = 0


class TransactionChecks:
    """The open transactions of one broker.

    Parameters:
        first_ms: how long after it was stored a transaction is asked about first.
        interval_ms: how long after that again, every time.
        checks_max: how often.
    """

    def __init__(self, first_ms: int, interval_ms: int, checks_max: int) -> None:
        self._first_ms = first_ms
        self._interval_ms = interval_ms
        self._checks_max = checks_max
        self._open: dict[bytes, _Open] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, message_id: bytes, now_ms: int) -> None:
        """A half message is stored, or was found stored at the start; one that is known already changes nothing."""
        if message_id not in self._open:
            due_ms = now_ms + self._first_ms
            self._open[message_id] = _Open(due_ms)
            heappush(self._heap, (due_ms, message_id))

    def ended(self, message_id: bytes) -> None:
        """It was committed, rolled back or given up."""
        if self._open.pop(message_id, None) is not None and len(self._heap) > 2 * len(self._open) + _SPARE_ENTRIES:
            # Most end long before they are due: swept out before they pile up.
            self._heap = [(due, mid) for due, mid in self._heap if self._is_current(due, mid)]
            heapify(self._heap)

    def attempts(self, message_id: bytes) -> int:
        """How often it was asked about."""
        found = self._open.get(message_id)
        return 0 if found is None else found.attempts

    def due(self, now_ms: int, limit: int) -> list[Action]:
        """What is to be done by now, at most so much."""
        actions: list[Action] = []
        while self._heap and self._heap[0][0] <= now_ms and len(actions) < limit:
            due_ms, message_id = heappop(self._heap)
            if not self._is_current(due_ms, message_id):
                continue
            found = self._open[message_id]
            if found.attempts >= self._checks_max:
                found.due_ms = -1  # no moment of its own until it has ended, or `postpone`
                actions.append(Action(message_id, 0))
                continue
            found.attempts += 1
            actions.append(Action(message_id, found.attempts))
            self._put(message_id, found, now_ms + self._interval_ms)
        return actions

    def postpone(self, message_id: bytes, now_ms: int, wait_ms: int) -> None:
        """It could not be given up now: try again later."""
        found = self._open.get(message_id)
        if found is not None and found.due_ms < 0:
            self._put(message_id, found, now_ms + wait_ms)

    def _put(self, message_id: bytes, found: _Open, due_ms: int) -> None:
        found.due_ms = due_ms
        heappush(self._heap, (due_ms, message_id))

    def _is_current(self, due_ms: int, message_id: bytes) -> bool:
        found = self._open.get(message_id)
        return found is not None and found.due_ms == due_ms
