"""The access to the cluster that the broker of a leader has: the registry, and the leaders of other shards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from dmq.registry.cluster_view import ClusterView
from dmq.registry.topic_entries import TopicEntries

__all__ = ["ClusterAccess", "GroupChange"]


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
