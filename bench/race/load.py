"""The loads, in a process of the tree that is measured: `python -m bench.race.load FOLDER`, one task in a line of JSON.

It starts a broker of its tree, on a directory in the folder, and answers each line with what the task took. Another
tree runs this very file with its own interpreter, so nothing of DMQ is used here but what every version has; the
floor is that of the tree that asks.

What always holds: bodies come out of a file, made before; keys and `Message` objects are made within the timed part;
a consumer touches body and key of every message; the settings are the defaults. CPU is that of this process and of
the broker, in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import dmq
import dmq.aio
from dmq.testing.processes import BrokerProcess

__all__ = ["paced"]

Answer = dict[str, Any]

_ECHO_ANSWER_BYTES: Final = 8
_BLOCK_BYTES: Final = 512  # of st_blocks
_QUEUES_A_TOPIC: Final = 250
_WAIT_SECONDS_MAX: Final = 60.0
_JOIN_SECONDS: Final = 0.5
_SETTLE_SECONDS: Final = 2.0
_FLOOR_TIMES: Final = 4  # all bodies so often: the floor is faster, and what disturbs it should have the same chance
_BALLAST: Final = "ballast"


def paced(count: int, rate: float, send: Callable[[int], None]) -> None:
    """Call `send` for each number, so many a second; late ones follow at once."""
    began = time.perf_counter()
    for number in range(count):
        pause = began + number / rate - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        send(number)


def made(bodies: Sequence[bytes], first: int) -> list[dmq.Message]:
    return [dmq.Message(body, f"k-{first + number}") for number, body in enumerate(bodies)]


def _process_cpu(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid makes of it


class Bodies:
    """Those of the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, list[bytes]] = {}

    def __call__(self, name: str, count: int) -> list[bytes]:
        if name not in self._read:
            self._read[name] = pickle.loads((self._folder / name).read_bytes())
        return self._read[name][:count]


class Side:
    """A broker of this tree, a client, and the bodies."""

    def __init__(self, folder: Path) -> None:
        self.bodies = Bodies(folder)
        self._topics = 0
        self.data = folder / f"data-{os.getpid()}"
        self.broker = BrokerProcess(self.data).start()
        self.client = dmq.connect(self.broker.url, app="race")
        self.producer = self.client.producer(timeout=60.0)
        self.filled: dict[tuple[str, int], str] = {}
        self.groups = 0
        self.waiting: Waiting | None = None
        self.idle: list[Any] = []

    def topic(self, queues: int = 4) -> str:
        self._topics += 1
        name = f"race-{self._topics}"
        self.client.admin.create_topic(name, queues)
        return name

    def broker_cpu(self) -> float:
        return _process_cpu(self.broker.pid)

    def timed(self, count: int, run: Callable[[], object]) -> Answer:
        client, broker, began = time.process_time(), self.broker_cpu(), time.perf_counter()
        more = run()
        return {
            "count": count,
            "seconds": time.perf_counter() - began,
            "client": time.process_time() - client,
            "broker": self.broker_cpu() - broker,
            **(more if isinstance(more, dict) else {}),
        }

    def close(self) -> None:
        if self.waiting is not None:
            self.waiting.close()
        for consumer in self.idle:
            consumer.close()
        self.client.close()
        self.broker.stop()


# --- produce ----------------------------------------------------------------------------------------------------------


def many(side: Side, bodies: str, count: int, batch: int) -> Answer:
    """`send_many` by batches."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()

    def run() -> None:
        for first in range(0, count, batch):
            side.producer.send_many(topic, made(all_of_them[first : first + batch], first), durability="stored")

    return side.timed(count, run)


def each_async(side: Side, bodies: str, count: int) -> Answer:
    """`send_async`, and a future for each; how many messages were in a request, too."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()
    requests = side.client.admin.stats("broker_requests")["broker_requests"]

    def run() -> None:
        send = side.producer.send_async
        futures = [send(topic, body, key=f"k-{number}", durability="stored") for number, body in enumerate(all_of_them)]
        for future in futures:
            future.result()

    answer = side.timed(count, run)
    requests = side.client.admin.stats("broker_requests")["broker_requests"] - requests
    return {**answer, "batch": count / max(1, requests)}


