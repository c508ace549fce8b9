"""A consumer at two brokers: what each of them is told."""

from __future__ import annotations

from typing import Any, Unpack

from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.options import ConsumerOptions, SubscribeOptions
from dmq.errors import UnknownTopic
from dmq.protocol import Command, Status
from dmq.protocol.consume import (
    Credit,
    LeaseRef,
    Push,
    Refusal,
    Settle,
    SettleReply,
    Subscribe,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from tests.unit.client.deliveries import bodies, book, frame, said, taken
from tests.unit.client.links import FakeConsumer, FakeLink, Request


class TwoBrokers(FakeConsumer):
    """A consumer that is subscribed at two brokers."""

    def __init__(self, named: int = 2, handlers: int = 8, **options: Unpack[SubscribeOptions]) -> None:
        self.links = [FakeLink("one"), FakeLink("two")]
        super().__init__(ConsumerOptions("orders", "billing", options), *self.links, named=named)
        self.core.handlers = handlers
        self.subscriptions.begin()

    def push(
        self,
        broker: int,
        lease: int,
        *texts: str,
        first: int = 0,
        ids: list[Any] | None = None,
        since: float | None = None,
    ) -> None:
        """A broker pushes messages; just now, or at the earliest since a moment."""
        since = self.clock.boottime() if since is None else since
        leases, body = frame(lease, bodies(*texts), first=first, ids=ids)
        subscription = [*self.subscriptions][broker]
        subscription.pushed(self.links[broker], Pushed(Command.CONSUMER_PUSH, Push(1, leases), bytes(body), since))

    def told(self, broker: int) -> list[Any]:
        return said([told for told in self.links[broker].told if isinstance(told, Settle)])

    def settles(self, broker: int) -> list[Request]:
        return [request for request in self.links[broker].requests if request.command == Command.SETTLE]

    def asked(self, broker: int) -> list[Any]:
        return said([request.header for request in self.settles(broker)])

    def credits(self, broker: int) -> list[int]:
        return [told.messages for told in self.links[broker].told if isinstance(told, Credit)]

    def subscribed(self, broker: int) -> list[Subscribe]:
        return [request.header for request in self.links[broker].requests if isinstance(request.header, Subscribe)]


def test_it_subscribes_at_both_under_one_name_and_shares_out_its_prefetch() -> None:
    made = TwoBrokers(prefetch=7)
    headers = [made.subscribed(broker)[0] for broker in (0, 1)]
    assert [header.member for header in headers] == ["me.1", "me.1"]
    assert [subscription.window.ceiling for subscription in made.subscriptions] == [4, 3]
    assert [header.prefetch_messages for header in headers] == [4, 3]
    assert made.attended == made.links


def test_acks_go_back_to_where_the_messages_came_from() -> None:
    made = TwoBrokers()
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 1, "b", ids=[(1, 8, 0)])
    for delivery, index in made.core.take(2):
        made.core.ack(delivery, index)
    made.flush()
    assert made.told(0) == made.told(1) == [(1, "ACK", [(0, 1)])]


def test_leases_of_two_brokers_may_have_one_number() -> None:
    made = TwoBrokers()
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 1, "b", ids=[(1, 8, 0)])
    assert taken(made.core) == [b"a", b"b"]
    held = [delivery for one in (0, 1) for delivery in book(made.core, one).held.values()]
    assert len({delivery.key for delivery in held}) == 2


def test_what_one_broker_lost_stays_with_the_other() -> None:
    made = TwoBrokers()
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 1, "b", ids=[(1, 8, 0)])
    lost = SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)])
    made.core.subscribed(book(made.core, 0), lost)
    assert taken(made.core) == [b"b"]


def test_words_for_a_broker_that_is_away_wait_while_the_other_is_told() -> None:
    made = TwoBrokers()
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 1, "b", ids=[(1, 8, 0)])
    made.links[0].is_usable = False
    for delivery, index in made.core.take(2):
        made.core.ack(delivery, index)
    made.flush()
    assert (made.told(0), made.told(1)) == ([], [(1, "ACK", [(0, 1)])])
    made.links[0].is_usable = True
    made.flush()
    assert made.told(0) == [(1, "ACK", [(0, 1)])]


def test_a_reconnect_subscribes_again_at_that_broker_with_its_leases() -> None:
    made = TwoBrokers()
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 5, "b", ids=[(1, 8, 0)])
    made.links[1] = FakeLink("two")
    [*made.subscriptions][1].connected(made.links[1])
    assert len(made.subscribed(0)) == 1
    assert made.subscribed(1)[-1].holding == [LeaseRef("orders", 0, 1, 5)]


def test_a_pause_takes_each_brokers_credit_back() -> None:
    made = TwoBrokers(prefetch=7)
    made.subscriptions.set_paused(True)
    made.subscriptions.set_paused(False)
    assert (made.credits(0), made.credits(1)) == ([-4, 4], [-3, 3])


