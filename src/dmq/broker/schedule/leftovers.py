"""What of a topic is not consumed yet in this shard: asked before its slot goes, and before ordered messages go on.

What always holds: a topic of which something is left says so. One whose messages no group consumes is never empty,
until retention has dropped them.
"""

from __future__ import annotations

from dmq.broker.journal.journal import Journal
from dmq.broker.schedule.delays import Delays
from dmq.broker.schedule.transactions import Transactions
from dmq.storage.state.state import Topic

__all__ = ["Leftovers"]


class Leftovers:
    """Of the topics of one broker."""

    def __init__(self, journal: Journal, delays: Delays, transactions: Transactions) -> None:
        self._queries = journal.queries
        self._delays = delays
        self._transactions = transactions

    def behind(self, topic: Topic) -> int:
        """How many messages its groups have not settled, retries included."""
        queries, count = self._queries, 0
        for group in queries.groups_at(topic.id):
            for queue in range(topic.config.queues):
                first, following = queries.bounds(topic.name, queue)
                position = queries.position(group, topic.name, queue)
                floor = first if position is None else max(first, position.floor)
                settled = 0 if position is None else sum(end - start for start, end in position.ranges)
                count += max(0, following - floor - settled)
            count += queries.retrying_all(group, topic)
        return count

    async def is_empty(self, topic: Topic) -> bool:
        """Whether every message is consumed, and none is delayed or prepared."""
        if not self._queries.groups_at(topic.id):
            bounds = [self._queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
            if any(following > first for first, following in bounds):
                return False
        if self.behind(topic):
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
