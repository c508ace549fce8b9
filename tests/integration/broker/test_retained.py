"""What stays in a broker of clients, topics and groups that came and went: nothing that grows with their number."""

from __future__ import annotations

import gc
import types
from collections import deque
from typing import Any, Final

import dmq
from dmq.settings import StoreSettings
from dmq.storage.delay.fragment import Fragment
from dmq.storage.index.block_file import BlockCache
from dmq.storage.journal.journal import WindowCache
from dmq.storage.read.record_origin import Identities
from dmq.storage.state.state import HALF_ID, SCHEDULE_ID
from dmq.testing.disk.files import MemoryFiles
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually

CYCLES: Final = 40
# Small bounds, so that what is bounded is full before the first count.
STORE: Final = StoreSettings(producers_max=20, checkpoint_records=20)
CODE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)


def live(url: str, number: int) -> None:
    """All of a short life: connect, use a topic and a group of one's own, delete both."""
    topic, group = f"topic-{number}", f"group-{number}"
    with dmq.connect(url, app=f"app-{number}", client_id=f"client-{number}") as client:
        client.admin.create_topic(topic, queues=2)
        client.admin.set_limit(topic=topic, messages=1_000_000)
        with client.producer(group=f"makers-{number}") as producer:
            producer.send_many(topic, [dmq.Message(b"x", key="k")] * 3)
            producer.send(topic, b"y", ttl=60.0)
            client.admin.cancel_delay(producer.send(topic, b"later", delay=3600.0).id)
            with producer.transaction(topic, b"one") as transaction:
                transaction.send(topic, b"two")
            producer.transaction(topic, b"never").rollback()
        with client.consumer(topic, group=group, tags="a || b") as consumer:
            consumer.pull(4, wait=0.01)
        with client.consumer(topic, group=f"{group}-more") as consumer:
            for message in consumer.pull(6, wait=20.0):
                message.nack(delay=60.0)
        client.admin.reset(topic, group, to="earliest")
        client.admin.delete_group(f"{group}-more")
        client.admin.delete_group(group)
        client.admin.delete_topic(topic)


def reached(root: object, passed_over: set[int]) -> dict[int, Any]:
    """All objects that can be reached from one, by their identity."""
    found: dict[int, Any] = {id(root): root}
    waiting = deque([root])
    while waiting:
        for other in gc.get_referents(waiting.popleft()):
            if id(other) not in found and id(other) not in passed_over and not isinstance(other, CODE):
                found[id(other)] = other
                waiting.append(other)
    return found


def sizes(served: ServedBroker) -> dict[int, tuple[int, Any]]:
    """How much is in each container of a broker."""
    transactions, derived = served.broker.transactions, served.broker.store.queries.derived
    # Bounded by a number that is too large for a test: how transactions ended (100,000), the heap of checks (1,024 and
    # the open ones), batch tables, the queues of the two topics that always exist. Or the disk, or on the way to it.
    bounded = (transactions._ended, transactions.checks._heap, derived.state.next, derived.lookup)
    # Delays of what was deleted stay until they are due, which is noticed if the clock passes a fragment meanwhile.
    kinds = BlockCache | Fragment | Identities | MemoryFiles | WindowCache
    passed_over = {id(one) for one in bounded} | {id(one) for one in gc.get_objects() if isinstance(one, kinds)}
    found = reached(served.server, passed_over)
    return {at: (len(one), one) for at, one in found.items() if isinstance(one, dict | list | set | deque)}


def test_what_came_and_went_leaves_nothing_that_grows() -> None:
    with ServedBroker(store=STORE, auto_create=False) as served, dmq.connect(served.url) as watcher:
        for number in range(CYCLES):
            live(served.url, number)
        before = {at: count for at, (count, _) in sizes(served).items()}
        for number in range(CYCLES, 2 * CYCLES):
            live(served.url, number)
        eventually(lambda: len(served.server._server.connections) == 1)
        grown = [
            (count - before[at], repr(one)[:200])
            for at, (count, one) in sizes(served).items()
            if at in before and count - before[at] >= CYCLES // 2
        ]
        assert not grown, "\n".join(map(str, grown))
        assert watcher.admin.topics() == []
        state = served.broker.store.queries.derived.state
        assert {key >> 8 for key in state.next} <= {SCHEDULE_ID, HALF_ID}
        # One more than may be remembered comes with every transaction until the next checkpoint.
        eventually(lambda: len(state.transaction_groups) <= STORE.producers_max + 20)
