"""The leader: feeds its followers, and knows what is committed and whether it may answer. Without I/O.

Its owner carries the frames, flushes the store, writes the record of the shard, and asks `right` before each answer.

What always holds: a unit is committed when every member of every set that may be in force has it flushed, and visible
in the store then and not before; what a follower confirms counts only if it confirms this epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dmq.errors import Damaged, NotInCluster, StaleEpoch
from dmq.protocol.cluster.replication import Confirm, Follow, FollowReply, Journal
from dmq.shard.divergence import common_end
from dmq.shard.feed import Feed, Pace, Reading, Standpoint, Tail
from dmq.shard.in_sync import InSyncSet
from dmq.shard.serving_right import PROMISE_SECONDS, TRUSTED, Right, right_to_serve
from dmq.storage.files import Buffer
from dmq.storage.state.state import EpochRow
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.identity import Membership

__all__ = ["Leader"]

_NEVER: Final = float("-inf")


class Leader:
    """Leads one epoch of a shard.

    Attributes:
        epoch: that it leads.

    Parameters:
        store: taken over from our replica in this epoch.
        member: as what our directory belongs to the shard.
        in_sync: the set, as the record that we won with has it.
        unsafe: the epoch of the last promotion with loss, of the record.
        reads_ahead: the owner carries out `reading`, so that the disk is not waited for.
    """

    def __init__(
        self,
        store: MessageStore,
        member: Membership,
        in_sync: InSyncSet,
        *,
        unsafe: int = 0,
        promise_seconds: float = PROMISE_SECONDS,
        reads_ahead: bool = False,
    ) -> None:
        self._store = store
        self._member = member
        self.in_sync = in_sync
        self._unsafe = unsafe
        self._promise_seconds = promise_seconds
        self._reads_ahead = reads_ahead
        self._pace = Pace()
        self._tail = Tail(store)
        self._feeds: dict[int, Feed] = {}
        self._reached: dict[int, int] = {}  # by follower, up to where it was sent something before its connection ended
        self._unread: dict[int, int] = {}  # by follower, what it needed and could not be read
        self._echoes: dict[int, float] = {}
        self._clocks: dict[int, tuple[int, float]] = {}  # a follower's wall clock, and when it told that
        self._looked_at, self._look_seconds = _NEVER, min(in_sync.moment_seconds, Pace.LOOK_SECONDS)
        self._shown = 0  # up to where the store knows what is committed
        self.epoch = store.queries.epoch

    @property
    def standpoint(self) -> Standpoint:
        queries = self._store.queries
        return Standpoint(self.epoch, queries.end, self.in_sync.committed, queries.start)

    # --- followers --------------------------------------------------------------------------------------------------

    def follow(self, request: Follow) -> FollowReply:
        """A member wants our journal: where it goes on.

        Raises:
            NotInCluster: it is of another cluster, shard or journal.
            StaleEpoch: it looks for another leader.
            Damaged: it came to where our journal cannot be read, and no member has given us these bytes since.
        """
        member, queries = self._member, self._store.queries
        asked, own = (request.cluster, request.shard), (member.cluster, member.shard)
        if asked != own or request.journal_id != queries.journal_id:
            raise NotInCluster(
                f"shard {request.shard!r} of cluster {request.cluster!r} with journal {request.journal_id:016x} is not "
                f"ours, which is {member.shard!r} of {member.cluster!r} with {queries.journal_id:016x}: check the "
                "addresses in the registry"
            )
        if request.epoch != self.epoch:
            raise StaleEpoch(f"this is the leader of epoch {self.epoch}, not {request.epoch}", epoch=self.epoch)
        self._check_readable(request.replica)
        theirs = [EpochRow(*row) for row in request.epochs]
        common = common_end(theirs, request.end, [*self._store.epochs], queries.end)
        reply = FollowReply(
            epoch=self.epoch,
            common=common,
            first=queries.start,
            committed=self.in_sync.committed,
            unsafe=self._unsafe,
        )
        start = queries.start if common is None or request.end < queries.start else max(common, queries.start)
        self.in_sync.followed(request.replica, start)
        self.leave(request.replica)
        feed = self._feeds[request.replica] = Feed(
            self._store,
            start,
            self._store.unit_before(start),
            pace=self._pace,
            tail=self._tail,
            reads_ahead=self._reads_ahead,
        )
        feed.checked_to = self._reached.get(request.replica, start)
        return reply

    def leave(self, replica: int) -> None:
        """A follower's connection ended."""
        feed = self._feeds.pop(replica, None)
        if feed is not None:
            self._reached[replica] = feed.next_offset

    def cannot_read(self, replica: int, offset: int) -> None:
        """A follower needs what cannot be read here: as long as that is so, it would come no further."""
        self._unread[replica] = offset

    def _check_readable(self, replica: int) -> None:
        at = self._unread.pop(replica, -1)
        if any(start <= at < end for start, end in self._store.damage.ranges):
            self._unread[replica] = at
            raise Damaged(
                f"the leader's journal is damaged at {at}, and no other member has given it these bytes: start one "
                "that has them, or restore the range from a backup",
                start=at,
            )

    def is_fed(self, replica: int) -> bool:
        """Whether everything that was written is on its way to a follower."""
        feed = self._feeds.get(replica)
        return feed is None or feed.next_offset >= self._store.queries.end

    def frames(self, replica: int, now: float) -> Iterator[tuple[Journal, Buffer]]:
        """What to send to a follower now."""
        feed = self._feeds.get(replica)
        return iter(()) if feed is None else feed.frames(self.standpoint, now)

    def last_frame(self, replica: int, standpoint: Standpoint, now: float) -> tuple[Journal, Buffer] | None:
        """All that is left for a follower that is level, as nearly all are; see `Feed.last_frame`."""
        feed = self._feeds.get(replica)
        return None if feed is None else feed.last_frame(standpoint, now)

    def reading(self, replica: int, now: float) -> tuple[Feed, Reading, float] | None:
        """What to read next for a follower, and after how many seconds; `Feed.was_read` takes the result.

        Raises:
            Damaged: it cannot be read.
        """
        feed = self._feeds.get(replica)
        if feed is None:
            return None
        found = feed.reading(self.standpoint, now, is_awaited=replica in self.in_sync.union)
        return None if found is None else (feed, *found)

    def confirmed(self, replica: int, confirm: Confirm, now: float) -> bool:
        """A follower said what it has. Returns whether more is committed by that.

        Raises:
            StaleEpoch: it follows another epoch.
        """
        if confirm.epoch != self.epoch:
            raise StaleEpoch(f"this is epoch {self.epoch}, and {confirm.epoch} is confirmed", epoch=self.epoch)
        feed = self._feeds.get(replica)
        if feed is None:
            return False
        feed.confirmed(confirm.end)
        self.in_sync.confirmed(replica, confirm.flushed, now)
        if confirm.now_ms:
            self._clocks[replica] = confirm.now_ms, now
        if confirm.sent > self._echoes.get(replica, _NEVER):
            self._echoes[replica] = confirm.sent
        before = self.in_sync.committed
        return confirm.flushed > before and self.commit() > before

    # --- what is committed ------------------------------------------------------------------------------------------

    def wrote(self, now: float) -> None:
        """The store has written more, or may have."""
        self._tail.forget()
        if now - self._looked_at >= self._look_seconds:
            self._looked_at = now
            end = self._store.queries.end
            self.in_sync.wrote(end, now)
            self._pace.wrote(end, now)

    def commit(self) -> int:
        """Show what is committed by now; returns up to where."""
        committed = self.in_sync.commit(self._store.queries.flushed)
        if committed > self._shown:
            self._shown = committed
            self._store.confirm_replicated(committed)
        return committed

    def skew_of(self, replica: int, now: float, now_ms: int) -> float:
        """By how many seconds a follower's wall clock is ahead of ours, as far as its confirmations tell.

        Parameters:
            now: on the clock that counts suspended time.
            now_ms: on ours.
        """
        told_ms, at = self._clocks.get(replica, (now_ms, now))
        return (told_ms - now_ms) / 1000 + (now - at)

    def right(self, now: float, deadline: float) -> Right:
        """Why we may answer at this moment; see `right_to_serve`."""
        others = self.in_sync.union - {self._member.replica_id}
        return right_to_serve(now, deadline, others, self._echoes, promise_seconds=self._promise_seconds)

    @property
    def promised_until(self) -> float:
        """Until when the promises of all that count give us the right to serve; for ever if we are alone."""
        own, echoes, oldest = self._member.replica_id, self._echoes, float("inf")
        for replica in self.in_sync.union:
            if replica != own:
                oldest = min(oldest, echoes.get(replica, float("-inf")))
        return oldest + TRUSTED * self._promise_seconds

    def is_deaf(self, now: float, registered: Iterable[int]) -> bool:
        """Whether no in-sync member has been heard for twice the lag, though one is registered: we must give way.

        Parameters:
            registered: members that have been registered for so long.
        """
        others = self.in_sync.recorded - {self._member.replica_id}
        is_one_there = not others.isdisjoint(registered)
        return is_one_there and all(self.in_sync.is_silent(replica, now, times=2) for replica in others)
