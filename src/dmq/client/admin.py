"""Administration from a blocking program: `client.admin`.

What always holds: every call is one conversation of `dmq.client.calls`, over the connection in use; nothing is asked
twice, so a call that raises `TimedOut` or `NotConnected` may or may not have been carried out.
"""

from __future__ import annotations

from typing import Any, TypeVar

from dmq.client import calls
from dmq.client.calls import Call, When, run
from dmq.client.reports import BrokerReport, GroupReport, Lag, Move, QueueRange, StoredMessage, Topic
from dmq.client.transport import Transport
from dmq.model import MessageId

__all__ = ["Admin"]

T = TypeVar("T")


class Admin:
    """What can be asked of a broker beside sending and consuming.

    Parameters:
        timeout: how long a call may take; None is for ever.
    """

    def __init__(self, transport: Transport, timeout: float | None) -> None:
        self._transport = transport
        self._timeout = timeout

    def _run(self, call: Call[T]) -> T:
        return run(call, lambda command, header: self._transport.request(command, header, timeout=self._timeout))

    def create_topic(
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
        return self._run(
            calls.create_topic(name, {"queues": queues, "priority": priority, "ttl": ttl, **settings}, allow_existing)
        )

    def update_topic(self, name: str, **settings: Any) -> Topic:
        """Change some settings of a topic, by name."""
        return self._run(calls.update_topic(name, settings))

    def delete_topic(self, name: str) -> None:
        """Delete a topic, its messages and all positions in it."""
        self._run(calls.delete_topic(name))

    def topics(self, prefix: str = "", *, system: bool = False) -> list[Topic]:
        """All topics by name; DMQ's own only with `system`."""
        return self._run(calls.topics(prefix, system))

    def topic(self, name: str) -> Topic:
        """One topic, and the groups that consume it."""
        return self._run(calls.topic(name))

    def groups(self, topic: str = "") -> list[GroupReport]:
        """All groups, or those that consume a topic."""
        return self._run(calls.groups(topic))

    def group(self, name: str) -> GroupReport:
        """One group and its members."""
        return self._run(calls.group(name))

    def create_group(self, name: str, topic: str) -> None:
        """Give a group a position in a topic before its first member comes."""
        self._run(calls.create_group(name, topic))

    def delete_group(self, name: str, topic: str = "") -> None:
        """Forget a group, or its position in one topic."""
        self._run(calls.delete_group(name, topic))

    def lag(self, topic: str, group: str) -> Lag:
        """How much of a topic a group has not settled; of all it consumes if the topic is ""."""
        return self._run(calls.lag(topic, group))

    def reset(self, topic: str, group: str, to: When, *, queue: int | None = None, dry_run: bool = False) -> list[Move]:
        """Move a group within a topic.

        Parameters:
            to: "earliest", "latest", an offset, a datetime, or a timedelta back from now.
            queue: only this one.
            dry_run: only tell what would happen.
        """
        return self._run(calls.reset(topic, group, to, queue, dry_run))

    def find(
        self, topic: str = "", *, key: str | None = None, id: MessageId | str | None = None, limit: int = 100
    ) -> list[StoredMessage]:
        """Messages with a key, or the one with an id."""
        return self._run(calls.find(topic, key, id, limit))

    def peek(
        self, topic: str, *, queue: int | None = None, at: When = "earliest", limit: int = 100, tags: str = ""
    ) -> list[StoredMessage]:
        """Look at messages from a place on, without consuming them."""
        return self._run(calls.peek(topic, queue, at, limit, tags))

    def read(
        self, topic: str, queue: int, offset: int, *, limit: int = 100, tags: str = ""
    ) -> tuple[list[StoredMessage], int]:
        """Messages of one queue from an offset on, and the offset from which to read for more."""
        return self._run(calls.read(topic, queue, offset, limit, tags))

    def offsets(self, topic: str, *, queue: int | None = None, at: When = "earliest") -> list[QueueRange]:
        """What each queue keeps, and where a place lies in it."""
        return self._run(calls.offsets(topic, queue, at))

    def stats(self, *prefixes: str) -> dict[str, float]:
        """The broker's counters: all, or those that begin with one of these."""
        return self._run(calls.stats(prefixes))

    def cluster(self) -> list[BrokerReport]:
        """All brokers that are known, the one we are connected to first."""
        return self._run(calls.cluster())
