"""A consumer at several shards: how much of its prefetch each has, and what joins and goes."""

from __future__ import annotations

from typing import Any, Unpack

import pytest

from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.consumer.options import ConsumerOptions, SubscribeOptions
from dmq.client.consumer.prefetch import LOOK_SECONDS, CreditWindow, loans
from dmq.client.consumer.strategy import SETTLED_SECONDS
from dmq.client.consumer.subscription import Subscriptions
from dmq.errors import SubscriptionConflict, UnknownTopic
from dmq.protocol import Command
from dmq.protocol.cluster.route import RouteReply, ShardRoute, SlotRoute, TopicRoute
from dmq.protocol.consume import (
    Assign,
    Credit,
    GroupMembers,
    PointKind,
    Push,
    Settle,
    Subscribe,
    SubscribeReply,
    Unsubscribe,
)
from dmq.protocol.session import Heartbeat
from tests.unit.client.deliveries import bodies, frame, said, taken
from tests.unit.client.links import FakeConsumer, FakeLink, Request

ME = "me.1"


class Shards(FakeConsumer):
    """A consumer that is subscribed at some shards, numbered from 1 on, for so long that shares may move."""

    def __init__(
        self,
        count: int = 3,
        named: int | None = None,
        handlers: int = 1,
        *,
        is_new: bool = False,
        **options: Unpack[SubscribeOptions],
    ) -> None:
        self.links = [FakeLink(f"shard-{number}", number) for number in range(1, count + 1)]
        super().__init__(
            ConsumerOptions("orders", "billing", options), *self.links, named=count if named is None else named
        )
        self.core.handlers = handlers
        self.subscriptions.begin()
        self.clock.advance(0.0 if is_new else LOOK_SECONDS)
        self._leases = 0
        self._answered: list[Request] = []

    def push(self, shard: int, count: int, queue: int = 0) -> None:
        """A shard pushes so many messages."""
        self._leases += 1
        leases, body = frame(
            self._leases, bodies(*map(str, range(count))), first=1000 * self._leases, queue=queue, ids=[(count, 0, 0)]
        )
        push = Pushed(Command.CONSUMER_PUSH, Push(1, leases), bytes(body), self.clock.boottime())
        self.at(shard).pushed(self.links[shard - 1], push)

    def at(self, shard: int) -> Any:
        return next(one for one in self.subscriptions if one.book.shard == shard)

    def members(self, shard: int, queues: int, *names: str) -> None:
        told = Pushed(Command.GROUP_MEMBERS, GroupMembers(1, queues, [*names]), b"", 0.0)
        self.at(shard).pushed(self.links[shard - 1], told)

    def answer(self) -> None:
        """Brokers answer what they are asked."""
        for link in self.links * 2:
            for request in link.requests:
                if request.command == Command.HEARTBEAT and request not in self._answered:
                    self._answered.append(request)
                    request.answer(Heartbeat(0))

    def handle(self, count: int, seconds: float = 0.001) -> list[int]:
        """Handle so many messages; of which shards they were."""
        shards = []
        for delivery, index in self.core.take(count):
            self.clock.advance(seconds)
            shards.append(ReceivedMessage(delivery, index).shard)
            self.core.ack(delivery, index)
            self.flush()
            self.answer()
        return shards

    def subscribed(self, shard: int) -> list[Subscribe]:
        return [request.header for request in self.links[shard - 1].requests if isinstance(request.header, Subscribe)]

    def credit(self, shard: int) -> int:
        """What a shard may have out now, as it was told."""
        told = [told.messages for told in self.links[shard - 1].told if isinstance(told, Credit)]
        return self.subscribed(shard)[-1].prefetch_messages + sum(told)

    def credits(self) -> list[int]:
        return [self.credit(number) for number in range(1, len(self.links) + 1)]

    @property
    def shares(self) -> list[int]:
        return [one.window.ceiling for one in self.subscriptions]

    def told(self, shard: int) -> list[Any]:
        return said([told for told in self.links[shard - 1].told if isinstance(told, Settle)])

    def assigned(self, shard: int) -> list[list[int]]:
        return [told.queues for told in self.links[shard - 1].told if isinstance(told, Assign)]


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_window_doubles_by_what_others_do_not_need() -> None:
    windows = [CreditWindow(10), CreditWindow(10), CreditWindow(10)]
    assert loans(windows, [10, 1, 8], 0, even=10) == [(1, 9), (2, 1)]
    assert loans(windows, [10, 10, 10], 0, even=10) == []


