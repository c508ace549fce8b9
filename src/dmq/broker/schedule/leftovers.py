"""What of a topic is not consumed yet in this shard: asked before its slot goes, and before ordered messages go on.

What always holds: a topic of which something is left says so. One whose messages no group consumes is never empty,
until retention has dropped them.
"""

from __future__ import annotations

from typing import Final

from dmq.broker.journal.journal import Journal
from dmq.broker.schedule.delays import Delays
from dmq.broker.schedule.transactions import Transactions
from dmq.storage.state.state import Topic

__all__ = ["Leftovers"]

_HOLDS_MAX: Final = 1000


class Leftovers:
    """Of the topics of one broker."""

    def __init__(self, journal: Journal, delays: Delays, transactions: Transactions) -> None:
        self._queries = journal.queries
        self._delays = delays
        self._transactions = transactions
        self._holds: dict[int, tuple[int, list[int]]] = {}  # by topic: which hold it is, and where queues ended then

    def behind(self, topic: Topic, hold: int = 0) -> int:
        """How many messages its groups have not settled where they are stored: what is retried later is in no order.

        Parameters:
            hold: a number for the time in which its ordered messages are held. Then only those count that it had at the
                beginning: others go on coming, and are in no order.
        """
        noted, ends = self._holds.get(topic.id, (0, []))
        if not hold:
            ends = self._ends(topic)
        elif noted != hold:
            if len(self._holds) >= _HOLDS_MAX:
                self._holds.clear()
            self._holds[topic.id] = (hold, [])
            return 1  # what was taken just before may not be written yet: it is when this is asked again
        elif not ends:
            ends = self._ends(topic)
            self._holds[topic.id] = (hold, ends)
        groups = self._queries.groups_at(topic.id)
        return sum(self._unsettled(group, topic, queue, end) for group in groups for queue, end in enumerate(ends))

    def _ends(self, topic: Topic) -> list[int]:
        return [self._queries.bounds(topic.name, queue)[1] for queue in range(topic.config.queues)]

    def _unsettled(self, group: str, topic: Topic, queue: int, end: int) -> int:
        """Messages of a queue before an offset that a group has not settled."""
        first, _ = self._queries.bounds(topic.name, queue)
        position = self._queries.position(group, topic.name, queue)
        if position is None:
            return max(0, end - first)
        settled = sum(max(0, min(stop, end) - start) for start, stop in position.ranges)
        return max(0, end - max(first, position.floor) - settled)

    async def is_empty(self, topic: Topic) -> bool:
        """Whether every message is consumed, and none is delayed or prepared."""
        groups = self._queries.groups_at(topic.id)
        if not groups:
            bounds = [self._queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
            if any(following > first for first, following in bounds):
                return False
        if self.behind(topic) or any(self._queries.retrying_all(one, topic) for one in groups):
            return False
        after = (0, 0)
        while True:
            delays, after = await self._delays.pending(after, 1, topic.name)
            if delays:
                return False
            if after == (0, 0):
                break
        since = (0, b"")
        while True:
            halves, since = await self._transactions.page(since, 1000, topic.name)
            if halves:
                return False
            if since == (0, b""):
                return True