def tasks(side: Side, bodies: str, count: int, senders: int) -> Answer:
    """As many tasks on one event loop as there are senders, each with one message at a time."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()

    async def run() -> Answer:
        async with dmq.aio.connect(side.broker.url, app="race") as client:
            producer = client.producer(timeout=60.0)

            async def send(first: int, end: int) -> None:
                for number in range(first, end, senders):
                    await producer.send(topic, all_of_them[number], key=f"k-{number}", durability="stored")

            await asyncio.gather(*(send(number, min(count, 10 * senders)) for number in range(senders)))
            cpu, broker, began = time.process_time(), side.broker_cpu(), time.perf_counter()
            await asyncio.gather(*(send(number, count) for number in range(senders)))
            return {
                "count": count,
                "seconds": time.perf_counter() - began,
                "client": time.process_time() - cpu,
                "broker": side.broker_cpu() - broker,
            }

    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(run())
    return asyncio.run(run())


def threads(side: Side, bodies: str, count: int, senders: int) -> Answer:
    """As many threads with one producer as there are senders, each with one message at a time."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()
    barrier = threading.Barrier(senders + 1)

    def send(first: int) -> None:
        barrier.wait()
        for number in range(first, count, senders):
            side.producer.send(topic, all_of_them[number], key=f"k-{number}", durability="stored")

    with ThreadPoolExecutor(senders) as pool:
        futures = [pool.submit(send, number) for number in range(senders)]

        def run() -> None:
            barrier.wait()
            for future in futures:
                future.result()

        return side.timed(count, run)


# --- consume ----------------------------------------------------------------------------------------------------------


def filled(side: Side, bodies: str, count: int) -> str:
    """A topic with so many of these bodies."""
    if (bodies, count) not in side.filled:
        topic = side.topic()
        all_of_them = side.bodies(bodies, count)
        for first in range(0, count, 500):
            side.producer.send_many(topic, made(all_of_them[first : first + 500], first), durability="stored")
        side.filled[bodies, count] = topic
    side.groups += 1
    return side.filled[bodies, count]


def pull(side: Side, bodies: str, count: int, batch: int) -> Answer:
    """`pull` and `ack` by batches."""
    consumer = side.client.consumer(filled(side, bodies, count), group=f"race-{side.groups}")

    def run() -> None:
        left, size = count, 0
        while left > 0:
            pulled = consumer.pull(max_messages=batch, wait=_WAIT_SECONDS_MAX)
            if not pulled:
                raise RuntimeError(f"{left} of {count} messages were not delivered")
            for message in pulled:
                size += len(message.body) + len(message.key or "")
            consumer.ack(pulled)
            left -= len(pulled)

    with contextlib.closing(consumer):
        return side.timed(count, run)


def handler(side: Side, bodies: str, count: int) -> Answer:
    """A handler for each message, one worker."""
    consumer = side.client.consumer(filled(side, bodies, count), group=f"race-{side.groups}")
    done = threading.Event()
    seen = size = 0

    def handle(message: Any) -> None:
        nonlocal seen, size
        size += len(message.body) + len(message.key or "")
        seen += 1
        if seen >= count:
            done.set()

    runner = threading.Thread(target=lambda: consumer.run(handle, workers=1), daemon=True)

    def run() -> None:
        runner.start()
        if not done.wait(_WAIT_SECONDS_MAX):
            raise RuntimeError(f"{count - seen} of {count} messages were not delivered")

    answer = side.timed(count, run)
    consumer.close()
    runner.join(10.0)
    return answer


# --- one at a time ----------------------------------------------------------------------------------------------------


