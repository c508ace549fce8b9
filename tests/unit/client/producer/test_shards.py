"""Batches over the shards of a cluster: which place they take, and what becomes of them when a shard refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dmq.client.producer.core import Core, ProducerOptions
from dmq.client.producer.future import SendFuture
from dmq.client.producer.message import SendOptions
from dmq.client.producer.routes import Route, Routes
from dmq.client.producer.sender import LEADER_SECONDS, MOVES_MAX, ROUTE_SECONDS
from dmq.errors import (
    Busy,
    NotConnected,
    NotEnoughReplicas,
    NotLeader,
    RateLimited,
    ServerError,
    StaleRoute,
    UnknownTopic,
)
from dmq.model import Message, place_of
from dmq.protocol import Command, Flag
from dmq.protocol.cluster.route import ShardRoute, TopicRoute
from dmq.records import business_hash
from dmq.testing import FakeClock
from tests.unit.client.connection.test_route_book import answer, shard, topic
from tests.unit.client.drafts import draft_of
from tests.unit.client.links import FakeLink, FakeRouter, Request


class Rig:
    """A producer's core over a cluster of three shards."""

    def __init__(self, *rows: ShardRoute | TopicRoute, **options: Any) -> None:
        self.clock = FakeClock()
        self.router = FakeRouter(self.clock, FakeLink("url"))
        self.router.join(answer(*(rows or (shard(1), shard(2), shard(3), topic("orders", 1, 2, 3)))))
        self.routes = Routes()
        self.core = Core.make("shop", ProducerOptions(**options), self.routes, self.router, self.clock)
        row = self.router.topic_route("orders")
        assert row is not None
        self.routes.put("orders", Route.of_slots(row))
        self.router.watch(self)

    def connected(self, link: FakeLink) -> None:
        self.core.sender.connected(link)

    def routes_changed(self, topics: Sequence[str]) -> None:
        self.core.sender.routes_changed(topics)

    def learn(self, *rows: ShardRoute | TopicRoute) -> None:
        """Routes come."""
        assert self.router._keeper is not None
        self.router._keeper.learned(answer(shard(1), shard(2), shard(3), *rows))

    def link(self, number: int) -> FakeLink:
        return self.router._pools[number].link

    @property
    def requests(self) -> list[Request]:
        """All that was produced, shard by shard."""
        return [request for number in (1, 2, 3) for request in self.link(number).produced()]

    def shard_of(self, request: Request) -> int:
        return next(number for number in (1, 2, 3) if request in self.link(number).requests)

    def send(self, body: bytes = b"x", **message: Any) -> SendFuture:
        route = self.routes.get("orders")
        assert route is not None
        put = self.core.put(draft_of(self.core, route, "orders", body, **message), attended=True, deadline=None)
        assert put is not None
        if put[0].is_worth_a_look:
            self.core.sender.pump(put[0].lane)
        return SendFuture(*put)

    def lose(self, number: int) -> None:
        link = self.link(number)
        self.router.interrupted(number, NotConnected("gone"))
        link.lose()
        link._pending.clear()

    def back(self, number: int) -> None:
        link = self.link(number)
        link.is_usable = True
        self.router.resumed(number)
        self.core.sender.connected(link)


def name_at(place: int, places: Sequence[int], after: int = 0) -> str:
    """A business id that goes to a place."""
    return [name for name in map(str, range(2000)) if places[business_hash(name) % len(places)] == place][after]


PLACES = [place_of(queue, number) for number in (1, 2, 3) for queue in (0, 1)]


def test_messages_go_to_all_shards_by_their_weights() -> None:
    rig = Rig(shard(1), shard(2, weight=50), shard(3, weight=0), topic("orders", 1, 2, 3))
    stored: list[Request] = []
    for _ in range(60):
        future = rig.send()
        stored.append(next(one for one in rig.requests if one not in stored))
        stored[-1].store()
        assert future.done()
    shares = Counter(rig.shard_of(request) for request in rig.requests)
    assert shares == {1: 40, 2: 20}


def test_a_receipt_names_the_shard_and_the_queue_within_it() -> None:
    rig = Rig()
    future = rig.send()
    (request,) = rig.requests
    request.store(7)
    receipt = future.result(0)
    assert (receipt.shard, receipt.queue, receipt.offset) == (rig.shard_of(request), request.header.queue, 7)
    assert request.header.queue in (0, 1)
    assert request.header.slots_version == 0


