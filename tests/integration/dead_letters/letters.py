"""Dead letters for tests: messages that a group rejects, and waiting for them to be somewhere."""

from __future__ import annotations

import dmq
from dmq.client.admin.dead_letters import DeadLetter
from dmq.client.client import Client
from tests.patience import PATIENCE_S, eventually


def rejected(
    client: Client, count: int, topic: str = "orders", group: str = "billing", prefix: str = "m"
) -> list[dmq.Receipt]:
    """Send messages and have a group reject them all."""
    producer = client.producer()
    messages = [dmq.Message(f"{prefix}{n}".encode(), key=f"{prefix}-k{n}") for n in range(count)]
    receipts = [*producer.send_many(topic, messages)]
    producer.close()
    reject(client, count, topic, group)
    return receipts


def reject(client: Client, count: int, topic: str = "orders", group: str = "billing") -> None:
    """Have a group reject so many messages."""
    left = count
    with client.consumer(topic, group) as consumer:
        while left:
            for message in consumer.pull(max_messages=left, wait=PATIENCE_S):
                message.reject(f"no good: {message.body.decode()}")
                left -= 1


def drained(client: Client, count: int, **wanted: str) -> list[DeadLetter]:
    """The dead letters, once so many are in the database."""
    eventually(lambda: len(client.admin.dead_letters(bodies=False, **wanted)) >= count)  # type: ignore[arg-type]
    found = client.admin.dead_letters(**wanted)  # type: ignore[arg-type]
    assert len(found) == count
    return found


def consumed(client: Client, count: int, topic: str = "orders", group: str = "billing") -> list[tuple[str, int]]:
    """Body and attempt of so many messages that a group gets and acks, and that no more come."""
    got: list[tuple[str, int]] = []
    with client.consumer(topic, group) as consumer:
        while len(got) < count:
            batch = consumer.pull(max_messages=count, wait=PATIENCE_S)
            assert len(batch), f"only {got} came"
            got += [(message.body.decode(), message.attempt) for message in batch]
            consumer.ack(batch)
        more = consumer.pull(max_messages=10, wait=0.3)
        assert [message.body for message in more] == []
    return got
