"""A consumer with a strategy: what it makes of the news who is in its group (R-08)."""

from __future__ import annotations

from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.options import ConsumerOptions, Strategy
from dmq.protocol import Buffer, Command
from dmq.protocol.consume import Assign, GroupMembers, Lease, Outcome, Push, Settle
from tests.unit.client.deliveries import bodies, frame
from tests.unit.client.links import FakeConsumer, FakeLink

ME = "me.1"


class Divider(FakeConsumer):
    """A consumer with a strategy, over a link that keeps what it is told."""

    def __init__(self, strategy: Strategy | None = "average") -> None:
        self.link = FakeLink()
        super().__init__(ConsumerOptions("orders", "billing", {"strategy": strategy}), self.link)
        self.core.on_reports = lambda is_urgent: self.flush()
        self.subscriptions.begin()
        (self.subscription,) = self.subscriptions

    @property
    def queues(self) -> tuple[int, ...] | None:
        return self.subscriptions.queues

    def reconnect(self) -> None:
        self.link = FakeLink()
        self.subscription.connected(self.link)

    def push(self, leases: list[Lease], body: Buffer) -> None:
        self.subscription.pushed(
            self.link, Pushed(Command.CONSUMER_PUSH, Push(1, leases), bytes(body), self.clock.boottime())
        )

    def hear(self, queues: int, *members: str, subscription: int = 1) -> None:
        told = GroupMembers(subscription, queues, [*members])
        self.subscription.pushed(self.link, Pushed(Command.GROUP_MEMBERS, told, b"", 0.0))

    @property
    def assigned(self) -> list[list[int]]:
        return [told.queues for told in self.link.told if isinstance(told, Assign)]


def test_it_begins_with_nothing_and_takes_its_share() -> None:
    made = Divider()
    assert (made.queues, made.link.requests[0].header.queues) == ((), [])
    assert made.link.requests[0].header.strategy == "average"
    made.hear(4, ME)
    made.hear(4, ME, "you.1")
    made.hear(4, ME, "you.1", "i.1")
    assert made.assigned == [[0, 1, 2, 3], [0, 1], [2]]
    assert made.queues == (2,)


def test_what_changes_nothing_is_not_told() -> None:
    made = Divider()
    made.hear(1, ME)
    made.hear(1, ME, "you.1")
    made.hear(1, "you.1", ME)
    assert made.assigned == [[0]]


def test_news_that_are_not_for_it_are_passed_over() -> None:
    made = Divider()
    made.hear(4, "you.1")
    made.hear(4, ME, subscription=2)
    free = Divider(strategy=None)
    free.hear(4, ME)
    assert made.assigned == free.assigned == []
    assert free.queues is None


def test_what_waits_of_a_queue_it_drops_goes_back_once_it_cannot_return_and_the_rest_stays() -> None:
    made = Divider()
    made.hear(2, ME)
    for queue in (0, 1):
        made.push(*frame(queue + 1, bodies("a", "b"), queue=queue, first=10 * queue))
    in_hand = made.core.take(1)
    made.hear(2, "a.1", ME)  # which has queue 0 now
    assign, release = made.link.told[-2:]
    assert isinstance(release, Settle)
    assert [(said.queue, said.outcome, said.ranges) for said in release.settlements] == [(0, Outcome.RELEASE, [(1, 1)])]
    assert assign == Assign(1, [1])
    assert made.core.waiting == 2
    assert [delivery.lease.queue for delivery, _ in in_hand] == [0]


def test_what_was_on_its_way_from_a_queue_it_dropped_goes_back() -> None:
    made = Divider()
    made.hear(2, ME)
    made.hear(2, "a.1", ME)  # which has queue 0 now
    for queue in (0, 1):
        made.push(*frame(queue + 1, bodies("a", "b"), queue=queue, first=10 * queue))
    release = made.link.told[-1]
    assert isinstance(release, Settle)
    assert [(said.queue, said.outcome, said.ranges) for said in release.settlements] == [(0, Outcome.RELEASE, [(0, 2)])]
    assert made.core.waiting == 2


def test_after_a_reconnect_it_goes_on_with_its_queues() -> None:
    made = Divider()
    made.hear(3, ME, "you.1")
    made.reconnect()
    assert made.link.requests[-1].header.queues == [0, 1]
