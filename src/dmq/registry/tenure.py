"""The tenure of a session: until when it surely lives, as far as its client can know. Pure code.

What always holds: the deadline comes from writes to an ephemeral entry of ours that were answered with success within
the session, and counts from when each was sent: the registry renewed the session later than that. Half the session is
left for clocks that run apart. A session that is over, or replaced by another one, has no deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmq.registry.registry import NO_DEADLINE, Create, Delete, Operation, Put

__all__ = ["Tenure"]


class Tenure:
    """What a client knows of its session.

    Attributes:
        session: its number; 0 while there is none.
        deadline: on `Clock.boottime`.
    """

    def __init__(self, session_seconds: float) -> None:
        self._half_seconds = session_seconds / 2
        self.session = 0
        self.deadline = NO_DEADLINE
        self._ephemeral: set[str] = set()  # those that answered writes have made

    def grant(self, session_seconds: float) -> None:
        """The registry lets our session live so long without a sign of us, from now on."""
        half_seconds = session_seconds / 2
        if half_seconds < self._half_seconds:
            self.deadline -= self._half_seconds - half_seconds
        self._half_seconds = half_seconds

    def begin(self, session: int) -> None:
        """Our session is this one; nothing changes if it was before."""
        if session != self.session:
            self.session = session
            self.deadline = NO_DEADLINE
            self._ephemeral.clear()

    def end(self) -> None:
        """The session is over, or may be."""
        self.begin(0)

    def adopt(self, session_seconds: float) -> None:
        """Sessions live this long; if that is new, the next answered write sets the deadline."""
        if session_seconds / 2 != self._half_seconds:
            self._half_seconds = session_seconds / 2
            self.deadline = NO_DEADLINE

    def answered(self, operations: Sequence[Operation], session: int, sent_at: float) -> None:
        """A write went well that was sent then, in that session."""
        if session != self.session:
            return
        is_kept = False
        for operation in operations:
            match operation:
                case Create(path, _, ephemeral):
                    if ephemeral:
                        self._ephemeral.add(path)
                        is_kept = True
                case Put(path, _, _):
                    is_kept = is_kept or path in self._ephemeral
                case Delete(path, _):
                    self._ephemeral.discard(path)
        if is_kept:
            self.deadline = max(self.deadline, sent_at + self._half_seconds)
