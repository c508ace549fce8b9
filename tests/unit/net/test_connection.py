"""The outbox: what is sent in a turn goes out at its end, or when it is released; and what is sent at once."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from dmq.errors import DMQError
from dmq.net.connection import Connection, WriteCoalescer
from dmq.protocol.frame import Chunks, Frame
from dmq.testing import FakeClock


class Line:
    def __init__(self, *, fails: bool = False) -> None:
        self.flushes = 0
        self._fails = fails

    def flush(self) -> None:
        self.flushes += 1
        if self._fails:
            raise RuntimeError("gone")


def test_what_is_sent_in_a_turn_goes_out_at_its_end() -> None:
    async def run() -> None:
        outbox, one, other = WriteCoalescer(), Line(), Line()
        outbox.add(one)
        outbox.add(other)
        assert (one.flushes, other.flushes) == (0, 0)
        await asyncio.sleep(0)
        assert (one.flushes, other.flushes) == (1, 1)
        await asyncio.sleep(0)
        assert (one.flushes, other.flushes) == (1, 1)

    asyncio.run(run())


def test_what_is_sent_while_it_is_held_goes_out_when_it_is_released() -> None:
    async def run() -> None:
        outbox, one = WriteCoalescer(), Line()
        outbox.is_held = True
        outbox.add(one)
        await asyncio.sleep(0)
        assert one.flushes == 0
        outbox.release()
        assert one.flushes == 1
        outbox.add(one)
        await asyncio.sleep(0)
        assert one.flushes == 2

    asyncio.run(run())


def test_one_connection_that_fails_does_not_keep_the_answers_of_others(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        outbox, bad, good = WriteCoalescer(), Line(fails=True), Line()
        outbox.add(bad)
        outbox.add(good)
        await asyncio.sleep(0)
        assert good.flushes == 1

    asyncio.run(run())
    assert "sending failed" in caplog.text


class Transport:
    """One over a socket, whose own writes are only noted."""

    def __init__(self, sock: socket.socket, *, waiting: int = 0, ssl: object = None) -> None:
        self._extra = {"socket": sock, "peername": ("127.0.0.1", 1), "sslcontext": ssl}
        self._waiting = waiting
        self.written = b""

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def get_extra_info(self, name: str) -> object:
        return self._extra[name]

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data


class Nobody:
    """A peer that hears nothing."""

    def connected(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, frame: Frame) -> None: ...

    def refused(self, connection: Connection, error: DMQError) -> None: ...

    def writable(self, connection: Connection) -> None: ...

    def disconnected(self, connection: Connection) -> None: ...


def sent_now(data: bytes, *, waiting: int = 0, ssl: object = None) -> tuple[bytes, bytes]:
    """What the socket has of what is sent at once, and what the transport got of it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        with near:
            near.setblocking(False)
            transport = Transport(near, waiting=waiting, ssl=ssl)
            connection = Connection(Nobody(), FakeClock(), 1 << 20, lambda *_: None, WriteCoalescer(), Chunks())
            connection.connection_made(cast(asyncio.Transport, transport))
            connection.send_now(data)
            near.shutdown(socket.SHUT_WR)
            received = b""
            while got := far.recv(1 << 20):
                received += got
            return received, transport.written


def test_what_is_sent_at_once_is_in_the_socket_at_once() -> None:
    assert sent_now(b"answer") == (b"answer", b"")


def test_what_the_socket_does_not_take_at_once_and_what_must_not_pass_by_the_transport_is_left_to_it() -> None:
    large = b"answer" * (8 << 20)
    received, written = sent_now(large)
    assert received
    assert written
    assert received + written == large
    assert sent_now(b"answer", waiting=1) == (b"", b"answer"), "something waits before it"
    assert sent_now(b"answer", ssl=object()) == (b"", b"answer"), "it has to be encrypted"
