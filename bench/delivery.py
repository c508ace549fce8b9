"""What delivery features cost: `python -m bench.delivery [ROW …] [--scale 1.0] [--json FILE]`.

A broker in another process, on a directory of its own. Every row that has a bar in relation to something else measures
that beside it, in turns; wall times on a shared machine are noisy, so the CPU time of each process stands beside them.

Rows:
    delay-in       delayed messages in, beside plain ones: send_many, 200-byte bodies, durability "stored"
    delay-fire     all of them due at once: how fast they get to their topic
    delay-pending  many pending: what they cost in memory (5 million at --scale 1)
    transactions   prepared and committed from one process, in parallel
    retry          failures: pulled, nacked with a wait, moved to the schedule; then fired, delivered and acked
    filter         a group whose tag one message in a hundred has: how many index entries a second are gone through
    ordered        send_many by 500 with order by 10,000 business ids, beside the same without order
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import dmq
from dmq.testing.benchmark.benchmark import Load, machine
from dmq.testing.processes import BrokerProcess, resident_bytes

BODY_BYTES = 200
TOPIC = "bench"
WAIT_SECONDS = 15.0  # longer than it takes for all to fail
Row = dict[str, Any]


def prepared(broker: BrokerProcess) -> dmq.Client:
    client = dmq.connect(broker.url, app="bench")
    client.admin.create_topic(TOPIC, queues=4)
    return client


def measured(broker: BrokerProcess, work: Callable[[], None], count: int) -> dict[str, float]:
    """Messages a second, and the CPU time of both processes for one."""
    wall, mine, theirs = time.perf_counter(), time.process_time(), broker.cpu_seconds()
    work()
    taken = time.perf_counter() - wall
    return {
        "per_second": count / taken,
        "client_us": (time.process_time() - mine) / count * 1e6,
        "broker_us": (broker.cpu_seconds() - theirs) / count * 1e6,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def delay_in(scale: float) -> Row:
    """Delayed messages in, beside plain ones."""
    load = Load(max(1, int(50_000 * scale)), BODY_BYTES, 10_000)
    plain: list[dict[str, float]] = []
    delayed: list[dict[str, float]] = []
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(compression="none", timeout=120.0)
        bodies = load.bodies()

        def send(**options: Any) -> None:
            for at, group in enumerate(load.groups(bodies)):
                producer.send_many(TOPIC, load.made(group, at * load.batch), durability="stored", **options)

        send()
        send(delay=3600)
        for _ in range(9):
            plain.append(measured(broker, send, load.messages))
            delayed.append(measured(broker, lambda: send(delay=3600), load.messages))
    ratios = [d["per_second"] / p["per_second"] for p, d in zip(plain, delayed, strict=True)]
    costs = [
        (p["client_us"] + p["broker_us"]) / (d["client_us"] + d["broker_us"])
        for p, d in zip(plain, delayed, strict=True)
    ]
    return {
        "messages": load.messages,
        "plain": medians(plain),
        "delayed": medians(delayed),
        "of_plain": statistics.median(ratios),
        "of_plain_spread": [min(ratios), max(ratios)],
        "of_plain_by_cpu": statistics.median(costs),
        "bar": ">= 0.5 of plain",
    }


def delay_fire(scale: float) -> Row:
    """All due at once."""
    count = max(1, int(500_000 * scale))
    load = Load(count, BODY_BYTES, 10_000)
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(compression="none", timeout=120.0)
        due = time.time() + 15 + count / 20_000
        for at, group in enumerate(load.groups(load.bodies())):
            producer.send_many(TOPIC, load.made(group, at * load.batch), durability="stored", deliver_at=due)
        waited = due - time.time()
        time.sleep(max(0.0, waited - 0.2))
        before = broker.cpu_seconds()
        while not (begun := client.admin.stats("broker_delays")["broker_delays_fired"]):
            time.sleep(0.01)
        wall = time.perf_counter()
        while (fired := client.admin.stats("broker_delays")["broker_delays_fired"]) < count:
            time.sleep(0.05)
        taken = time.perf_counter() - wall
        cpu = broker.cpu_seconds() - before
        stored = sum(row.next_offset for row in client.admin.offsets(TOPIC))
    return {
        "messages": count,
        "per_second": (fired - begun) / taken,
        "broker_us": cpu / count * 1e6,
        "in_topic": stored,
        "spare_seconds": waited,
        "bar": ">= 50,000/s",
    }


def delay_pending(scale: float) -> Row:
    """Memory of many pending."""
    count = max(1, int(5_000_000 * scale))
    load = Load(100_000, 64, 20_000)
    bodies = load.bodies()
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(compression="none", timeout=120.0)
        for at, group in enumerate(load.groups(bodies)):
            producer.send_many(TOPIC, load.made(group, at * load.batch), durability="stored")
        time.sleep(1.0)
        before = resident_bytes(broker.pid)
        sent = 0
        while sent < count:
            for at, group in enumerate(load.groups(bodies)):
                due = time.time() + 86_400 + (sent + at * 7919) % 1_000_000
                producer.send_many(TOPIC, load.made(group, sent), durability="stored", deliver_at=due)
                sent += len(group)
        time.sleep(12.0)  # a checkpoint
        after = resident_bytes(broker.pid)
        pending = client.admin.stats("store_delays")["store_delays"]
    return {"pending": pending, "more_megabytes": (after - before) / 1e6, "bar": "< 200 MB for 5 million"}


def transactions(scale: float) -> Row:
    """Prepared and committed in parallel: many open at a time, each with its own commit."""
    count = max(1, int(100_000 * scale))
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(group="bench", check=lambda _: "commit", compression="none")
        bodies = Load(count, BODY_BYTES, 1000).bodies()

        def run() -> None:
            ends = [producer.transaction_async(TOPIC, body).commit_async() for body in bodies]
            for end in ends:
                end.result(60.0)

        rounds = [measured(broker, run, count) for _ in range(4)]
        done = client.admin.stats("broker_transactions")["broker_transactions_committed"]
    return {"messages": count, **medians(rounds[1:]), "committed": done, "bar": ">= 20,000/s"}


def retry(scale: float) -> Row:
    """The way of a failure: out of its queue into the schedule, and from there to its next attempt."""
    count = max(1000, int(100_000 * scale))
    with BrokerProcess() as broker, prepared(broker) as client:
        bodies = Load(count, BODY_BYTES, 1000).bodies()
        messages = [dmq.Message(body, key=f"k{number}") for number, body in enumerate(bodies)]
        client.producer(compression="none", timeout=120.0).send_many(TOPIC, messages, durability="stored")
        consumer = client.consumer(TOPIC, "bench")

        def settled(attempt: int) -> None:
            seen = 0
            while seen < count:
                batch = consumer.pull(1000, wait=30.0)
                assert all(message.attempt == attempt and message.body and message.key for message in batch)
                seen += len(batch)
                batch.nack(delay=WAIT_SECONDS, reason="it failed") if attempt == 1 else batch.ack()
            while client.admin.lag(TOPIC, "bench").total:
                time.sleep(0.01)

        began = time.perf_counter()
        failed = measured(broker, lambda: settled(1), count)
        time.sleep(max(0.0, began + WAIT_SECONDS - time.perf_counter()))  # the first are due
        delivered = measured(broker, lambda: settled(2), count)
    together = 1e6 / (failed["broker_us"] + delivered["broker_us"])
    return {
        "messages": count,
        "failed": failed,
        "fired_delivered_acked": delivered,
        "per_second_of_broker_cpu": together,
        "bar": ">= 20,000/s",
    }


def tag_filter(scale: float) -> Row:
    """One message in a hundred matches."""
    count = max(1000, int(2_000_000 * scale))
    rounds = []
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(compression="none", timeout=120.0)
        for first in range(0, count, 10_000):
            numbers = range(first, min(first + 10_000, count))
            tagged = [dmq.Message(b"%d" % n, tag="rare" if n % 100 == 0 else "common") for n in numbers]
            producer.send_many(TOPIC, tagged, durability="stored")
        for number in range(4):
            with client.consumer(TOPIC, f"bench-{number}", tags="rare", prefetch=2000) as consumer:

                def take(consumer: dmq.Consumer = consumer) -> None:
                    left = -(-count // 100)
                    while left:
                        batch = consumer.pull(1000, wait=30.0)
                        assert {message.tag for message in batch} == {"rare"}
                        left -= len(batch)
                        consumer.ack(batch)

                rounds.append(measured(broker, take, count))
    found = medians(rounds[1:])
    return {"entries": count, **found, "per_second_of_broker_cpu": 1e6 / found["broker_us"], "bar": ">= 5,000,000/s"}


def ordered(scale: float) -> Row:
    """Order by business id, beside no order."""
    load = Load(max(1000, int(50_000 * scale)), BODY_BYTES, 500)
    with BrokerProcess() as broker, prepared(broker) as client:
        producer = client.producer(compression="none", timeout=120.0)
        bodies = load.bodies()

        def send(is_ordered: bool) -> None:
            for at in range(0, load.messages, load.batch):
                producer.send_many(
                    TOPIC,
                    [
                        dmq.Message(body, business_id=f"u-{number % 10_000}", ordered=is_ordered)
                        for number, body in enumerate(bodies[at : at + load.batch], at)
                    ],
                    durability="stored",
                )

        send(False)
        send(True)
        pairs = [
            (measured(broker, lambda: send(False), load.messages), measured(broker, lambda: send(True), load.messages))
            for _ in range(9)
        ]
    ratios = [with_order["per_second"] / without["per_second"] for without, with_order in pairs]
    return {
        "messages": load.messages,
        "unordered": medians([without for without, _ in pairs]),
        "ordered": medians([with_order for _, with_order in pairs]),
        "of_unordered": statistics.median(ratios),
        "of_unordered_spread": [min(ratios), max(ratios)],
        "bar": ">= 0.5 of unordered",
    }


ROWS: dict[str, Callable[[float], Row]] = {
    "delay-in": delay_in,
    "delay-fire": delay_fire,
    "delay-pending": delay_pending,
    "transactions": transactions,
    "retry": retry,
    "filter": tag_filter,
    "ordered": ordered,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="which; all if left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    results: dict[str, Row] = {}
    for name in arguments.rows or ROWS:
        results[name] = ROWS[name](arguments.scale)
        print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(), "scale": arguments.scale, "rows": results}, file, indent=2)


if __name__ == "__main__":
    main()