def test_a_window_below_an_even_share_gets_that_of_those_above_it_whatever_they_need() -> None:
    windows = [CreditWindow(25), CreditWindow(4), CreditWindow(1)]
    assert loans(windows, [25, 4, 1], 1, even=10) == [(0, 4)]
    windows = [CreditWindow(20), CreditWindow(9), CreditWindow(1)]
    assert loans(windows, [20, 9, 1], 1, even=10) == [(0, 1)]
    windows = [CreditWindow(19), CreditWindow(10), CreditWindow(1)]
    assert loans(windows, [19, 10, 1], 1, even=10) == []


def test_a_window_says_twenty_times_a_second_that_its_ceiling_is_too_low() -> None:
    window = CreditWindow(4)
    window.begin(2, 0.0)
    told = [at for at in range(1000) if window.finished(4, at / 1000)]
    assert told[0] == LOOK_SECONDS * 1000, "at first all are small"
    assert len(told) == 10


@pytest.mark.parametrize("options", [{}, {"broadcast": True}, {"ordered": True}], ids=str)
def test_a_shard_that_has_all_messages_gets_all_credit_but_one_of_each_other(options: dict[str, Any]) -> None:
    made = Shards(prefetch=30, **options)
    for _ in range(12):
        made.push(2, made.credit(2))
        made.handle(100)
        assert sum(made.shares) == 30
        assert sum(made.credits()) <= 30
    assert made.shares == [1, 28, 1]
    assert made.credits() == [1, 28, 1]


def test_the_first_shard_that_has_messages_leaves_the_others_their_shares_until_they_could_have_some() -> None:
    made = Shards(prefetch=30, is_new=True)
    for _ in range(5):
        made.push(2, made.credit(2))
        made.handle(100)
    assert made.shares == [10, 10, 10]
    assert made.credit(2) == 10
    made.clock.advance(LOOK_SECONDS)
    for _ in range(8):
        made.push(2, made.credit(2))
        made.handle(100)
    assert made.shares == [1, 28, 1]


def test_credit_is_returned_by_the_share_of_one_shard() -> None:
    made = Shards(prefetch=30)
    for _ in range(6):
        for shard in (1, 2, 3):
            made.push(shard, made.credit(shard))
        made.handle(100)
    assert made.credits() == [10, 10, 10]
    assert made.core.urgent_count == 10


@pytest.mark.parametrize(
    ("count", "options", "batch"),
    [
        (1, {}, 25),
        (2, {}, 25),
        (3, {}, 33),  # not 25 and a rest of 8
        (5, {}, 20),
        (3, {"ordered": True}, 10),
        (3, {"parallel": 2}, 10),
    ],
)
def test_a_push_of_a_shard_has_its_whole_share_or_an_even_part_of_it(
    count: int, options: dict[str, Any], batch: int
) -> None:
    made = Shards(count, prefetch=100, **options)
    assert made.subscribed(count)[0].batch == batch


def test_shards_that_get_messages_again_get_their_shares_back() -> None:
    made = Shards(prefetch=30)
    for _ in range(12):
        made.push(2, made.credit(2))
        made.handle(100)
    for _ in range(12):
        for shard in (1, 2, 3):
            made.push(shard, made.credit(shard))
        made.handle(100)
    assert made.shares == [10, 10, 10]


def test_a_program_that_keeps_all_it_gets_has_the_whole_prefetch_also_from_one_shard() -> None:
    made = Shards(prefetch=12)
    for _ in range(6):
        room = made.credit(3) - made.core.in_hand(made.at(3).book)
        if room:
            made.push(3, room)
        made.core.take(100)
        made.subscriptions.starve()
        made.answer()
    assert made.core.in_hand() == 10
    assert made.credits() == [1, 1, 10]


