"""Several batches of a producer under way to one queue: when they leave, what they name, and what follows a refusal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dmq.client.producer.accumulator import OVERLAP_MAX, SendBatch
from dmq.client.producer.accumulator import SECOND_MESSAGES_MIN as MANY
from dmq.client.producer.message import SendOptions
from dmq.errors import Busy, DiskFull, DMQError, OutOfOrder, RateLimited, ServerError, TimedOut
from dmq.model import Message
from dmq.protocol import Flag
from dmq.protocol.session import OVERLAP
from dmq.storage.state.producers import REMEMBERED
from tests.unit.client.links import FakeLink, Request
from tests.unit.client.producer.test_sender import Rig


def make_rig(*, queues: int = 1, features: Sequence[str] = (OVERLAP,)) -> Rig:
    rig = Rig(queues=queues)
    rig.link.features = frozenset(features)
    return rig


def send_batch(rig: Rig, body: bytes = b"x", count: int = 3) -> SendBatch:
    """One batch, as `send_many` makes it."""
    ((batch, _),) = rig.core.many(rig.route, [Message(body)] * count, SendOptions("orders"))
    with rig.core.lock:
        rig.core.accumulator.add(batch)
    rig.core.sender.pump(batch.lane)
    return batch


def named(link: FakeLink) -> list[tuple[int, int | None]]:
    """What each batch begins with, and what it names as the message before it."""
    return [(request.header.first_sequence, request.header.previous_sequence) for request in link.requests]


def out_of_order(request: Request) -> None:
    request.refuse(OutOfOrder("not yet"))


def test_batches_follow_each_other_and_name_the_one_before() -> None:
    rig = make_rig()
    batches = [send_batch(rig) for _ in range(6)]
    assert named(rig.link) == [(0, None), (3, 2), (6, 5), (9, 8)]
    for request in rig.link.requests:
        request.store()
    assert named(rig.link)[4:] == [(12, 11), (15, 14)]
    for request in rig.link.requests[4:]:
        request.store()
    assert all(batch.is_done and batch.error is None for batch in batches)
    send_batch(rig)
    assert named(rig.link)[6] == (18, None)  # nothing is under way: a broker that forgot the producer takes it


def test_there_are_never_more_under_way_than_a_broker_remembers() -> None:
    assert OVERLAP_MAX < REMEMBERED


def test_free_queues_come_first() -> None:
    rig = make_rig(queues=3)
    for _ in range(20):
        send_batch(rig)
    queues = [request.header.queue for request in rig.link.requests]
    assert len(queues) == 3 * OVERLAP_MAX
    assert all(sorted(queues[at : at + 3]) == [0, 1, 2] for at in range(0, len(queues), 3))


def test_a_broker_without_the_feature_gets_one_batch_at_a_time() -> None:
    rig = make_rig(features=())
    batches = [send_batch(rig) for _ in range(3)]
    assert named(rig.link) == [(0, None)]
    for at in range(3):
        rig.link.requests[at].store()
    assert named(rig.link) == [(0, None), (3, None), (6, None)]
    assert all(batch.is_done for batch in batches)


def test_messages_that_gather_leave_beside_others_once_they_are_many() -> None:
    rig = make_rig()
    rig.send()
    for _ in range(5 * MANY):
        rig.send()
    assert [request.header.count for request in rig.link.requests] == [1, MANY, MANY, MANY]
    for request in rig.link.requests[:4]:
        request.store()
    assert [request.header.count for request in rig.link.requests][4:] == [2 * MANY]


@pytest.mark.parametrize("error", [Busy("full", retry_after_ms=100), DiskFull("no space"), ServerError("odd")])
def test_what_comes_behind_a_refused_batch_waits_for_it(error: DMQError) -> None:
    rig = make_rig()
    first, second, third = (send_batch(rig) for _ in range(3))
    requests = [*rig.link.requests]
    requests[0].refuse(error)
    late = send_batch(rig)  # not behind one that has to go again
    out_of_order(requests[1])
    out_of_order(requests[2])
    assert len(rig.link.requests) == 3
    rig.lines.advance(0.2)
    assert named(rig.link)[3:] == [(0, None)]
    rig.link.requests[3].store()
    assert named(rig.link)[4:] == [(3, None)]
    rig.link.requests[4].store()
    rig.link.requests[5].store()
    assert named(rig.link)[5:] == [(6, None), (9, None)]
    assert first.error is second.error is third.error is None
    assert not late.is_done


def test_a_batch_behind_one_that_failed_goes_without_it() -> None:
    rig = make_rig()
    first, second = send_batch(rig), send_batch(rig)
    requests = [*rig.link.requests]
    requests[0].refuse(RateLimited("too fast"))
    assert isinstance(first.error, RateLimited)
    assert len(rig.link.requests) == 2  # its answer is still to come
    out_of_order(requests[1])
    assert named(rig.link)[2:] == [(3, None)]
    assert not rig.link.requests[2].flags & Flag.RESEND
    rig.link.requests[2].store()
    assert second.error is None


def test_after_a_lost_connection_batches_go_again_one_by_one() -> None:
    rig = make_rig()
    batches = [send_batch(rig) for _ in range(3)]
    rig.link.lose()
    rig.reconnect(rig.link)
    for at in range(3):
        assert len(rig.link.requests) == 4 + at
        assert rig.link.requests[3 + at].flags & Flag.RESEND
        rig.link.requests[3 + at].store()
    assert named(rig.link)[3:] == [(0, None), (3, None), (6, None)]
    assert all(batch.error is None and batch.is_done for batch in batches)


def test_a_connection_to_an_older_broker_takes_over_batches_that_overlap() -> None:
    rig = Rig("one", "two", queues=1)
    rig.links[0].features = frozenset({OVERLAP})
    for _ in range(3):
        send_batch(rig)
    rig.links[0].lose()
    rig.reconnect(rig.links[1])
    send_batch(rig)
    for at in range(4):
        assert len(rig.links[1].requests) == at + 1
        rig.links[1].requests[at].store()
    assert named(rig.links[1]) == [(0, None), (3, None), (6, None), (9, None)]


def test_a_sender_whose_time_is_over_takes_back_what_is_held() -> None:
    rig = make_rig()
    send_batch(rig)
    second, third = send_batch(rig), send_batch(rig)
    requests = [*rig.link.requests]
    requests[0].refuse(Busy("full", retry_after_ms=1000))
    out_of_order(requests[1])
    out_of_order(requests[2])
    error = rig.core.sender.too_late(second, 1.0)
    assert isinstance(error, Busy), "what the broker said of those before it"
    assert rig.core.sender.withdraw(second, TimedOut("over"))
    rig.lines.advance(1.1)
    rig.link.requests[3].store()
    assert named(rig.link)[3:] == [(0, None), (6, None)]
    rig.link.requests[4].store()
    assert third.error is None


def test_a_broker_that_always_says_out_of_order_is_not_asked_for_ever() -> None:
    rig = make_rig()
    batch = send_batch(rig)
    for _ in range(20):
        for request in rig.link.requests[-1:]:
            out_of_order(request)
        rig.lines.advance(1.0)
    assert isinstance(batch.error, OutOfOrder)
    assert len(rig.link.requests) == 4


def test_closing_ends_what_is_held_and_sends_nothing() -> None:
    rig = make_rig()
    batches = [send_batch(rig) for _ in range(3)]
    requests = [*rig.link.requests]
    requests[0].refuse(Busy("full", retry_after_ms=1000))
    out_of_order(requests[1])
    rig.core.sender.close(TimedOut("closed"))
    rig.lines.advance(5.0)
    assert len(rig.link.requests) == 3
    assert all(isinstance(batch.error, TimedOut) for batch in batches)


def test_prepared_messages_go_one_batch_at_a_time() -> None:
    rig = make_rig()
    first = send_batch(rig)
    lane = rig.core.lane(first.lane.key._replace(is_half=True, group="shop"))
    for _ in range(2):
        batch = SendBatch(lane)
        batch.messages, batch.is_plain, batch.count, batch.bytes = [Message(b"half")], False, 1, 200
        with rig.core.lock:
            rig.core.accumulator.add(batch)
        rig.core.sender.pump(lane)
    assert len(rig.link.requests) == 2


def test_a_batch_that_is_repeated_goes_alone() -> None:
    rig = make_rig()
    batch = send_batch(rig)
    rig.lines.advance(200.0)  # it is given up
    assert batch.is_done
    assert batch.is_unknown
    send_batch(rig)
    sent = len(rig.link.requests)
    again = rig.core.sender.resume(batch, None)
    send_batch(rig)
    assert len(rig.link.requests) == sent
    rig.link.requests[-1].store()
    assert named(rig.link)[sent:] == [(0, None)]
    rig.link.requests[-1].store()
    assert again.is_done
    assert named(rig.link)[sent + 1 :] == [(6, None)]
