"""What a replicated shard costs, beside a baseline from the same run.

    python -m bench.shard [--small] [--only catch-up] [--loads N] [--senders N] [--batch N] [--rounds N]
                          [--dir DIR] [--json FILE]

Everything runs in processes on this machine: a name server, brokers, and the load. `--small` fills 256 MB instead of
1 GB, to see that all is well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from crc32c import crc32c

import dmq
from bench.loads import Spread, machine
from bench.rows import SEED, Row, verdict
from bench.shard_cluster import Cluster, Load, journal_bytes
from dmq.testing.processes import BrokerProcess

_BATCH: Final = 500
_BODY_BYTES: Final = 200
_CHUNK_BYTES: Final = 1 << 20
_LOADS: Final = 1
_SENDERS: Final = 2
_WARM_SECONDS: Final = 2.0
_RATE_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.005
_LEVEL_SHARE: Final = 0.95
_LONE_MESSAGES: Final = 500
_IDLE_SECONDS: Final = 6.0  # until a leader that has written counts as one that does not, and sends at full speed


class ShardBench(NamedTuple):
    """What all rows share: the folder, how much a journal has, how often; how many processes the load has, with how
    many senders each, and messages a call."""

    folder: Path
    journal_bytes: int
    rounds: int
    loads: int
    senders: int
    batch: int

    def load(self, url: str, durability: str = "flushed") -> Load:
        return Load(url, self.loads, self.senders, self.batch, durability)


def fill(cluster: Cluster, name: str, size: int) -> None:
    """Send messages until a member's journal has so many bytes."""
    rng = random.Random(SEED)
    with cluster.connect(name) as client:
        client.admin.create_topic("load", 4)
        producer = client.producer(timeout=60.0)
        while journal_bytes(cluster.data(name)) < size:
            pool = rng.randbytes(_BATCH * _BODY_BYTES)
            bodies = [pool[at : at + _BODY_BYTES] for at in range(0, len(pool), _BODY_BYTES)]
            for _ in range(20):
                producer.send_many("load", [dmq.Message(body) for body in bodies])


def checksummed_copy(source: Path, target: Path) -> float:
    """Copy a journal, with the checksum of each piece taken before and after, and flush it; bytes a second."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    began, size = time.perf_counter(), 0
    for path in sorted((source / "journal").iterdir()):
        with path.open("rb", buffering=0) as read, (target / path.name).open("wb", buffering=0) as write:
            while chunk := read.read(_CHUNK_BYTES):
                before = crc32c(chunk)
                write.write(chunk)
                assert crc32c(chunk) == before
                size += len(chunk)
            os.fsync(write.fileno())
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return size / took


class LoadRate(NamedTuple):
    """Messages a second, and the leader's CPU time a message, in microseconds."""

    messages: float
    cpu: float


class CatchUp(NamedTuple):
    """How fast a follower got its bytes, the CPU time that took in nanoseconds a byte, and what the leader did
    meanwhile."""

    rate: float
    leader_cpu: float
    follower_cpu: float
    load: LoadRate


