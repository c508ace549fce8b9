"""Parallel consumption of one queue (J-13): so many messages out at once, in leases of a batch, in any order."""

from __future__ import annotations

import threading

from dmq.client.consumer.message import ReceivedMessage
from tests.integration.consumer.handler_thread import PATIENCE, Handling
from tests.integration.delivery.scenes import Scene, bodies
from tests.patience import eventually


def test_twenty_in_parallel_in_batches_of_ten_are_two_leases(scene: Scene) -> None:
    scene.send(*range(100))
    one, two, three = (scene.consumer(parallel=20, batch=10) for _ in range(3))
    first, second = one.pull(10), two.pull(10)
    assert (bodies(first), bodies(second)) == ([*range(10)], [*range(10, 20)])
    assert not three.pull(10, wait=0.1)
    assert scene.queue().leased == 20


def test_the_second_lease_may_be_settled_first(scene: Scene) -> None:
    scene.send(*range(100))
    one, two = (scene.consumer(parallel=20, batch=10) for _ in range(2))
    first, second = one.pull(10), two.pull(10)
    two.ack(second)
    third = two.pull(10)
    assert bodies(third) == [*range(20, 30)], "it does not wait for the first"
    assert scene.queue().floor == 0
    for message in reversed(list(third)):
        message.ack()
    one.ack(first)
    eventually(lambda: scene.queue().floor == 30)


def test_handlers_of_all_members_together_never_have_more(scene: Scene) -> None:
    scene.send(*range(60))
    lock, may_end = threading.Lock(), threading.Event()
    begun: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        with lock:
            begun.append(int(message.body))
        assert may_end.wait(PATIENCE)

    one, two = (scene.consumer(parallel=20, batch=10) for _ in range(2))
    with Handling(one, handle, workers=20, policy="block"), Handling(two, handle, workers=20, policy="block"):
        eventually(lambda: len(begun) == 20)
        assert scene.queue().leased == 20
        scene.client.admin.topics()  # whatever else was on its way is here now
        assert sorted(begun) == [*range(20)]
        may_end.set()
        eventually(lambda: scene.lag() == 0)
    assert sorted(begun) == [*range(60)]


def test_one_that_fails_does_not_hold_up_the_others(scene: Scene) -> None:
    scene.send(*range(40))
    done: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        if message.body == b"3" and message.attempt == 1:
            raise ValueError("not yet")
        done.append(int(message.body))

    with Handling(scene.consumer(parallel=2, batch=1), handle, workers=2, local_retries=0):
        eventually(lambda: len(done) == 40)
    assert sorted(done) == [*range(40)]
    assert done.index(3) > 5