@pytest.mark.parametrize(
    "error", [NotLeader("no"), NotEnoughReplicas("no"), Busy("no", retry_after_ms=900), StaleRoute("no")], ids=repr
)
def test_what_a_shard_refuses_goes_to_another_one_with_other_numbers(error: Exception) -> None:
    rig = Rig()
    future = rig.send()
    (first,) = rig.requests
    first.refuse(error)  # type: ignore[arg-type]
    rig.router.advance(ROUTE_SECONDS)
    second = next(one for one in rig.requests if one is not first)
    assert rig.shard_of(second) != rig.shard_of(first)
    assert not second.flags & Flag.RESEND
    assert second.header.first_sequence > first.header.first_sequence
    assert second.body == first.body
    second.store()
    assert future.result(0).shard == rig.shard_of(second)


def test_a_shard_that_refused_is_avoided_for_a_while() -> None:
    rig = Rig()
    rig.send()
    (first,) = rig.requests
    bad = rig.shard_of(first)
    first.refuse(NotEnoughReplicas("no"))
    for _ in range(20):
        rig.send()
        settle(rig, first)
    assert all(rig.shard_of(request) != bad for request in rig.requests if request is not first)


def test_three_other_shards_are_tried_and_then_the_same_one_is_waited_for() -> None:
    rig = Rig(retries=0)
    future = rig.send()
    seen: list[Request] = []
    for _ in range(MOVES_MAX + 1):
        fresh = [one for one in rig.requests if one not in seen]
        if not fresh:
            break
        seen += fresh
        fresh[0].refuse(NotEnoughReplicas("no"))
    assert len(seen) == MOVES_MAX + 1
    rig.router.advance(1.0)
    last = [one for one in rig.requests if one not in seen]
    assert rig.shard_of(last[0]) == rig.shard_of(seen[-1])
    last[0].store()
    assert future.done()


def test_what_was_sent_and_not_answered_stays_with_its_shard() -> None:
    rig = Rig()
    future = rig.send()
    (first,) = rig.requests
    number = rig.shard_of(first)
    rig.lose(number)
    rig.router.advance(10.0)
    assert rig.requests == [first]
    rig.back(number)
    again = rig.link(number).produced()[-1]
    assert again.flags & Flag.RESEND
    assert again.numbers == first.numbers
    again.store()
    assert future.result(0).shard == number


def test_a_failure_of_a_broker_keeps_the_shard() -> None:
    rig = Rig()
    rig.send()
    (first,) = rig.requests
    first.refuse(ServerError("oops"))
    rig.router.advance(2.0)
    assert {rig.shard_of(request) for request in rig.requests} == {rig.shard_of(first)}
    assert rig.requests[-1].numbers == first.numbers


def test_a_limit_fails_at_once() -> None:
    rig = Rig()
    future = rig.send()
    rig.requests[0].refuse(RateLimited("slow down"))
    assert isinstance(future.exception(0), RateLimited)


def test_what_waits_for_a_leader_goes_to_another_shard_after_a_second() -> None:
    rig = Rig()
    for number in (1, 2, 3):
        rig.lose(number)
    future = rig.send()
    assert not rig.requests
    rig.back(1)
    assert len(rig.requests) == 1
    rig.requests[0].store()
    assert future.done()


def test_a_shard_that_is_lost_between_the_choice_and_the_sending_gives_the_batch_to_another() -> None:
    rig = Rig()
    rig.send()
    number = rig.shard_of(rig.requests[0])
    rig.requests[0].refuse(NotLeader("no"))  # it moves
    moved = next(one for one in rig.requests if one.header.first_sequence)
    other = rig.shard_of(moved)
    link = rig.link(other)
    link.is_usable = False  # nobody knows yet
    moved.refuse(NotLeader("no"))
    rig.router.advance(LEADER_SECONDS * 2)
    assert {rig.shard_of(request) for request in rig.requests} >= {number, other}
    assert len(rig.requests) == 3


def test_an_unknown_topic_is_asked_for_once_before_it_fails() -> None:
    rig = Rig()
    future = rig.send()
    rig.requests[0].refuse(UnknownTopic("none"))
    rig.router.advance(1.0)
    assert any(request.command == Command.ROUTE for number in (1, 2, 3) for request in rig.link(number).requests)
    max(rig.requests, key=lambda one: one.header.first_sequence).refuse(UnknownTopic("none"))
    assert isinstance(future.exception(0), UnknownTopic)


# --- order ----------------------------------------------------------------------------------------------------------