def _cpu(pid: int) -> float:
    """Of a process, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid makes of it


def catch_up(cluster: Cluster, load: Load | None = None) -> CatchUp:
    """A member with an empty directory follows until it is nearly level, or for some seconds under a load.

    Not until it is level: it would join the in-sync set, and its leader would wait for it when it is killed.
    """
    target = journal_bytes(cluster.data("a")) * _LEVEL_SHARE
    cluster.start("b")
    data = cluster.data("b")
    while not (first := journal_bytes(data)):
        time.sleep(_LOOK_SECONDS)
    pids = cluster.brokers["a"].pid, cluster.brokers["b"].pid
    cpu = [_cpu(pid) for pid in pids]
    began, sent = time.perf_counter(), 0 if load is None else load.sent()
    have = first
    while have < target and (load is None or time.perf_counter() - began < 2 * _RATE_SECONDS):
        time.sleep(_LOOK_SECONDS)
        have = journal_bytes(data)
    took = time.perf_counter() - began
    messages = 0 if load is None else load.sent() - sent
    meanwhile = LoadRate(messages / took, (_cpu(pids[0]) - cpu[0]) * 1e6 / max(1, messages))
    leader, follower = ((_cpu(pid) - before) * 1e9 / (have - first) for pid, before in zip(pids, cpu, strict=True))
    cluster.wipe("b")
    return CatchUp((have - first) / took, leader, follower, meanwhile)


def catching_up(bench: ShardBench) -> list[Row]:
    """A follower that gets everything from segments: beside a copy of the same bytes, and beside the leader's load."""
    with Cluster(bench.folder / "catch-up") as cluster:
        cluster.start("a")
        fill(cluster, "a", bench.journal_bytes)
        time.sleep(_IDLE_SECONDS)
        copies, caught = [], []
        for turn in range(bench.rounds + 1):
            copy, one = checksummed_copy(cluster.data("a"), bench.folder / "copy"), catch_up(cluster)
            if turn:
                copies.append(copy)
                caught.append(one)
        kept, by_cpu, loaded = _load_kept(bench, cluster)
    ratio = Spread([one.rate / copy for one, copy in zip(caught, copies, strict=True)])
    mb = statistics.median(one.rate for one in caught) / 1e6
    leader, follower = Spread([one.leader_cpu for one in caught]), Spread([one.follower_cpu for one in caught])
    return [
        Row(
            f"catch-up of {bench.journal_bytes / 1e6:.0f} MB from segments, of a checksummed copy",
            ">= 0.7",
            f"{ratio}, {mb:.0f} MB/s beside {statistics.median(copies) / 1e6:.0f}; CPU in ns a byte: leader {leader}, "
            f"follower {follower}",
            verdict(ratio.median >= 0.7, ratio.values[-1] >= 0.7),
            {"ratio": ratio.plain(), "rounds": [one._asdict() for one in caught], "copies": copies},
        ),
        Row(
            "the leader's rate meanwhile, of that without it",
            ">= 0.8",
            f"{kept}, by the leader's CPU a message {by_cpu}; at "
            f"{statistics.median(one.rate for one in loaded) / 1e6:.0f} MB/s of catch-up and "
            f"{statistics.median(one.load.messages for one in loaded) / 1e3:.0f} k messages/s",
            verdict(kept.median >= 0.8, kept.values[-1] >= 0.8),
            {"kept": kept.plain(), "by_cpu": by_cpu.plain(), "rounds": [one._asdict() for one in loaded]},
        ),
    ]


def _load_kept(bench: ShardBench, cluster: Cluster) -> tuple[Spread, Spread, list[CatchUp]]:
    """The leader's rate while a follower catches up, as a share of that before and after, by wall and by CPU time."""
    load = bench.load(cluster.brokers["a"].url)
    time.sleep(_WARM_SECONDS)
    kept, by_cpu, rounds = [], [], []
    before = load_rate(cluster.brokers["a"].pid, load)
    for turn in range(bench.rounds + 1):
        meanwhile = catch_up(cluster, load)
        after = load_rate(cluster.brokers["a"].pid, load)
        if turn:
            kept.append(2 * meanwhile.load.messages / (before.messages + after.messages))
            by_cpu.append((before.cpu + after.cpu) / 2 / meanwhile.load.cpu)
            rounds.append(meanwhile)
        before = after
    load.stop()
    return Spread(kept), Spread(by_cpu), rounds


def load_rate(pid: int, load: Load) -> LoadRate:
    """Over a while, with the CPU of the broker's process."""
    messages, took, cpu = watch(load, {"broker": pid})
    return LoadRate(messages / took, cpu["broker"])


def watch(load: Load, pids: dict[str, int]) -> tuple[int, float, dict[str, float]]:
    """Over a while: messages, seconds, and by process the microseconds of CPU a message; the load counts as one."""
    watched = {**{name: [pid] for name, pid in pids.items()}, "load": load.pids}
    began, sent = time.perf_counter(), load.sent()
    before = {name: sum(map(_cpu, some)) for name, some in watched.items()}
    time.sleep(_RATE_SECONDS)
    messages = load.sent() - sent
    cpu = {name: (sum(map(_cpu, some)) - before[name]) * 1e6 / max(1, messages) for name, some in watched.items()}
    return messages, time.perf_counter() - began, cpu