def test_leases_are_extended_at_their_brokers() -> None:
    made = TwoBrokers()
    made.core.is_running = True
    made.push(0, 1, "a", ids=[(1, 7, 0)])
    made.push(1, 2, "b", ids=[(1, 8, 0)])
    made.core.take(2)
    made.router.advance(16)
    assert (made.asked(0), made.asked(1)) == ([(1, "EXTEND", [])], [(2, "EXTEND", [])])


def test_a_lease_is_longer_only_once_its_broker_has_said_so() -> None:
    made = TwoBrokers()
    made.core.is_running = True
    made.push(0, 1, "a", "b", "c", ids=[(3, 7, 0)])
    taken_ = made.core.take(2)
    made.router.advance(16)
    made.clock.suspend(15)  # the request lies in a buffer while the machine sleeps, and the lease ends
    made.settles(0)[0].answer(SettleReply([Refusal(0, Status.LEASE_LOST)]))
    assert taken(made.core) == []
    assert made.core.without_expired(taken_) == []


def test_a_lease_that_was_extended_counts_from_when_that_was_asked_for() -> None:
    made = TwoBrokers()
    made.core.is_running = True
    made.push(0, 1, "a", "b", ids=[(2, 7, 0)])
    first = made.core.take(1)
    made.router.advance(16)
    made.clock.advance(10)
    made.settles(0)[0].answer(SettleReply())
    made.clock.advance(18)  # 44 s after it was given, 29 after it was asked for
    assert made.core.without_expired(first) == first
    made.clock.advance(2)
    assert made.core.without_expired(first) == []
    assert taken(made.core) == []


def test_a_push_that_may_be_old_is_taken_once_its_broker_says_that_the_lease_is_still_ours() -> None:
    made = TwoBrokers()
    made.clock.advance(40)
    made.push(0, 1, "a", ids=[(1, 7, 0)], since=made.clock.boottime() - 16)
    made.push(0, 2, "b", ids=[(1, 7, 1)], since=made.clock.boottime() - 40)
    assert taken(made.core) == []
    assert made.asked(0) == [(1, "EXTEND", []), (2, "EXTEND", [])]
    first, second = made.settles(0)
    second.answer(SettleReply([Refusal(0, Status.LEASE_LOST)]))
    assert taken(made.core) == []
    first.answer(SettleReply())
    assert taken(made.core) == [b"a"]
    made.clock.advance(40)
    assert made.core.holding(book(made.core, 0)) == [LeaseRef("orders", 0, 1, 1)]


def test_something_is_asked_of_each_broker_four_times_a_lease_so_that_pushes_are_known_to_be_young() -> None:
    made = TwoBrokers()
    made.router.advance(30.5)
    assert [request.command for request in made.links[1].requests].count(Command.HEARTBEAT) == 4


def test_a_broker_that_gets_queues_later_is_subscribed_at_and_gets_its_share() -> None:
    made = TwoBrokers(prefetch=10, named=1)
    assert (made.subscribed(0)[0].prefetch_messages, made.subscribed(1)) == (10, [])
    made.router.table.named = 2
    made.router.advance(8)
    assert (made.credits(0), made.subscribed(1)[0].prefetch_messages) == ([-1], 1)
    made.push(1, 1, "b")
    assert taken(made.core) == [b"b"]


def ended(made: TwoBrokers) -> None:
    """The topic is deleted: one broker says so after the other."""
    for one, link in zip(made.subscriptions, made.links, strict=True):
        header = SubscriptionEnded(1, Status.UNKNOWN_TOPIC, "topic 'orders' was deleted")
        one.pushed(link, Pushed(Command.SUBSCRIPTION_ENDED, header, b"", made.clock.boottime()))


def test_a_consumer_that_has_ended_subscribes_nowhere_again() -> None:
    made = TwoBrokers()
    ended(made)
    assert made.core.ended is not None
    made.router.advance(60)  # the topic was made anew: the broker that was to be asked again would take it
    for one in made.subscriptions:
        one.connected(FakeLink("new"))
    assert (len(made.subscribed(0)), len(made.subscribed(1))) == (1, 1)


def test_a_consumer_that_has_ended_takes_no_place_that_a_topic_gets_later() -> None:
    made = TwoBrokers(named=1)
    made.subscriptions.end(UnknownTopic("topic 'orders' was deleted"))
    made.router.table.named = 2
    made.router.advance(60)
    made.subscriptions.refresh()
    assert made.subscribed(1) == []


def test_a_consumer_that_has_ended_gives_back_what_comes_after_that() -> None:
    made = TwoBrokers(prefetch=10)
    made.push(0, 1, "a")
    made.subscriptions.end(UnknownTopic("topic 'orders' was deleted"))
    assert made.credits(1) == [-5], "no broker is to send anything"
    assert taken(made.core) == [b"a"], "what came before is handled"
    made.push(1, 2, "b")
    assert taken(made.core) == []
    assert made.told(1) or made.asked(1), "its lease goes back"


def test_it_subscribes_once_over_a_link() -> None:
    made = TwoBrokers()
    [*made.subscriptions][1].connected(made.links[1])  # as a thread of the pool may while another one begins
    assert (len(made.subscribed(0)), len(made.subscribed(1))) == (1, 1)


