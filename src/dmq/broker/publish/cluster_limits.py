"""Rate limits of a cluster: the registry has them whole, and each shard puts its share in force.

A topic's limit stands in its entry, an app's in `/dmq/limit/<app>`. A shard's share of a topic's limit is that of its
queues among those that take messages; of an app's limit, one part of as many as there are open shards.

What always holds: the shares of all shards are the limit, each rounded up to at least 1 a second. Nothing of it is in
the journal: a leader that begins has read the registry.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from dmq.broker.catalog.cluster_access import ClusterAccess
from dmq.broker.publish.rate_limits import Limit
from dmq.errors import UnknownTopic
from dmq.registry.cluster_view import ViewChange
from dmq.registry.contents import LimitContent, ShardState, TopicContent, TopicState
from dmq.registry.registry import needs_registry

__all__ = ["ClusterLimits"]

_DEAD_LETTER: Final = "dead-letter"


class ClusterLimits:
    """The limits of one cluster, at one leader."""

    def __init__(self, access: ClusterAccess) -> None:
        self._view = access.view
        self._entries = access.entries
        self._shard = access.shard
        self._limited: frozenset[str] | set[str] = frozenset()  # topics that have a limit

    def whole(self) -> list[Limit]:
        """The limits of the cluster, by name."""
        found = [_limit(content, app=app) for app, content in self._view.limits.items()]
        for name, topic in self._view.topics.items():
            if topic.limits and topic.state is TopicState.OPEN:
                self._limited = self._limited | {name}
                found.append(_limit(msgspec.convert(topic.limits, LimitContent), topic=name))
        return sorted(limit for limit in found if limit.messages is not None or limit.bytes is not None)

    def concerns(self, change: ViewChange) -> bool:
        """Whether a limit, or our share of one, may have changed."""
        before, topics = self._limited, self._view.topics
        named = {name for name in change.topics if (found := topics.get(name)) is not None and found.limits}
        self._limited = (before - change.topics) | named
        return change.is_all or change.has_limits or change.has_shards or bool(named or before & change.topics)

    def share(self, limit: Limit) -> Limit:
        """What of a limit is in force here."""
        part = self._topic_part(limit.topic) if limit.topic else self._app_part()
        return limit._replace(
            messages=None if limit.messages is None else max(1, math.ceil(limit.messages * part)),
            bytes=None if limit.bytes is None else max(1, math.ceil(limit.bytes * part)),
        )

    def _topic_part(self, name: str) -> float:
        content = self._view.topics[name]
        queues = {shard: count for shard, count in content.slots if shard not in content.removed}
        return queues.get(self._shard, 0) / max(1, sum(queues.values()))

    def _app_part(self) -> float:
        return 1 / max(1, sum(record.state is ShardState.OPEN for record in self._view.shards.values()))

    async def put(self, limit: Limit) -> None:
        """Write a limit; without numbers it is taken away.

        Raises:
            UnknownTopic: there is no such topic.
            RegistryDown, WriteUnknown, Busy: as of `TopicEntries.rewrite`.
        """
        policy = _DEAD_LETTER if limit.is_dead_letter else ""
        content = LimitContent(messages=limit.messages or 0, bytes=limit.bytes or 0, policy=policy)
        is_gone = limit.messages is None and limit.bytes is None
        if limit.app:
            with needs_registry():
                await self._entries.put_limit(limit.app, None if is_gone else content)
            return

        def limited(topic: TopicContent | None) -> TopicContent:
            if topic is None or topic.state is not TopicState.OPEN:
                raise UnknownTopic(f"there is no topic {limit.topic!r}: create it first", topic=limit.topic)
            fields = {} if is_gone else {"messages": content.messages, "bytes": content.bytes, "policy": policy}
            return msgspec.structs.replace(topic, limits=fields)

        await self._entries.rewrite(limit.topic, limited)


def _limit(content: LimitContent, topic: str = "", app: str = "") -> Limit:
    is_dead_letter = content.policy == _DEAD_LETTER
    return Limit(topic, app, content.messages or None, content.bytes or None, is_dead_letter=is_dead_letter)
