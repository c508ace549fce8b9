"""Selection: which queue of a topic is served next.

Pure code. Queues that may have something are marked; the caller picks one, proposes from its cursor, and unmarks it
when there was nothing. Whatever may give a queue something again (messages became visible, something was settled, a
lease or a delay is over, the position was set) marks it, so an idle queue costs nothing.

What always holds: only marked queues are picked; a marked queue is picked within as many picks as there are queues, or,
in a priority topic, within ten times as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["RETRY_QUEUES", "QueueSelection", "with_retries"]

# In a priority topic every so many picks one goes round, so that no queue starves.
_IN_TURN_EVERY: Final = 10
RETRY_QUEUES: Final = 256  # a queue of the retry topic is marked as its number and this
_OWN_QUEUES: Final = (1 << RETRY_QUEUES) - 1


def with_retries(queues: int) -> int:
    """A bit for each of these queues, and for each queue of the retry topic that goes with one of them."""
    return queues | queues << RETRY_QUEUES


class QueueSelection:
    """The marked queues of one topic and group.

    Parameters:
        by_priority: the queue is the priority: the highest first, every tenth pick in turn.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._marked = 0  # bit per queue
        self._last = -1  # the queue picked last in turn
        self._picks = 0

    def mark(self, queue: int) -> None:
        """The queue may have something to hand out."""
        self._marked |= 1 << queue

    def unmark(self, queue: int) -> None:
        """The queue that was picked has nothing to hand out for now."""
        self._marked &= ~(1 << queue)
        self._picks -= 1  # a pick that gave nothing does not bring the next turn nearer

    def drained(self, queue: int) -> None:
        """The queue that was picked gave what it had."""
        self._marked &= ~(1 << queue)

    @property
    def has_any(self) -> bool:
        """Whether any queue may have something to hand out."""
        return self._marked != 0

    def marked(self) -> Iterator[int]:
        """The queues that may have something to hand out."""
        left = self._marked
        while left:
            queue = (left & -left).bit_length() - 1
            left ^= 1 << queue
            yield queue

    def is_marked(self, queue: int) -> bool:
        return bool(self._marked >> queue & 1)

    def pick(self, allowed: int = -1) -> int | None:
        """The queue to serve next.

        Parameters:
            allowed: a bit for each queue that may be picked; all by default.
        """
        marked = self._marked & allowed
        if not marked:
            return None
        self._picks += 1
        if self._by_priority and self._picks % _IN_TURN_EVERY:
            own, again = marked & _OWN_QUEUES, marked >> RETRY_QUEUES
            # Of one priority those that failed come first: they have waited longer.
            return (own if own.bit_length() > again.bit_length() else marked).bit_length() - 1
        after = marked >> (self._last + 1)
        if after:
            self._last += (after & -after).bit_length()
        else:
            self._last = (marked & -marked).bit_length() - 1
        return self._last

    def __len__(self) -> int:
        return self._marked.bit_count()