def lone(side: Side, bodies: str, count: int, port: int) -> Answer:
    """`send` and a blocking echo, one by one; microseconds of each."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()
    echoes: list[float] = []
    sends: list[float] = []
    clock = time.perf_counter
    size = len(all_of_them[0])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(size.to_bytes(4, "big"))

        def run() -> None:
            for body in all_of_them:
                began = clock()
                sock.sendall(body)
                if len(sock.recv(_ECHO_ANSWER_BYTES)) != _ECHO_ANSWER_BYTES:
                    raise RuntimeError("the echo is gone")
                echoed = clock()
                side.producer.send(topic, body, durability="stored")
                sends.append((clock() - echoed) * 1e6)
                echoes.append((echoed - began) * 1e6)

        answer = side.timed(count, run)
    return {**answer, "samples": {"send": sends, "echo": echoes}}


def flushed(side: Side, bodies: str, count: int) -> Answer:
    """`send` stored, `send` flushed and an fdatasync, one by one; microseconds of each."""
    all_of_them, topic = side.bodies(bodies, count), side.topic()
    samples: dict[str, list[float]] = {"stored": [], "flushed": [], "fdatasync": []}
    clock = time.perf_counter
    with (side.data.parent / f"beside-{os.getpid()}").open("wb", buffering=0) as file:
        side.producer.send(topic, all_of_them[0], durability="flushed")
        os.sync()

        def run() -> None:
            for body in all_of_them:
                for durability in ("stored", "flushed"):
                    began = clock()
                    side.producer.send(topic, body, durability=durability)
                    samples[durability].append((clock() - began) * 1e6)
                file.write(body)  # the write is in `stored` already
                began = clock()
                os.fdatasync(file.fileno())
                samples["fdatasync"].append((clock() - began) * 1e6)

        answer = side.timed(2 * count, run)
    return {**answer, "samples": samples}


class Waiting:
    """A consumer that waits in a thread, and when its handler got each message."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._topic = side.topic()
        self._consumer = side.client.consumer(self._topic, group="race")
        self._arrived: list[tuple[str, int, float]] = []
        self._wanted = 0
        self._done = threading.Event()
        self._runner = threading.Thread(target=lambda: self._consumer.run(self._handle, workers=1), daemon=True)
        self._runner.start()
        time.sleep(_JOIN_SECONDS)

    def _handle(self, message: Any) -> None:
        self._arrived.append((message.key or "", len(message.body), time.perf_counter()))
        if len(self._arrived) >= self._wanted:
            self._done.set()

    def run(self, bodies: Sequence[bytes], rate: float, way: str) -> list[float]:
        self._arrived.clear()
        self._done.clear()
        self._wanted = len(bodies)
        sent: list[float] = []
        producer = self._side.producer
        call: Any = producer.send_async if way == "send_async" else producer.send

        def send(number: int) -> None:
            sent.append(time.perf_counter())
            call(self._topic, bodies[number], key=str(number), durability="stored")

        paced(len(bodies), rate, send)
        if not self._done.wait(_WAIT_SECONDS_MAX):
            raise RuntimeError(f"{len(bodies) - len(self._arrived)} of {len(bodies)} messages were not delivered")
        return [(at - sent[int(key)]) * 1e6 for key, _, at in self._arrived]

    def close(self) -> None:
        self._consumer.close()
        self._runner.join(10.0)


def end_to_end(side: Side, bodies: str, count: int, rate: float, way: str) -> Answer:
    """From just before a send to the handler of a consumer that waits; microseconds."""
    all_of_them = side.bodies(bodies, count)
    waiting = side.waiting = side.waiting or Waiting(side)
    samples: list[float] = []
    answer = side.timed(count, lambda: samples.extend(waiting.run(all_of_them, rate, way)))
    return {**answer, "samples": {"end_to_end": samples}}


# --- the broker alone -------------------------------------------------------------------------------------------------


def disk(side: Side, bodies: str, count: int, batch: int) -> Answer:
    """Blocks on the disk after the checkpoint of an orderly stop, less what an empty broker has; by folder, too."""
    answer = many(side, bodies, count, batch)
    side.client.close()
    side.broker.stop()
    parts: dict[str, int] = {}
    for path in side.data.rglob("*"):
        if path.is_file() and path.name != _BALLAST:
            name = path.relative_to(side.data).parts[0]
            parts[name] = parts.get(name, 0) + path.stat().st_blocks * _BLOCK_BYTES
    size = sum(map(len, side.bodies(bodies, count)))
    side.broker.start()
    side.client = dmq.connect(side.broker.url, app="race")
    side.producer = side.client.producer(timeout=60.0)
    return {**answer, "body_bytes": size, "disk_bytes": sum(parts.values()), "parts": parts}


