"""A broker without sockets: connections that are fed by hand, so that a test decides what arrives in one turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from dmq.broker.broker import Broker
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.model import Durability, Message, TopicConfig
from dmq.net.connection import Connection
from dmq.net.server import ConnectionLimits, Server
from dmq.protocol import (
    FRAME_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    decode_response,
    pack_batch,
    request_head,
    seal_frame,
)
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import FRAME_CRC, Hello
from dmq.records import encode_batch
from dmq.settings import BrokerSettings, Settings, StoreSettings
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles


class Wire:
    """The transport of a connection, and the client behind it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._parser = FrameParser(FRAME_BYTES_MAX)
        self.writes = 0
        self.received = b""
        self.frames: list[Frame] = []
        self.is_closed = False
        self.on_write: Callable[[], None] = lambda: None

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", self._port) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.received += data
        self.on_write()
        self.frames += self._parser.feed(bytes(data))

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    @property
    def is_checked(self) -> bool:
        """Whether the broker puts checksums behind its frames."""
        return self._parser.is_checked


class Peer:
    """One connection after its hello."""

    def __init__(self, connection: Connection, port: int, *, has_crc: bool = False, hello: bytes = b"") -> None:
        self._connection = connection
        self._has_crc = has_crc
        self.wire = Wire(port)
        self._correlation = 1
        connection.connection_made(cast(asyncio.Transport, self.wire))
        features = [FRAME_CRC] if has_crc else []
        self.feed(hello or self.seal(request_head(Command.HELLO, Hello("shop", features=features), 0)))

    def seal(self, frame: bytes) -> bytes:
        """A frame as it goes over this connection."""
        return b"".join(seal_frame(frame)) if self._has_crc else frame

    def feed(self, data: bytes) -> None:
        """Bytes arrive."""
        while data:
            room = self._connection.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self._connection.buffer_updated(size)
            data = data[size:]

    def frame(
        self,
        bodies: Sequence[bytes],
        *,
        topic: str = "orders",
        named: str = "",
        queue: int = 0,
        producer: int = 7,
        sequence: int = 0,
        durability: Durability = Durability.STORED,
    ) -> bytes:
        """A PRODUCE; `named` is the topic that the records name, if it is another."""
        batch = encode_batch(named or topic, "shop", [Message(body) for body in bodies], sent_at_ms=1)
        body = b"".join(pack_batch(batch))
        header = Produce(topic, queue, batch.count, 0, producer, 0, sequence, durability)
        self._correlation += 1
        return self.seal(request_head(Command.PRODUCE, header, self._correlation, len(body)) + body)

    def send(self, bodies: Sequence[bytes], **how: Any) -> int:
        """A PRODUCE arrives; returns its correlation."""
        self.feed(self.frame(bodies, **how))
        return self._correlation

    def answers(self) -> list[ProduceReply | int]:
        """What was answered since the last call, in order: replies, or statuses of errors."""
        frames, self.wire.frames = self.wire.frames, []
        return [frame.status or decode_response(frame) for frame in frames]

    def reply(self) -> ProduceReply:
        """The one answer since the last call, which is a success."""
        (reply,) = self.answers()
        assert isinstance(reply, ProduceReply), reply
        return reply


class Rig:
    """The broker, its store and its connections."""

    def __init__(self, dispatcher: Dispatcher, store: MessageStore, files: MemoryFiles) -> None:
        self.dispatcher = dispatcher
        self.files = files
        self.store = store
        self._server = Server(
            dispatcher,
            dispatcher.clock,
            ConnectionLimits(
                connections_max=1000,
                output_bytes_max=1 << 20,
                hello_seconds=10,
                partial_seconds=10,
                partial_bytes_max=1 << 20,
                silence_seconds=60,
            ),
            outbox=dispatcher.outbox,
        )
        self.peers: list[Peer] = []

    @property
    def broker(self) -> Broker:
        assert self.dispatcher.broker is not None
        return self.dispatcher.broker

    async def connect(self, count: int, *, has_crc: bool = False) -> list[Peer]:
        for _ in range(count):
            self.peers.append(Peer(self._server._make(), 1000 + len(self.peers), has_crc=has_crc))
        await self.turn()
        for peer in self.peers:
            peer.wire.frames.clear()
            peer.wire.writes, peer.wire.received = 0, b""
        return self.peers[-count:]

    async def greet(self, hello: bytes) -> Peer:
        """A connection that begins with these bytes."""
        peer = Peer(self._server._make(), 1, hello=hello)
        await self.turn()
        return peer

    async def turn(self) -> None:
        """One turn of the loop: what arrived before is written and answered, but for what waits for a flush."""
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Everything is answered."""
        await self.broker.writer.drain()

    def bodies(self, topic: str = "orders", queue: int = 0) -> list[bytes]:
        """All messages of a queue."""
        at, end = self.store.queries.bounds(topic, queue)
        taken: list[bytes] = []
        while at < end:
            part = self.store.queries.read(topic, queue, at, end - at)
            taken += [bytes(record.body) for record in part.records()]
            at = part.next_offset
        return taken


@contextlib.asynccontextmanager
async def running(
    files: MemoryFiles | None = None, store_settings: StoreSettings | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """A broker with the topics `orders` and `bills`, of four queues.

    Parameters:
        files: a directory that has them already.
    """
    made, clock = files or MemoryFiles(), FakeClock()
    store = MessageStore(made, store_settings, clock, checkpoint_inline=False, new_epoch=True)
    if files is None:
        for topic in ("orders", "bills"):
            store.create_topic(topic, TopicConfig(queues=4))
    files = made
    dispatcher = Dispatcher(Settings(broker=BrokerSettings(**settings)), clock, COMMANDS, hello)
    broker = Broker(store, dispatcher.settings.broker, clock, dispatcher)
    dispatcher.attach(broker)
    rig = Rig(dispatcher, store, files)
    try:
        yield rig
    finally:
        await broker.stop(0.0)
