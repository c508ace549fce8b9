"""A client that speaks frames and nothing more, to do what no good client does."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import dmq
from dmq.model import Durability
from dmq.protocol import (
    FRAME_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    Header,
    Kind,
    pack_batch,
    request_head,
    seal_frame,
)
from dmq.protocol.produce import Produce
from dmq.protocol.session import FRAME_CRC, Hello
from dmq.records import encode_batch
from tests.patience import PATIENCE_S


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


class RawClient:
    """One connection.

    Parameters:
        app: said in the hello; None says none.
        receive_bytes: of the socket's own buffer, to make it full soon.
        features: offered in the hello; with `frame-crc` every frame has its checksum.
    """

    def __init__(
        self,
        port: int,
        app: str | None = "raw",
        *,
        receive_bytes: int = 0,
        client_id: str = "",
        features: Sequence[str] = (),
    ) -> None:
        self.sock = socket.socket()
        if receive_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(("127.0.0.1", port))
        self._parser = FrameParser(FRAME_BYTES_MAX)
        self._frames: list[Frame] = []
        self._correlation = 0
        self._seals = FRAME_CRC in features
        if app is not None:
            assert self.ask(Command.HELLO, Hello(app, client_id, features=[*features])).status == 0

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def request(self, command: int, header: Header, body: bytes = b"") -> int:
        """Send a request; returns its correlation."""
        self._correlation += 1
        frame = [request_head(command, header, self._correlation, len(body)), body]
        self.send(b"".join(map(bytes, seal_frame(*frame) if self._seals else frame)))
        return self._correlation

    def ask(self, command: int, header: Header, body: bytes = b"") -> Frame:
        """Send a request and wait for its answer; what is pushed meanwhile is passed over."""
        correlation = self.request(command, header, body)
        while True:
            frame = self.read()
            assert frame is not None, "the broker hung up"
            if frame.kind == Kind.RESPONSE and frame.correlation == correlation:
                return frame

    def read(self) -> Frame | None:
        """The next frame; None once the broker has hung up."""
        while not self._frames:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += self._parser.feed(data)
        return self._frames.pop(0)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def produce(topic: str, *bodies: bytes, sequence: int = 0, producer: int = 77, **options: Any) -> tuple[Produce, bytes]:
    """Header and body of a PRODUCE."""
    messages = [dmq.Message(body) for body in bodies]
    batch = encode_batch(topic, "raw", messages, sent_at_ms=1_700_000_000_000)
    options.setdefault("durability", Durability.STORED)
    header = Produce(topic, 0, batch.count, len(batch.hashes), producer, 1, sequence, **options)
    return header, b"".join(map(bytes, pack_batch(batch)))
