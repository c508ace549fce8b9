"""What clients and brokers pay for many shards: CPU time a message over three of them, beside a lone broker.

    python -m bench.cluster [--only produce,consume,owned,topics] [--rounds N] [--durability stored] [--json FILE]

The three shards have one member each, so that what is compared is routes and not replication. All run on one machine
and share its cores: CPU time is compared, not throughput. Each round measures the lone broker, the cluster, and the
lone broker again, whose two figures show how far the same code is from itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import dmq
from bench.cluster_load import ClusterLoad
from bench.loads import Spread, machine
from bench.rows import Row, verdict
from dmq.protocol.admin import TopicList, TopicListReply
from dmq.protocol.cluster.route import Route, RouteReply
from dmq.protocol.commands import Command, decode_response
from dmq.registry.contents import ChangeContent, TopicContent, encode_content, hex_id
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Put
from dmq.registry.url import open_registry
from dmq.testing.processes import BrokerProcess, DevClusterProcess, cpu_seconds, resident_bytes
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.questions import ask
from tests.integration.frame_client import RawClient
from tests.patience import eventually

_BAR: Final = 1.15
_SHARDS: Final = 3
_QUEUES: Final = 4
_AT_ONCE: Final = 100
_FEW: Final = 2000  # messages: a group that consumes so few does little more than begin


class ClusterBench(NamedTuple):
    """What all rows share."""

    folder: Path
    rounds: int
    durability: str
    topics: int
    clients: int


class Contestant(NamedTuple):
    """Brokers, by their processes, and a client of theirs."""

    load: ClusterLoad
    brokers: list[int]

    def run(self, do: str, **arguments: Any) -> Cost:
        before = sum(map(cpu_seconds, self.brokers))
        found = self.load.do(do, **arguments)
        brokers = sum(map(cpu_seconds, self.brokers)) - before
        return Cost(found["cpu"] * 1e6 / found["messages"], brokers * 1e6 / found["messages"])


class Cost(NamedTuple):
    """Microseconds of CPU a message."""

    client: float
    brokers: float

    @property
    def both(self) -> float:
        return self.client + self.brokers


class Round(NamedTuple):
    """A lone broker, three shards, and the lone broker again."""

    lone: Cost
    cluster: Cost
    again: Cost

    def ratio(self, figure: Callable[[Cost], float]) -> float:
        return 2 * figure(self.cluster) / (figure(self.lone) + figure(self.again))


def row(what: str, rounds: list[Round]) -> Row:
    """The line of a comparison."""
    both = Spread([one.ratio(lambda cost: cost.both) for one in rounds])
    client = Spread([one.ratio(lambda cost: cost.client) for one in rounds])
    brokers = Spread([one.ratio(lambda cost: cost.brokers) for one in rounds])
    own = Spread([one.again.both / one.lone.both for one in rounds])

    def middle(which: Callable[[Round], float]) -> str:
        return f"{statistics.median(map(which, rounds)):.3g}"

    reached = f"{both}, client {client}, brokers {brokers}; A/A {own}; us: client "
    reached += f"{middle(lambda r: r.cluster.client)} beside {middle(lambda r: r.lone.client)}, brokers "
    reached += f"{middle(lambda r: r.cluster.brokers)} beside {middle(lambda r: r.lone.brokers)}"
    figures = {"both": both.plain(), "own": own.plain(), "rounds": [one._asdict() for one in rounds]}
    return Row(what, f"<= {_BAR}", reached, verdict(both.median <= _BAR, both.values[0] <= _BAR), figures)


class Field:
    """A lone broker and a cluster, with a client process each."""

    def __init__(self, bench: ClusterBench) -> None:
        self._bench = bench
        self._lone = BrokerProcess(bench.folder / "lone", wait=60.0)
        self._cluster = DevClusterProcess(bench.folder / "cluster", shards=_SHARDS, replicas=1)

    def __enter__(self) -> Field:
        self._lone.start()
        self._cluster.start()
        self.lone = Contestant(ClusterLoad(self._lone.url), [self._lone.pid])
        self.cluster = Contestant(ClusterLoad(self._cluster.url), [line["pid"] for line in self._cluster.rows])
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.lone, self.cluster):
            one.load.__exit__()
        self._lone.kill()
        self._cluster.stop()

    def make(self, topic: str) -> None:
        for url in (self._lone.url, self._cluster.url):
            with dmq.connect(url, app="bench", timeout=60.0) as client:
                client.admin.create_topic(topic, queues=_QUEUES)

    def compare(self, do: str, **arguments: Any) -> list[Round]:
        """Turn by turn; the first turn warms up."""
        found = []
        for turn in range(self._bench.rounds + 1):
            lone = self.lone.run(do, **arguments)
            cluster = self.cluster.run(do, **arguments)
            one = Round(lone, cluster, self.lone.run(do, **arguments))
            if turn:
                found.append(one)
        return found


def producing(bench: ClusterBench) -> list[Row]:
    rows = []
    with Field(bench) as field:
        field.make("load")
        for do, what, count in (
            ("send_many", "send_many by 500", 200_000),
            ("send_async", "send_async", 40_000),
            ("send_lone", "send, one by one", 2_000),
        ):
            rounds = field.compare(do, topic="load", count=count, durability=bench.durability)
            rows.append(row(f"{what}, {bench.durability}", rounds))
    return rows


def consuming(bench: ClusterBench) -> list[Row]:
    """Of a backlog that each group consumes from its first message on: a long one, and one that is all beginning."""
    rows = []
    with Field(bench) as field:
        for do, what, count in (("pull", "pull and ack by 500", 600_000), ("push", "a handler for each", 200_000)):
            for topic, size in ((do, count), (f"{do}-few", _FEW)):
                field.make(topic)
                for one in (field.lone, field.cluster):
                    one.load.do("send_many", topic=topic, count=size)
            long = field.compare(do, topic=do, count=count)
            rows.append(row(f"{what}, {count:,}", long))
            rows.append(beginning(what, long, field.compare(do, topic=f"{do}-few", count=_FEW)))
    return rows


def beginning(what: str, long: list[Round], short: list[Round]) -> Row:
    """What a group costs before its first messages: what few of them cost beyond the same number of many."""

    def milliseconds(which: Callable[[Round], float]) -> float:
        return (statistics.median(map(which, short)) - statistics.median(map(which, long))) * _FEW / 1e3

    found = {
        "client": milliseconds(lambda one: one.cluster.client),
        "client alone": milliseconds(lambda one: one.lone.client),
        "brokers": milliseconds(lambda one: one.cluster.brokers),
        "broker alone": milliseconds(lambda one: one.lone.brokers),
    }
    reached = f"client {found['client']:.1f} ms beside {found['client alone']:.1f}, "
    reached += f"brokers {found['brokers']:.1f} ms beside {found['broker alone']:.1f}"
    figures = {**found, "rounds": [one._asdict() for one in short]}
    return Row(f"{what}: the beginning of a group", "", reached, "", figures)


# --- a leader dies ----------------------------------------------------------------------------------------------------


def owned(bench: ClusterBench) -> list[Row]:
    """How long the queues of a shard are without a consumer when its leader is killed, beyond the election."""
    elected, consumed = [], []
    with (
        ClusterProcesses(bench.folder / "owned", _SHARDS, 2) as cluster,
        dmq.connect(cluster.url, app="bench", timeout=60.0) as client,
    ):
        client.admin.create_topic("owned", queues=_QUEUES)
        number, last = cluster.numbers["s1"], dict.fromkeys(range(_QUEUES), 0.0)

        def handle(message: dmq.ReceivedMessage) -> None:
            if message.shard == number:
                last[message.queue] = time.monotonic()

        consumer = client.consumer("owned", "owners")
        threading.Thread(target=consumer.run, args=(handle, _QUEUES)).start()
        producer, is_over = client.producer(timeout=60.0), threading.Event()

        def send() -> None:
            for at in itertools.count():
                producer.send_async("owned", b"x", business_id=f"b-{at % 200}", ordered=True)
                if is_over.wait(0.005):
                    return

        threading.Thread(target=send).start()
        for _ in range(bench.rounds):
            eventually(lambda: all(last.values()))
            victim = cluster.leader("s1")
            killed_at = time.monotonic()
            cluster.members[victim].kill()
            cluster.members[victim].start()  # two members have to have everything before any of them serves
            eventually(lambda: _is_served(cluster))
            led_at = time.monotonic()
            eventually(lambda: all(at > led_at for at in last.values()))  # noqa: B023
            elected.append(led_at - killed_at)
            consumed.append(max(last.values()) - led_at)
            eventually(lambda: len(cluster.in_sync("s1")) == 2)
        is_over.set()
        consumer.close()
        producer.close()
    reached = f"{Spread(consumed)} s after the next leader serves, which it does {Spread(elected)} s after the kill"
    what = f"a leader is killed: until all {_QUEUES} queues of its shard are consumed"
    return [Row(what, "<= 3 s", reached, verdict(max(consumed) <= 3, min(consumed) <= 3), {"rounds": consumed})]


def _is_served(cluster: ClusterProcesses) -> bool:
    """Whether a member leads the first shard, and answers."""
    ports = [process.port for name, process in cluster.members.items() if name[:-1] == "s1"]
    return any(ask(port, Command.TOPIC_LIST, TopicList()) is not None for port in ports)


# --- many topics, many clients ----------------------------------------------------------------------------------------


def refresh_bytes(port: int, topics: int) -> tuple[int, int]:
    """Of a ROUTE over so many topics, and of its answer."""
    with RawClient(port) as client:
        asked = Route([f"t-{number}" for number in range(topics)])
        frame = client.ask(Command.ROUTE, asked)
        assert isinstance(decode_response(frame), RouteReply)
        return sum(len(name) + 1 for name in asked.topics), len(frame.header) + len(frame.body)


def many(bench: ClusterBench) -> list[Row]:
    """So many topics over three shards, and so many clients in five processes, each of which knows 20 topics."""
    rows: list[Row] = []

    def tell(what: str, reached: str, **figures: Any) -> None:
        rows.append(Row(what, "", reached, "", figures))

    with ClusterProcesses(bench.folder / "many", _SHARDS, settings=()) as cluster:
        pids = [member.pid for member in cluster.members.values()]
        port = next(iter(cluster.members.values())).port
        empty = [resident_bytes(pid) for pid in pids]
        before, began = sum(map(cpu_seconds, pids)), time.perf_counter()
        asyncio.run(_make_topics(cluster, bench.topics))
        took, cpu = time.perf_counter() - began, sum(map(cpu_seconds, pids)) - before
        grown = statistics.mean(resident_bytes(pid) - was for pid, was in zip(pids, empty, strict=True))
        tell(
            f"{bench.topics:,} topics of {_QUEUES} queues a shard come into the registry",
            f"leaders have all after {took:.0f} s, {cpu * 1e3 / bench.topics / _SHARDS:.2f} ms of CPU a topic each; "
            f"a broker grows by {grown / 1e6:.0f} MB, {grown / bench.topics:.0f} bytes a topic",
            seconds=took, cpu=cpu, bytes=grown,
        )  # fmt: skip
        with ClusterLoad(cluster.url) as load:
            found = load.do("touch", topics=bench.topics)
            tell(
                f"a client that sends to all {bench.topics:,}",
                f"grows by {found['bytes'] / 1e6:.0f} MB, {found['bytes'] / bench.topics:.0f} bytes a topic",
                **found,
            )
            asked, answered = refresh_bytes(port, 20)
            tell("ROUTE of 20 topics: a refresh of such a client", f"{asked} bytes, answer {answered}", bytes=answered)
        rows += _crowd(bench, cluster, pids)
    return rows


async def _make_topics(cluster: ClusterProcesses, topics: int) -> None:
    """Write entries, as an import does, and wait until all leaders have them in their journals."""
    registry, paths = await open_registry(cluster.registry, "bench"), Paths("/dmq")
    slots = [(shard, _QUEUES) for shard in cluster.shards]
    try:
        for start in range(0, topics, _AT_ONCE):
            names = [paths.topic(f"t-{number}") for number in range(start, min(topics, start + _AT_ONCE))]
            entries = [
                TopicContent(incarnation=hex_id(start + at + 1), slots=slots, slots_version=1)
                for at in range(len(names))
            ]
            made = [Create(name, encode_content(entry)) for name, entry in zip(names, entries, strict=True)]
            await registry.write(made)
        change = ChangeContent(path=paths.topics, count=topics)
        await registry.write([Put(paths.change, encode_content(change), None)])
    finally:
        await registry.close()
    for member in cluster.members.values():
        while _count_topics(member.port) < topics:
            await asyncio.sleep(3.0)


def _count_topics(port: int) -> int:
    """Those that a broker has in its journal."""
    count, after = 0, ""
    with RawClient(port) as client:
        while True:
            reply = decode_response(client.ask(Command.TOPIC_LIST, TopicList("t-", after)))
            assert isinstance(reply, TopicListReply)
            count += sum(info.topic_id > 0 for info in reply.topics)
            if not reply.more or not reply.topics:
                return count
            after = reply.topics[-1].topic


def _crowd(bench: ClusterBench, cluster: ClusterProcesses, pids: list[int]) -> list[Row]:
    """Many clients: memory, what they cost at rest, and how soon all of them know a change."""
    loads = [ClusterLoad(cluster.url) for _ in range(5)]
    each = bench.clients // len(loads)
    memory = [resident_bytes(pid) for pid in pids]
    for load in loads:
        load.begin("connect", count=each, topics=20)
    made = [load.end() for load in loads]
    grown = statistics.mean(resident_bytes(pid) - was for pid, was in zip(pids, memory, strict=True))
    own = statistics.mean(one["bytes"] for one in made) / each
    rows = [
        Row(
            f"{bench.clients} clients of 20 topics each", "",
            f"{own / 1e3:.0f} kB a client, {grown / bench.clients / 1e3:.0f} kB of each broker a client", "",
            {"client": own, "broker": grown / bench.clients},
        )
    ]  # fmt: skip
    seconds = 60.0
    before = sum(map(cpu_seconds, pids))
    for load in loads:
        load.begin("rest", seconds=seconds)
    rest = [load.end() for load in loads]
    brokers, clients = sum(map(cpu_seconds, pids)) - before, sum(one["cpu"] for one in rest)
    rows.append(
        Row(
            f"{seconds:g} s in which nothing changes: refreshes every 30 s, keep-alives", "",
            f"clients {clients * 1e3 / bench.clients / seconds * 30:.2f} ms of CPU each in 30 s, all brokers together "
            f"{brokers * 1e3 / bench.clients / seconds * 30:.2f} ms a client", "",
            {"clients": clients, "brokers": brokers},
        )
    )  # fmt: skip
    seen = []
    with dmq.connect(cluster.url, app="bench", timeout=60.0) as client:
        for turn in range(5):
            shard = cluster.shards[-1]
            before = sum(map(cpu_seconds, pids))
            client_cpu = sum(cpu_seconds(load.pid) for load in loads)
            began = time.monotonic()
            add, remove = (shard, "") if turn % 2 else ("", shard)
            changed = client.admin.place_topic("t-0", add=add, remove=remove, force=bool(remove))
            answered = time.monotonic() - began
            for load in loads:
                load.begin("know", topic="t-0", version=changed.slots_version)
            known = max(load.end()["at"] for load in loads) - began
            cpu = sum(map(cpu_seconds, pids)) - before, sum(cpu_seconds(load.pid) for load in loads) - client_cpu
            seen.append({"known": known, "answered": answered, "brokers": cpu[0], "clients": cpu[1]})
            time.sleep(2.0)
    spread = {key: Spread([one[key] for one in seen]) for key in ("known", "brokers", "clients")}
    rows.append(
        Row(
            f"a topic's slots change: until all {bench.clients} clients know", "",
            f"{spread['known']} s; CPU of all brokers {spread['brokers']} s, of all clients {spread['clients']} s", "",
            {"rounds": seen},
        )
    )  # fmt: skip
    for load in loads:
        load.__exit__()
    return rows


ROWS: dict[str, Callable[[ClusterBench], list[Row]]] = {
    "produce": producing,
    "consume": consuming,
    "owned": owned,
    "topics": many,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of each comparison")
    parser.add_argument("--durability", default="flushed", help="of sends")
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="dmq-bench-"))
    facts, rows = machine(), []
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    try:
        for name in names:
            bench = ClusterBench(folder / name, options.rounds, options.durability, options.topics, options.clients)
            bench.folder.mkdir()
            for one in ROWS[name](bench):
                print(f"| {one.what} | {one.bar} | {one.reached} | {one.verdict} |", flush=True)
                rows.append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": [one._asdict() for one in rows]}, indent=1))


if __name__ == "__main__":
    main()
