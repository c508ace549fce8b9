"""The power goes at any moment of a store's life, and again while it recovers. (J-03, J-10, D-14, D-15, D-18, D-20)

Each state is drawn from a seed; a failure names the seed, the operation and the state, which `life_until` and
`recovered` bring up again.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from dmq.model import Durability, TopicConfig
from dmq.storage.store import MessageStore
from dmq.testing import CrashNow, MemoryFiles
from tests.fault.store.rig import SMALL, Rig
from tests.fault.store.workload import ORDERS, workload
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

LIVES = sample_size(share=3, whole=12)
POINTS = sample_size(share=24, whole=110)  # crashes of one life
STATES = sample_size(share=8, whole=20)  # states one crash may leave
# Lives x points x states: 576 in the share, 26,400 in the whole.


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


def crash_points(number: int) -> list[int]:
    """Operations of a life to crash in: one of each kind on each sort of file, for every third kind, the rest anywhere.

    Three lives that follow each other take every kind there is.
    """
    rig = life(life_seed(number))
    begun = rig.files.operations
    for step in workload(rig):
        step()
    by_sort: dict[tuple[str, str], list[int]] = {}
    for operation in rig.files.trace:
        changes = operation.kind not in ("read", "open", "listdir", "size")
        if changes and operation.number > begun:
            by_sort.setdefault((operation.kind, operation.path.partition("/")[0]), []).append(operation.number)
    assert len(by_sort) > 30
    rng = random.Random(life_seed(number))
    chosen = [rng.choice(by_sort[sort]) for sort in sorted(by_sort)[number % 3 :: 3]]
    return sorted(chosen + rng.sample(range(begun + 1, rig.files.operations), POINTS - len(chosen)))


def life_seed(number: int) -> int:
    return SEED * 1000 + number


def recovered(rig: Rig, seed: str) -> Rig:
    """One of the states a crash may leave, opened; in every other one the power goes again while it recovers."""
    rng = random.Random(seed)
    twin = rig.fork(rig.files.crash(rng), seed)
    if rng.random() < 0.5:
        twin.files = crashed_again(twin, rng)
    twin.open(durable=rig.store.queries.flushed)
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
    seed = life_seed(number)
    for operation in crash_points(number):
        rig = life_until(seed, operation)
        for state in range(STATES):
            where = f"{seed}/{operation}/{state}"
            try:
                twin = recovered(rig, where)
                twin.check(sample=1)
                goes_on(twin)
            except Exception as error:
                raise AssertionError(f"life {seed}, crash in operation {operation}, state {where!r}") from error


def goes_on(rig: Rig) -> None:
    """A store that has recovered takes messages, keeps them through the next crash, and is cleanly closed."""
    topic = rig.names[0] if rig.names else None
    if topic is not None:
        rig.append([rig.batch(topic, 0, rig.messages(2), producer=999)])
        rig.flush()
    if rig.rng.random() < 0.2:
        rig.crash(rig.rng)
        rig.check(sample=1)


@pytest.mark.sampled
def test_messages_on_the_straight_path_survive_as_the_others_do() -> None:
    """The power goes in each operation that writes a lone unit, or flushes it; the path is taken, not its fallback."""
    rig = life(SEED)
    rig.create(ORDERS, TopicConfig(queues=2))
    begun = rig.files.operations
    assert all(one_by_one(rig, number) for number in range(6))
    for operation in range(begun + 1, rig.files.operations + 1):
        rig = life(SEED)
        rig.create(ORDERS, TopicConfig(queues=2))
        rig.files.crash_at = operation
        with contextlib.suppress(CrashNow):
            for number in range(6):
                one_by_one(rig, number)
        for state in range(STATES):
            twin = recovered(rig, f"{SEED}/{operation}/{state}")
            twin.check(sample=1)
            goes_on(twin)


def one_by_one(rig: Rig, number: int) -> bool:
    level = (Durability.STORED, Durability.FLUSHED)[number % 2]
    items = [rig.batch(ORDERS, at % 2, rig.messages(1), producer=1 + at) for at in range(1 + number % 3)]
    is_usual = rig.append_lone(items, level)
    if level is Durability.FLUSHED:
        rig.flush()
    return is_usual
