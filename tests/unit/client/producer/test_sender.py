"""Batches on their way: sent, refused, lost, sent again, given up."""

from __future__ import annotations

from typing import Any

import pytest

from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.core import Core, ProducerOptions
from dmq.client.producer.future import SendFuture
from dmq.client.producer.routes import Route, Routes
from dmq.errors import (
    Busy,
    DMQError,
    InvalidRequest,
    NotConnected,
    OutOfRetries,
    RateLimited,
    ServerError,
    UnknownTopic,
)
from dmq.model import TopicConfig
from dmq.protocol import Command, Flag
from dmq.protocol.admin import TopicDescribeReply, TopicInfo
from dmq.testing import FakeClock
from tests.unit.client.drafts import draft_of
from tests.unit.client.links import FakeLink, FakeLinks


class Rig:
    """A producer's core over fake links."""

    def __init__(self, *hosts: str, queues: int = 4, **options: Any) -> None:
        self.clock = FakeClock()
        self.links = [FakeLink(host) for host in hosts or ("one",)]
        self.lines = FakeLinks(self.clock, *self.links)
        self.routes = Routes()
        self.route = Route(queues, False, self.clock.monotonic())
        self.routes.put("orders", self.route)
        self.core = Core.make("shop", ProducerOptions(**options), self.routes, self.lines, self.clock)

    @property
    def link(self) -> FakeLink:
        return self.links[0]

    def send(self, body: bytes = b"x", **message: Any) -> SendFuture:
        draft = draft_of(self.core, self.route, "orders", body, **message)
        put = self.core.put(draft, attended=True, deadline=None)
        assert put is not None, "the window is full"
        batch, index = put
        self.core.sender.pump(batch.lane)
        return SendFuture(batch, index)

    def reconnect(self, link: FakeLink) -> None:
        link.is_usable = True
        self.lines.links = [link, *(other for other in self.links if other is not link)]
        self.core.sender.connected(link)


def batch_of(future: SendFuture) -> SendBatch:
    outcome = future._outcome
    assert isinstance(outcome, SendBatch)
    return outcome


def test_a_lone_message_leaves_at_once() -> None:
    rig = Rig()
    future = rig.send()
    (request,) = rig.link.requests
    assert request.command == Command.PRODUCE
    assert future.id is not None
    assert not future.done()
    request.store(41)
    assert future.result(0).offset == 41
    assert future.result(0).id == future.id


def test_the_next_batch_gathers_while_one_is_under_way() -> None:
    rig = Rig()
    rig.send()
    rest = [rig.send() for _ in range(5)]
    assert len(rig.link.requests) == 1
    rig.link.requests[0].store()
    assert [request.header.count for request in rig.link.requests] == [1, 5]
    rig.link.requests[1].store(10)
    assert [future.result(0).offset for future in rest] == [10, 11, 12, 13, 14]


def test_each_batch_takes_the_next_queue() -> None:
    rig = Rig()
    for number in range(8):
        rig.send()
        rig.link.requests[number].store()
    queues = [request.header.queue for request in rig.link.requests]
    assert sorted(queues[:4]) == [0, 1, 2, 3]
    assert queues[4:] == queues[:4]


def test_a_lost_batch_is_sent_again_to_its_broker_with_the_same_numbers() -> None:
    rig = Rig()
    future = rig.send(b"once")
    first = rig.link.requests[0]
    assert not first.flags & Flag.RESEND
    rig.link.lose()
    assert not future.done()
    rig.reconnect(rig.link)
    again = rig.link.requests[1]
    assert again.flags & Flag.RESEND
    assert again.numbers == first.numbers
    assert again.body == first.body
    again.store(3)
    assert future.result(0).offset == 3


def test_a_message_that_never_left_goes_without_resend() -> None:
    rig = Rig()
    rig.link.is_usable = False
    future = rig.send()
    assert rig.link.requests == []
    rig.reconnect(rig.link)
    assert not rig.link.requests[0].flags & Flag.RESEND
    rig.link.requests[0].store()
    assert future.exception(0) is None