def test_a_share_moves_once_what_its_broker_had_sent_is_here() -> None:
    """Or what both have out would be more than the prefetch."""
    made = Shards(count=2, prefetch=10)
    made.push(1, 2)
    for _ in range(3):
        made.core.take(10)
        made.subscriptions.starve()
        if made.credit(1) > made.core.in_hand():
            made.push(1, made.credit(1) - made.core.in_hand())
    assert made.shares == [5, 1]
    assert made.credits() == [5, 1]
    made.push(2, 2)  # both were under way when its credit was lowered
    made.answer()
    assert made.shares == [8, 1]
    assert sum(made.credits()) <= 10
    made.core.ack(*next(found for found in made.core.take(10) if found[0].shard == 2))
    made.flush()
    made.answer()
    assert sum(made.shares) == 10


def test_handlers_of_a_shard_that_has_more_than_its_credit_get_it_at_once() -> None:
    """Nobody has to wait for its look, a second later."""
    made = Shards(handlers=8, prefetch=90)
    assert made.credits() == [6, 6, 6]
    made.push(1, 6)
    assert made.credit(1) == 12


def test_bytes_follow_the_shares() -> None:
    made = Shards(prefetch=30, prefetch_bytes=3000)
    assert [made.subscribed(shard)[0].prefetch_bytes for shard in (1, 2, 3)] == [1000, 1000, 1000]
    for _ in range(12):
        made.push(2, made.credit(2))
        made.handle(100)
    moved = [sum(told.bytes for told in link.told if isinstance(told, Credit)) for link in made.links]
    assert moved == [-900, 1800, -900]


def test_of_more_shards_than_the_prefetch_none_sends_while_all_of_it_is_in_hand() -> None:
    made = Shards(prefetch=1)
    assert made.credits() == [1, 1, 1]
    made.push(1, 1)
    assert made.credits() == [0, 0, 0]
    assert made.handle(5) == [1]
    assert made.credits() == [1, 1, 1]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_what_two_of_more_shards_than_the_prefetch_sent_at_once_goes_back_untouched(is_ordered: bool) -> None:
    made = Shards(prefetch=1, ordered=is_ordered)
    made.push(1, 1)
    made.push(3, 1)
    made.flush()
    assert made.core.in_hand() == 1
    assert made.told(3) == [(2, "RELEASE", [(2000, 1)])]
    assert isinstance(made.links[2].told[0], Credit), "before, or it would come straight back"
    assert made.handle(5) == [1]


def test_a_lease_that_was_lost_does_not_keep_shards_silent() -> None:
    made = Shards(prefetch=1)
    made.push(1, 1)
    assert made.credits() == [0, 0, 0]
    made.clock.suspend(70)
    made.router.advance(20)
    assert made.credits() == [1, 1, 1]


# --- shards that come and go ------------------------------------------------------------------------------------------


def test_a_shard_that_gets_the_topic_later_is_consumed_from_its_first_message_on() -> None:
    made = Shards(named=2, prefetch=12, start_from="latest")
    made.router.table.named = 3
    made.subscriptions.routes_changed(["bills"])
    assert made.subscribed(3) == []
    made.subscriptions.routes_changed(["orders"])
    assert [made.subscribed(shard)[0].start_from.kind for shard in (1, 2, 3)] == [
        PointKind.LATEST,
        PointKind.LATEST,
        PointKind.EARLIEST,
    ]
    assert made.shares == [5, 6, 1], "it has one message's credit, and claims what it needs"
    made.push(3, 1)
    assert made.handle(1) == [3]
    assert sum(made.shares) == 12


