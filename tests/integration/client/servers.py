"""A real broker on a thread of its own, and a peer that does as a test says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dmq.broker.server import BrokerServer
from dmq.errors import UnknownCommand
from dmq.model import TopicConfig
from dmq.protocol import (
    FRAME_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    Header,
    Kind,
    decode_request,
    error_frame,
    one_way_head,
    response_head,
    seal_frame,
)
from dmq.protocol.admin import TopicDescribeReply, TopicInfo
from dmq.protocol.cluster.route import Route, RouteReply
from dmq.protocol.produce import ProduceReply
from dmq.protocol.session import FRAME_CRC, Heartbeat, HelloReply, Limits, ShardInfo
from dmq.settings import BrokerSettings, Settings
from dmq.testing.processes import free_port
from tests.patience import PATIENCE_S


class RunningBroker:
    """A broker that listens, with its data in a folder; it can be stopped and started again on the same port."""

    def __init__(self, data: Path, **settings: Any) -> None:
        self._data = data
        self._settings = settings
        self.port = free_port()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self.port}"

    def start(self) -> None:
        ready = threading.Event()

        async def main() -> None:
            settings = BrokerSettings(
                port=self.port, metrics_port=0, telnet_port=None, data=str(self._data), **self._settings
            )
            server = BrokerServer(Settings(broker=settings))
            await server.start()
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await self._stop.wait()
            await server.stop(self._drain_seconds)

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S), "the broker did not start"

    def stop(self, drain_seconds: float = 0.0) -> None:
        if self._thread is not None:
            self._drain_seconds = drain_seconds
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


Answer = Callable[["Peer", Frame], "Header | Exception | None"]


class Peer:
    """Listens, says hello, and answers each other request as `answer` says; None leaves it unanswered.

    Another one may come back to its port: no other test gets it.
    """

    def __init__(self, answer: Answer | None = None, *, heartbeat_ms: int = 30_000, port: int = 0) -> None:
        self._answer = answer
        self._limits = Limits(FRAME_BYTES_MAX, 4 << 20, heartbeat_ms, 1000, 1 << 24, 30_000)
        self.port = port or free_port()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.shard: ShardInfo | None = None  # what it says of itself
        self.name = "peer"
        self.routes: Callable[[Route], RouteReply | Exception] | None = None  # what it answers to ROUTE
        self.is_mute = False  # it answers no hello
        self.frames: list[Frame] = []
        self.sockets: list[socket.socket] = []
        self._checked: set[socket.socket] = set()  # of clients that want checksums
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self.port}"

    def produced(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.command == Command.PRODUCE]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        parser = FrameParser(FRAME_BYTES_MAX)
        try:
            while data := sock.recv(1 << 16):
                for frame in parser.feed(data):
                    if parser.is_checked:
                        self._checked.add(sock)
                    self._take(sock, frame)
        except OSError:
            pass

    def _take(self, sock: socket.socket, frame: Frame) -> None:
        if frame.command == Command.HELLO:
            if self.is_mute:
                return
            features = [FRAME_CRC] if sock in self._checked else []
            reply = HelloReply(self.name, "", 1, self._limits, features=features, shard=self.shard)
            self.send(sock, response_head(frame.command, reply, frame.correlation))
            return
        if frame.command == Command.HEARTBEAT and frame.kind == Kind.REQUEST:
            self.frames.append(frame)
            self.send(sock, response_head(frame.command, Heartbeat(), frame.correlation))
            return
        if frame.command == Command.ROUTE:
            routes = UnknownCommand("no routes here") if self.routes is None else self.routes(decode_request(frame))
            if isinstance(routes, Exception):
                self.send(sock, error_frame(routes, frame.command, frame.correlation))
            else:
                self.send(sock, response_head(frame.command, routes, frame.correlation))
            return
        self.frames.append(frame)
        answer = self._answer(self, frame) if self._answer else usual(frame)
        if isinstance(answer, Exception):
            self.send(sock, error_frame(answer, frame.command, frame.correlation))
        elif answer is not None:
            self.send(sock, response_head(frame.command, answer, frame.correlation))

    def send(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(self.seal(sock, data))

    def seal(self, sock: socket.socket, frame: bytes) -> bytes:
        """A frame as it goes over this connection."""
        return b"".join(seal_frame(frame)) if sock in self._checked else frame

    def push(self, command: Command, header: Header) -> None:
        for sock in self.sockets:
            self.send(sock, one_way_head(command, header))

    def cut(self) -> None:
        """Break all connections."""
        sockets, self.sockets = self.sockets, []
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was first
            sock.close()

    def close(self) -> None:
        """Break all connections and listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()  # or it might take one more, which nobody would close
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            pass  # the test did


def usual(frame: Frame) -> Header:
    """What a broker in good health answers."""
    if frame.command == Command.TOPIC_DESCRIBE:
        return TopicDescribeReply(TopicInfo(decode_request(frame).topic, TopicConfig()))
    asked = decode_request(frame)
    return ProduceReply(asked.queue, 0, 0, asked.durability)
