"""What tests of consuming share: sending, waiting, and a consumer whose handlers run in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import dmq
from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.message import ReceivedMessage

PATIENCE = 120.0


def send(client: Client, *bodies: str, topic: str = "orders", **options: object) -> list[dmq.Receipt]:
    producer = client.producer()
    receipts = [producer.send(topic, body, **options) for body in bodies]  # type: ignore[arg-type]
    producer.close()
    return receipts


class Handling:
    """A consumer whose `run` goes on in a thread."""

    def __init__(self, consumer: Consumer, handler: Callable[[ReceivedMessage], object], **options: object) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(handler, options))
        self._thread.start()

    def _run(self, handler: Callable[[ReceivedMessage], object], options: dict[str, object]) -> None:
        try:
            self.consumer.run(handler, **options)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Handling:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def lag(client: Client, group: str = "billing", topic: str = "orders") -> int:
    return client.admin.lag(topic, group).total
