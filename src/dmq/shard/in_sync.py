"""The in-sync set: which members must have a unit before it is committed. Pure code; the leader's view of its shard.

The set stands in the shard's record in the registry, and only its members can be elected. A write of the record may be
lost, late, or answered after all, so more than one set may be in force at a time: the leader counts on the union of all
of them. What is committed is what every member of the union has flushed.

What always holds:
- A member joins the union before the record is written, and leaves it after the answer.
- A write that was not answered keeps its set in the union until a later write is answered; no read ends that.
- No set is proposed that is smaller than `min_in_sync`: who left such a set could no longer be elected, though nobody
  else has everything. Commit stands still instead.
- A member joins only after it confirmed everything up to the start of this epoch, and all that is committed. The
  committed offset alone would not do: a leader that was just elected may know less of it than the last one answered.
- `committed` never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

__all__ = ["InSyncSet", "Progress"]

LAG_SECONDS: Final = 10.0
_UNSETTLED_MAX: Final = 16
_MOMENTS: Final = 64  # of a lag, at which it is noted how much we had written


class Progress:
    """How far a member has come, by its confirmations.

    Attributes:
        flushed: everything below is durable there.
        heard_at: when it last confirmed; the beginning of the epoch if it never did.
    """

    __slots__ = ("flushed", "heard_at")

    def __init__(self, heard_at: float) -> None:
        self.flushed = 0
        self.heard_at = heard_at


class InSyncSet:
    """The set of one leader in one epoch.

    Parameters:
        leader: our own replica id; always a member of every set.
        members: the set that the record has since we were elected.
        epoch_end: where the unit ends that began our epoch.
        began_at: when that was; nobody lags before `lag_seconds` have passed.

    Attributes:
        committed: everything below is durable on all members that count.
        is_alone: the shard is asynchronous: the set is to be the leader alone.
    """

    def __init__(
        self,
        leader: int,
        members: Iterable[int],
        *,
        epoch_end: int,
        began_at: float,
        min_in_sync: int,
        lag_seconds: float = LAG_SECONDS,
    ) -> None:
        self._leader = leader
        self._recorded = frozenset(members) | {leader}
        self._epoch_end = epoch_end
        self.min_in_sync = min_in_sync
        self.is_alone = False
        self._lag_seconds = lag_seconds
        self._unsettled: list[frozenset[int]] = []  # sets whose write has no answer, oldest first
        self._progress: dict[int, Progress] = {}
        self._own_flushed = 0
        self._began_at = began_at
        # When we had written how much, the newest last; the first is at least as old as a lag, so it tells who lags.
        self._ends: deque[tuple[float, int]] = deque([(began_at, 0)])
        self.committed = 0

    @property
    def moment_seconds(self) -> float:
        """How often it is noted how much we have written."""
        return self._lag_seconds / _MOMENTS

    # --- sets -------------------------------------------------------------------------------------------------------

    @property
    def recorded(self) -> frozenset[int]:
        """The set of the last write that was answered."""
        return self._recorded

    @property
    def union(self) -> frozenset[int]:
        """Everybody who is a member of any set that may be in force."""
        return self._recorded.union(*self._unsettled) if self._unsettled else self._recorded

    @property
    def is_settled(self) -> bool:
        """Whether one set alone is in force."""
        return not self._unsettled

    @property
    def is_enough(self) -> bool:
        """Whether so many are in sync that anything may be committed."""
        return len(self._recorded) >= self.min_in_sync

    def begin_write(self, members: frozenset[int]) -> None:
        """A write of this set is about to be sent."""
        assert self._leader in members
        self._unsettled.append(members)
        if len(self._unsettled) > _UNSETTLED_MAX:
            first, second, *rest = self._unsettled
            self._unsettled = [first | second, *rest]

    def withdraw(self) -> None:
        """The write that was begun last was surely not carried out; those before it stay as they are."""
        self._unsettled.pop()

    def found(self, members: Iterable[int]) -> None:
        """The record was read and has this set: it may be in force, if we do not know of it."""
        known = frozenset(members) | {self._leader}
        if known != self._recorded and known not in self._unsettled:
            self._unsettled.append(known)

    def written(self, members: frozenset[int]) -> None:
        """The write of a set was answered with success: it is in force, and no other."""
        self._recorded = members
        self._unsettled = []

    def refused(self, recorded: Iterable[int]) -> None:
        """A write was answered with a conflict, and the record, read after that, has this set."""
        self._recorded = frozenset(recorded) | {self._leader}
        self._unsettled = []

    # --- progress ---------------------------------------------------------------------------------------------------

    def wrote(self, end: int, now: float) -> None:
        """Our journal has grown to this end."""
        ends, seconds = self._ends, self._lag_seconds
        if now - ends[-1][0] >= seconds / _MOMENTS:
            ends.append((now, end))
        while len(ends) > 1 and ends[1][0] <= now - seconds:
            ends.popleft()

    def followed(self, replica: int, start: int) -> None:
        """A follower begins anew here: what it had confirmed beyond counts no more, it may have lost it."""
        progress = self._progress.get(replica)
        if progress is not None:
            progress.flushed = min(progress.flushed, start)

    def confirmed(self, replica: int, flushed: int, now: float) -> None:
        """A follower has everything below, durable, as its confirmation that came now says."""
        progress = self._progress.get(replica)
        if progress is None:
            progress = self._progress[replica] = Progress(now)
        if now > progress.heard_at:
            progress.heard_at = now
        if flushed > progress.flushed:
            progress.flushed = flushed

    def flushed_of(self, replica: int) -> int:
        """What a member has confirmed, or our own."""
        if replica == self._leader:
            return self._own_flushed
        progress = self._progress.get(replica)
        return 0 if progress is None else progress.flushed

    def commit(self, flushed: int = 0) -> int:
        """Move `committed` on as far as it goes; returns it.

        Parameters:
            flushed: everything below is durable on our own disk, if that is more than before.
        """
        if flushed > self._own_flushed:
            self._own_flushed = flushed
        if self.is_enough:
            lowest, known = self._own_flushed, self._progress
            for replica in self.union if self._unsettled else self._recorded:
                if replica != self._leader:
                    if replica not in known:
                        return self.committed
                    if known[replica].flushed < lowest:
                        lowest = known[replica].flushed
            if lowest > self.committed:
                self.committed = lowest
        return self.committed

    def seconds_behind(self, replica: int, now: float) -> float:
        """How old the oldest is of what we have written and a member has not confirmed; 0 if it has everything."""
        flushed = self.flushed_of(replica)
        return next((now - at for at, end in self._ends if end > flushed), 0.0)

    def seconds_uncommitted(self, now: float) -> float:
        """How old the oldest is of what we have written and is not committed; 0 if all is."""
        return next((now - at for at, end in self._ends if end > self.committed), 0.0)

    def is_committing(self, now: float) -> bool:
        """Whether so many keep up that what is written now will be committed."""
        return sum(not self.lags(replica, now) for replica in self._recorded) >= self.min_in_sync

    # --- changes ----------------------------------------------------------------------------------------------------

    def lags(self, replica: int, now: float) -> bool:
        """Whether a member was silent for too long, or lacks what we had written so long ago."""
        if replica == self._leader:
            return False
        if self.is_silent(replica, now):
            return True
        since = now - self._lag_seconds
        target = next((end for at, end in reversed(self._ends) if at <= since), 0)
        return self.flushed_of(replica) < target

    def keeping_up(self, followers: Iterable[int], now: float) -> list[int]:
        """Which of those that are connected confirm, and lag behind no more than they may."""
        return [replica for replica in followers if not self.lags(replica, now)]

    def is_silent(self, replica: int, now: float, *, times: int = 1) -> bool:
        """Whether a member has confirmed nothing for so many lags."""
        progress = self._progress.get(replica)
        heard_at = self._began_at if progress is None else progress.heard_at
        return heard_at <= now - times * self._lag_seconds

    def _has_lost(self, replica: int) -> bool:
        """Whether a member began anew below what is committed: it had confirmed that, so its disk is an older one."""
        progress = self._progress.get(replica)
        return replica != self._leader and progress is not None and progress.flushed < self.committed

    def _may_join(self, replica: int, now: float) -> bool:
        flushed = self.flushed_of(replica)
        return flushed >= max(self._epoch_end, self.committed) and not self.lags(replica, now)

    def proposal(self, members: Iterable[int], now: float, gone: Iterable[int] = ()) -> frozenset[int] | None:
        """The set that is to be written now; None if the record is as it should be.

        While a write is unsettled there is always one, if only the old set: its answer settles those before it.

        Parameters:
            members: the replica ids that belong to the shard.
            gone: those that are not connected, and not registered or lost their connection a while ago: there is
                nothing to wait for.
        """
        belong = frozenset() if self.is_alone else frozenset(members) - {*gone}
        belong |= {self._leader}
        kept = self._recorded & belong
        stay = {replica for replica in kept if not self.lags(replica, now) and not self._has_lost(replica)}
        joining = {replica for replica in belong - self._recorded if self._may_join(replica, now)}
        wanted = frozenset(stay | joining | {self._leader})
        if len(wanted) < self.min_in_sync:
            wanted = self._recorded | joining  # nobody leaves: those that lag can still be elected
        return None if wanted == self._recorded and not self._unsettled else wanted
