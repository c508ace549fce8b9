"""The power goes at any moment of a store's life, and again while it recovers. (J-03, J-10, D-14, D-15, D-18, D-20)

Each state is drawn from a seed; a failure names the seed, the operation and the state, which `life_until` and
`recovered` bring up again.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from dmq.storage.store import MessageStore
from dmq.testing import CrashNow, MemoryFiles
from tests.fault.rig import SMALL, Rig
from tests.fault.workload import workload
from tests.sampling import SEED, sample_size

LIVES = sample_size(share=3, whole=12)
POINTS = sample_size(share=36, whole=110)  # crashes of one life
STATES = sample_size(share=20, whole=20)  # states one crash may leave
# Lives x points x states: 2,160 in the share, 26,400 in the whole.


def life(seed: int) -> Rig:
    return Rig(seed, SMALL, MemoryFiles(rng=random.Random(seed), trace=5_000))


def life_until(seed: int, operation: int) -> Rig:
    """A store's life, ended by a crash in its nth operation on the disk."""
    rig = life(seed)
    rig.files.crash_at = operation
    try:
        for step in workload(rig):
            step()
    except CrashNow:
        return rig
    raise AssertionError(f"life {seed} has no operation {operation}")


def crash_points(seed: int, count: int) -> list[int]:
    """Operations to crash in: of every kind on every sort of file some, the rest anywhere."""
    rig = life(seed)
    begun = rig.files.operations
    for step in workload(rig):
        step()
    rng = random.Random(seed)
    by_sort: dict[tuple[str, str], list[int]] = {}
    for operation in rig.files.trace:
        changes = operation.kind not in ("read", "open", "listdir", "size")
        if changes and operation.number > begun:
            sort = (operation.kind, operation.path.partition("/")[0])
            by_sort.setdefault(sort, []).append(operation.number)
    chosen = [rng.choice(numbers) for numbers in by_sort.values()]
    rng.shuffle(chosen)
    # A life has more sorts than the share takes: each seed takes others, and all together take every one.
    return sorted(chosen[: count // 2] + rng.sample(range(begun + 1, rig.files.operations), count - count // 2))


def recovered(rig: Rig, seed: str) -> Rig:
    """One of the states a crash may leave, opened; in every other one the power goes again while it recovers."""
    rng = random.Random(seed)
    twin = rig.fork(rig.files.crash(rng), seed)
    if rng.random() < 0.5:
        twin.files = crashed_again(twin, rng)
    twin.open(durable=rig.store.flushed)
    return twin


def crashed_again(rig: Rig, rng: random.Random) -> MemoryFiles:
    """What is left when the machine fails up to three times while the store opens."""
    files = rig.files
    for _ in range(rng.randrange(1, 4)):
        files.crash_at = files.operations + rng.randrange(1, 60)
        with contextlib.suppress(CrashNow):
            MessageStore(files, SMALL, rig.clock)
        files = files.crash(rng)
    return files


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_no_crash_takes_what_was_flushed_or_shows_what_was_not_sent(number: int) -> None:
    """J-03, J-10: nothing flushed is lost, nothing appears from nowhere, order is kept, only a last part may go.

    D-14, D-15, D-18, D-20: delays, producers, transactions and positions are those of the part that is left.
    """
    life_seed = SEED * 1000 + number
    for operation in crash_points(life_seed, POINTS):
        rig = life_until(life_seed, operation)
        for state in range(STATES):
            where = f"{life_seed}/{operation}/{state}"
            try:
                twin = recovered(rig, where)
                twin.check(sample=1)
                goes_on(twin)
            except Exception as error:
                raise AssertionError(f"life {life_seed}, crash in operation {operation}, state {where!r}") from error


def goes_on(rig: Rig) -> None:
    """A store that has recovered takes messages, keeps them through the next crash, and is cleanly closed."""
    topic = rig.names[0] if rig.names else None
    if topic is not None:
        rig.append([rig.batch(topic, 0, rig.messages(2), producer=999)])
        rig.flush()
    if rig.rng.random() < 0.2:
        rig.crash(rig.rng)
        rig.check(sample=1)
