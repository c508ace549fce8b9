"""An ordered group keeps its order when the broker dies while a handler runs. (J-14, R-11)"""

from __future__ import annotations

import threading

from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from tests.patience import eventually

FIRST, LATER = 5, 5


def test_what_comes_again_after_a_restart_waits_for_the_handler_that_still_runs() -> None:
    entered, may_go = threading.Event(), threading.Event()
    lock = threading.Lock()
    began: list[bytes] = []
    done: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        with lock:
            began.append(message.body)
        if message.body == b"0":
            entered.set()
            assert may_go.wait(120)
        with lock:
            done.append(message.body)

    with TestBroker(auto_create=False) as broker, broker.connect() as client:
        client.admin.create_topic("orders", queues=1)
        producer = client.producer(timeout=60.0)
        bodies = [b"%d" % number for number in range(FIRST + LATER)]
        for body in bodies[:FIRST]:
            producer.send("orders", body)
        consumer = client.consumer("orders", "ledger", ordered=True)
        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 3})
        running.start()
        try:
            assert entered.wait(120)
            for body in bodies[FIRST:]:  # behind what is out: nobody gets them before that is settled
                producer.send("orders", body)
            broker.kill()
            broker.start()
            # All of them are out with this member again, the later ones for the first time.
            eventually(lambda: client.admin.stats("broker_delivered")["broker_delivered"] >= len(bodies))
            with lock:
                assert began == [b"0"]
            may_go.set()
            eventually(lambda: len(done) >= len(bodies))
            eventually(lambda: client.admin.lag("orders", "ledger").total == 0)
        finally:
            may_go.set()
            consumer.close()
            running.join(120)
    assert done == bodies
