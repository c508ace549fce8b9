"""The post of a member: what it has in every role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from dmq.shard.heart import Heart
from dmq.shard.peers import Peers
from dmq.shard.place import Directory, MemberSettings, Place
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.repairs import Repairs
from dmq.shard.serving_right import Promise

__all__ = ["Post"]


class Post(NamedTuple):
    """Of one member.

    Attributes:
        promise: not to stand; outlives the leaders it was given to.
        repairs: mends the journal.
        notes: held while the directory's own record of its membership is changed.
        mark: drawn at this start, and written into the record: another one there is that of a copy of our directory.
    """

    place: Place
    settings: MemberSettings
    directory: Directory
    view: ShardView
    peers: Peers
    promise: Promise
    heart: Heart
    repairs: Repairs
    notes: asyncio.Lock
    mark: str

    def now(self) -> float:
        """On the clock of promises, rights and deadlines."""
        return self.directory.clock.boottime()

    async def note(self, work: Callable[[], None]) -> None:
        """Change what the directory notes of its membership, one change at a time; who is cancelled leaves it whole."""
        await asyncio.shield(self._note(work))

    async def _note(self, work: Callable[[], None]) -> None:
        async with self.notes:
            await self.directory.on_disk(work)
