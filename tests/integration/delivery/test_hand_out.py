"""Handing out: pull and push, leases, and what is said of messages."""

from __future__ import annotations

import pytest

import dmq
from dmq.client.client import connect
from dmq.testing.processes import BrokerProcess
from tests.integration.delivery.scenes import Scene, bodies
from tests.patience import eventually


def test_more_members_than_queues_work_at_once(scene: Scene) -> None:
    scene.send(*range(30))
    members = [scene.consumer() for _ in range(3)]
    batches = [scene.pull(member, 10) for member in members]
    assert sorted(n for batch in batches for n in bodies(batch)) == [*range(30)]


def test_a_pull_of_one_queue_gets_that_queue_and_waits_for_it(client: dmq.Client) -> None:
    scene = Scene(client, "of-one-queue", queues=3)
    receipts = scene.send(*range(9), business_id="u-7", ordered=True)
    mine = receipts[0].queue
    consumer = scene.consumer()
    assert not consumer.pull(wait=0.1, queue=(mine + 1) % 3)
    assert bodies(scene.pull(consumer, 9, queue=mine)) == [*range(9)]
    with pytest.raises(dmq.UnknownTopic, match="queues 0-2"):
        consumer.pull(wait=0.1, queue=3)


def test_pushes_stop_at_the_prefetch_and_every_ack_makes_room(scene: Scene) -> None:
    scene.send(*range(20))
    consumer = scene.consumer(prefetch=4)
    first, *_ = [next(consumer) for _ in range(4)]
    eventually(lambda: scene.queue().leased == 4)
    first.ack()
    eventually(lambda: scene.queue().floor == 1 and scene.queue().leased == 4)


def test_pushes_are_bounded_in_bytes_as_well(scene: Scene) -> None:
    with scene.client.producer(compression="none") as producer:
        producer.send_many(scene.topic, [dmq.Message(bytes(4000)) for _ in range(20)])
    consumer = scene.consumer(prefetch_bytes=10_000, batch=1)
    held = [next(consumer) for _ in range(3)]
    for number in range(20):
        assert scene.queue().leased <= 3, "the third one goes out while there is room; then no more"
        if number < 17:
            eventually(lambda: scene.queue().leased == 3)
        held.pop(0).ack()
        if number < 17:
            held.append(next(consumer))
    eventually(lambda: scene.queue().floor == 20)


def test_single_messages_are_settled_in_any_order(scene: Scene) -> None:
    scene.send(*range(6))
    messages = scene.pull(scene.consumer(), 6)
    for at in (5, 0, 3):
        messages[at].ack()
    eventually(lambda: scene.queue().lag == 3)
    assert (scene.queue().floor, scene.queue().leased) == (1, 3)
    messages[1].ack()
    messages[2].ack()
    eventually(lambda: scene.queue().floor == 4)


def test_a_lease_that_ran_out_is_handed_out_again_as_the_next_attempt(scene: Scene) -> None:
    scene.send("1")
    assert scene.pull(scene.consumer(lease=0.2), 1)[0].attempt == 1
    assert scene.pull(scene.consumer(), 1)[0].attempt == 2


def test_a_member_whose_leases_ran_out_has_room_again(scene: Scene) -> None:
    scene.send(*range(3))
    consumer = scene.consumer(prefetch=3, lease=0.3)
    first = [next(consumer) for _ in range(3)]
    again = [next(consumer) for _ in range(3)]
    assert [message.attempt for message in (*first, *again)] == [1, 1, 1, 2, 2, 2]


def test_a_late_ack_still_counts(scene: Scene) -> None:
    scene.send("1")
    (late,) = scene.pull(scene.consumer(lease=0.2), 1)
    (again,) = scene.pull(scene.consumer(), 1)
    assert again.attempt == 2
    late.ack()
    eventually(lambda: scene.lag() == 0)


def test_a_late_extension_or_nack_does_not(scene: Scene) -> None:
    scene.send("1")
    (late,) = scene.pull(scene.consumer(lease=0.2), 1)
    other = scene.consumer()
    (again,) = scene.pull(other, 1)
    with pytest.raises(dmq.LeaseLost):
        late.extend(10)
    late.nack(delay=0.0)
    assert not other.pull(wait=0.3), "it is out already, and stays there"
    again.ack()
    eventually(lambda: scene.lag() == 0)
    assert scene.client.admin.lag(scene.topic, "billing").retrying == 0


def test_a_kill_of_the_broker_is_no_attempt_and_forgets_no_ack(mortal: BrokerProcess) -> None:
    with connect(mortal.url, app="test", timeout=60.0) as client:
        scene = Scene(client, "orders")
        scene.send(*range(10))
        consumer = scene.consumer()
        messages = scene.pull(consumer, 10)
        for at in (9, 2, 5):
            messages[at].ack()
        eventually(lambda: scene.lag() == 7)
        scene.send("10")  # acks are written before what comes next is flushed, or a moment later
        mortal.kill()
        mortal.start()
        with connect(mortal.url, app="test") as fresh:
            rest = scene.pull(fresh.consumer("orders", "billing"), 8)
            assert sorted(bodies(rest)) == [0, 1, 3, 4, 6, 7, 8, 10]
            assert {message.attempt for message in rest} == {1}


def test_a_group_misses_nothing_of_queues_that_a_topic_gets_while_it_is_away(client: dmq.Client) -> None:
    scene = Scene(client, "gets-queues", queues=1)
    with scene.consumer(start_from="latest") as consumer:
        assert not consumer.pull(wait=0.01)
    client.admin.update_topic("gets-queues", queues=3)
    scene.send(*range(12))
    with scene.consumer(start_from="latest") as consumer:
        assert sorted(bodies(scene.pull(consumer, 12))) == [*range(12)]
