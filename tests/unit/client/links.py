"""Connections and time that do as a test says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from dmq.client.connection.link import Link, ShardHealth
from dmq.client.connection.pool import BrokerAt, PoolSettings
from dmq.client.connection.router import AnyRouter
from dmq.client.connection.session import OnAnswer, Pending
from dmq.client.connection.url import Address, OneBroker
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.subscription import Subscriptions
from dmq.errors import DMQError, NotConnected
from dmq.protocol import Buffer, Command, Frame, Header, Kind, error_frame, frame_head, response_head
from dmq.protocol import FrameParser as Parser
from dmq.protocol.cluster.route import Route, RouteReply, TopicRoute
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import Hello, HelloReply, Limits
from dmq.testing import FakeClock

LIMITS = Limits(16 << 20, 4 << 20, 30_000, 1000, 1 << 24, 30_000)


class Request:
    """One request that a fake link got."""

    def __init__(self, command: int, header: Any, body: Sequence[Buffer], flags: int, on_answer: OnAnswer) -> None:
        self.command = command
        self.header = header
        self.body = b"".join(body)
        self.flags = flags
        self.on_answer = on_answer

    def answer(self, header: Header) -> None:
        self.on_answer(parsed(response_head(self.command, header, 1)))

    def refuse(self, error: DMQError) -> None:
        self.on_answer(parsed(error_frame(error, self.command, 1)))

    def store(self, first_offset: int = 0) -> None:
        """Answer a PRODUCE as a broker does."""
        produce: Produce = self.header
        self.answer(ProduceReply(produce.queue, first_offset, 0, produce.durability))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What a batch that is sent again must keep."""
        return self.header.producer_id, self.header.first_sequence, self.header.count, self.header.queue


def parsed(data: bytes) -> Frame:
    frame = Parser().feed(data)[0]
    assert frame.kind == Kind.RESPONSE
    return frame


class FakeLink:
    """A link that keeps what it is given."""

    client_id = "me"
    answered_since = 0.0
    is_member = False
    shard = 0

    def __init__(self, host: str = "one", shard: int = 0) -> None:
        self.shard = shard
        self.address = Address(host, 9611)
        self.limits = LIMITS
        self.features: frozenset[str] = frozenset()
        self.is_usable = True
        self.requests: list[Request] = []
        self.told: list[Any] = []
        self._pending: dict[int, Request] = {}
        self._numbers = count(1)

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = (),
        *,
        on_answer: OnAnswer,
        flags: int = 0,
        attended: bool = True,
    ) -> Pending:
        if not self.is_usable:
            raise NotConnected("the connection is closed")
        frame_head(Kind.REQUEST, command)
        request = Request(command, header, body, flags, on_answer)
        self.requests.append(request)
        number = next(self._numbers)
        self._pending[number] = request
        return Pending(on_answer, number, attended)

    def tell_and_submit(
        self,
        told: Sequence[tuple[int, Header]],
        command: int,
        header: Header,
        *,
        on_answer: OnAnswer,
        attended: bool = True,
    ) -> Pending:
        return self.submit(command, header, on_answer=on_answer, attended=attended)

    def nudge(self) -> None:
        pass

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ()) -> None:
        if not self.is_usable:
            raise NotConnected("the connection is closed")
        self.told.append(header)

    def forget(self, pending: Pending) -> bool:
        return self._pending.pop(pending.correlation, None) is not None

    def lose(self) -> None:
        """Break: everything unanswered hears of it."""
        self.is_usable = False
        for request in [*self._pending.values()]:
            request.on_answer(NotConnected("the connection broke"))

    def produced(self) -> list[Request]:
        return [request for request in self.requests if request.command == Command.PRODUCE]


