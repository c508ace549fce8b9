"""The heart of a member: how a thread beside the event loop sees that the loop, or a leader's flush, stands still.

A loop that stands still cannot see that itself, and its leader must give way all the same: the process has a thread
that asks `is_beating` several times a second, and a session in the registry that ends with the loop. Then `/leader`
goes, and followers, who hear nothing either, elect another one. While only a flush stands still, the loop turns: the
leader then gives up `/leader` itself, and ceases when the registry has answered that, since without the registry nobody
could be elected in its place.

What always holds: one thread writes, the event loop's; reading takes no lock.
"""

from __future__ import annotations

from dmq.clock import Clock

__all__ = ["Heart"]


class Heart:
    """Of one member.

    Parameters:
        limit_seconds: half a session of the registry.
    """

    def __init__(self, clock: Clock, limit_seconds: float) -> None:
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._beat_at: float | None = None
        self._stuck_since: float | None = None

    def beat(self) -> None:
        """The event loop turns."""
        self._beat_at = self._clock.boottime()

    def rest(self) -> None:
        """The member has stopped: nothing is expected of it."""
        self._beat_at = self._stuck_since = None

    def flush_waits(self, since: float | None) -> None:
        """A leader's flush is under way since then; None if nothing is to be flushed."""
        self._stuck_since = since

    @property
    def is_flush_stuck(self) -> bool:
        since = self._stuck_since
        return since is not None and self._clock.boottime() - since > self._limit_seconds

    @property
    def is_beating(self) -> bool:
        """False if the loop, or a leader's flush, has not reported for half a session: it is to give way."""
        beat_at = self._beat_at
        is_late = beat_at is not None and self._clock.boottime() - beat_at > self._limit_seconds
        return not (is_late or self.is_flush_stuck)
