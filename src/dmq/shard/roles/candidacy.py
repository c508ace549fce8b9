"""The candidacy: a member stands for election, by one write to the registry.

What always holds:
- It stands only while `election.obstacle` finds nothing against it, which is asked again right before the write.
- A doubtful member stands only if the others of the set show that it lacks nothing (`election.has_compared`).
- A write without an answer, or whose answer came later than half a session, counts as lost. Before this member stands
  again, a later write has been answered and an entry `/leader` of its own is deleted; the next epoch is higher.
"""

from __future__ import annotations

import asyncio
import contextlib
from statistics import median_low
from typing import Final, NamedTuple

import msgspec

from dmq.errors import DMQError, RegistryConflict, RegistryDown, SessionExpired, WriteUnknown
from dmq.event_log import EventLog
from dmq.protocol.cluster import replication
from dmq.registry.contents import LeaderContent, ShardContent, encode_content, hex_id
from dmq.registry.registry import Check, Create, Delete
from dmq.shard.election import Obstacle, Situation, Standing, delay_of, has_compared, obstacle, won_record
from dmq.shard.roles.post import Post
from dmq.storage.replica import Replica

__all__ = ["Candidacy", "Victory"]

log = EventLog(__name__)

_ASK_SECONDS: Final = 0.3


class Victory(NamedTuple):
    """An epoch that was won.

    Attributes:
        session: in which `/leader` is ours.
    """

    record: ShardContent
    session: int


class Candidacy:
    """Of one member, for as long as its process lives.

    Attributes:
        is_unsettled: a write of our own has no answer, or `/leader` may still be ours though we do not lead.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self.is_unsettled = True  # by an earlier process of this directory

    # --- whether ----------------------------------------------------------------------------------------------------

    def obstacle(self, replica: Replica, *, is_following: bool = False, has_compared: bool = True) -> Obstacle | None:
        """What keeps the member from standing; None if nothing is known of the shard."""
        post = self._post
        view, member = post.view, replica.membership
        if view.record is None:
            return None
        return obstacle(
            Situation(
                replica=member.replica_id,
                record=view.record,
                is_led=view.leader_entry is not None,
                is_promised=not post.promise.is_over(post.now()),
                is_following=is_following,
                is_doubtful=member.doubtful,
                has_compared=has_compared,
                has_holes=replica.damage.has_holes,
                is_unsettled=self.is_unsettled,
                revision_seen=member.revision,
                is_drained=post.place.broker in view.record.drained,
            )
        )

    def _may(self, replica: Replica, own: Standing, others: list[Standing]) -> bool:
        record = self._post.view.record
        is_known = record is not None and has_compared(own, others, record)
        return self.obstacle(replica, has_compared=is_known) is Obstacle.NONE

    # --- settling ---------------------------------------------------------------------------------------------------

    async def settle(self, replica: Replica) -> None:
        """Have a write answered, and `/leader` deleted if it is ours.

        Raises:
            RegistryDown, SessionExpired, WriteUnknown, RegistryConflict: it is not settled.
        """
        view, own = self._post.view, hex_id(replica.membership.replica_id)
        await view.refresh()
        entry, leader = view.leader_entry, view.leader
        if entry is not None and leader is not None and leader.replica == own:
            await view.write([Delete(view.paths.leader(view.shard), entry.version)])
            log.info("gave up /leader", shard=view.shard, epoch=leader.epoch)
        else:
            await view.write([Check(view.paths.shards, None)])
        await view.refresh()
        # If it is ours, an earlier write was carried out after all: the next call deletes what it made.
        self.is_unsettled = view.leader is not None and view.leader.replica == own

    # --- standing ---------------------------------------------------------------------------------------------------

    async def stand(self, replica: Replica, *, at_once: bool = False) -> Victory | None:
        """Try to become the leader; None if it does not work now.

        Parameters:
            at_once: the leader has handed over to us; nobody else stands for now.
        """
        own, *others = _by_median([self._own(replica), *([] if at_once else await self._ask(replica))])
        if not self._may(replica, own, others):
            return None
        delay = delay_of(own, others)
        if delay:
            await asyncio.sleep(delay)
        try:
            await self._post.view.refresh()
        except DMQError as error:
            log.info("does not stand: the registry does not answer", shard=self._post.place.shard, error=error)
            return None
        if not self._may(replica, own, others):
            return None
        return await self._write(replica)

    def _own(self, replica: Replica) -> Standing:
        last_epoch = 0 if replica.last is None else replica.last.epoch
        return Standing(replica.membership.replica_id, last_epoch, replica.end)

    async def _ask(self, replica: Replica) -> list[Standing]:
        """How far the other in-sync members are, as far as they answer in time."""
        view, own = self._post.view, hex_id(replica.membership.replica_id)
        record = view.record
        assert record is not None
        found = [view.node_of(one) for one in record.in_sync if one != own]
        asked = [self._ask_one(replica, node.replication_address) for _, node in filter(None, found)]
        return [standing for standing in await asyncio.gather(*asked) if standing is not None]

    async def _ask_one(self, replica: Replica, address: str) -> Standing | None:
        clock, member = self._post.directory.clock, replica.membership
        question = replication.Standing(
            cluster=member.cluster, shard=member.shard, replica=member.replica_id, now_ms=max(0, clock.now_ms())
        )
        with contextlib.suppress(DMQError, TimeoutError):
            async with asyncio.timeout(_ASK_SECONDS):
                reply = await self._post.peers.standing(address, question, _ASK_SECONDS)
            skew_seconds = (reply.now_ms - clock.now_ms()) / 1000
            return Standing(reply.replica, reply.last_epoch, reply.end, skew_seconds, is_doubtful=reply.is_doubtful)
        return None

    async def _write(self, replica: Replica) -> Victory | None:
        """The one write that decides."""
        post = self._post
        view, registry = post.view, post.view.registry
        assert view.record is not None
        last_epoch = self._own(replica).last_epoch
        version_read = view.version
        members = {int(one, 16) for one in view.record.members.values()}
        record = won_record(view.record, replica.membership.replica_id, last_epoch, view.registered & members)
        content = LeaderContent(replica=hex_id(replica.membership.replica_id), epoch=record.epoch)
        session, sent_at = registry.session, post.now()
        create = Create(view.paths.leader(view.shard), encode_content(content), ephemeral=True)
        self.is_unsettled = True
        try:
            _, version = await view.write([create, view.put_record(record, version_read)])
        except (RegistryConflict, RegistryDown, SessionExpired) as error:
            self.is_unsettled = False  # nothing was written
            log.info("not elected", shard=view.shard, epoch=record.epoch, why=error)
            return None
        except WriteUnknown:
            log.warning("an election was not answered: it counts as lost", shard=view.shard, epoch=record.epoch)
            return None
        view.wrote_record(record, version)
        if post.now() - sent_at > registry.session_seconds / 2 or registry.session != session:
            log.warning("an election was answered too late: it counts as lost", shard=view.shard, epoch=record.epoch)
            return None
        return Victory(record, session)


def _by_median(standings: list[Standing]) -> list[Standing]:
    """The skew of each from the clock in the middle: whose clock is wrong, only several of them can tell."""
    middle = median_low([one.skew_seconds for one in standings])
    return [msgspec.structs.replace(one, skew_seconds=one.skew_seconds - middle) for one in standings]
