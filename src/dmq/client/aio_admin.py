"""Administration from asyncio: the twin of `dmq.client.admin`.

What always holds: the same conversations, in the same words.
"""

from __future__ import annotations

from typing import Any, TypeVar

from dmq.client import calls
from dmq.client.aio_transport import AioTransport
from dmq.client.calls import Call, When
from dmq.client.reports import BrokerReport, GroupReport, Lag, Move, QueueRange, StoredMessage, Topic
from dmq.model import MessageId

__all__ = ["AioAdmin"]

T = TypeVar("T")


class AioAdmin:
    """What can be asked of a broker beside sending and consuming; see `dmq.client.admin.Admin`."""

    def __init__(self, transport: AioTransport, timeout: float | None) -> None:
        self._transport = transport
        self._timeout = timeout

    async def _run(self, call: Call[T]) -> T:
        try:
            command, header = next(call)
            while True:
                command, header = call.send(await self._transport.request(command, header, timeout=self._timeout))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def create_topic(
        self,
        name: str,
        queues: int = 4,
        *,
        priority: bool = False,
        ttl: float | None = None,
        allow_existing: bool = False,
        **settings: Any,
    ) -> Topic:
        """Make a topic.

        Parameters:
            queues: how many; messages of one queue stay in order. With `priority` there are ten, one for each.
            ttl: seconds after which its messages expire; None is never.
            allow_existing: do not mind if it is there with the same settings.
            settings: the others of a topic, by name.

        Raises:
            TopicExists: one of that name is there.
            InvalidName, InvalidSettings: the broker refused them.
        """
        return await self._run(
            calls.create_topic(name, {"queues": queues, "priority": priority, "ttl": ttl, **settings}, allow_existing)
        )

    async def update_topic(self, name: str, **settings: Any) -> Topic:
        """Change some settings of a topic, by name."""
        return await self._run(calls.update_topic(name, settings))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, its messages and all positions in it."""
        await self._run(calls.delete_topic(name))

    async def topics(self, prefix: str = "", *, system: bool = False) -> list[Topic]:
        """All topics by name; DMQ's own only with `system`."""
        return await self._run(calls.topics(prefix, system))

    async def topic(self, name: str) -> Topic:
        """One topic, and the groups that consume it."""
        return await self._run(calls.topic(name))

    async def groups(self, topic: str = "") -> list[GroupReport]:
        """All groups, or those that consume a topic."""
        return await self._run(calls.groups(topic))

    async def group(self, name: str) -> GroupReport:
        """One group and its members."""
        return await self._run(calls.group(name))

    async def create_group(self, name: str, topic: str) -> None:
        """Give a group a position in a topic before its first member comes."""
        await self._run(calls.create_group(name, topic))

    async def delete_group(self, name: str, topic: str = "") -> None:
        """Forget a group, or its position in one topic."""
        await self._run(calls.delete_group(name, topic))

    async def lag(self, topic: str, group: str) -> Lag:
        """How much of a topic a group has not settled; of all it consumes if the topic is ""."""
        return await self._run(calls.lag(topic, group))

    async def reset(
        self, topic: str, group: str, to: When, *, queue: int | None = None, dry_run: bool = False
    ) -> list[Move]:
        """Move a group within a topic.

        Parameters:
            to: "earliest", "latest", an offset, a datetime, or a timedelta back from now.
            queue: only this one.
            dry_run: only tell what would happen.
        """
        return await self._run(calls.reset(topic, group, to, queue, dry_run))

    async def find(
        self, topic: str = "", *, key: str | None = None, id: MessageId | str | None = None, limit: int = 100
    ) -> list[StoredMessage]:
        """Messages with a key, or the one with an id."""
        return await self._run(calls.find(topic, key, id, limit))

    async def peek(
        self, topic: str, *, queue: int | None = None, at: When = "earliest", limit: int = 100, tags: str = ""
    ) -> list[StoredMessage]:
        """Look at messages from a place on, without consuming them."""
        return await self._run(calls.peek(topic, queue, at, limit, tags))

    async def read(
        self, topic: str, queue: int, offset: int, *, limit: int = 100, tags: str = ""
    ) -> tuple[list[StoredMessage], int]:
        """Messages of one queue from an offset on, and the offset from which to read for more."""
        return await self._run(calls.read(topic, queue, offset, limit, tags))

    async def offsets(self, topic: str, *, queue: int | None = None, at: When = "earliest") -> list[QueueRange]:
        """What each queue keeps, and where a place lies in it."""
        return await self._run(calls.offsets(topic, queue, at))

    async def stats(self, *prefixes: str) -> dict[str, float]:
        """The broker's counters: all, or those that begin with one of these."""
        return await self._run(calls.stats(prefixes))

    async def cluster(self) -> list[BrokerReport]:
        """All brokers that are known, the one we are connected to first."""
        return await self._run(calls.cluster())