class FakeLinks:
    """Links and timers by hand."""

    def __init__(self, clock: FakeClock, *links: FakeLink) -> None:
        self.clock = clock
        self.links = [*links]
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def link_for(self, topic: str, queue: int = -1) -> Link | None:
        return self.links[0] if self.links and self.links[0].is_usable else None

    is_single = True
    health = ShardHealth()

    def reachable(self, topic: str, queues: int, wanted: int = -1) -> Sequence[int]:
        return range(queues)

    def closed(self, topic: str) -> DMQError | None:
        return None

    def away(self, topic: str, queue: int = -1) -> list[str]:
        return []

    def topic_route(self, topic: str) -> TopicRoute | None:
        return None

    def stale(self, topic: str) -> None:
        pass

    @property
    def is_connected(self) -> bool:
        return self.link_for("") is not None

    def has_other(self, link: Link) -> bool:
        return len(self.links) > 1

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        found(next((other for other in self.links if other is not link and other.is_usable), None))

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.clock.monotonic() + seconds, next(self._numbers), function))

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due happen at its time."""
        end = self.clock.monotonic() + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, function = heapq.heappop(self._timers)
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            function()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))


class FakePool:
    """A link to one broker, and the timers of all."""

    def __init__(self, links: FakeLinks, link: FakeLink, shard: int = 0) -> None:
        self.shard = shard
        self.addresses: tuple[Address, ...] = (link.address,)
        self.aimed: list[tuple[tuple[Address, ...], str, int]] = []
        self.link = link
        self.call_later = links.call_later
        self.closed_by: DMQError | None = None
        self.watchers: list[Any] = []

    @property
    def standing(self) -> FakePool:
        return self

    @property
    def in_use(self) -> FakeLink:
        return self.link

    def current(self) -> FakeLink | None:
        return self.link if self.link.is_usable else None

    def start(self) -> None:
        pass

    def aim(self, addresses: tuple[Address, ...], leader: str, epoch: int) -> None:
        self.aimed.append((addresses, leader, epoch))

    def retire(self, reason: DMQError) -> None:
        self.closed_by = reason

    def watch(self, watcher: Any, subscription: int | None = None) -> None:
        self.watchers.append(watcher)
        if self.link.is_usable:
            watcher.connected(self.link)

    def unwatch(self, watcher: Any) -> None:
        self.watchers.remove(watcher)

    def has_other(self, link: Link) -> bool:
        return False

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        found(None)


class FakeTable:
    """Brokers of which each has some queues of every topic."""

    def __init__(self, *brokers: tuple[Address, range]) -> None:
        self._brokers = brokers
        self.home = 0
        self.named = len(brokers)  # so many of them have queues

    def brokers(self, topic: str) -> Sequence[int]:
        return range(self.named)

    def broker(self, topic: str, place: int) -> int:
        return next(at for at, (_, queues) in enumerate(self._brokers) if place in queues)

    def addresses(self, broker: int) -> tuple[Address, ...]:
        return (self._brokers[broker][0],)


class FakeRouter(AnyRouter[FakePool, FakeLink]):
    """A router over links by hand: each of them leads to a broker that has two queues of every topic."""

    def __init__(self, clock: FakeClock, *links: FakeLink) -> None:
        self.timers = FakeLinks(clock)
        self._made = {link.address: link for link in links}
        self.scouted: list[Route] = []
        addresses = [link.address for link in links]
        self.table = FakeTable(*((address, range(2 * at, 2 * at + 2)) for at, address in enumerate(addresses)))
        super().__init__(OneBroker(addresses) if len(links) == 1 else self.table, PoolSettings(Hello("test"), clock))

    def _make_pool(self, at: BrokerAt) -> FakePool:
        return FakePool(self.timers, self._made[at.addresses[0]], at.number)

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]:
        return self.timers.call_later

    def scout(self, asked: Route) -> None:
        self.scouted.append(asked)

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)

    def join(self, reply: RouteReply) -> None:
        """Learn that it is a cluster, as at the start. Shard n is at host "n"."""
        for row in reply.shards:
            self._made.setdefault(Address(str(row.number), 9611), FakeLink(str(row.number)))
        self._join(reply, HelloReply("fake", "", 1, LIMITS))

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due happen at its time."""
        self.timers.advance(seconds)


class FakeConsumer:
    """What subscriptions ask of a consumer, without anybody who waits.

    Parameters:
        links: each to a broker.
        named: how many of these brokers have queues of its topic.
    """

    def __init__(self, options: ConsumerOptions, *links: FakeLink, named: int = 1) -> None:
        self.clock = FakeClock()
        self.router = FakeRouter(self.clock, *links)
        self.router.table.named = named
        self.core = ConsumerCore(options, self.clock, lambda delivery, seconds: None)
        self.subscriptions = Subscriptions(options, 1, self.router, self.core, self)
        self.core.on_reports = lambda is_urgent: self.flush() if is_urgent else None
        self.attended: list[FakeLink] = []
        self.subscriptions.refresh()

    def wake(self, count: int = 0, *, nudge: bool = False) -> None:
        pass

    def flush(self) -> None:
        self.subscriptions.report()

    def attend(self, link: FakeLink) -> None:
        self.attended.append(link)
