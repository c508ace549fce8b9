"""Ordered groups (J-14, R-11): a queue's messages one after the other, also when one fails."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from tests.integration.consumer.handler_thread import Handling
from tests.integration.delivery.scenes import Scene, bodies
from tests.patience import eventually


class Log:
    """What handlers did, and whether two of one queue ever ran at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self.overlaps = 0
        self.by_id: dict[str, list[int]] = defaultdict(list)

    def handler(self, fails: Callable[[ReceivedMessage], bool]) -> Callable[[ReceivedMessage], None]:
        def handle(message: ReceivedMessage) -> None:
            with self._lock:
                self.overlaps += message.queue in self._running
                self._running.add(message.queue)
            try:
                time.sleep(0.001)
                if fails(message):
                    raise dmq.Retry("again", after=0.05)
                with self._lock:
                    self.by_id[message.business_id or ""].append(int(message.body))
            finally:
                with self._lock:
                    self._running.discard(message.queue)

        return handle

    @property
    def count(self) -> int:
        return sum(map(len, self.by_id.values()))


def test_messages_of_one_business_id_are_handled_in_order_by_any_number_of_members(client: Client) -> None:
    scene = Scene(client, "ordered", queues=4)
    with client.producer() as producer:
        for n in range(120):
            producer.send("ordered", str(n), business_id=f"u-{n % 12}", ordered=True)
    log = Log()
    handle = log.handler(lambda message: message.attempt == 1 and int(message.body) % 17 == 0)
    members = [scene.consumer(ordered=True) for _ in range(3)]
    with (
        Handling(members[0], handle, workers=4),
        Handling(members[1], handle, workers=4),
        Handling(members[2], handle, workers=4),
    ):
        eventually(lambda: log.count == 120)
    assert log.by_id == {f"u-{k}": [*range(k, 120, 12)] for k in range(12)}
    assert log.overlaps == 0


def test_there_is_one_lease_at_a_time_and_the_next_only_when_it_is_settled(scene: Scene) -> None:
    scene.send(*range(10), business_id="u", ordered=True)
    one, two = (scene.consumer(ordered=True, batch=3) for _ in range(2))
    first = one.pull(3)
    assert bodies(first) == [0, 1, 2]
    assert not two.pull(3, wait=0.1)
    first[0].ack()
    first[1].ack()
    assert not two.pull(3, wait=0.1)
    first[2].ack()
    assert bodies(two.pull(3)) == [3, 4, 5]


def test_a_failing_message_blocks_its_queue_and_no_other(client: Client) -> None:
    scene = Scene(client, "blocked", queues=2)
    queues: dict[int, str] = {}
    for n in range(50):
        if len(queues) < 2:
            (receipt,) = scene.send("0", business_id=f"u-{n}", ordered=True)
            queues.setdefault(receipt.queue, f"u-{n}")
    stuck, free = queues.values()
    for name in queues.values():
        scene.send(*range(1, 6), business_id=name, ordered=True)
    log = Log()
    may_pass = threading.Event()
    fails = lambda message: message.business_id == stuck and message.body == b"2" and not may_pass.is_set()  # noqa: E731
    with Handling(scene.consumer(ordered=True, max_attempts=None), log.handler(fails), workers=4):
        eventually(lambda: 5 in log.by_id[free] and 1 in log.by_id[stuck])
        assert 3 not in log.by_id[stuck]
        may_pass.set()
        eventually(lambda: 5 in log.by_id[stuck])
    assert [n for n in log.by_id[stuck] if n] == [1, 2, 3, 4, 5]


def test_after_its_last_attempt_a_message_is_a_dead_letter_and_the_queue_goes_on(scene: Scene) -> None:
    scene.send(*range(4), business_id="u", ordered=True)
    log = Log()
    with Handling(
        scene.consumer(ordered=True, max_attempts=3), log.handler(lambda message: message.body == b"1"), workers=2
    ):
        eventually(lambda: log.by_id["u"] == [0, 2, 3])
    eventually(lambda: [x.body for x in scene.client.admin.dead_letters(topic=scene.topic)] == [b"1"])
    (letter,) = scene.client.admin.dead_letters(topic=scene.topic)
    assert (letter.attempts, letter.reason) == (3, "RETRIES_EXHAUSTED")