def backlog(side: Side, bodies: str, gigabytes: float) -> Answer:
    """So much in a topic that nobody reads."""
    all_of_them, topic = side.bodies(bodies, 10_000), side.topic()
    size = sum(map(len, all_of_them))
    rounds = int(gigabytes * 1e9 / size)
    for number in range(rounds):
        fresh = [number.to_bytes(8, "big") + body[8:] for body in all_of_them]
        side.producer.send_many(topic, made(fresh, number * len(fresh)), durability="stored")
    return {"count": rounds * len(all_of_them)}


def idle(side: Side, queues: int, seconds: float) -> Answer:
    """CPU seconds a second of a broker with so many queues whose group waits in vain."""
    if not side.idle:
        for first in range(0, queues, _QUEUES_A_TOPIC):
            topic = side.topic(min(_QUEUES_A_TOPIC, queues - first))
            consumer = side.client.consumer(topic, group="idle")
            threading.Thread(target=_wait_in_vain, args=(consumer,), daemon=True).start()
            side.idle.append(consumer)
        time.sleep(min(_SETTLE_SECONDS, seconds))
    return side.timed(1, lambda: time.sleep(seconds))


def _wait_in_vain(consumer: Any) -> None:
    consumer.run(lambda _: None, workers=1)


# --- the floor --------------------------------------------------------------------------------------------------------


class Ground:
    """The floor, in place of a broker; of this tree, so no other tree may be asked for it."""

    def __init__(self, folder: Path) -> None:
        from dmq.testing.benchmark.floor import Floor

        self.bodies = Bodies(folder)
        self._stack = contextlib.ExitStack()
        self.floor = self._stack.enter_context(Floor.running())

    def timed(self, count: int, run: Callable[[], Answer]) -> Answer:
        """What `run` says, and the CPU time of both sides, which is little more than that of the timed part."""
        client, server = time.process_time(), _process_cpu(self.floor.pid)
        answer = run()
        return {
            "count": count,
            "client": time.process_time() - client,
            "broker": _process_cpu(self.floor.pid) - server,
            **answer,
        }

    def close(self) -> None:
        self._stack.close()


def _groups(bodies: list[bytes], batch: int) -> list[list[bytes]]:
    return [bodies[first : first + batch] for first in range(0, len(bodies), batch)]


def floor_produce(ground: Ground, bodies: str, count: int, batch: int) -> Answer:
    groups = _groups(ground.bodies(bodies, count), batch) * _FLOOR_TIMES
    return ground.timed(count * _FLOOR_TIMES, lambda: {"seconds": ground.floor.produce(groups)})


def floor_consume(ground: Ground, bodies: str, count: int, batch: int) -> Answer:
    groups = _groups(ground.bodies(bodies, count), batch) * _FLOOR_TIMES
    # Its CPU time would be that of filling it, too.
    return {"count": count * _FLOOR_TIMES, "seconds": ground.floor.consume(groups)}


def floor_window(ground: Ground, bodies: str, count: int, senders: int) -> Answer:
    all_of_them = ground.bodies(bodies, count)
    return ground.timed(count, lambda: {"seconds": ground.floor.window(all_of_them, senders)})


def floor_relay(ground: Ground, bodies: str, count: int, rate: float) -> Answer:
    all_of_them = ground.bodies(bodies, count)

    def run() -> Answer:
        taken = ground.floor.relay(all_of_them, lambda send: paced(count, rate, send))
        return {"samples": {"relay": [seconds * 1e6 for seconds in taken]}}

    return ground.timed(count, run)


TASKS: Final[dict[str, Callable[..., Answer]]] = {
    task.__name__: task
    for task in (
        many,
        each_async,
        tasks,
        threads,
        pull,
        handler,
        lone,
        flushed,
        end_to_end,
        disk,
        backlog,
        idle,
        floor_produce,
        floor_consume,
        floor_window,
        floor_relay,
    )
}


def main(folder: Path, is_floor: bool) -> None:
    side: Any = Ground(folder) if is_floor else Side(folder)
    try:
        print(json.dumps({"dmq": dmq.__version__}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = TASKS[asked.pop("task")](side, **asked)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        side.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "floor" in sys.argv[2:])
