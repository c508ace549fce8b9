"""Looking at stored messages: what one answer of the broker has no room for comes in the next ones."""

from __future__ import annotations

import random

import pytest

import dmq


@pytest.fixture
def topic(client: dmq.Client) -> str:
    """Two queues of six messages, each message a quarter of what one answer has room for."""
    for name in ("large", "large-queues"):
        client.admin.create_topic(name, queues=2, allow_existing=True)
    if not client.admin.peek("large", limit=1):
        bodies = random.Random(7)
        producer = client.producer()
        counts = [0, 0]
        while counts != [6, 6]:
            customer = bodies.choice(["u-1", "u-2", "u-3", "u-4", "u-5"])
            queue = producer.send("large-queues", b"", business_id=customer, ordered=True).queue
            if counts[queue] < 6:
                tag = "even" if counts[queue] % 2 == 0 else "odd"
                producer.send("large", bodies.randbytes(1 << 20), business_id=customer, ordered=True, tag=tag)
                counts[queue] += 1
    return "large"


def places(client: dmq.Client, topic: str, **options: int | str) -> list[tuple[int, int]]:
    return [(message.queue, message.offset) for message in client.admin.peek(topic, **options)]  # type: ignore[arg-type]


def test_all_messages_come_up_to_the_limit_queue_by_queue_however_large(client: dmq.Client, topic: str) -> None:
    everything = [(queue, offset) for queue in (0, 1) for offset in range(6)]
    assert places(client, topic) == everything
    assert places(client, topic, limit=8) == everything[:8]
    assert places(client, topic, queue=1, at=1) == everything[7:]
    assert places(client, topic, tags="odd") == [place for place in everything if place[1] % 2]
    assert places(client, topic, at="latest") == []
