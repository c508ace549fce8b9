"""How much goes through: the measurements behind `dmq bench produce` and `dmq bench consume`.

Who calls this: the command line, with a broker that is there. What always holds: the first round warms up and does not
count; every round has a topic or a group of its own; topics are deleted in the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dmq.client.client import Client
from dmq.client.connection.url import parse_url
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.producer.producer import Producer
from dmq.testing.benchmark.benchmark import (
    BrokerCpu,
    Figure,
    Load,
    Progress,
    Rates,
    Ways,
    bench_topic,
    measured,
    percentiles,
)
from dmq.testing.benchmark.floor import Floor
from dmq.testing.benchmark.senders import Senders, Task

__all__ = ["consume", "produce", "produce_connections"]

_CONSUME_SECONDS_MAX = 60.0


# --- produce ----------------------------------------------------------------------------------------------------------


def produce(
    url: str, load: Load, broker_cpu: BrokerCpu, progress: Progress, *, is_async: bool = False, threads: int = 1
) -> Figure:
    """One producer: `send_many` by batches, `send` one at a time if the batch is 1, or `send_async`.

    Parameters:
        threads: how many use it at once, each with its share of the messages.
    """
    bodies = load.bodies()
    rates = Rates(load.messages, sum(map(len, bodies)))
    how = "send_async" if is_async else "send" if load.batch == 1 else f"send_many by {load.batch}"
    send = _send_async if is_async else _send_each if load.batch == 1 else _send_many
    calls: list[float] = []
    ways = Ways()
    with Floor.running() as floor:
        for number in range(load.rounds + 1):
            raw = floor.window(bodies, threads) if load.batch == 1 else floor.produce(load.groups(bodies))
            if number:
                rates.floor_seconds.append(raw)
            calls.clear()  # those of the last round count
            with bench_topic(url) as (client, topic), client.producer(timeout=60.0) as producer:

                def share(part: list[bytes], producer: Producer = producer, topic: str = topic) -> None:
                    send(producer, topic, load, part, progress=progress, calls=calls)

                def run(share: Callable[[list[bytes]], None] = share) -> None:
                    _side_by_side(share, bodies, threads)

                with ways(client):
                    measured(rates, run, broker_cpu, number > 0)
    if threads > 1:
        how += f" in {threads} threads"
    each = {} if is_async else percentiles(calls)
    return rates.figure(f"{how}, {load.size} B, {load.durability}", **each, **ways.values())


def _side_by_side(share: Callable[[list[bytes]], None], bodies: list[bytes], threads: int) -> None:
    """Have each of some threads send its part of the bodies."""
    if threads == 1:
        share(bodies)
        return
    step = -(-len(bodies) // threads)
    parts = [bodies[first : first + step] for first in range(0, len(bodies), step)]
    with ThreadPoolExecutor(threads, "dmq-bench") as pool:
        for _ in pool.map(share, parts):
            pass


def _send_many(
    producer: Producer, topic: str, load: Load, bodies: list[bytes], progress: Progress, calls: list[float]
) -> None:
    first = 0
    for group in load.groups(bodies):
        began = time.perf_counter()
        producer.send_many(topic, load.made(group, first), durability=load.durability)
        calls.append(time.perf_counter() - began)
        first += len(group)
        progress(len(group))


def _send_each(
    producer: Producer, topic: str, load: Load, bodies: list[bytes], progress: Progress, calls: list[float]
) -> None:
    for number, body in enumerate(bodies):
        began = time.perf_counter()
        producer.send(topic, body, key=f"k-{number}", durability=load.durability)
        calls.append(time.perf_counter() - began)
        if number % 1000 == 0:
            progress(min(1000, len(bodies) - number))


def _send_async(
    producer: Producer, topic: str, load: Load, bodies: list[bytes], progress: Progress, calls: list[float]
) -> None:
    futures = []
    for number, body in enumerate(bodies):
        futures.append(producer.send_async(topic, body, key=f"k-{number}", durability=load.durability))
        if number % 1000 == 0:
            progress(min(1000, len(bodies) - number))
    for future in futures:
        future.result()


def produce_connections(url: str, load: Load, connections: int, broker_cpu: BrokerCpu, progress: Progress) -> Figure:
    """Many connections, each of which sends one message at a time and waits for its receipt; see `senders`."""
    address = parse_url(url)[0]
    bodies = load.bodies()
    rates = Rates(load.messages, sum(map(len, bodies)))
    counts: list[int] = []
    ways = Ways()
    with Floor.running() as floor:
        for number in range(load.rounds + 1):
            raw = floor.window(bodies, connections)
            with bench_topic(url) as (client, topic):
                task = Task(address.host, address.port, topic, connections, load=load)
                with contextlib.closing(Senders(task)) as senders, ways(client):
                    broker = broker_cpu()
                    outcome = senders.run()
                    used = broker_cpu() - broker
            progress(load.messages)
            if number:
                rates.floor_seconds.append(raw)
                rates.seconds.append(outcome.seconds)
                rates.client_cpu.append(outcome.cpu)
                rates.broker_cpu.append(used)
                counts = outcome.counts
    return rates.figure(
        f"{connections} connections, one message at a time, {load.size} B, {load.durability}",
        fewest_of_most=min(counts) / max(counts),
        **ways.values(),
    )


# --- consume ----------------------------------------------------------------------------------------------------------


def _fill(client: Client, topic: str, load: Load, bodies: list[bytes]) -> None:
    with client.producer(timeout=60.0) as producer:
        _send_many(producer, topic, load, bodies, progress=lambda _: None, calls=[])


def consume(url: str, load: Load, broker_cpu: BrokerCpu, progress: Progress, *, is_push: bool = False) -> Figure:
    """One consumer: `pull` and `ack` by batches, or a handler for each message; body and key are touched."""
    bodies = load.bodies()
    rates = Rates(load.messages, sum(map(len, bodies)))
    with Floor.running() as floor, bench_topic(url) as (client, topic):
        _fill(client, topic, load, bodies)
        for number in range(load.rounds + 1):
            raw = floor.consume(load.groups(bodies))
            if number:
                rates.floor_seconds.append(raw)
            group = f"bench-{number}"

            def run(group: str = group) -> None:
                take = _handle_each if is_push else _pull_all
                take(client, topic, group, load, progress=progress)

            measured(rates, run, broker_cpu, number > 0)
            client.admin.delete_group(group)
    how = "a handler for each" if is_push else f"pull and ack by {load.batch}"
    return rates.figure(f"{how}, {load.size} B")


def _pull_all(client: Client, topic: str, group: str, load: Load, progress: Progress) -> None:
    deadline = time.monotonic() + _CONSUME_SECONDS_MAX
    consumer = client.consumer(topic, group=group)
    left, size = load.messages, 0
    try:
        while left > 0 and time.monotonic() < deadline:
            batch = consumer.pull(max_messages=load.batch, wait=5.0)
            for message in batch:
                size += len(message.body) + len(message.key or "")
            consumer.ack(batch)
            left -= len(batch)
            progress(len(batch))
    finally:
        consumer.close()
    if left > 0:
        raise RuntimeError(f"{left} of {load.messages} messages were not delivered")


def _handle_each(client: Client, topic: str, group: str, load: Load, progress: Progress) -> None:
    consumer = client.consumer(topic, group=group)
    done = threading.Event()
    seen = 0
    touched = 0

    def handle(message: ReceivedMessage) -> None:
        nonlocal seen, touched
        touched += len(message.body) + len(message.key or "")
        seen += 1
        if seen % 1000 == 0:
            progress(1000)
        if seen >= load.messages:
            done.set()

    runner = threading.Thread(target=lambda: consumer.run(handle, workers=1), daemon=True)
    runner.start()
    is_whole = done.wait(_CONSUME_SECONDS_MAX)
    consumer.close()
    runner.join(10.0)
    if not is_whole:
        raise RuntimeError(f"{load.messages - seen} of {load.messages} messages were not delivered")