def test_ordered_messages_are_pinned_and_carry_the_version_of_the_slots() -> None:
    rig = Rig()
    for place in PLACES:
        rig.send(business_id=name_at(place, PLACES), ordered=True)
    found = {place_of(request.header.queue, rig.shard_of(request)) for request in rig.requests}
    assert found == {*PLACES}
    assert {request.header.slots_version for request in rig.requests} == {1}


def test_an_ordered_message_waits_for_the_leader_of_its_shard() -> None:
    rig = Rig()
    rig.lose(2)
    future = rig.send(business_id=name_at(place_of(0, 2), PLACES), ordered=True)
    rig.router.advance(30.0)
    assert not rig.requests
    rig.back(2)
    rig.requests[0].store()
    assert future.result(0).shard == 2


def test_a_stale_route_has_messages_divided_anew_in_order() -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    old = PLACES[:4]
    start = place_of(0, 1)
    names = [f"{name_at(start, old, after)}" for after in range(100, 108)]  # none is a part of another
    futures = [
        rig.send(b"%s-%d" % (name.encode(), turn), business_id=name, ordered=True)
        for turn in range(3)
        for name in names
    ]
    (first,) = rig.requests
    assert first.header.count == 1
    first.refuse(StaleRoute("other slots", slots_version=2))
    rig.router.advance(ROUTE_SECONDS * 3)
    assert rig.requests == [first], "until the new slots are known"
    rig.learn(topic("orders", 1, 2, 3, version=2))
    settle(rig, first)
    for number, future in enumerate(futures):
        name = names[number % 8]
        receipt = future.result(0)
        assert place_of(receipt.queue, receipt.shard) == PLACES[business_hash(name) % 6]
    assert_in_order(rig, names, first)


@pytest.mark.parametrize("detail", [{}, {"slots_version": 1}], ids=["says nothing", "says what it knows"])
def test_a_shard_that_does_not_know_the_newest_slots_yet_is_asked_again(detail: dict[str, int]) -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2, version=2))
    name = name_at(place_of(0, 1), PLACES[:4])
    first, second = (rig.send(body, business_id=name, ordered=True) for body in (b"1", b"2"))
    (early,) = rig.requests
    for _ in range(3):
        rig.requests[-1].refuse(StaleRoute("no queues in this shard", **detail))
        count = len(rig.requests)
        rig.router.advance(ROUTE_SECONDS * 2)
        assert len(rig.requests) == count + 1
    again = rig.requests[-1]
    assert again.numbers == early.numbers
    again.store()
    rig.requests[-1].store()
    assert (first.result(0).offset, second.result(0).shard) == (0, 1)


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_refused_batch_that_was_divided_anew_is_not_sent_as_it_was(is_settled: bool) -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    names = [name_at(place_of(0, 1), PLACES[:4], after) for after in range(20)]
    futures = [rig.send(name.encode(), business_id=name, ordered=True) for name in names]
    rig.requests[0].store()
    refused = rig.requests[-1]
    assert refused.header.count == 19
    refused.refuse(StaleRoute("other slots", slots_version=2))
    rig.learn(topic("orders", 1, 2, 3, version=2))
    parts = rig.requests[2:]
    assert len({rig.shard_of(part) for part in parts}) > 1
    if is_settled:
        for part in parts:
            part.store()
    rig.router.advance(ROUTE_SECONDS * 3)
    assert rig.requests[2:] == parts, "it would be stored twice"
    if not is_settled:
        for part in parts:
            part.store()
    assert all(future.done() and future.result(0).shard for future in futures)


def test_what_is_under_way_by_old_slots_ends_there_before_others_go_by_new_ones() -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    name = next(
        name
        for name in map(str, range(2000))
        if PLACES[:4][business_hash(name) % 4] == place_of(0, 1) and PLACES[business_hash(name) % 6] == place_of(0, 3)
    )
    before = rig.send(b"1", business_id=name, ordered=True)
    (first,) = rig.requests
    rig.learn(topic("orders", 1, 2, 3, version=2))
    after = rig.send(b"2", business_id=name, ordered=True)
    assert rig.requests == [first], "it would overtake the first one"
    first.store()
    assert before.result(0).shard == 1
    (second,) = rig.link(3).produced()
    assert second.header.slots_version == 2
    second.store()
    assert after.result(0).shard == 3


