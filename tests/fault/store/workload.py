"""A scripted life of a store: everything that writes, with checkpoints, segment rolls and retention in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dmq.model import Durability, TopicConfig
from tests.fault.store.model import Expected
from tests.fault.store.rig import Rig

ORDERS, EVENTS, DEAD = "orders", "events", "%DLQ%billing"
TOPICS = (ORDERS, EVENTS, DEAD)
ROUNDS = 24

Step = Callable[[], object]


def workload(rig: Rig, rounds: int = ROUNDS) -> Iterator[Step]:
    """The steps one after another; what a step does depends on the rig's seed and on nothing else."""
    yield lambda: rig.create(ORDERS, TopicConfig(queues=2))
    yield lambda: rig.create(DEAD, TopicConfig(queues=1, carry_for="billing"))
    for number in range(rounds):
        if number % 6 == 0:
            yield lambda: rig.create(EVENTS, TopicConfig(queues=1))
        for step in (append_some, append_lone, append_many, append_together, delay, fire, begin_or_end, settle, settle):
            yield lambda step=step, number=number: step(rig, number)  # type: ignore[misc]
            if rig.rng.random() < 0.4:
                yield rig.flush
        yield lambda: rig.clock.advance(300.0)
        if number % 3 == 1:
            yield rig.checkpoint
        if number % 6 == 2:
            yield lambda number=number: checkpoint_in_steps(rig, number)  # type: ignore[misc]
        if number % 4 == 3:
            yield rig.retain
        if number % 6 == 4:
            yield lambda: rig.delete(EVENTS)


def durability(rig: Rig) -> Durability:
    return rig.rng.choice((Durability.STORED, Durability.FLUSHED))


def append_some(rig: Rig, number: int) -> None:
    topic = rig.rng.choice([name for name in rig.names if name in TOPICS])
    sent = rig.batch(topic, 0, rig.messages(rig.rng.randrange(1, 5)), producer=1 + number % 3)
    rig.append([sent], durability(rig))


def append_lone(rig: Rig, number: int) -> None:
    """Messages that came one by one: alone, and several producers' in one unit."""
    for count in (1, 1, 3):
        items = [rig.batch(ORDERS, at % 2, rig.messages(1), producer=20 + at) for at in range(count)]
        rig.append_lone(items, durability(rig))


def append_many(rig: Rig, number: int) -> None:
    messages = rig.alike(100) if number % 3 == 1 else rig.messages(100, 60)
    sent = rig.batch(ORDERS, number % 2, messages, producer=5, named=True)
    rig.append([sent], durability(rig))


def append_together(rig: Rig, number: int) -> None:
    items: list[Expected] = [rig.batch(DEAD, 0, rig.messages(1))]
    items += [rig.batch(ORDERS, queue, rig.messages(2, 3000), producer=7) for queue in (0, 1, 0)]
    rig.append(items, durability(rig), atomic=number % 2 == 0)


def delay(rig: Rig, number: int) -> None:
    now_ms = rig.clock.now_ms()
    dues = [now_ms + rig.rng.choice((1, 500_000, 5_000_000)) for _ in range(3)]
    rig.append([rig.delayed(number % 3, rig.messages(3), dues, ORDERS)], durability(rig))


def fire(rig: Rig, number: int) -> None:
    for due in rig.store.take_due(rig.clock.now_ms(), 3):
        rig.deliver(due, durability(rig))


def begin_or_end(rig: Rig, number: int) -> None:
    open_ones = sorted(rig.model.seen.transactions)
    if len(open_ones) > 3:
        rig.end_transaction(rig.rng.choice(open_ones), commit=number % 2 == 0)
    else:
        rig.append([rig.half(0, rig.messages(1), ORDERS)], durability(rig))


def checkpoint_in_steps(rig: Rig, number: int) -> None:
    """As a broker does it: life goes on while the files are written."""
    plan = rig.store.begin_checkpoint()
    rig.upkeep(lambda: None)
    assert plan is not None
    append_many(rig, number)
    delay(rig, number)
    settle(rig, number)
    plan.write()
    rig.upkeep(lambda: rig.store.finish_checkpoint(plan))


def settle(rig: Rig, number: int) -> None:
    topic = rig.rng.choice([name for name in rig.names if name in TOPICS])
    count = len(rig.model.seen.queues.get((rig.id_of(topic), 0), []))
    if not count:
        return
    group = rig.rng.choice(("billing", "audit"))
    if rig.rng.random() < 0.1:
        rig.append([rig.put_at("audit", topic, 0, rig.rng.randrange(count))], durability(rig))
        return
    start = rig.rng.randrange(count)
    width = min(count - start, 20)
    bitmap = rig.rng.choice((b"", rig.rng.randbytes(-(-width // 8))))
    rig.append([rig.settle(group, topic, 0, start, width, bitmap)], durability(rig))
