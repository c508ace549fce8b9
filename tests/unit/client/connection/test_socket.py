"""The wire of a blocking client."""

from __future__ import annotations

import socket

import pytest

from dmq.client.connection.socket import Wire


def test_a_wire_that_was_disposed_of_touches_no_socket_that_got_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    wire = Wire(one)
    number = one.fileno()
    wire.dispose()
    fresh, beside = socket.socketpair()  # the lowest free numbers
    with other, fresh, beside:
        assert number in (fresh.fileno(), beside.fileno())
        fresh.send(b"not for the wire")
        beside.send(b"not for the wire")
        with pytest.raises(OSError, match="Bad file descriptor"):
            wire.recv_into(memoryview(bytearray(100)))
        assert wire.write([b"late"], 4)  # as if it went: who closed it has told everybody
        for sock in (fresh, beside):
            assert sock.recv(100) == b"not for the wire"
