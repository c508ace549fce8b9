"""What becomes of clients in a forked child: nothing there may use the parent's connection.

Two processes on one socket would take each other's answers, and two producers with one name would be taken for one that
repeats itself, so that the broker would store the messages of only one of them.

What always holds: in a child, whatever a client is asked for raises `NotConnected` that says to connect again; closing
it does nothing; the parent notices nothing of it.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from dmq.errors import NotConnected

__all__ = ["Forkable", "end_in_children"]


class Forkable(Protocol):
    """Something that belongs to one process."""

    def forked(self, reason: NotConnected) -> None:
        """We are in a child: only this thread is here, and any lock may be held for ever."""


_living: WeakSet[Forkable] = WeakSet()


def end_in_children(thing: Forkable) -> None:
    """Have it told in each child."""
    _living.add(thing)


def _end() -> None:
    for thing in [*_living]:
        thing.forked(NotConnected("this client belongs to the process that was forked: connect again in this one"))


os.register_at_fork(after_in_child=_end)