def test_a_shard_that_has_the_topic_no_more_is_left_once_nothing_of_it_is_in_hand() -> None:
    made = Shards(prefetch=12)
    made.push(3, 2)
    made.router.table.named = 2
    made.subscriptions.refresh()
    assert len([*made.subscriptions]) == 3
    made.handle(2)
    assert len(made.told(3)) == 2, "the acks go where the messages came from"
    made.subscriptions.refresh()
    assert len([*made.subscriptions]) == 2
    assert isinstance(made.links[2].requests[-1].header, Unsubscribe)
    assert made.shares == [6, 6]


def test_a_topic_that_nobody_has_any_more_is_still_listened_for() -> None:
    made = Shards()
    made.router.table.named = 0
    made.subscriptions.refresh()
    assert len([*made.subscriptions]) == 3


def test_a_shard_that_does_not_know_the_topic_yet_is_asked_again_and_the_others_go_on() -> None:
    made = Shards()
    made.links[1].requests[0].refuse(UnknownTopic("no topic 'orders'"))
    assert made.core.ended is None
    made.router.advance(1.1)
    assert len(made.subscribed(2)) == 2
    made.links[1].requests[1].answer(SubscribeReply(1, 2, 1, 1, 1))
    made.push(2, 1)
    assert taken(made.core) == [b"0"]


def test_a_topic_that_no_shard_knows_ends_the_consumer() -> None:
    made = Shards()
    for link in made.links:
        link.requests[0].refuse(UnknownTopic("no topic 'orders'"))
    assert isinstance(made.core.ended, UnknownTopic)


def test_a_refusal_that_all_shards_would_repeat_ends_the_consumer() -> None:
    made = Shards()
    made.links[1].requests[0].refuse(SubscriptionConflict("another filter"))
    assert isinstance(made.core.ended, SubscriptionConflict)


def routed(*shards: int, topic: str = "orders", version: int = 1) -> RouteReply:
    """The routes of a cluster of three shards."""
    rows = [ShardRoute(number, f"s{number}", 1, f"{number}:9611", [f"{number}:9611"]) for number in (1, 2, 3)]
    slots = [SlotRoute(number, 2) for number in shards]
    return RouteReply(7, rows, [TopicRoute(topic, 5, slots, version)] if slots else [])


class Routed(FakeConsumer):
    """A consumer in a cluster, which knows of its topic what the routes say."""

    def __init__(self, reply: RouteReply, topic: str = "orders", **options: Unpack[SubscribeOptions]) -> None:
        super().__init__(ConsumerOptions(topic, "billing", options), FakeLink("url"))
        self.router.join(reply)
        self.subscriptions = Subscriptions(self.core.options, 1, self.router, self.core, self)
        self.core._books.clear()
        self.subscriptions.refresh()

    def learn(self, reply: RouteReply) -> None:
        assert self.router._keeper is not None
        self.router._keeper.learned(reply)

    @property
    def shards(self) -> list[int]:
        return [one.pool.shard for one in self.subscriptions]


def test_a_topic_is_consumed_where_the_routes_say_and_before_they_do_nowhere() -> None:
    made = Routed(routed())
    assert (made.shards, made.subscriptions.is_routed) == ([], False)
    made.learn(routed(1, 2))
    assert (made.shards, made.subscriptions.is_routed) == ([1, 2], True)


def test_a_change_of_the_routes_is_followed_at_once() -> None:
    made = Routed(routed(1, 2))
    made.subscriptions.begin()
    made.learn(routed(1, 2, 3, version=2))
    assert made.shards == [1, 2, 3]
    made.learn(routed(2, 3, version=3))
    assert made.shards == [2, 3]
    made.subscriptions.unwatch()
    made.learn(routed(1, 2, 3, version=4))
    assert made.shards == [2, 3]


def test_a_route_that_is_forgotten_ends_nothing() -> None:
    made = Routed(routed(1, 2))
    assert made.router._keeper is not None
    made.router._keeper.learned(routed(), ["orders"])
    assert made.shards == [1, 2]


def test_a_system_topic_is_consumed_from_all_shards() -> None:
    assert Routed(routed(), "%RETRY%billing%1").shards == [1, 2, 3]