def test_what_was_sent_and_not_answered_keeps_its_place_over_a_change_of_slots() -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    name = name_at(place_of(0, 1), PLACES[:4])
    future = rig.send(b"1", business_id=name, ordered=True)
    (first,) = rig.requests
    rig.lose(1)
    rig.learn(topic("orders", 1, 2, 3, version=2))
    rig.router.advance(3.0)
    assert rig.requests == [first]
    rig.back(1)
    again = rig.link(1).produced()[-1]
    assert again.numbers == first.numbers
    assert again.flags & Flag.RESEND
    again.refuse(StaleRoute("it never came"))
    rig.router.advance(ROUTE_SECONDS)
    last = [one for one in rig.requests if one not in (first, again)]
    assert [one.header.slots_version for one in last] == [2]
    last[0].store()
    assert future.done()


def test_send_many_by_old_slots_is_divided_anew() -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    route = rig.routes.get("orders")
    assert route is not None
    messages = [Message(b"%d" % number, business_id=f"u{number % 40}", ordered=True) for number in range(400)]
    batches = [*rig.core.many(route, messages, SendOptions("orders"))]
    rig.learn(topic("orders", 1, 2, 3, version=2))
    for batch, _ in batches:
        rig.core.accumulator.add(batch)
        rig.core.sender.pump(batch.lane)
    settle(rig)
    for batch, indexes in batches:
        assert batch.is_done
        for rank, index in enumerate(indexes):
            receipt = batch.receipt(rank)
            assert place_of(receipt.queue, receipt.shard) == PLACES[business_hash(f"u{index % 40}") % 6]
    assert rig.core.accumulator.messages == 0
    assert rig.core.accumulator.bytes == 0


def test_a_part_that_fails_fails_its_own_messages_only() -> None:
    rig = Rig(shard(1), shard(2), shard(3), topic("orders", 1, 2))
    start = place_of(0, 1)
    names = [name_at(start, PLACES[:4], after) for after in range(8)]
    blocker = rig.send(b"0", business_id=names[0], ordered=True)
    futures = [rig.send(b"1", business_id=name, ordered=True) for name in names]
    (first,) = rig.requests
    rig.learn(topic("orders", 1, 2, 3, version=2))
    first.store()
    assert blocker.done()
    parts = [request for request in rig.requests if request is not first]
    assert len(parts) > 1
    parts[0].refuse(RateLimited("no"))
    for part in parts[1:]:
        part.store()
    failed = [future for future in futures if future.exception(0) is not None]
    assert 0 < len(failed) < len(futures)
    assert len(failed) == parts[0].header.count


def test_a_topic_without_writable_slots_refuses_ordered_messages_with_a_sentence() -> None:
    rig = Rig()
    with pytest.raises(StaleRoute, match="dmq topic place"):
        draft_of(rig.core, Route(2, False, 0.0, (), 3), "orders", b"x", business_id="b", ordered=True)


def settle(rig: Rig, *done: Request) -> None:
    """Have everything stored that is under way, until nothing is."""
    settled = [*done]
    while fresh := [request for request in rig.requests if request not in settled]:
        settled.append(fresh[0])
        fresh[0].store()
        rig.router.advance(0.0)


def assert_in_order(rig: Rig, names: list[str], *but: Request) -> None:
    """The messages of a business id were sent in the order of their turns."""
    for name in names:
        at = []
        for turn in range(3):
            body = name.encode() + b"-%d" % turn
            ((request, where),) = [
                (one, one.body.index(body)) for one in rig.requests if one not in but and body in one.body
            ]
            at.append((rig.shard_of(request), request.header.queue, request.header.first_sequence, where))
        assert at == sorted(at)
        assert len({place[:2] for place in at}) == 1


def test_what_may_go_to_other_shards_does_not_wait_for_one_that_does_not_answer() -> None:
    rig = Rig()
    silent = rig.send(b"silent")
    (unanswered,) = rig.requests
    waiting = rig.send(b"waiting")  # gathers, as long as the first may be answered any moment
    assert rig.requests == [unanswered]
    rig.router.advance(LEADER_SECONDS + 0.1)
    moved = [request for request in rig.requests if request is not unanswered]
    assert len(moved) == 1
    assert rig.shard_of(moved[0]) != rig.shard_of(unanswered)
    moved[0].store()
    assert waiting.done()
    for _ in range(20):
        rig.router.advance(0.2)
        rig.send()
        settle(rig, unanswered)
    assert all(rig.shard_of(one) != rig.shard_of(unanswered) for one in rig.requests if one is not unanswered)
    assert not silent.done()
    unanswered.store()
    assert silent.result(0).shard == rig.shard_of(unanswered)
