"""Groups of a cluster, at the leader of one shard, and the access to the cluster that this leader has.

The registry names the groups, and the journal of each slot has their positions. `ClusterAccess` is what the rooms of
the leader's broker are given: the registry, and the leaders of other shards.

What always holds: a group that the registry names has positions in a slot that is added to its topic before the slot
takes a message, at its beginning. So a group that is away then, and begins at the end of what is new to it, misses
nothing. The registry names a group soon after its first positions are written; a leader that is gone in between has its
successor see to that, which goes through all groups of its journal when it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from dmq.broker.runtime.runtime import Runtime
from dmq.errors import DMQError, RegistryDown, ShardConflict, StaleRoute, UnknownGroup, UnknownTopic, WriteUnknown
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX
from dmq.registry.cluster_view import ClusterView
from dmq.registry.contents import TopicState
from dmq.registry.topic_entries import TopicEntries

__all__ = ["ClusterAccess", "ClusterGroups", "GroupChange"]


class GroupChange(NamedTuple):
    """A group is created in a topic, or deleted in one or, without a name, in all."""

    group: str
    topic: str
    is_deleted: bool = False


class ClusterAccess(NamedTuple):
    """The cluster, as the broker of a leader reaches it.

    Attributes:
        shard: our own, by name.
        ask: has the leader at an address bring its slot of a topic in line; how much of it is not consumed there.
        ask_group: has it create or delete a group in its own slots.
    """

    shard: str
    view: ClusterView
    entries: TopicEntries
    ask: Callable[[str, str], Awaitable[int]]
    ask_group: Callable[[str, GroupChange], Awaitable[None]]


log = EventLog(__name__)

_RETRY_SECONDS: Final = 3.0
_GROUPS_MAX: Final = 10_000


class ClusterGroups:
    """The groups of a cluster at one leader; good for as long as its broker."""

    def __init__(self, access: ClusterAccess, runtime: Runtime) -> None:
        self._access = access
        self._view = access.view
        self._entries = access.entries
        self._runtime = runtime
        self._noted: dict[tuple[str, str], bool] = {}  # to be noted in the registry, by topic; whether they are gone
        self._news = asyncio.Event()
        self._is_over = False

    def start(self) -> None:
        """Have the registry name groups that begin, from now on."""
        self._runtime.tasks.run(self._note(), lambda error: None)

    def end(self) -> None:
        self._is_over = True

    def began(self, topic: str, group: str) -> None:
        """A group has its first positions in a topic: the registry is to name it. Beyond a bound it is not."""
        self._note_later(topic, group, is_gone=False)

    def _note_later(self, topic: str, group: str, *, is_gone: bool) -> None:
        if len(self._noted) < _GROUPS_MAX and not topic.startswith(SYSTEM_PREFIX):
            self._noted[topic, group] = is_gone
            self._news.set()

    async def _note(self) -> None:
        while not self._is_over:
            await self._news.wait()
            self._news.clear()
            while self._noted:
                (topic, group), is_gone = next(iter(self._noted.items()))
                try:
                    await self._entries.note_group(topic, group, is_gone=is_gone)
                except DMQError as error:
                    log.debug("group not noted in the registry yet", topic=topic, group=group, error=error)
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    if self._noted.get((topic, group)) is is_gone:
                        del self._noted[topic, group]

    async def change(self, change: GroupChange, topics: Iterable[str], local: Awaitable[None] | None) -> None:
        """Create a group in all slots of a topic, or delete it in all; ours is done by `local`.

        Parameters:
            topics: in which the group is deleted, as far as we know.

        Raises:
            UnknownGroup: no shard knows it.
            ShardConflict: it is done, but for shards that have no leader.
        """
        unknown: list[DMQError] = []
        if local is not None:
            try:
                await local
            except UnknownGroup as error:
                unknown.append(error)
        content = self._view.topics.get(change.topic)
        is_there = content is not None and content.state is TopicState.OPEN
        slots = [shard for shard, _ in content.slots] if content is not None and is_there else [*self._view.shards]
        others = [shard for shard in slots if shard != self._access.shard]
        lacking = [shard for shard in others if not await self._tell(shard, change, unknown)]
        for topic in {*topics, change.topic} - {""}:
            try:
                await self._entries.note_group(topic, change.group, is_gone=change.is_deleted)
            except (RegistryDown, WriteUnknown):  # the shards have done it; the registry is told when it is back
                self._note_later(topic, change.group, is_gone=change.is_deleted)
        if lacking:
            done = "deleted" if change.is_deleted else "created"
            raise ShardConflict(
                f"group {change.group!r} is {done}, but for the shards {', '.join(lacking)}, which have no leader: ask "
                "again when they have one",
                shards=lacking,
            )
        if unknown and len(unknown) == len(others) + (local is not None):
            raise unknown[0]

    async def _tell(self, shard: str, change: GroupChange, unknown: list[DMQError]) -> bool:
        leader = self._view.leader_of(shard)
        if leader is None:
            return False
        try:
            await self._access.ask_group(leader[1].address, change)
        except (UnknownGroup, UnknownTopic, StaleRoute) as error:
            unknown.append(error)
        except DMQError as error:
            log.warning("a shard did not follow a change of a group", shard=shard, group=change.group, error=error)
            return False
        return True
