"""What stays in a broker of clients, topics and groups that came and went: nothing that grows with their number."""

from __future__ import annotations

import gc
import types
from collections import deque
from typing import Any, Final

import dmq
from dmq.storage.journal.window_cache import WindowCache
from dmq.storage.read.record_origin import Identities
from dmq.testing.disk.files import MemoryFiles
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually

CYCLES: Final = 30
# These keep the last so many bytes or rows of the journal, whatever is in them; the disk is memory here.
BOUNDED: Final = (WindowCache, Identities, MemoryFiles)
CODE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)


def live(url: str, number: int) -> None:
    """All of a short life: connect, use a topic and a group of one's own, delete both."""
    topic, group = f"topic-{number}", f"group-{number}"
    with dmq.connect(url, app=f"app-{number}", client_id=f"client-{number}") as client:
        client.admin.create_topic(topic, queues=2)
        client.admin.set_limit(topic=topic, messages=1_000_000)
        with client.producer() as producer:
            producer.send_many(topic, [dmq.Message(b"x", key="k")] * 3)
            producer.send(topic, b"y", ttl=60.0)
        with client.consumer(topic, group=group, tags="a || b") as consumer:
            consumer.pull(4, wait=0.01)
        with client.consumer(topic, group=f"{group}-more") as consumer:
            for message in consumer.pull(4, wait=20.0):
                message.nack(delay=60.0)
        client.admin.reset(topic, group, to="earliest")
        client.admin.delete_group(f"{group}-more")
        client.admin.delete_group(group)
        client.admin.delete_topic(topic)


def containers(root: object) -> dict[int, Any]:
    """All containers that can be reached from an object, by their identity."""
    found: dict[int, Any] = {}
    seen = {id(root)}
    waiting = deque([root])
    while waiting:
        one = waiting.popleft()
        if isinstance(one, dict | list | set | deque):
            found[id(one)] = one
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, CODE) and not isinstance(other, BOUNDED):
                seen.add(id(other))
                waiting.append(other)
    return found


def test_what_came_and_went_leaves_nothing_that_grows() -> None:
    with ServedBroker(auto_create=False) as served, dmq.connect(served.url) as watcher:
        for number in range(CYCLES):
            live(served.url, number)
        before = {at: len(one) for at, one in containers(served.server).items()}
        for number in range(CYCLES, 2 * CYCLES):
            live(served.url, number)
        eventually(lambda: len(served.server._server.connections) == 1)
        grown = [
            (len(one) - before[at], repr(one)[:200])
            for at, one in containers(served.server).items()
            if at in before and len(one) - before[at] >= CYCLES
        ]
        assert grown == []
        assert watcher.admin.topics() == []
