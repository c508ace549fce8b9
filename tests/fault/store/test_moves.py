"""Messages that fail are moved, and the machine dies before, inside and after every unit: never lost, never twice."""

from __future__ import annotations

import asyncio
import random

import pytest

from dmq.model import MessageId
from dmq.storage.store import MessageStore
from dmq.testing import CrashNow, FakeClock, MemoryFiles
from tests.fault.store.move_rig import MESSAGES, SETTINGS, Failing, places
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

LIVES = sample_size(share=4, whole=40)
STATES = sample_size(share=4, whole=12)  # states one crash may leave, a killed process not counted
ROUNDS = 40


def lived(seed: int, crash_at: int | None) -> Failing:
    """A life of failing messages, ended by a crash in its nth operation on the disk."""
    rng = random.Random(seed)
    files, clock = MemoryFiles(rng=random.Random(seed)), FakeClock()

    async def live() -> Failing:
        failing = Failing(files, clock)
        failing.begin()
        if crash_at is not None:
            files.crash_at = files.operations + crash_at
        try:
            await failing.work(rng, ROUNDS)
        except CrashNow:
            return failing
        assert crash_at is None, f"seed {seed}: there was no crash at {crash_at}"
        return failing

    return asyncio.run(live())


def check(files: MemoryFiles, acked: set[int], what: str) -> None:
    store = MessageStore(files, SETTINGS, FakeClock())
    found = places(store)
    for number in range(MESSAGES):
        count = found.pop(MessageId(7, number), 0)
        assert count <= 1, f"message {number} is in {count} places: {what}"
        assert count == 1 or number in acked, f"message {number} is lost: {what}"
    assert not found
    store.close()


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_a_message_that_fails_is_always_in_exactly_one_place(number: int) -> None:
    """J-05, R-13."""
    seed = SEED * 1000 + number
    whole = lived(seed, None)
    begun = MemoryFiles(rng=random.Random(seed))
    asyncio.run(_begun(begun))
    operations = whole.files.operations - begun.operations
    assert operations > 20
    assert len(whole.acked) < MESSAGES
    check(whole.files.kill(), whole.acked, f"seed {seed}, whole")
    step = max(1, operations // sample_size(share=25, whole=200))
    for point in range(1, operations, step):
        failing = lived(seed, point)
        rng = random.Random(point)
        check(failing.files.kill(), failing.acked, f"seed {seed}, killed at {point}")
        for state in range(STATES):
            check(failing.files.crash(rng), failing.acked, f"seed {seed}, crash at {point}, state {state}")


async def _begun(files: MemoryFiles) -> None:
    Failing(files, FakeClock()).begin()
