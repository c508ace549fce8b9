"""How long one message takes: the measurement behind `dmq bench latency`.

What always holds: what a send is compared with, an echo and an fdatasync, is measured right before it.
"""

from __future__ import annotations

import threading
import time

from dmq.client.client import Client
from dmq.client.producer import Producer
from dmq.client.received import ReceivedMessage
from dmq.testing.baselines import Echo, fdatasync_seconds
from dmq.testing.measuring import Figure, Load, Progress, bench_topic, latency_figure, percentile

__all__ = ["latency"]


def latency(url: str, load: Load, folder: str, progress: Progress, *, rate: float = 1000.0) -> list[Figure]:
    """One message at a time: `send` beside a bare echo and an fdatasync; and from `send` to a waiting handler."""
    count = load.messages
    body = load.bodies()[0]
    with Echo.running() as echo:
        echo.round_trips(min(count, 200), load.size)
        echoes = sorted(echo.round_trips(count, load.size))
    progress(count)
    syncs = sorted(fdatasync_seconds(folder, max(50, count // 10), 4096))
    echo_p50, sync_p50 = percentile(echoes, 0.5), percentile(syncs, 0.5)
    figures = [latency_figure("a bare echo", echoes), latency_figure("fdatasync of 4 KiB", syncs)]
    with bench_topic(url) as (client, topic), client.producer(timeout=60.0) as producer:
        for durability, baseline in (("stored", echo_p50), ("flushed", echo_p50 + sync_p50)):
            many = count if durability == "stored" else max(50, count // 10)
            _send_timed(producer, topic, body, durability, min(many, 200))
            taken = _send_timed(producer, topic, body, durability, many)
            name = "the echo" if durability == "stored" else "the echo and fdatasync"
            figures.append(
                latency_figure(
                    f"send, {durability} (beside {name})", taken, of_baseline=percentile(sorted(taken), 0.5) / baseline
                )
            )
            progress(count)
    with bench_topic(url) as (client, topic):
        taken = _end_to_end(client, topic, body, load, rate)
        figures.append(
            latency_figure(
                f"send to handler at {rate:,.0f} a second (beside the echo)",
                taken,
                of_baseline=percentile(sorted(taken), 0.5) / echo_p50,
            )
        )
        progress(count)
    return figures


def _send_timed(producer: Producer, topic: str, body: bytes, durability: str, count: int) -> list[float]:
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
