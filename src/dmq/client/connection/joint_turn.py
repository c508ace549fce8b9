"""A turn at several connections: one thread that waits for what any of them brings reads all that nobody else reads.

Without it a thread of each connection would read, and wake the one that waits: with messages from three brokers that is
a change of threads for each push, and four threads that want the interpreter at once.

What always holds: what `Turns` promises holds for each connection by itself, whichever of them the thread leads;
another thread that leaves one of them, or wakes this one, ends its poll.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dmq.client.connection.connection import Turns
from dmq.client.connection.socket import POLL_SECONDS_MAX
from dmq.client.connection.threads import FOREVER, Waiter

__all__ = ["JointTurn", "PollWaiter", "Polled"]


class Polled(Protocol):
    """A connection, as far as it is polled together with others."""

    @property
    def turns(self) -> Turns: ...

    @property
    def nudge(self) -> Callable[[], None]: ...

    @property
    def is_closed(self) -> bool: ...

    def register(self, poll: select.poll) -> Sequence[int]: ...

    def happened(self, descriptor: int, events: int) -> None: ...


class PollWaiter(Waiter):
    """One thread that waits to be woken, or polls: `wake` ends both."""

    __slots__ = ("nudge",)

    def __init__(self) -> None:
        super().__init__()
        self.nudge: Callable[[], None] | None = None

    def wake(self) -> None:
        super().wake()
        nudge = self.nudge
        if nudge is not None:
            nudge()

    def poll(self, poll: select.poll, seconds: float) -> list[tuple[int, int]]:
        """What one finds within so long."""
        return poll.poll(min(seconds, POLL_SECONDS_MAX) * 1000)


class JointTurn:
    """One thread's wait at several connections, for something that is not an answer.

    Parameters:
        connections: the first of those that it reads is nudged when it is woken.
    """

    def __init__(self, connections: Sequence[Polled]) -> None:
        self._connections = connections
        self._led: set[Turns] = set()
        self.waiter: Final = PollWaiter()

    def until(self, is_done: Callable[[], object], deadline: float, *, is_lender: bool = False) -> None:
        """Wait until `is_done`, which somebody follows with `waiter.wake()`, or one of the connections is closed; read
        meanwhile what nobody else does.

        Parameters:
            is_lender: this thread will be back in a moment, to wait for more.
        """
        connections, waiter = self._connections, self.waiter
        for one in connections:
            one.turns.join(waiter, is_patient=True)
        try:
            while not is_done() and not self._is_broken() and (left := deadline - time.monotonic()) > 0:
                pause, mine = FOREVER, []
                for one in connections:
                    patience = one.turns.patience(waiter)
                    if patience:
                        pause = min(pause, patience)
                    elif one.turns.take():
                        mine.append(one)
                if mine:
                    self._lead(mine, is_done, min(left, pause))
                else:
                    waiter.wait(min(left, pause))
        finally:
            for one in connections:
                one.turns.part(waiter, is_patient=True, is_lent=is_lender and one.turns in self._led)

    def _is_broken(self) -> bool:
        return any(one.is_closed for one in self._connections)

    def _lead(self, mine: Sequence[Polled], is_done: Callable[[], object], seconds: float) -> None:
        """Read these until `is_done`, until woken, or for so long."""
        waiter, deadline = self.waiter, time.monotonic() + seconds
        self._led.update(one.turns for one in mine)
        try:
            waiter.nudge = mine[0].nudge  # before the looks below, so that none of them is too early
            poll = select.poll()
            owners = {descriptor: one for one in mine for descriptor in one.register(poll)}
            while not waiter.wait(0.0) and not is_done() and not self._is_broken():
                left = max(0.0, deadline - time.monotonic())
                for descriptor, events in waiter.poll(poll, left):
                    owners[descriptor].happened(descriptor, events)
                if not left:
                    return
                for one in mine:
                    one.register(poll)  # again: whether one waits for room changes
        finally:
            waiter.nudge = None
            for one in mine:
                one.turns.release()