def run_load(url: str, durability: str, senders: int, batch: int) -> None:
    """In a process of its own: send batches; a line on standard input is answered with how many were acknowledged."""
    counts = [0] * senders
    client = dmq.connect(url, app="bench")
    is_over = threading.Event()

    def send(number: int) -> None:
        producer, rng = client.producer(timeout=60.0), random.Random(number)
        while not is_over.is_set():
            pool = rng.randbytes(batch * _BODY_BYTES)
            bodies = [pool[at : at + _BODY_BYTES] for at in range(0, len(pool), _BODY_BYTES)]
            producer.send_many("load", [dmq.Message(body) for body in bodies], durability=durability)  # type: ignore[arg-type]
            counts[number] += batch

    threads = [threading.Thread(target=send, args=(number,)) for number in range(senders)]
    for thread in threads:
        thread.start()
    for _ in sys.stdin:
        print(sum(counts), flush=True)
    is_over.set()
    for thread in threads:
        thread.join()
    client.close()


class Served(NamedTuple):
    """What a broker, or the leader of a shard, did: messages a second, by process the microseconds of CPU a message,
    and the median of a lone send in microseconds."""

    messages: float
    cpu: dict[str, float]
    send_us: float

    @property
    def cores(self) -> float:
        """How many were busy, with the load's."""
        return self.messages * sum(self.cpu.values()) / 1e6


def served(
    bench: ShardBench, broker: BrokerProcess, durability: str, followers: Sequence[BrokerProcess] = ()
) -> Served:
    """Batches from processes of their own, then messages one by one from this one."""
    load = bench.load(broker.url, durability)
    time.sleep(_WARM_SECONDS)
    pids = {"broker": broker.pid, **{f"follower {at}": one.pid for at, one in enumerate(followers, 1)}}
    messages, took, cpu = watch(load, pids)
    load.stop()
    with dmq.connect(broker.url, app="bench") as client:
        producer, body, sends = client.producer(timeout=60.0), random.Random(SEED).randbytes(_BODY_BYTES), []
        for _ in range(_LONE_MESSAGES):
            began = time.perf_counter()
            producer.send("load", body, durability=durability)  # type: ignore[arg-type]
            sends.append(time.perf_counter() - began)
    return Served(messages / took, cpu, statistics.median(sends) * 1e6)


class Round(NamedTuple):
    """A lone broker, twice, so that it shows how far the same code is from itself; and a shard between them."""

    lone: Served
    leader: Served
    again: Served

    def ratio(self, figure: Callable[[Served], float]) -> float:
        return 2 * figure(self.leader) / (figure(self.lone) + figure(self.again))

    def own_ratio(self, figure: Callable[[Served], float]) -> float:
        """A/A."""
        return figure(self.again) / figure(self.lone)


FIGURES: dict[str, Callable[[Served], float]] = {
    "rate": lambda one: one.messages,
    "leader": lambda one: one.cpu["broker"],
    "send": lambda one: one.send_us,
    "all": lambda one: sum(one.cpu.values()),
}


def serving(bench: ShardBench) -> list[Row]:
    """A shard of three members, beside a broker by itself that flushes, in turns."""
    lone = BrokerProcess(bench.folder / "lone", [], wait=60.0)
    rounds: list[Round] = []
    with Cluster(bench.folder / "serving", min_in_sync=2) as cluster:
        lone.start()
        try:
            for name in "abc":
                cluster.start(name)
            cluster.wait_in_sync("a", 3)
            for url in (lone.url, cluster.brokers["a"].url):
                with dmq.connect(url, app="bench") as client:
                    client.admin.create_topic("load", 4)
            for turn in range(bench.rounds + 1):
                alone, leader = served(bench, lone, "flushed"), cluster.leader("a")
                others = [one for one in cluster.brokers.values() if one is not leader]
                one = Round(alone, served(bench, leader, "replicated", others), served(bench, lone, "flushed"))
                if turn:
                    rounds.append(one)
        finally:
            lone.kill()
    return _serving_rows(rounds)