def test_an_unordered_batch_moves_when_its_broker_is_gone() -> None:
    rig = Rig("one", "two")
    rig.send()
    rig.links[0].lose()
    rig.reconnect(rig.links[1])
    assert rig.links[1].requests[0].numbers == rig.links[0].requests[0].numbers


def test_an_ordered_batch_that_may_be_stored_waits_for_its_broker() -> None:
    rig = Rig("one", "two")
    future = rig.send(business_id="u-7", ordered=True)
    rig.links[0].lose()
    rig.reconnect(rig.links[1])
    assert rig.links[1].requests == []
    rig.reconnect(rig.links[0])
    assert rig.links[0].requests[1].flags & Flag.RESEND
    rig.links[0].requests[1].store()
    assert future.exception(0) is None


def test_an_unanswered_batch_is_sent_again_after_30_60_and_90_seconds_and_then_given_up() -> None:
    rig = Rig()
    future = rig.send()
    for seconds, times in ((29, 1), (2, 2), (28, 2), (2, 3), (28, 3), (2, 4), (28, 4)):
        rig.lines.advance(seconds)
        assert len(rig.link.produced()) == times
    assert {request.numbers for request in rig.link.produced()} == {rig.link.produced()[0].numbers}
    assert all(request.flags & Flag.RESEND for request in rig.link.produced()[1:])
    assert not future.done()
    rig.lines.advance(2)
    assert isinstance(future.exception(0), OutOfRetries)
    assert rig.core.accumulator.messages == 0


def test_an_answer_to_any_sending_counts() -> None:
    rig = Rig(resend_after=(1.0, 2.0))
    future = rig.send()
    rig.lines.advance(1.5)
    assert len(rig.link.produced()) == 2
    rig.link.produced()[1].store(9)
    assert future.result(0).offset == 9
    rig.lines.advance(60)
    assert len(rig.link.produced()) == 2


def test_busy_is_tried_again_when_the_broker_said() -> None:
    rig = Rig()
    future = rig.send()
    rig.link.requests[0].refuse(Busy("full", retry_after_ms=700))
    rig.lines.advance(0.6)
    assert len(rig.link.requests) == 1
    rig.lines.advance(0.2)
    assert rig.link.requests[1].numbers == rig.link.requests[0].numbers
    assert not rig.link.requests[1].flags & Flag.RESEND
    rig.link.requests[1].store()
    assert future.exception(0) is None


def test_a_refused_batch_goes_to_another_broker() -> None:
    rig = Rig("one", "two")
    future = rig.send()
    rig.links[0].requests[0].refuse(Busy("full", retry_after_ms=700))
    rig.links[1].requests[0].store()
    assert future.exception(0) is None


def test_a_limit_holds_on_every_broker_so_what_is_over_it_fails_at_once() -> None:
    rig = Rig("one", "two")
    future = rig.send()
    rig.links[0].requests[0].refuse(RateLimited("too fast", retry_after_ms=100))
    error = future.exception(0)
    assert isinstance(error, RateLimited)
    assert error.retry_after == 0.1
    rig.lines.advance(0.2)
    assert (len(rig.links[0].requests), len(rig.links[1].requests)) == (1, 0)


def test_what_the_broker_may_have_stored_is_asked_of_it_again() -> None:
    rig = Rig("one", "two")
    rig.send()
    rig.links[0].requests[0].refuse(ServerError("oops"))
    rig.lines.advance(1)
    assert rig.links[1].requests == []
    assert rig.links[0].requests[1].flags & Flag.RESEND


def test_refusals_without_a_time_end_after_the_retries() -> None:
    rig = Rig(retries=2)
    future = rig.send()
    for number in range(3):
        rig.link.requests[number].refuse(Busy("full"))
        rig.lines.advance(5)
    assert len(rig.link.requests) == 3
    assert isinstance(future.exception(0), Busy)


