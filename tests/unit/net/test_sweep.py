"""Clients that are silent, slow to say hello, or stuck in a frame are swept out, by a clock that is moved. (D-11)"""

from __future__ import annotations

import pytest

from dmq.net.server import ConnectionLimits, Server
from dmq.testing import FakeClock


class Parser:
    pending_since: float | None = None
    pending_bytes = 0


class Silent:
    """As much of a connection as a sweep looks at."""

    def __init__(self, clock: FakeClock) -> None:
        self.opened_at = self.heard_at = clock.monotonic()
        self.heard = self.heard_before = 0
        self.is_silent = False
        self.is_stalled = False
        self.session: object | None = object()
        self.parser = Parser()
        self.address = ("127.0.0.1", 1)
        self.whence = "127.0.0.1:1"
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def server(clock: FakeClock, *connections: Silent) -> Server:
    made = Server(
        None,  # type: ignore[arg-type]
        clock,
        ConnectionLimits(
            connections_max=10,
            output_bytes_max=1,
            hello_seconds=10.0,
            partial_seconds=30.0,
            partial_bytes_max=100,
            silence_seconds=90.0,
        ),
    )
    made.connections.update(connections)  # type: ignore[arg-type]
    return made


def test_a_client_that_is_silent_for_three_heartbeats_is_closed_and_one_that_beats_is_not(clock: FakeClock) -> None:
    silent, beating = Silent(clock), Silent(clock)
    swept = server(clock, silent, beating)
    for _ in range(4):
        clock.advance(30.0)
        beating.heard += 1
        swept.sweep()
    assert (silent.is_aborted, beating.is_aborted) == (True, False)


def test_it_is_not_closed_before(clock: FakeClock) -> None:
    silent = Silent(clock)
    swept = server(clock, silent)
    clock.advance(90.0)
    swept.sweep()
    assert not silent.is_aborted
    clock.advance(0.1)
    swept.sweep()
    assert silent.is_aborted


def test_a_connection_without_a_hello_is_closed_sooner(clock: FakeClock) -> None:
    stranger = Silent(clock)
    stranger.session = None
    swept = server(clock, stranger)
    clock.advance(10.1)
    stranger.heard += 1
    swept.sweep()
    assert stranger.is_aborted


def test_a_frame_that_is_never_whole_ends_its_connection_unless_we_do_not_read(clock: FakeClock) -> None:
    slow, stalled = Silent(clock), Silent(clock)
    for connection in (slow, stalled):
        connection.parser.pending_since = clock.monotonic()
    stalled.is_stalled = True
    swept = server(clock, slow, stalled)
    clock.advance(30.1)
    swept.sweep()
    assert (slow.is_aborted, stalled.is_aborted) == (True, False)


def test_half_sent_frames_take_a_bounded_room_together_and_the_oldest_go_first(clock: FakeClock) -> None:
    connections = [Silent(clock) for _ in range(4)]
    for connection in connections:
        connection.parser.pending_since = clock.monotonic()
        connection.parser.pending_bytes = 40
        clock.advance(0.5)
    swept = server(clock, *connections[1:])
    swept.sweep()  # of 120 bytes 80 may just be on their way
    assert not any(connection.is_aborted for connection in connections)
    clock.advance(1.0)
    swept.sweep()
    assert [connection.is_aborted for connection in connections[1:]] == [True, False, False]
    swept.connections.update(connections[:1])  # type: ignore[arg-type]
    swept.connections.discard(connections[1])
    connections[0].parser.pending_bytes = 10
    swept.sweep()
    assert [connection.is_aborted for connection in connections] == [False, True, False, False]
