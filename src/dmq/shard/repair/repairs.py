"""When a member mends: what is known to be damaged, as soon as that is known; everything, when a person asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dmq.event_log import EventLog
from dmq.registry.contents import hex_id
from dmq.shard.peers import Peers
from dmq.shard.place import Directory
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.answer import CommittedJournal
from dmq.shard.repair.mender import Mended, Mender
from dmq.storage.upkeep.damage import Damage

__all__ = ["Repairs"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 10.0
_TELL_SECONDS: Final = 60.0  # between lines that tell the same


class Repairs:
    """Of one member; one at a time.

    Attributes:
        mended: how many ranges so far.
    """

    def __init__(self, directory: Directory, view: ShardView, peers: Peers) -> None:
        self._directory = directory
        self._view = view
        self._peers = peers
        self._turn = asyncio.Lock()
        self._again_at = self._tell_at = float("-inf")
        self.mended = 0

    def is_due(self, damage: Damage) -> bool:
        """Whether something is damaged, and it was not tried in vain a moment ago."""
        return self._directory.clock.boottime() >= self._again_at and bool(damage.ranges)

    async def run(self, journal: Callable[[], CommittedJournal], *, scrub: bool = False) -> Mended:
        """Mend what is damaged.

        Parameters:
            journal: ours, as it is at the moment; raises a DMQError once it is not ours to mend any more.
            scrub: look through everything first.

        Raises:
            StorageError: the disk does not take it.
            DMQError: of `journal`.
        """
        async with self._turn:
            # Not before the next try is due, even if this one fails.
            self._again_at = self._directory.clock.boottime() + _AGAIN_SECONDS
            own = journal().member.replica_id
            addresses = self._addresses(own)
            are_all = len(addresses) >= self._others(own)
            mender = Mender(self._peers, self._directory.on_disk, addresses, are_all=are_all)
            if scrub:
                await mender.scrub(journal)
            mended = await mender.mend(journal)
            self.mended += len(mended.mended)
            if not mended.left:
                self._again_at = float("-inf")  # what is found next waits for nothing
        if mended.mended or (mended.left and (scrub or self._is_to_be_told())):
            for start, end in mended.left:
                log.error("damage is left", start=start, end=end, reason=mended.reason)
            log.warning(
                "repair done",
                shard=self._view.shard,
                mended_bytes=sum(end - start for start, end in mended.mended),
                left_bytes=sum(end - start for start, end in mended.left),
                reason=mended.reason or None,
            )
        return mended

    def _is_to_be_told(self) -> bool:
        """Whether it was not said a moment ago that nobody has what is damaged."""
        now = self._directory.clock.boottime()
        if now < self._tell_at:
            return False
        self._tell_at = now + _TELL_SECONDS
        return True

    def _others(self, own: int) -> int:
        """How many other members the shard has, whether they run or not."""
        record = self._view.record
        return 1 if record is None else len(set(record.members.values()) - {hex_id(own)})

    def _addresses(self, own: int) -> list[str]:
        """Of the other members that run, the leader's first."""
        view = self._view
        leader = None if view.leader is None else view.leader.replica
        nodes = [
            node
            for node in view.nodes.values()
            if node.shard == view.shard and node.replication_address and node.replica != hex_id(own)
        ]
        return [node.replication_address for node in sorted(nodes, key=lambda node: node.replica != leader)]
