"""What a scrape of /metrics costs the event loop: `python -m bench.metrics [pairs …]`.

A broker in memory keeps that many pairs of topic and group, with messages not consumed in each. A heartbeat on its
loop tells how long the loop stood still at most while `/metrics` was scraped, and the CPU of the loop's thread tells
what a scrape cost in all.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from dmq.broker.server import BrokerServer
from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.settings import BrokerSettings, Settings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import PositionSet
from dmq.testing import MemoryFiles

GROUPS = 100
SCRAPES = 20
QUEUES = 4


async def filled(pairs: int) -> BrokerServer:
    """A broker with that many pairs, each with a lag."""
    settings = BrokerSettings(port=0, metrics_port=0, telnet_port=None, topics_max=1_000_000, groups_max=1_000_000)
    server = BrokerServer(Settings(broker=settings), files=MemoryFiles())
    await server.start()
    writer, store = server.broker.writer, server.broker.store
    for number in range(max(1, pairs // GROUPS)):
        name = f"topic-{number}"
        await writer.write([store.creation(name, TopicConfig(queues=QUEUES))])
        topic_id = store.queries.topic(name).id
        encoded = encode_batch(name, "bench", [Message(b"x")] * (1 + number % 7), sent_at_ms=1)
        data, lengths = encoded.data, encoded.lengths
        batches = [Batch(topic=name, queue=queue, data=data, lengths=lengths) for queue in range(QUEUES)]
        places = [PositionSet(f"group-{g}", topic_id, queue, 0) for g in range(GROUPS) for queue in range(QUEUES)]
        await writer.write([*batches, *places])
    return server


async def scrape(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    text = await reader.read()
    writer.close()
    return text.decode()


async def longest_turn(over: asyncio.Event) -> float:
    """How long the longest turn of the loop took, in seconds."""
    longest = 0.0
    while not over.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0)
        longest = max(longest, time.perf_counter() - before)
    return longest


async def measure(server: BrokerServer, path: str) -> tuple[float, float, int]:
    """Milliseconds the loop stood still at most and of CPU in all, medians of the scrapes, and the size of the page."""
    still, cpu = [], []
    text = await scrape(server.metrics_port, path)
    for _ in range(SCRAPES):
        await asyncio.sleep(0.05)
        over = asyncio.Event()
        beating = asyncio.ensure_future(longest_turn(over))
        await asyncio.sleep(0)
        await scrape(server.metrics_port, path)
        over.set()
        still.append(await beating * 1000)
        began = time.thread_time()
        await scrape(server.metrics_port, path)
        cpu.append((time.thread_time() - began) * 1000)
    return statistics.median(still), statistics.median(cpu), len(text)


async def run(counts: list[int]) -> None:
    for count in counts:
        server = await filled(count)
        for path in ("/metrics", "/metrics/detail?limit=500"):
            still, cpu, size = await measure(server, path)
            print(f"{count:>8} pairs  {path:<28} loop at most {still:6.2f} ms, CPU {cpu:6.2f} ms, {size:>8} bytes")
        await server.stop(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", type=int, default=[4_000, 100_000])
    asyncio.run(run(parser.parse_args().pairs))


if __name__ == "__main__":
    main()