def _serving_rows(rounds: list[Round]) -> list[Row]:
    ratio = {name: Spread([one.ratio(figure) for one in rounds]) for name, figure in FIGURES.items()}
    own = {name: Spread([one.own_ratio(figure) for one in rounds]) for name, figure in FIGURES.items()}

    def middle(figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(one) for one in rounds)

    def cpu(which: str) -> str:
        names = getattr(rounds[0], which).cpu
        return ", ".join(f"{name} {middle(lambda one, n=name: getattr(one, which).cpu[n]):.2f}" for name in names)  # type: ignore[misc]

    rates = f"{middle(lambda one: one.leader.messages) / 1e3:.0f} k messages/s beside "
    rates += f"{middle(lambda one: one.lone.messages) / 1e3:.0f} k, "
    cores = [middle(lambda one, w=which: getattr(one, w).cores) for which in ("leader", "lone")]  # type: ignore[misc]
    rates += f"with {cores[0]:.2f} cores busy beside {cores[1]:.2f}"
    sends = f"{middle(lambda one: one.leader.send_us):.0f} us beside {middle(lambda one: one.lone.send_us):.0f}"
    figures = {"rounds": [one._asdict() for one in rounds]}
    return [
        Row(
            "replicated throughput of three members, of a lone broker's flushed",
            ">= 0.6",
            f"{ratio['rate']}; {rates}; A/A {own['rate']}; CPU of all a message {ratio['all']}, A/A {own['all']}",
            verdict(ratio["rate"].median >= 0.6, ratio["rate"].values[-1] >= 0.6),
            figures,
        ),
        Row(
            "the leader's CPU a message, of a lone broker's",
            "<= 1.35",
            f"{ratio['leader']}; A/A {own['leader']}; us in the shard: {cpu('leader')}; alone: {cpu('lone')}",
            verdict(ratio["leader"].median <= 1.35, ratio["leader"].values[0] <= 1.35),
            figures,
        ),
        Row(
            "a lone send, replicated, p50, of a lone broker's flushed",
            "<= 2.5",
            f"{ratio['send']}; {sends}; A/A {own['send']}",
            verdict(ratio["send"].median <= 2.5, ratio["send"].values[0] <= 2.5),
            figures,
        ),
    ]


ROWS: dict[str, Callable[[ShardBench], list[Row]]] = {
    "serving": serving,
    "catch-up": catching_up,
}


def main() -> None:
    if sys.argv[1:2] == ["load"]:
        url, durability, senders, batch = sys.argv[2:6]
        run_load(url, durability, int(senders), int(batch))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="256 MB instead of 1 GB: a quick check")
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--loads", type=int, default=_LOADS, help="processes of the load; one if left out")
    parser.add_argument("--senders", type=int, default=_SENDERS, help="threads of each of them; two if left out")
    parser.add_argument("--batch", type=int, default=_BATCH, help="messages a call of the load; 500 if left out")
    parser.add_argument("--dir", type=Path, help="where to put the directories; a temporary folder if left out")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs of each comparison")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="dmq-bench-", dir=options.dir))
    size = 256 << 20 if options.small else 1 << 30
    rows: list[Row] = []
    try:
        bench = ShardBench(folder, size, options.rounds, options.loads, options.senders, options.batch)
        for name in (name for name in ROWS if name in names):
            for row in ROWS[name](bench):
                rows.append(row)
                print(f"{row.verdict:6} {row.what} | {row.bar} | {row.reached}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        settings: dict[str, Any] = {"seed": SEED, "rounds": options.rounds, "journal_bytes": size}
        settings |= {"loads": options.loads, "senders": options.senders, "batch": options.batch}
        result = {**machine(), **settings, "load_average": os.getloadavg(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
