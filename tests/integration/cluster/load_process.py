"""A process that sends in several ways and consumes, and says at its end what came of it.

    python load_process.py URL NAME

It is run by its path, with the code of this checkout or of another, so it uses the public names of `dmq` alone. The
first line on standard input ends its senders, which is answered with a line; the second one its consumers, and is
answered with a line of JSON. What always holds: a body is sent once, so that one found at two places was stored twice.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import dmq

TIMEOUT_S = 60.0
PAUSE_S = 0.005
KEYS = 6


class Sender(threading.Thread):
    """Sends one after the other until it is told to stop; a step sends once, and returns how many messages that were.

    Attributes:
        acks: when each step was answered, by the clock that all processes share.
        errors: what steps failed with.
    """

    def __init__(self, name: str, step: Callable[[int], int]) -> None:
        super().__init__(name=name)
        self._step = step
        self.is_over = threading.Event()
        self.acks: list[float] = []
        self.errors: list[str] = []
        self.count = 0

    def run(self) -> None:
        while not self.is_over.wait(PAUSE_S):
            try:
                self.count += self._step(self.count)
                self.acks.append(time.monotonic())
            except dmq.DMQError as error:
                self.errors.append(f"{self.name} {self.count}: {error!r}")
                self.count += 1000  # a body is sent once


class Load:
    """The senders and the consumers of one process."""

    def __init__(self, url: str, name: str) -> None:
        self._client = dmq.connect(url, app=name, timeout=TIMEOUT_S)
        self._producer = self._client.producer(timeout=TIMEOUT_S)
        self._name = name
        self._senders = [
            Sender(f"{name}-lone", self._send_lone),
            Sender(f"{name}-ordered", self._send_ordered),
            Sender(f"{name}-many", self._send_many),
            Sender(f"{name}-async", self._send_async),
        ]
        self._seen: list[tuple[str, int, int, int, int]] = []
        self._consumers = [
            self._client.consumer("rolled", f"{name}-rolled"),
            self._client.consumer("rolled-in-order", f"{name}-rolled-in-order", ordered=True),
        ]
        self._runs = [threading.Thread(target=one.run, args=(self._handle, 2)) for one in self._consumers]

    def _body(self, kind: str, number: int) -> bytes:
        return f"{self._name} {kind} {number}".encode()

    def _send_lone(self, number: int) -> int:
        self._producer.send("rolled", self._body("lone", number))
        return 1

    def _send_ordered(self, number: int) -> int:
        key = f"{self._name}-{number % KEYS}"
        self._producer.send("rolled-in-order", self._body(key, number), business_id=key, ordered=True)
        return 1

    def _send_many(self, number: int) -> int:
        messages = [dmq.Message(self._body("many", number + at)) for at in range(20)]
        self._producer.send_many("rolled", messages)
        return len(messages)

    def _send_async(self, number: int) -> int:
        futures = [self._producer.send_async("rolled", self._body("async", number + at)) for at in range(5)]
        for future in futures:
            future.result(TIMEOUT_S)
        return len(futures)

    def _handle(self, message: dmq.ReceivedMessage) -> None:
        place = (message.shard, message.queue, message.offset, message.attempt)
        self._seen.append((message.body.decode(), *place))

    def run(self) -> None:
        for thread in (*self._runs, *self._senders):
            thread.start()
        print("running", flush=True)
        sys.stdin.readline()
        for sender in self._senders:
            sender.is_over.set()
        for sender in self._senders:
            sender.join()
        print("sent", flush=True)
        sys.stdin.readline()
        for consumer in self._consumers:
            consumer.close()
        for thread in self._runs:
            thread.join()
        self._client.close()
        print(json.dumps(self._result()), flush=True)

    def _result(self) -> dict[str, Any]:
        return {
            "code": dmq.__file__,
            "senders": {one.name: {"acks": one.acks, "errors": one.errors, "sent": one.count} for one in self._senders},
            "seen": self._seen,
        }


if __name__ == "__main__":
    Load(sys.argv[1], sys.argv[2]).run()