def test_the_queues_of_a_shard_without_a_leader_are_divided_too() -> None:
    made = Routed(routed(1, 2, 3), strategy="average")
    made.core.member = ME
    made.subscriptions.begin()
    first = next(iter(made.subscriptions))
    first.book.shard = 1
    told = Pushed(Command.GROUP_MEMBERS, GroupMembers(1, 2, ["a.1", ME]), b"", 0.0)
    first.pushed(FakeLink("1", 1), told)
    assert first.queues == [], "the first three are a.1's"


# --- queues by a strategy ---------------------------------------------------------------------------------------------


def divided(*names: str) -> Shards:
    """A member with a strategy, at three shards of two queues each."""
    made = Shards(strategy="average")
    for shard in (1, 2, 3):
        made.members(shard, 2, *names)
    return made


def test_the_queues_of_all_shards_are_divided_at_once() -> None:
    made = divided("a.1", ME)
    assert made.subscriptions.queues == (2 << 8 | 1, 3 << 8, 3 << 8 | 1)
    assert [made.at(shard).queues for shard in (1, 2, 3)] == [[], [1], [0, 1]]
    assert made.assigned(3)[-1] == [0, 1]


def test_every_queue_is_one_members_and_all_of_them_compute_alike() -> None:
    names = ["b.1", ME, "z.1"]
    found: list[int] = []
    for name in names:
        made = Shards(strategy="circle")
        made.core.member = name
        for shard in (3, 1, 2):
            made.members(shard, 2, *reversed(names))
        assert made.subscriptions.queues is not None
        found += made.subscriptions.queues
    assert sorted(found) == [shard << 8 | queue for shard in (1, 2, 3) for queue in (0, 1)]


def test_the_members_that_the_first_slots_shard_names_count() -> None:
    made = divided("a.1", ME)
    made.members(2, 2, ME)
    assert made.subscriptions.queues == (2 << 8 | 1, 3 << 8, 3 << 8 | 1)
    made.members(1, 2, ME)
    assert [made.at(shard).queues for shard in (1, 2, 3)] == [[0, 1]] * 3


def test_a_failover_of_the_first_shard_moves_no_queues() -> None:
    made = divided("a.1", ME)
    before = made.subscriptions.queues
    made.at(1).lost(made.links[0], UnknownTopic(""))
    made.links[0] = FakeLink("shard-1", 1)
    made.at(1).connected(made.links[0])
    made.members(1, 2, ME)  # the first one to be back
    assert made.subscriptions.queues == before
    assert made.subscribed(1)[-1].queues == []
    made.router.advance(SETTLED_SECONDS + 0.1)
    assert [made.at(shard).queues for shard in (1, 2, 3)] == [[0, 1]] * 3, "the other one did not come back"


def test_queues_that_moved_while_a_shard_was_away_are_in_its_next_subscription() -> None:
    made = divided("a.1", ME)
    made.at(3).lost(made.links[2], UnknownTopic(""))
    made.links[2] = FakeLink("shard-3", 3)
    made.members(1, 2, ME, "z.1")
    made.at(3).connected(made.links[2])
    assert made.subscribed(3)[-1].queues == []
    assert made.at(1).queues == [0, 1]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_names_its_shard_and_its_queue_there() -> None:
    made = Shards()
    made.push(2, 1, queue=1)
    made.push(3, 1)
    found = [ReceivedMessage(*place) for place in made.core.take(2)]
    assert [(message.shard, message.queue) for message in found] == [(2, 1), (3, 0)]


def test_higher_priorities_of_any_shard_come_first() -> None:
    made = Shards(prefetch=30)
    for lease, (shard, priority) in enumerate([(1, 1), (2, 9), (3, 5)]):
        leases, body = frame(lease, bodies(str(shard), priority=priority), ids=[(1, 0, 0)])
        made.at(shard).pushed(
            made.links[shard - 1],
            Pushed(Command.CONSUMER_PUSH, Push(1, leases), bytes(body), made.clock.boottime()),
        )
    assert taken(made.core) == [b"2", b"3", b"1"]