# --- credit follows what handlers finish ------------------------------------------------------------------------------


def finish(made: TwoBrokers, count: int, seconds: float) -> None:
    """Handle so many messages that wait, each for so long."""
    for delivery, index in made.core.take(count):
        made.clock.advance(seconds)
        made.core.ack(delivery, index)
        made.flush()


def test_a_member_asks_for_two_rounds_of_work_and_for_leases_that_may_grow() -> None:
    made = TwoBrokers(handlers=4)
    (first, second) = (made.subscribed(broker)[0] for broker in (0, 1))
    assert (first.prefetch_messages, second.prefetch_messages) == (4, 4)
    assert (first.batch, second.batch) == (250, 250)


def test_credit_doubles_as_long_as_handlers_finish_it_in_no_time() -> None:
    made = TwoBrokers(named=1, handlers=2, prefetch=30)
    made.push(0, 1, *map(str, range(28)))
    finish(made, 28, 0.001)
    assert made.credits(0) == [4, 8, 14]  # 4, 8, 16, and all of it
    assert made.core.urgent_count == 15


def test_credit_stays_where_handlers_are_slow() -> None:
    made = TwoBrokers(named=1, handlers=2)
    made.push(0, 1, *map(str, range(8)))
    finish(made, 8, 0.2)
    assert made.credits(0) == []


def test_credit_grows_for_those_who_wait_with_all_of_it_in_hand() -> None:
    """A program may take many before it acks the first."""
    made = TwoBrokers(named=1, handlers=1, prefetch=7)
    made.subscriptions.starve()
    assert made.credits(0) == []
    made.push(0, 1, "a", "b")
    assert len(made.core.take(2)) == 2
    made.subscriptions.starve()
    made.subscriptions.starve()
    assert made.credits(0) == [2]
    made.push(0, 2, "c", "d", first=2)
    made.subscriptions.starve()
    made.subscriptions.starve()
    assert made.credits(0) == [2, 3]


def test_a_program_that_keeps_many_before_it_acks_the_first_gets_on() -> None:
    made = TwoBrokers(named=1, handlers=1, prefetch=64)
    for lease in range(20):
        made.push(0, lease, str(lease), first=lease)
        assert made.core.take(1)
        made.router.advance(0.3)
        made.subscriptions.starve()
        assert 2 + sum(made.credits(0)) > lease + 1


def test_a_member_that_becomes_slow_gives_back_what_it_will_not_get_to() -> None:
    made = TwoBrokers(named=1, handlers=2, prefetch=64)
    made.push(0, 1, *map(str, range(60)))
    finish(made, 60, 0.001)
    made.router.advance(1)
    assert sum(made.credits(0)) == 60
    made.push(0, 2, *map(str, range(60)), first=60)
    slow = made.core.take(2)
    made.router.advance(0.6)
    assert sum(made.credits(0)) == 0  # as at the beginning
    assert made.told(0)[-1] == (2, "RELEASE", [(64, 56)])  # two are in hand, and two more wait
    assert made.links[0].told[-2] == Credit(1, -60)  # before, or they would come straight back
    made.core.ack(*slow[0])
    assert taken(made.core) == [b"2", b"3"]


def test_an_ordered_member_that_becomes_slow_keeps_its_leases() -> None:
    made = TwoBrokers(named=1, handlers=2, prefetch=64, ordered=True)
    made.push(0, 1, *map(str, range(10)))
    made.core.take(1)
    made.router.advance(2)
    assert made.told(0) == []


def test_members_of_a_broadcast_group_share_nothing_and_ask_for_all() -> None:
    made = TwoBrokers(named=1, handlers=2, prefetch=64, broadcast=True)
    made.push(0, 1, *map(str, range(60)))
    made.core.take(1)
    made.router.advance(2)
    assert (made.subscribed(0)[0].prefetch_messages, made.credits(0), made.told(0)) == (64, [], [])


def test_credit_that_changes_during_a_pause_is_told_once_it_ends() -> None:
    made = TwoBrokers(named=1, handlers=1, prefetch=64)
    made.push(0, 1, "a", "b")
    made.core.take(2)
    made.subscriptions.set_paused(True)
    made.subscriptions.starve()
    assert made.credits(0) == [-2]
    made.subscriptions.set_paused(False)
    assert made.credits(0) == [-2, 4]


def test_a_subscription_that_begins_again_ends_what_the_broker_may_still_have_of_it() -> None:
    made = TwoBrokers()
    header = SubscriptionEnded(1, Status.UNKNOWN_TOPIC, "topic 'orders' was deleted")
    one, link = next(iter(made.subscriptions)), made.links[0]
    one.pushed(link, Pushed(Command.SUBSCRIPTION_ENDED, header, b"", made.clock.boottime()))
    made.router.advance(60)
    assert [request.header for request in link.requests if isinstance(request.header, Unsubscribe | Subscribe)] == [
        made.subscribed(0)[0],
        Unsubscribe(1, release=False),  # the end may be that of an earlier one, which crossed ours
        made.subscribed(0)[1],
    ]
