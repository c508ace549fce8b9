"""What scenarios of delivery share: a topic of one's own, and short ways to send and look."""

from __future__ import annotations

from typing import Any

import dmq
from dmq.client.admin.reports import QueueLag
from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.message import Batch, ReceivedMessage

GROUP = "billing"


class Scene:
    """A topic and one group of it.

    Parameters:
        settings: of the topic.
    """

    def __init__(self, client: Client, topic: str, queues: int = 1, **settings: Any) -> None:
        self.client = client
        self.topic = topic
        client.admin.create_topic(topic, queues=queues, **settings)

    def send(self, *bodies: object, **options: Any) -> list[dmq.Receipt]:
        with self.client.producer() as producer:
            return [producer.send(self.topic, str(body), **options) for body in bodies]

    def consumer(self, **options: Any) -> Consumer:
        return self.client.consumer(self.topic, options.pop("group", GROUP), **options)

    def pull(self, consumer: Consumer, count: int, **options: Any) -> list[ReceivedMessage]:
        """So many messages, in one pull after the other."""
        found: list[ReceivedMessage] = []
        while len(found) < count:
            batch = consumer.pull(count - len(found), wait=20.0, **options)
            assert batch, "there is less than expected"
            found += batch
        return found

    def queue(self, number: int = 0, group: str = GROUP) -> QueueLag:
        return self.client.admin.lag(self.topic, group).queues[number]

    def lag(self, group: str = GROUP) -> int:
        return self.client.admin.lag(self.topic, group).total


def bodies(messages: list[ReceivedMessage] | Batch[ReceivedMessage]) -> list[int]:
    return [int(message.body) for message in messages]
