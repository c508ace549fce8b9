"""Ten thousand delays over restarts, deaths and clocks that jump: none lost, none twice, none early. (D-14, D-18)

The broker runs on files in memory and by a clock that the test moves. Its own time is the wall clock at its start and
the monotonic clock since; the test keeps the same time beside it and knows what must be delivered, and what must not.
"""

from __future__ import annotations

import random
import time

import pytest

import dmq
from dmq.client.client import Client
from dmq.testing import FakeClock, TestBroker
from tests.sampling import SEED, sample_size

NOW = 1_700_000_000_000
HOUR = 3_600_000
PATIENCE = 60.0
QUEUES = 4


class Life:
    """A broker, what was delayed, and what came."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(NOW)
        self.broker = TestBroker(clock=self.clock, auto_create=False)
        self.broker.start()
        self.client: Client = self.broker.connect()
        self.client.admin.create_topic("orders", queues=QUEUES)
        self.producer = self.client.producer(timeout=60.0)
        self.time_ms = NOW  # the broker's
        self.latest_ms = NOW  # how far it had come in any life since the queues were last read
        self.dues: dict[str, int] = {}
        self.came: set[str] = set()
        self.deaths = self.restarts = self.jumps = 0
        self.read = [0] * QUEUES

    def send(self, count: int) -> None:
        """Delay messages by up to two hours, in batches and one by one."""
        while count > 0:
            size = min(count, self.rng.choice((1, 20, 300)))
            # A due time is a moment of the wall, whatever the broker thinks the time is.
            due_ms = self.time_ms + self.rng.randint(0, 2 * HOUR)
            messages = [dmq.Message(b"x", key=f"k-{len(self.dues) + n}") for n in range(size)]
            for receipt in self.producer.send_many("orders", messages, deliver_at=due_ms / 1000):
                self.dues[str(receipt.id)] = due_ms
            count -= size

    def pass_time(self) -> None:
        """Let time pass; the wall clock may jump by an hour besides, which a running broker does not notice."""
        passed_ms = self.rng.choice((0, 500, 60_000, 20 * 60_000))
        self.clock.advance(passed_ms / 1000)
        self.time_ms += passed_ms
        if self.rng.random() < 0.5:
            self.clock.set_wall_ms(self.clock.now_ms() + self.rng.choice((-HOUR, HOUR)))
            self.jumps += 1

    def end_and_start(self) -> None:
        """A restart, or a death at any moment, maybe in the middle of moving things; its time may go back by that."""
        self.latest_ms = max(self.latest_ms, self.time_ms)
        if self.rng.random() < 0.5:
            self.broker.kill()
            self.broker.start()
            self.deaths += 1
        else:
            self.broker.restart()
            self.restarts += 1
        self.time_ms = self.clock.now_ms()

    def settle(self) -> None:
        """Wait until everything due was delivered, and compare: all of that, once each, and nothing else."""
        due = {id for id, at_ms in self.dues.items() if at_ms <= self.time_ms}
        deadline = time.monotonic() + PATIENCE
        while True:
            self.look()
            if due <= self.came:
                break
            assert time.monotonic() < deadline, f"{len(due - self.came)} never came"
            time.sleep(0.01)

    def look(self) -> None:
        """Read on in every queue."""
        latest_ms = max(self.latest_ms, self.time_ms)
        for queue in range(QUEUES):
            while True:
                page, at = self.client.admin.read("orders", queue, self.read[queue], limit=1000)
                self.read[queue] = at
                for message in page:
                    id = str(message.id)
                    assert id in self.dues, "what was never sent"
                    assert id not in self.came, "it came twice"
                    assert self.dues[id] <= latest_ms, "it came early"
                    self.came.add(id)
                if not page:
                    break
        self.latest_ms = self.time_ms

    def close(self) -> None:
        self.client.close()
        self.broker.stop()


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(sample_size(share=1, whole=10)))
def test_ten_thousand_delays_over_restarts_deaths_and_jumps_come_once_and_not_early(number: int) -> None:
    life = Life(SEED + number)
    try:
        left = 10_000
        while left:
            life.send(min(left, 1000))
            left -= min(left, 1000)
            life.pass_time()
            if life.rng.random() < 0.7:
                life.end_and_start()
            if life.rng.random() < 0.7:
                life.settle()
        while not (life.deaths and life.restarts and life.jumps):  # chance may have left one of them out
            life.pass_time()
            life.end_and_start()
        # However far the clock was turned back: after three more hours all are due.
        behind_ms = max(life.dues.values()) - life.time_ms
        life.clock.advance(behind_ms / 1000 + 1.0)
        life.time_ms += behind_ms + 1000
        life.settle()
        assert len(life.came) == 10_000
        life.end_and_start()
        life.look()  # a start brings nothing back
        assert life.client.admin.stats("store_delays")["store_delays"] == 0
        print(
            f"DMQ_SEED={SEED}, life {number}: {len(life.came)} delays came, each once, over {life.deaths} deaths, "
            f"{life.restarts} restarts and {life.jumps} jumps of the clock"
        )
    except BaseException as error:
        error.add_note(f"DMQ_SEED={SEED}, life {number}")
        raise
    finally:
        life.close()
