"""What a large registry costs a broker, and whether a storm of writes there disturbs the data path.

    python -m bench.registry [--brokers 1000] [--topics 10000] [--seconds 10] [--only storm] [--json FILE]

A ZooKeeper of this machine holds the entries of a large cluster. One client of the registry reads them as a broker does
(`ClusterView`); CPU time is that of its process with kazoo's threads, requests are counted, and bytes are those of
paths and values. Then a shard of three brokers takes messages while other clients write to the registry as fast as it
lets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import dmq
from bench.loads import machine
from dmq.clock import SystemClock
from dmq.errors import DMQError
from dmq.registry.cluster_view import ClusterView
from dmq.registry.contents import (
    ChangeContent,
    ClusterContent,
    NodeContent,
    ShardContent,
    TopicContent,
    encode_content,
    hex_id,
)
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Entry, Operation, Put
from dmq.registry.zookeeper.client import ZooKeeperClient
from dmq.registry.zookeeper.ensemble import Ensemble
from dmq.shard.admin.operations import Operations
from dmq.shard.admin.visitor import Visitor
from dmq.shard.network import Network
from tests.integration.shard.processes import ShardProcesses
from tests.zookeepers import ZooKeeperProcess

_PATHS: Final = Paths("/large")
_AT_ONCE: Final = 100
_MEMBERS: Final = 3
_REWRITE_SECONDS: Final = 30.0
_WRITERS: Final = 4
_TIMEOUT_SECONDS: Final = 60.0


class Cost(NamedTuple):
    """Of something that a client of the registry did."""

    what: str
    cpu_ms: float
    requests: int
    bytes: int
    wall_ms: float


class CountedClient(ZooKeeperClient):
    """Counts what it asks, and what comes."""

    requests = 0
    received = 0

    async def _ask(self, *arguments: Any) -> Any:
        self.requests += 1
        found = await super()._ask(*arguments)
        if isinstance(found, list):
            self.received += sum(map(len, found))
        return found

    async def _read(self, path: str, until: float) -> Entry | None:
        entry = await super()._read(path, until)
        self.received += 0 if entry is None else len(path) + len(entry.value)
        return entry


@asynccontextmanager
async def opened(zookeeper: ZooKeeperProcess) -> AsyncIterator[CountedClient]:
    client = await CountedClient.open(Ensemble((zookeeper.address,), _PATHS.root), timeout=_TIMEOUT_SECONDS)
    assert isinstance(client, CountedClient)
    try:
        yield client
    finally:
        await client.close()


def entries(brokers: int, topics: int) -> Iterator[Create]:
    """A large cluster: shards of three, topics on four of them each."""
    yield from _PATHS.folders()
    yield Create(_PATHS.cluster, encode_content(ClusterContent(id=hex_id(1))))
    yield Create(_PATHS.change, encode_content(ChangeContent()))
    shards = max(1, brokers // _MEMBERS)
    for number in range(shards):
        names = [f"broker-{number * _MEMBERS + one}" for one in range(_MEMBERS)]
        replicas = [hex_id(number * _MEMBERS + one + 1) for one in range(_MEMBERS)]
        record = ShardContent(
            number=number + 1,
            revision=12,
            journal=hex_id(number + 1),
            members=dict(zip(names, replicas, strict=True)),
            leader=replicas[0],
            epoch=3,
            in_sync=replicas,
        )
        yield Create(_PATHS.shard(f"shard-{number}"), encode_content(record))
        for name, replica in zip(names, replicas, strict=True):
            yield Create(_PATHS.node(name), node_of(name, replica, number))
    for number in range(topics):
        slots = [(f"shard-{(number + one) % shards}", 4) for one in range(4)]
        yield Create(_PATHS.topic(f"orders.eu.customer-{number}"), topic_of(number, slots))


def node_of(name: str, replica: str, shard: int, load: float = 0.0) -> bytes:
    return encode_content(
        NodeContent(
            address=f"{name}.example.com:9611",
            replication_address=f"{name}.example.com:9613",
            shard=f"shard-{shard}",
            replica=replica,
            zone="a",
            version="1.0.0",
            load={
                "cpu": 0.5 + load,
                "connections": 120.0,
                "messages_in": 1234.5 + load,
                "bytes_in": 1234567.8 + load,
                "messages_out": 1234.5 + load,
                "bytes_out": 1234567.8 + load,
                "disk_used": 0.525,
            },
        )
    )


def topic_of(number: int, slots: list[tuple[str, int]]) -> bytes:
    settings = {"retention_seconds": 259200, "priority": False}
    return encode_content(TopicContent(incarnation=hex_id(number + 1), settings=settings, slots=slots, slots_version=1))


async def fill(client: ZooKeeperClient, operations: Sequence[Operation]) -> None:
    for start in range(0, len(operations), _AT_ONCE):
        await client.write(operations[start : start + _AT_ONCE])


async def cost(what: str, client: CountedClient, work: Callable[[], Coroutine[Any, Any, object]]) -> Cost:
    requests, received = client.requests, client.received
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    return Cost(
        what,
        (time.process_time() - cpu) * 1000,
        client.requests - requests,
        client.received - received,
        (time.perf_counter() - began) * 1000,
    )


# --- what a broker pays -----------------------------------------------------------------------------------------------


async def refreshes(zookeeper: ZooKeeperProcess, brokers: int, topics: int, seconds: float) -> list[Cost]:
    found: list[Cost] = []
    async with opened(zookeeper) as others, opened(zookeeper) as client:
        await fill(others, [*entries(brokers, topics)])
        view = ClusterView(client, _PATHS, SystemClock())
        found.append(await cost("all that there is: at the start, and once an hour", client, view.refresh))
        assert len(view.topics) == topics
        found.append(await cost("nothing has changed: every 3 s", client, view.refresh))

        name, content = "orders.eu.customer-7", topic_of(7, [("shard-1", 8)])
        change = encode_content(ChangeContent(paths=[_PATHS.topic(name)], count=1))
        await others.write([Put(_PATHS.topic(name), content, None), Put(_PATHS.change, change, None)])
        found.append(await cost("one topic was written", client, view.refresh))
        assert view.topics[name].slots == [("shard-1", 8)]

        keeper = asyncio.ensure_future(view.keep())
        await asyncio.sleep(2)
        found.append(await cost(f"{seconds:g} s in which nothing changes", client, lambda: asyncio.sleep(seconds)))
        writer = await asyncio.to_thread(_Rewriter, zookeeper, brokers)  # a loop that waits for it loses its session
        what = f"{seconds:g} s in which {brokers} brokers rewrite their entries every {_REWRITE_SECONDS:g} s"
        found.append(await cost(what, client, lambda: asyncio.sleep(seconds)))
        written = writer.stop()
        print(f"  ({written} entries were rewritten)")
        found.append(await cost("one shard is looked at: dmq shard show", client, _looked_at(client)))
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    return found


def _looked_at(client: CountedClient) -> Callable[[], Coroutine[Any, Any, object]]:
    """What a member does to show a shard; the members themselves are not there to be asked."""
    operations = Operations(Visitor(client, _PATHS), Network("bench", port=0), SystemClock(), "bench")
    return lambda: operations.shard("shard-7")


class _Rewriter:
    """Other brokers, in a process of their own: their CPU time is not that of the client."""

    def __init__(self, zookeeper: ZooKeeperProcess, brokers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.registry", "rewrite", str(zookeeper.address), str(brokers)],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.read(1)

    def stop(self) -> int:
        self._process.kill()
        return len(self._process.communicate()[0])


def rewrite(address: str, brokers: int) -> None:
    """Writes the entries of all brokers in turn, and a dot for each, until the process is killed."""
    from kazoo.client import KazooClient

    client = KazooClient(hosts=address)
    client.start()
    number = 0
    while True:
        name = f"broker-{number % brokers}"
        value = node_of(name, hex_id(number % brokers + 1), number % brokers // _MEMBERS, load=number / 10)
        client.set(_PATHS.node(name), value)
        os.write(1, b".")
        number += 1
        time.sleep(_REWRITE_SECONDS / brokers)


# --- a storm of writes ------------------------------------------------------------------------------------------------


class Sends(NamedTuple):
    """Sends one after the other, for a while."""

    sent: int
    failed: int
    p50_ms: float
    p99_ms: float


def send_for(url: str, seconds: float) -> Sends:
    took: list[float] = []
    failed = 0
    until = time.monotonic() + seconds
    with dmq.connect(url, app="bench", timeout=_TIMEOUT_SECONDS) as client, client.producer() as producer:
        while time.monotonic() < until:
            began = time.perf_counter()
            try:
                producer.send("load", b"x" * 200, durability="replicated", timeout=_TIMEOUT_SECONDS)
                took.append((time.perf_counter() - began) * 1000)
            except DMQError:
                failed += 1
    cuts = statistics.quantiles(took, n=100)
    return Sends(len(took), failed, cuts[49], cuts[98])


@contextmanager
def storm(zookeeper: ZooKeeperProcess) -> Iterator[list[int]]:
    """Clients that write as fast as they are answered; yields how often they did."""
    over, counts = threading.Event(), [0] * _WRITERS

    def write(number: int) -> None:
        from kazoo.client import KazooClient

        client = KazooClient(hosts=str(zookeeper.address))
        client.start()
        path = f"/storm-{number}"
        client.create(path, b"")
        while not over.is_set():
            client.set(path, b"x" * 1000)
            counts[number] += 1
        client.stop()
        client.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()


def disturbed(zookeeper: ZooKeeperProcess, seconds: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="dmq-bench-") as folder,
        ShardProcesses(
            Path(folder), settings=["store.ballast_bytes=0"], registry=f"zk://{zookeeper.address}/storm"
        ) as shard,
    ):
        with dmq.connect(shard.url, app="bench", timeout=_TIMEOUT_SECONDS) as client:
            client.admin.create_topic("load", queues=4)
        epoch = shard.until_whole().epoch
        send_for(shard.url, 2.0)
        calm = send_for(shard.url, seconds)
        with storm(zookeeper) as counts:
            began = time.monotonic()
            stormy = send_for(shard.url, seconds)
            writes = sum(counts) / (time.monotonic() - began)
        after = shard.until_whole().epoch
    return {"calm": calm._asdict(), "storm": stormy._asdict(), "writes_a_second": writes, "failovers": after - epoch}


def main() -> None:
    if sys.argv[1:2] == ["rewrite"]:
        rewrite(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brokers", type=int, default=1000)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each load lasts")
    parser.add_argument("--only", choices=("refresh", "storm"), help="one of the two")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    result: dict[str, Any] = {**machine(), "brokers": options.brokers, "topics": options.topics}
    with ZooKeeperProcess() as zookeeper:
        if options.only != "storm":
            costs = asyncio.run(refreshes(zookeeper, options.brokers, options.topics, options.seconds))
            for one in costs:
                print(
                    f"{one.what}: {one.cpu_ms:.1f} ms of CPU, {one.requests} requests, {one.bytes / 1000:.1f} kB, "
                    f"{one.wall_ms:.0f} ms"
                )
            result["refresh"] = [one._asdict() for one in costs]
        if options.only != "refresh":
            found = disturbed(zookeeper, options.seconds)
            for name in ("calm", "storm"):
                told = found[name]
                print(
                    f"{name}: {told['sent']} sends, {told['failed']} failed, p50 {told['p50_ms']:.2f} ms, "
                    f"p99 {told['p99_ms']:.2f} ms"
                )
            print(f"the storm: {found['writes_a_second']:.0f} writes a second; failovers: {found['failovers']}")
            result["storm"] = found
    if options.json:
        options.json.write_text(json.dumps(result | {"load_average": os.getloadavg()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
