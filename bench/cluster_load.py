"""The clients of `bench.cluster`, in a process of their own: `python -m bench.cluster_load URL`.

It reads one task a line, as JSON, and answers with what that took: messages, wall and CPU seconds, bytes in memory.
Bodies are made before the timed part.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

import dmq
from bench.rows import SEED
from dmq.testing.processes import resident_bytes

__all__ = ["ClusterLoad", "LoadClient"]

BATCH: Final = 500
_BODY_BYTES: Final = 200
_TIMEOUT: Final = 120.0
_HANDLERS: Final = 4


class LoadClient:
    """What the process does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = dmq.connect(url, app="bench", timeout=_TIMEOUT)
        self._producer = self._client.producer(timeout=_TIMEOUT)
        self._rng = random.Random(SEED)
        self._others: list[dmq.Client] = []
        self._groups = 0

    def _bodies(self, count: int) -> list[bytes]:
        pool = self._rng.randbytes(count * _BODY_BYTES)
        return [pool[at : at + _BODY_BYTES] for at in range(0, len(pool), _BODY_BYTES)]

    def _timed(self, messages: int, work: Callable[[], None]) -> dict[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        work()
        return {"messages": messages, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}

    # --- messages ---------------------------------------------------------------------------------------------------

    def send_many(self, topic: str, count: int, durability: Any = "flushed") -> dict[str, float]:
        batches = [self._bodies(BATCH) for _ in range(count // BATCH)]

        def work() -> None:
            for bodies in batches:
                self._producer.send_many(topic, [dmq.Message(body) for body in bodies], durability=durability)

        return self._timed(len(batches) * BATCH, work)

    def send_async(self, topic: str, count: int, durability: Any = "flushed") -> dict[str, float]:
        bodies = self._bodies(count)

        def work() -> None:
            futures = [self._producer.send_async(topic, body, durability=durability) for body in bodies]
            for future in futures:
                future.result(_TIMEOUT)

        return self._timed(count, work)

    def send_lone(self, topic: str, count: int, durability: Any = "flushed") -> dict[str, float]:
        bodies = self._bodies(count)

        def work() -> None:
            for body in bodies:
                self._producer.send(topic, body, durability=durability)

        return self._timed(count, work)

    def _group(self) -> str:
        self._groups += 1
        return f"group-{os.getpid()}-{self._groups}"

    def pull(self, topic: str, count: int) -> dict[str, float]:
        """Everything that a topic has, by a group of its own."""
        with self._client.consumer(topic, self._group()) as consumer:

            def work() -> None:
                left = count
                while left > 0:
                    batch = consumer.pull(BATCH, wait=5.0)
                    left -= sum(1 for message in batch if message.body and message.key is None)
                    consumer.ack(batch)

            return self._timed(count, work)

    def push(self, topic: str, count: int) -> dict[str, float]:
        consumer = self._client.consumer(topic, self._group())
        is_over, lock, left = threading.Event(), threading.Lock(), [count]

        def handle(message: dmq.ReceivedMessage) -> None:
            with lock:
                left[0] -= len(message.body) > 0
            if left[0] <= 0:
                is_over.set()

        def work() -> None:
            thread = threading.Thread(target=consumer.run, args=(handle, _HANDLERS))
            thread.start()
            is_over.wait(_TIMEOUT)
            consumer.close()
            thread.join()

        return self._timed(count, work)

    # --- many topics and clients ------------------------------------------------------------------------------------

    def touch(self, topics: int) -> dict[str, float]:
        """Send one message to each of so many topics, so that the client knows the routes of all."""
        before = resident_bytes(os.getpid())

        def work() -> None:
            for number in range(topics):
                self._producer.send(f"t-{number}", b"x")

        return {**self._timed(topics, work), "bytes": resident_bytes(os.getpid()) - before}

    def connect(self, count: int, topics: int) -> dict[str, float]:
        """So many more clients, each of which knows the routes of so many topics, those of the first client alone."""
        before = resident_bytes(os.getpid())

        def work() -> None:
            for number in range(count):
                client = dmq.connect(self._url, app=f"bench-{number}", timeout=_TIMEOUT)
                producer = client.producer(timeout=_TIMEOUT)
                for topic in range(topics):
                    producer.send(f"t-{topic}", b"x")
                self._others.append(client)

        return {**self._timed(count, work), "bytes": resident_bytes(os.getpid()) - before}

    def rest(self, seconds: float) -> dict[str, float]:
        """Do nothing: what it costs to be there."""
        return self._timed(len(self._others), lambda: time.sleep(seconds))

    def know(self, topic: str, version: int) -> dict[str, float]:
        """Wait until all clients know the slots of a topic in this version; when that was."""

        def is_known(client: dmq.Client) -> bool:
            book = client._router.book
            route = None if book is None else book.topic(topic)
            return route is not None and route.slots_version >= version

        def work() -> None:
            while not all(map(is_known, self._others)):
                time.sleep(0.01)

        return {**self._timed(len(self._others), work), "at": time.monotonic()}

    def run(self) -> None:
        for line in sys.stdin:
            task = json.loads(line)
            print(json.dumps(getattr(self, task.pop("do"))(**task)), flush=True)
        for client in (*self._others, self._client):
            client.close()


class ClusterLoad:
    """That process, as the benchmark sees it."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.cluster_load", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def do(self, do: str, **arguments: Any) -> dict[str, float]:
        self.begin(do, **arguments)
        return self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_TIMEOUT)


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    LoadClient(sys.argv[1]).run()
