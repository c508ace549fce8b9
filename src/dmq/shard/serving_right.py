"""The right to serve: whether a leader may answer now, and a follower stand. Pure code, on the clock that counts
suspended time.

A leader serves while nobody else can have been elected: while its session in the registry surely lives, so that its
entry there keeps others from standing; or while every other in-sync member has promised it not to stand; or while it is
alone in the set. A promise counts from when the leader sent the frame that the confirmation echoes, and for a tenth
less than the follower keeps it, since clocks run apart.

What always holds: the set is the union of every set that may be in force; a follower that was just started has
forgotten what it promised, so it keeps a whole promise first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

__all__ = ["PROMISE_SECONDS", "TRUSTED", "Promise", "Right", "right_to_serve"]

PROMISE_SECONDS: Final = 4.0
TRUSTED: Final = 0.9  # of a promise


class Right(StrEnum):
    """Why a leader may serve."""

    NONE = "none"
    SESSION = "session"
    PROMISES = "promises"
    ALONE = "alone"


def right_to_serve(
    now: float,
    deadline: float,
    others: Iterable[int],
    echoes: Mapping[int, float],
    *,
    promise_seconds: float = PROMISE_SECONDS,
) -> Right:
    """Why a leader may answer at this moment; NONE if it may not.

    Parameters:
        deadline: until when our session in the registry surely lives.
        others: every other member of any in-sync set that may be in force.
        echoes: by member, when we sent the newest frame that one of its confirmations echoes.
    """
    if now < deadline:
        return Right.SESSION
    oldest = now - TRUSTED * promise_seconds
    rest = [*others]
    if not rest:
        return Right.ALONE
    if all(echoes.get(replica, float("-inf")) > oldest for replica in rest):
        return Right.PROMISES
    return Right.NONE


class Promise:
    """A follower's word not to stand.

    Parameters:
        started_at: when this process began: what was promised before is forgotten, and kept all the same.
    """

    def __init__(self, started_at: float, promise_seconds: float = PROMISE_SECONDS) -> None:
        self._seconds = promise_seconds
        self._until = started_at + promise_seconds

    @property
    def until(self) -> float:
        """Until when it must not stand."""
        return self._until

    def silent_seconds(self, now: float) -> float:
        """How long ago a leader was last confirmed to, or this process began; 0 after a hand-over."""
        given_at = self._until - self._seconds
        return 0.0 if given_at == float("-inf") else max(0.0, now - given_at)

    def give(self, now: float) -> None:
        """A confirmation is about to be sent."""
        self._until = max(self._until, now + self._seconds)

    def release(self) -> None:
        """The leader that it was last given to has ceased to serve for good, and has said so by HANDOVER.

        A promise keeps a leader serving that has lost its session. Leaders of epochs before cannot serve by one: the
        leader of this epoch was elected with its own promise to them over, and has given them no other.
        """
        self._until = float("-inf")

    def is_over(self, now: float) -> bool:
        """Whether it may stand as far as its word goes."""
        return now >= self._until
