"""Moves against a simple model: what became of each message, which attempt is next, and not before when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import MessageId
from dmq.records import DeadReason
from dmq.testing import FakeClock, MemoryFiles
from tests.fault.store.move_rig import ATTEMPTS_MAX, MESSAGES, Failing, Verdict, places


class Life:
    """One message, as simple as it can be said."""

    def __init__(self) -> None:
        self.attempts = 0
        self.ready_at_ms = 0
        self.end = ""

    def hear(self, verdict: Verdict) -> None:
        assert not self.end, "it was settled for good"
        assert verdict.attempt == self.attempts + 1
        assert verdict.at_ms >= self.ready_at_ms, "it came early"
        self.attempts += 1
        if verdict.word == "ack":
            self.end = "acked"
        elif verdict.word == "reject":
            self.end = "REJECTED"
        elif self.attempts == ATTEMPTS_MAX:
            self.end = "RETRIES_EXHAUSTED"
        elif verdict.word == "later":
            self.ready_at_ms = verdict.at_ms + 1000 * 3 ** (self.attempts - 1)


@given(st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_messages_live_as_the_rules_say(seed: int) -> None:
    """J-05, R-13."""
    asyncio.run(check_life(random.Random(seed)))


async def check_life(rng: random.Random) -> None:
    failing = Failing(MemoryFiles(), FakeClock())
    failing.begin()
    member = failing.join()
    lives = [Life() for _ in range(MESSAGES)]
    for _ in range(rng.randrange(10, 120)):
        for verdict in await failing.step(member, rng):
            lives[verdict.body].hear(verdict)
        waiting = sum(not life.end and life.attempts > 0 for life in lives)
        assert failing.store.queries.retrying("g", failing.store.queries.topic("orders").id, 0) == waiting
    failing.store.flush()
    letters = failing.store.queries.find_topic("%DLQ%g")
    dead: Counter[tuple[MessageId | None, int | None, int | None]] = Counter()
    if letters is not None:
        for record in failing.store.queries.read(letters.name, 0, 0).records():
            said = record.attributes
            dead[said.message_id, said.attempt, said.reason_code] += 1
    assert dead == Counter(
        (MessageId(7, number), life.attempts, DeadReason[life.end].value)
        for number, life in enumerate(lives)
        if life.end not in ("", "acked")
    )
    assert places(failing.store) == Counter(
        MessageId(7, number) for number, life in enumerate(lives) if life.end != "acked"
    )
    failing.store.close()
