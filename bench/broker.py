"""What a PRODUCE costs the broker, without sockets: `python -m bench.broker`.

Connections are fed by hand with frames that were made before; a turn of the loop follows, and its CPU time is taken,
from the first byte to the last answer handed to the transport. What sockets cost comes on top, about 6 us a request
with uvloop. Each row shows the median and the best hundredth in microseconds a message, since other work on the machine
only ever adds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any, cast

from dmq.broker.broker import Broker
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello as greet
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.clock import SystemClock
from dmq.model import Durability, Message
from dmq.net.connection import Connection
from dmq.net.server import ConnectionLimits, Server
from dmq.protocol import Command, pack_batch, request_head, seal_frame
from dmq.protocol.produce import Produce
from dmq.protocol.session import FRAME_CRC, Hello
from dmq.records import ANY_QUEUE, encode_batch
from dmq.settings import Settings
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore

TOPIC = "bench"
BODIES = 32
ROWS = ((1, 1, 200, 4000), (10, 1, 200, 1000), (100, 1, 200, 300), (1, 500, 200, 300), (1, 500, 1024, 200))


class Sink:
    """A transport that counts what it is given."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.writes = 0

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", self._port) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.writes += 1

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def feed(connection: Connection, data: bytes) -> None:
    """Bytes arrive; the copy stands for the kernel's."""
    view = memoryview(data)
    while len(view):
        room = connection.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        connection.buffer_updated(size)
        view = view[size:]


def frames_of(connections: int, count: int, size: int, turns: int, seed: int) -> list[list[bytes]]:
    """For each turn a PRODUCE of each connection; batches have keys, lone messages have none."""
    rng = random.Random(seed)
    bodies = []
    for _ in range(BODIES):
        messages = [Message(rng.randbytes(size), f"k-{i}" if count > 1 else None) for i in range(count)]
        batch = encode_batch(TOPIC, "bench", messages, sent_at_ms=time.time_ns() // 1_000_000)
        bodies.append((b"".join(pack_batch(batch)), len(batch.hashes)))
    made = []
    for turn in range(turns):
        frames = []
        for index in range(connections):
            body, keys = bodies[(turn + index) % BODIES]
            header = Produce(TOPIC, ANY_QUEUE, count, keys, 1 + index, 0, turn * count, Durability.STORED)
            frames.append(request_head(Command.PRODUCE, header, turn, len(body)) + body)
        made.append(frames)
    return made


async def measure(connections: int, count: int, size: int, turns: int, given: argparse.Namespace) -> list[float]:
    """CPU seconds of each turn, sorted; the first tenth warms up."""
    settings, clock = Settings(), SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        store = MessageStore(OsFiles(folder), settings.store, clock, checkpoint_inline=False, new_epoch=True)
        store.create_topic(TOPIC)
        dispatcher = Dispatcher(settings, clock, COMMANDS, greet)
        broker = Broker(store, settings.broker, clock, dispatcher)
        dispatcher.attach(broker)
        server = Server(
            dispatcher,
            clock,
            ConnectionLimits(
                connections_max=10_000,
                output_bytes_max=1 << 20,
                hello_seconds=60,
                partial_seconds=60,
                partial_bytes_max=1 << 30,
                silence_seconds=60,
            ),
            outbox=dispatcher.outbox,
        )
        sinks = [Sink(index + 1) for index in range(connections)]
        peers = [server._make() for _ in sinks]
        for peer, sink in zip(peers, sinks, strict=True):
            peer.connection_made(cast(asyncio.Transport, sink))
            hello = request_head(Command.HELLO, Hello("bench", features=[] if given.plain else [FRAME_CRC]), 0)
            feed(peer, hello if given.plain else b"".join(seal_frame(hello)))
        await asyncio.sleep(0)
        taken = []
        for plain in frames_of(connections, count, size, turns, given.seed):
            frames = plain if given.plain else [b"".join(seal_frame(frame)) for frame in plain]
            began = time.thread_time()
            for peer, frame in zip(peers, frames, strict=True):
                feed(peer, frame)
            await asyncio.sleep(0)
            taken.append(time.thread_time() - began)
        assert all(sink.writes == turns + 1 for sink in sinks), "somebody was not answered in its turn"
        await broker.stop(0.0)
    return sorted(taken[turns // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="frames without checksums, as of peers without frame-crc")
    given = parser.parse_args()
    print(f"{'connections':>11} {'batch':>6} {'bytes':>6} {'median':>8} {'best':>8}   us of CPU a message")
    for connections, count, size, turns in ROWS:
        taken = asyncio.run(measure(connections, count, size, turns, given))
        scale = 1e6 / (connections * count)
        median, best = taken[len(taken) // 2] * scale, taken[len(taken) // 100] * scale
        print(f"{connections:>11} {count:>6} {size:>6} {median:>8.2f} {best:>8.2f}")


if __name__ == "__main__":
    main()