@pytest.mark.parametrize("error", [InvalidRequest("no"), UnknownTopic("gone")])
def test_what_cannot_succeed_is_not_tried_again(error: DMQError) -> None:
    rig = Rig()
    future = rig.send()
    rig.link.requests[0].refuse(error)
    for request in rig.link.requests[1:]:
        request.refuse(error)
    assert len(rig.link.produced()) == 1
    assert type(future.exception(0)) is type(error)


def test_an_unknown_topic_is_looked_at_again_before_giving_up() -> None:
    rig = Rig()
    future = rig.send()
    rig.link.requests[0].refuse(UnknownTopic("not here yet"))
    assert rig.link.requests[1].command == Command.TOPIC_DESCRIBE
    rig.link.requests[1].answer(TopicDescribeReply(TopicInfo("orders", TopicConfig(queues=8))))
    assert rig.routes.get("orders") is not None
    rig.link.requests[2].store()
    assert future.exception(0) is None


def test_a_connection_that_breaks_while_sending_leaves_the_batch_parked() -> None:
    rig = Rig()
    rig.send()
    rig.link.lose()
    later = rig.send()
    rig.reconnect(rig.link)
    assert [request.header.count for request in rig.link.produced()] == [1, 1]
    rig.link.produced()[1].store()
    rig.link.produced()[-1].store()
    assert later.exception(0) is None


def test_what_was_never_sent_fails_when_no_broker_is_reached_for_too_long() -> None:
    rig = Rig()
    sent = rig.send()
    rig.link.lose()
    unsent = rig.send()
    rig.core.sender.unreachable(NotConnected("nobody"))
    assert isinstance(unsent.exception(0), NotConnected)
    assert not sent.done()


def test_durability_none_needs_no_answer() -> None:
    rig = Rig()
    future = rig.send(durability="none")
    assert len(rig.link.told) == 1
    receipt = future.result(0)
    assert (receipt.durability, receipt.offset) == ("none", -1)


def test_a_slow_durability_holds_up_nobody() -> None:
    rig = Rig(queues=1)
    slow = rig.send(durability="flushed")
    fast = rig.send(durability="stored")
    rig.link.requests[1].store()
    assert fast.done()
    assert not slow.done()
    assert rig.link.requests[0].header.producer_id != rig.link.requests[1].header.producer_id


def test_callbacks_run_before_their_room_is_free() -> None:
    rig = Rig()
    seen: list[int] = []
    rig.send().add_done_callback(lambda _: seen.append(rig.core.accumulator.messages))
    rig.link.requests[0].store()
    assert seen == [1]
    assert rig.core.accumulator.messages == 0


def test_closing_fails_what_is_not_settled() -> None:
    rig = Rig()
    under_way, gathering = rig.send(), rig.send()
    rig.core.sender.close(NotConnected("closed"))
    for future in (under_way, gathering):
        assert isinstance(future.exception(0), NotConnected)
    with pytest.raises(NotConnected):
        rig.core.check_open()


def test_a_late_answer_after_the_end_changes_nothing() -> None:
    rig = Rig()
    future = rig.send()
    rig.core.sender.close(NotConnected("closed"))
    rig.link.requests[0].store()
    assert isinstance(future.exception(0), NotConnected)
    assert (rig.core.accumulator.messages, rig.core.accumulator.bytes) == (0, 0)


def test_a_batch_is_encoded_once() -> None:
    rig = Rig()
    future = rig.send(b"body", key="k")
    assert batch_of(future).messages == []
    assert b"body" in rig.link.requests[0].body


def test_what_is_known_of_a_topic_is_asked_for_anew_after_an_hour() -> None:
    rig = Rig()
    rig.clock.advance(3601)
    rig.send()
    assert [request.command for request in rig.link.requests] == [Command.TOPIC_DESCRIBE, Command.PRODUCE]
    rig.link.requests[0].answer(TopicDescribeReply(TopicInfo("orders", TopicConfig(queues=7))))
    route = rig.routes.get("orders")
    assert route is not None
    assert route.queues == 7
    rig.link.requests[1].store()
    rig.send()
    assert len(rig.link.requests) == 3
