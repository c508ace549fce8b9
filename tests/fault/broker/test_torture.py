"""A real broker is killed, stopped and cut off again and again, while clients of every kind work with it.

What must hold afterwards is in `torture.Ledger.check`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
from dmq.testing.proxy import ChaosProxy
from tests.fault.broker.nursery import ForkedBroker
from tests.fault.broker.torture import GROUPS, QUEUES, TOPIC, Ledger, Workload
from tests.sampling import IS_SOAK, SEED, sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

KILLS = sample_size(share=25, whole=100)  # on each way
PATIENCE = 60.0
PACE = 1.0 if IS_SOAK else 0.4  # how long the pauses between troubles are


class Chaos:
    """What happens to the broker and to those who talk to it."""

    def __init__(self, broker: ForkedBroker, proxy: ChaosProxy, rng: random.Random) -> None:
        self._broker = broker
        self._proxy = proxy
        self._rng = rng
        self.kills = 0
        self.breaks = 0
        self.done: list[str] = []

    def _pause(self, low: float, high: float) -> None:
        time.sleep(PACE * self._rng.uniform(low, high))

    def cut_all(self) -> None:
        self.breaks += bool(self._proxy.cut())

    def cut_some(self) -> None:
        self.breaks += bool(self._proxy.cut(self._rng.randrange(1, 5), self._rng))

    def cut_one_way(self) -> None:
        """Nothing comes through in one direction; then, as when the peer's patience is over, the connections go."""
        to_target = self._rng.random() < 0.5
        self._proxy.stall(to_target=to_target, to_client=not to_target)
        self._pause(0.05, 0.4)
        if self._rng.random() < 0.5:
            self.breaks += bool(self._proxy.cut())
        self._proxy.resume()

    def delay(self) -> None:
        self._proxy.delay_seconds = 0.01
        self._pause(0.1, 0.3)
        self._proxy.delay_seconds = 0.0

    def freeze(self) -> None:
        os.kill(self._broker.pid, signal.SIGSTOP)
        self._pause(0.1, 0.6)
        if self._rng.random() < 0.3:
            self.breaks += bool(self._proxy.cut())
        os.kill(self._broker.pid, signal.SIGCONT)

    def stop(self) -> None:
        assert self._broker.stop() == 0
        self.breaks += 1
        self._pause(0.0, 0.2)
        self._broker.start()

    def kill(self) -> None:
        self._broker.kill()
        self.kills += 1
        self.breaks += 1
        self._pause(0.0, 0.3)
        self._broker.start()

    def round(self) -> None:
        """Some trouble, then a kill at a random moment."""
        trouble: list[Callable[[], None]] = [
            self.cut_all, self.cut_some, self.cut_one_way, self.delay, self.freeze, self.stop,
        ]  # fmt: skip
        for happen in self._rng.choices(trouble, [3, 3, 3, 2, 3, 1], k=self._rng.randrange(3)):
            self.done.append(happen.__name__)
            happen()
            self._pause(0.0, 0.3)
        self.done.append("kill")
        self._pause(0.0, 0.5)
        self.kill()


@pytest.mark.sampled
@pytest.mark.parametrize("straight", [True, False])
def test_nothing_acknowledged_is_lost_and_nobody_gets_stuck(tmp_path: Path, straight: bool) -> None:
    rng = random.Random(f"{SEED} torture")
    broker = ForkedBroker(tmp_path / "data", [f"broker.straight={str(straight).lower()}"])
    ledger = Ledger()
    with broker, ChaosProxy(("127.0.0.1", broker.port)) as proxy:
        chaos = Chaos(broker, proxy, rng)
        try:
            with dmq.connect(broker.url, app="checker") as checker:
                checker.admin.create_topic(TOPIC, queues=QUEUES)
                for group in GROUPS:
                    checker.admin.create_group(group, TOPIC)
                workload = Workload(ledger, [broker.url, proxy.url], rng, straight=straight)
                try:
                    workload.start()
                    for _ in range(KILLS):
                        chaos.round()
                        # Looking at a group that is not back yet must not change what it is.
                        checker.admin.lag(TOPIC, rng.choice(GROUPS))
                        assert not workload.problems, workload.problems
                    workload.stop_producing(PATIENCE)
                    workload.drain(checker, PATIENCE)
                finally:
                    workload.close()
                assert not workload.problems, workload.problems
            assert chaos.kills == KILLS
            ledger.check(chaos.breaks)
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, kill {chaos.kills}, last: {chaos.done[-8:]}")
            error.add_note(ledger.report(chaos.kills, chaos.breaks))
            raise
    print(f"DMQ_SEED={SEED}:", ledger.report(chaos.kills, chaos.breaks))
