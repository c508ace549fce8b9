"""A socket is asked not to wait as the library asks it: the same bytes, and the same errors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from dmq.client.connection.socket import Calls, plain_calls_of
from tests.unit.compiled.extension import speed


def compiled_calls_of(sock: socket.socket) -> Calls:
    return (
        lambda data: speed.send_now(sock.fileno(), data),
        lambda buffer: speed.receive_now(sock.fileno(), buffer),
    )


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def told(call: Callable[..., int], given: object) -> object:
    """What a call returns, or the kind and the number of what it raises."""
    try:
        return call(given)
    except OSError as error:
        return type(error), error.errno


@pytest.fixture(params=[plain_calls_of, compiled_calls_of], ids=["plain", "compiled"])
def calls_of(request: pytest.FixtureRequest) -> Callable[[socket.socket], Calls]:
    made: Callable[[socket.socket], Calls] = request.param
    return made


def test_what_is_sent_arrives(
    calls_of: Callable[[socket.socket], Calls], pair: tuple[socket.socket, socket.socket]
) -> None:
    (send, _), (_, receive) = map(calls_of, pair)
    room = bytearray(100)
    assert send(b"some bytes") == 10
    assert receive(memoryview(room)[5:]) == 10
    assert room == b"\0" * 5 + b"some bytes" + b"\0" * 85


def test_a_blocking_socket_that_is_empty_or_full_does_not_wait(
    calls_of: Callable[[socket.socket], Calls], pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[0].settimeout(None)
    send, receive = calls_of(pair[0])
    with pytest.raises(BlockingIOError):
        receive(memoryview(bytearray(10)))
    sent = 0
    while isinstance(taken := told(send, bytes(60_000)), int):
        sent += taken
    assert taken == (BlockingIOError, 11)
    pair[0].shutdown(socket.SHUT_WR)
    received = 0
    while piece := pair[1].recv(1 << 20):
        received += len(piece)
    assert received == sent > 0


def test_the_end_of_a_connection_is_told_alike(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    both = [calls(pair[0]) for calls in (plain_calls_of, compiled_calls_of)]
    assert [told(receive, memoryview(bytearray(10))) for _, receive in both] == [0, 0]
    assert [told(send, b"more") for send, _ in both] == [(BrokenPipeError, 32)] * 2
    pair[0].close()
    assert [told(send, b"more") for send, _ in both] == [(OSError, 9)] * 2


def test_what_cannot_be_written_into_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].send(b"kept")
    with pytest.raises((TypeError, BufferError)):
        speed.receive_now(pair[0].fileno(), b"constant")
    assert pair[0].recv(10) == b"kept"
    with pytest.raises(TypeError):
        speed.send_now(pair[0].fileno(), bytearray(b"no bytes"))
