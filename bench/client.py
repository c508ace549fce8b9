"""What sending costs the client: `python -m bench.client [--url dmq://…]`.

Against a stub in another process that answers every PRODUCE at once, or against a broker. Beside each wall time stands
the CPU time of this process alone; the bare echo is the round trip of 100 bytes over the same kind of socket.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import dmq
from dmq.client.producer.accumulator import Accumulator, Draft, LaneKey
from dmq.model import Durability, TopicConfig
from dmq.protocol import (
    FRAME_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    Header,
    Kind,
    decode_request,
    response_head,
    seal_frame,
)
from dmq.protocol.admin import TopicDescribeReply, TopicInfo
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import FRAME_CRC, Heartbeat, HelloReply, Limits

BODY_BYTES = 200


class Stub(asyncio.BufferedProtocol):
    """Answers as a broker that has nothing to do."""

    def __init__(self) -> None:
        self._parser = FrameParser(FRAME_BYTES_MAX)
        self._offset = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer(sizehint)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._parser.buffer_updated(nbytes):
            if frame.kind == Kind.REQUEST:
                answer = response_head(frame.command, self._reply(frame), frame.correlation)
                self._transport.write(b"".join(seal_frame(answer)))

    def _reply(self, frame: Frame) -> Header:
        if frame.command == Command.PRODUCE:
            asked: Produce = decode_request(frame)
            self._offset += asked.count
            return ProduceReply(asked.queue, self._offset, 0, Durability.STORED)
        if frame.command == Command.HELLO:
            limits = Limits(FRAME_BYTES_MAX, 4 << 20, 30_000, 1000, prefetch_bytes=1 << 24, partial_ms=30_000)
            return HelloReply("stub", "", 1, limits, features=[FRAME_CRC])
        if frame.command == Command.TOPIC_DESCRIBE:
            return TopicDescribeReply(TopicInfo("bench", TopicConfig()))
        return Heartbeat()


class Echo(asyncio.Protocol):
    """The baseline."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def serve(pipe: Pipe) -> None:
    """The other process."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(kind, "127.0.0.1", 0) for kind in (Stub, Echo)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())


def show(what: str, count: int, work: Callable[[], object]) -> None:
    """Measure once after a warm-up; print microseconds a message."""
    work()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:<52}{wall / count * 1e6:>9.2f} us{cpu / count * 1e6:>9.2f} us CPU{count / wall:>12,.0f}/s")


def latencies(what: str, call: Callable[[], object], count: int = 3000) -> None:
    """Print the median and the 99th percentile of one call."""
    for _ in range(300):
        call()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    taken.sort()
    print(f"{what:<52}{taken[count // 2] * 1e6:>9.1f} us p50{taken[count * 99 // 100] * 1e6:>9.1f} us p99")


def bare_echo(port: int) -> Callable[[], object]:
    """One round trip."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = os.urandom(100)

    def call() -> bytes:
        sock.sendall(data)
        return sock.recv(4096)

    return call


def gather(count: int, bodies: list[bytes]) -> Callable[[], object]:
    """The accumulator alone."""

    def work() -> None:
        accumulator = Accumulator(1 << 40, 1 << 40)
        lane = accumulator.lane(LaneKey("bench", -1, Durability.STORED))
        for body in bodies:
            accumulator.append(Draft(lane, dmq.Message(body), len(body)))

    return work


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--url")
    arguments.add_argument("--durability", default="stored")
    arguments.add_argument("--count", type=int, default=100_000)
    options = arguments.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    stub_port, echo_port = ours.recv()
    count, level = options.count, options.durability
    client = dmq.connect(options.url or f"dmq://127.0.0.1:{stub_port}", app="bench")
    if options.url:
        client.admin.create_topic("bench", allow_existing=True)
    producer = client.producer(compression="none")
    bodies = [os.urandom(BODY_BYTES) for _ in range(count)]
    messages = [dmq.Message(body, key=f"k{index}") for index, body in enumerate(bodies)]

    def flood() -> None:
        futures = [producer.send_async("bench", body, durability=level) for body in bodies]
        producer.flush()
        assert futures[-1].result().durability

    latencies("bare echo, 100 bytes", bare_echo(echo_port))
    latencies(f"send, {level}", lambda: producer.send("bench", bodies[0], durability=level))
    show("Message + append to the accumulator", count, gather(count, bodies))
    show(f"send_async with a future each, {level}", count, flood)
    show(
        f"send_many, 500 a call, {level}",
        count,
        lambda: [producer.send_many("bench", messages[at : at + 500], durability=level) for at in range(0, count, 500)],
    )
    show(f"send_many, all at once, {level}", count, lambda: producer.send_many("bench", messages, durability=level))
    client.close()
    process.terminate()


if __name__ == "__main__":
    main()
