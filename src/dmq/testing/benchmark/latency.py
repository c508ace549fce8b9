"""How long one message takes: the measurement behind `dmq bench latency`.

What always holds: what a send is compared with, an echo, an fdatasync, a relay through the floor, is measured in turns
with it, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.producer.producer import Producer
from dmq.model import DurabilityName
from dmq.testing.benchmark.baselines import Echo, fdatasync_seconds
from dmq.testing.benchmark.benchmark import (
    BrokerCpu,
    Figure,
    Load,
    Progress,
    Ways,
    bench_topic,
    latency_figure,
    percentile,
)
from dmq.testing.benchmark.floor import Floor

__all__ = ["latency"]


_TURN: Final = 100  # round trips of one kind before the next
_RELAY_TURNS: Final = 4
_JOIN_SECONDS: Final = 0.3
_WAIT_SECONDS_MAX: Final = 30.0


def latency(
    url: str, load: Load, folder: str, broker_cpu: BrokerCpu, progress: Progress, *, rate: float = 1000.0
) -> list[Figure]:
    """One message at a time: `send` beside an echo and an fdatasync; and up to a waiting handler, beside a relay."""
    few = max(50, load.messages // 10)  # of what waits for a disk
    ways = Ways()
    bodies = load.bodies()
    with Echo.running() as echo, bench_topic(url) as (client, topic), client.producer(timeout=60.0) as producer:
        stored = _Sends(producer, topic, "stored", bodies, broker_cpu=broker_cpu)
        flushed = _Sends(producer, topic, "flushed", bodies, broker_cpu=broker_cpu)
        echo.round_trips(200, load.size)
        stored.warm_up(200)
        with ways(client):
            (echoes,) = _in_turns(load.messages, stored, lambda turn: echo.round_trips(turn, load.size))
        progress(2 * load.messages)
        flushed.warm_up(20)
        more, syncs = _in_turns(
            few,
            flushed,
            lambda turn: echo.round_trips(turn, load.size),
            lambda turn: fdatasync_seconds(folder, turn, 4096),
        )
        progress(load.messages)
    echo_p50 = percentile(sorted(echoes), 0.5)
    figures = [
        latency_figure("a bare echo", echoes),
        latency_figure("fdatasync of 4 KiB", syncs),
        stored.figure("send, stored (beside the echo)", echo_p50, **ways.values()),
        flushed.figure(
            "send, flushed (beside the echo and fdatasync)",
            percentile(sorted(more), 0.5) + percentile(sorted(syncs), 0.5),
        ),
    ]
    figures += _end_to_end(url, bodies, broker_cpu, rate)
    progress(load.messages)
    return figures


class _Sends:
    """Lone sends of one durability: how long each takes, and what they cost both sides."""

    def __init__(
        self, producer: Producer, topic: str, durability: DurabilityName, bodies: list[bytes], broker_cpu: BrokerCpu
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._durability = durability
        self._bodies = itertools.cycle(bodies)
        self._broker_cpu = broker_cpu
        self._taken: list[float] = []
        self._cpu = _Cpu(broker_cpu)

    def warm_up(self, count: int) -> None:
        self.run(count)
        self._taken.clear()
        self._cpu = _Cpu(self._broker_cpu)

    def run(self, count: int) -> None:
        send, topic, durability = self._producer.send, self._topic, self._durability
        with self._cpu:
            for body in itertools.islice(self._bodies, count):
                began = time.perf_counter()
                send(topic, body, durability=durability)
                self._taken.append(time.perf_counter() - began)

    def figure(self, name: str, baseline: float, **more: float | int | None) -> Figure:
        p50 = percentile(sorted(self._taken), 0.5)
        cpu = self._cpu.each(len(self._taken))
        return latency_figure(name, self._taken, of_baseline=p50 / baseline, **cpu, **more)


class _Cpu:
    """CPU time of both sides, within `with`, added up."""

    def __init__(self, broker_cpu: BrokerCpu) -> None:
        self._broker_cpu = broker_cpu
        self._client = self._broker = 0.0

    def __enter__(self) -> None:
        self._client -= time.process_time()
        self._broker -= self._broker_cpu()

    def __exit__(self, *_: object) -> None:
        self._client += time.process_time()
        self._broker += self._broker_cpu()

    def each(self, count: int) -> dict[str, float | int | None]:
        return {
            "client_us_per_message": self._client / count * 1e6,
            "broker_us_per_message": self._broker / count * 1e6 or None,
        }


def _in_turns(count: int, sends: _Sends, *baselines: Callable[[int], list[float]]) -> list[list[float]]:
    """So many of each, a few of one and then of the next; what the baselines took."""
    taken: list[list[float]] = [[] for _ in baselines]
    for at in range(0, count, _TURN):
        turn = min(_TURN, count - at)
        for baseline, seconds in zip(baselines, taken, strict=True):
            seconds += baseline(turn)
        sends.run(turn)
    return taken


def _paced(count: int, rate: float, send: Callable[[int], None]) -> None:
    """Call `send` for each number, so many a second; late ones follow at once."""
    began = time.perf_counter()
    for number in range(count):
        pause = began + number / rate - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        send(number)


def _end_to_end(url: str, bodies: list[bytes], broker_cpu: BrokerCpu, rate: float) -> list[Figure]:
    """From just before `send_async` to the handler of a consumer that waits; and the same through the floor."""
    turn = max(1, len(bodies) // _RELAY_TURNS)
    relayed: list[float] = []
    handled: list[float] = []
    cpu = _Cpu(broker_cpu)
    with (
        Floor.running() as floor,
        bench_topic(url) as (client, topic),
        client.producer(timeout=60.0) as producer,
        _Handler(client, topic) as handler,
    ):
        for first in range(0, len(bodies), turn):
            part = bodies[first : first + turn]
            relayed += floor.relay(part, partial(_paced, len(part), rate))
            with cpu:
                handled += handler.run(producer, part, rate)
    p50 = percentile(sorted(relayed), 0.5)
    return [
        latency_figure(f"floor relay at {rate:,.0f} a second", relayed),
        latency_figure(
            f"send to handler at {rate:,.0f} a second (beside the relay)",
            handled,
            of_baseline=percentile(sorted(handled), 0.5) / p50,
            **cpu.each(len(handled)),
        ),
    ]


class _Handler:
    """A consumer that waits in a thread, and when its handler got each message."""

    def __init__(self, client: Client, topic: str) -> None:
        self._topic = topic
        self._consumer = client.consumer(topic, group="bench")
        self._arrived: list[tuple[str, float]] = []
        self._wanted = 0
        self._done = threading.Event()
        self._runner = threading.Thread(target=lambda: self._consumer.run(self._handle, workers=1), daemon=True)

    def __enter__(self) -> Self:
        self._runner.start()
        time.sleep(_JOIN_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._runner.join(10.0)

    def _handle(self, message: ReceivedMessage) -> None:
        self._arrived.append((message.key or "", time.perf_counter()))
        if len(self._arrived) >= self._wanted:
            self._done.set()

    def run(self, producer: Producer, bodies: list[bytes], rate: float) -> list[float]:
        """The seconds of each message."""
        self._arrived.clear()
        self._done.clear()
        self._wanted = len(bodies)
        sent: list[float] = []

        def send(number: int) -> None:
            sent.append(time.perf_counter())
            producer.send_async(self._topic, bodies[number], key=str(number), durability="stored")

        _paced(len(bodies), rate, send)
        if not self._done.wait(_WAIT_SECONDS_MAX):
            raise RuntimeError(f"{len(bodies) - len(self._arrived)} of {len(bodies)} messages were not delivered")
        return [at - sent[int(key)] for key, at in self._arrived]
