"""Two brokers, and tables that say which of them has which queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dmq.client.client import Client
from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.route_book import BrokerAddresses
from dmq.client.connection.router import Listeners
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import parse_url
from dmq.clock import SystemClock
from dmq.model import Message
from dmq.testing import TestBroker
from tests.patience import eventually

__all__ = ["QUEUES", "Cluster", "numbered", "spread", "two_brokers"]

QUEUES = 4


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Bodies that tell messages apart."""
    return [b"%04d" % number for number in range(start, start + count)]


def spread(count: int, start: int = 0) -> list[Message]:
    """Messages with these bodies that go to all queues of a topic."""
    return [Message(body, business_id=body.decode(), ordered=True) for body in numbered(count, start)]


class Cluster:
    """Two brokers. Topic `orders` is at the first, `bills` at the second, and of `split` each has half of the queues.

    It is a route table itself.
    """

    def __init__(self, first: TestBroker, second: TestBroker) -> None:
        self.first = first
        self.second = second
        self.at = [tuple(parse_url(broker.url)) for broker in (first, second)]
        self.home = 0
        for broker in (first, second):
            with broker.connect() as client:
                for topic in ("orders", "bills", "split"):
                    client.admin.create_topic(topic, queues=QUEUES)

    def brokers(self, topic: str) -> Sequence[int]:
        return {"orders": [0], "bills": [1]}.get(topic, [0, 1])

    def broker(self, topic: str, place: int) -> int:
        brokers = self.brokers(topic)
        return brokers[0] if place < QUEUES // 2 else brokers[-1]

    def addresses(self, broker: int) -> BrokerAddresses:
        return self.at[broker]

    @property
    def settings(self) -> PoolSettings:
        return PoolSettings(make_hello("shop", None), SystemClock())

    def connect(self, listeners: Listeners | None = None) -> Client:
        """A client that is connected to both."""
        client = Client(self, self.settings, listeners or Listeners()).open()
        eventually(lambda: client._router.link_for("split", QUEUES - 1) is not None)
        return client

    def bodies(self, topic: str) -> tuple[list[bytes], list[bytes]]:
        """What each broker has stored of a topic."""
        first, second = (self._bodies(broker, topic) for broker in (self.first, self.second))
        return first, second

    def _bodies(self, broker: TestBroker, topic: str) -> list[bytes]:
        with broker.connect() as client:
            return sorted(message.body for message in client.admin.peek(topic, limit=60_000))

    def queues(self, topic: str) -> tuple[set[int], set[int]]:
        """In which queues each broker has stored something."""
        found = []
        for broker in (self.first, self.second):
            with broker.connect() as client:
                found.append({row.queue for row in client.admin.offsets(topic) if row.next_offset})
        return found[0], found[1]

    def unacked(self, topic: str, group: str) -> int:
        """How many messages a group has still to consume, at both brokers."""
        total = 0
        for broker in (self.first, self.second):
            with broker.connect() as client:
                total += client.admin.lag(topic, group).total
        return total


@contextmanager
def two_brokers() -> Iterator[Cluster]:
    with TestBroker(auto_create=False) as first, TestBroker(auto_create=False) as second:
        yield Cluster(first, second)
