"""How long one message takes: the measurement behind `dmq bench latency`.

What always holds: what a send is compared with, an echo and an fdatasync, is measured in turns with it, a hundred or so
of each at a time, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.producer.producer import Producer
from dmq.model import DurabilityName
from dmq.testing.benchmark.baselines import Echo, fdatasync_seconds
from dmq.testing.benchmark.benchmark import Figure, Load, Progress, bench_topic, latency_figure, percentile

__all__ = ["latency"]


_TURN: Final = 100  # round trips of one kind before the next


def latency(url: str, load: Load, folder: str, progress: Progress, *, rate: float = 1000.0) -> list[Figure]:
    """One message at a time: `send` beside a bare echo and an fdatasync; and from `send` to a waiting handler."""
    count, size, body = load.messages, load.size, load.bodies()[0]
    few = max(50, count // 10)  # of what waits for a disk
    with Echo.running() as echo, bench_topic(url) as (client, topic), client.producer(timeout=60.0) as producer:
        echo.round_trips(200, size)
        _send_timed(producer, topic, body, "stored", count=200)
        echoes, stored = _in_turns(
            count,
            lambda turn: echo.round_trips(turn, size),
            lambda turn: _send_timed(producer, topic, body, "stored", count=turn),
        )
        progress(2 * count)
        _send_timed(producer, topic, body, "flushed", count=20)
        more, syncs, flushed = _in_turns(
            few,
            lambda turn: echo.round_trips(turn, size),
            lambda turn: fdatasync_seconds(folder, turn, 4096),
            lambda turn: _send_timed(producer, topic, body, "flushed", count=turn),
        )
        progress(count)
    echo_p50 = percentile(sorted(echoes), 0.5)
    with_sync_p50 = percentile(sorted(more), 0.5) + percentile(sorted(syncs), 0.5)
    figures = [
        latency_figure("a bare echo", echoes),
        latency_figure("fdatasync of 4 KiB", syncs),
        latency_figure(
            "send, stored (beside the echo)", stored, of_baseline=percentile(sorted(stored), 0.5) / echo_p50
        ),
        latency_figure(
            "send, flushed (beside the echo and fdatasync)",
            flushed,
            of_baseline=percentile(sorted(flushed), 0.5) / with_sync_p50,
        ),
    ]
    with bench_topic(url) as (client, topic):
        taken = _end_to_end(client, topic, body, load, rate=rate)
        figures.append(
            latency_figure(
                f"send to handler at {rate:,.0f} a second (beside the echo)",
                taken,
                of_baseline=percentile(sorted(taken), 0.5) / echo_p50,
            )
        )
        progress(count)
    return figures


def _in_turns(count: int, *kinds: Callable[[int], list[float]]) -> list[list[float]]:
    """So many of each kind, a few of one and then of the next."""
    taken: list[list[float]] = [[] for _ in kinds]
    for at in range(0, count, _TURN):
        for kind, seconds in zip(kinds, taken, strict=True):
            seconds += kind(min(_TURN, count - at))
    return taken


def _send_timed(producer: Producer, topic: str, body: bytes, durability: DurabilityName, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        producer.send(topic, body, durability=durability)
        taken.append(time.perf_counter() - began)
    return taken


def _end_to_end(client: Client, topic: str, body: bytes, load: Load, rate: float) -> list[float]:
    """Seconds from just before `send` to the handler of a consumer that waits."""
    taken: list[float] = []
    sent_at: dict[str, float] = {}
    done = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        now = time.perf_counter()
        taken.append(now - sent_at[message.key or ""])
        if len(taken) >= load.messages:
            done.set()

    consumer = client.consumer(topic, group="bench")
    runner = threading.Thread(target=lambda: consumer.run(handle, workers=1), daemon=True)
    runner.start()
    time.sleep(0.3)
    with client.producer(timeout=60.0) as producer:
        began = time.perf_counter()
        for number in range(load.messages):
            pause = began + number / rate - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            key = str(number)
            sent_at[key] = time.perf_counter()
            producer.send_async(topic, body, key=key, durability="stored")
    done.wait(10.0)
    consumer.close()
    runner.join(10.0)
    if not taken:
        raise RuntimeError("nothing was delivered")
    return taken
