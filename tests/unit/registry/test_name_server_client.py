"""How long a client of name servers waits for an answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from dmq.protocol.cluster.registry import RegistryBeat
from dmq.protocol.commands import Command
from dmq.registry.name_server.client import NameServerClient, ServerAddress, _answer_of


class Wire:
    """A link to a name server that says one thing."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()

    async def request(self, command: int, header: Any) -> str:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._near, came.set)
        try:
            await came.wait()
            return "answered"
        finally:
            loop.remove_reader(self._near)

    def answer(self) -> None:
        self._far.send(b"!")

    def close(self) -> None:
        self._near.close()
        self._far.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_answer_that_came_while_the_process_was_not_let_run_is_in_time(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    wire, limit = Wire(), 0.02

    async def main() -> None:
        asked = asyncio.ensure_future(_answer_of(wire, Command.REGISTRY_BEAT, RegistryBeat(1), limit))  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0)
        wire.answer()
        time.sleep(2 * limit)  # the machine is busy with something else
        assert await asked == "answered"
        with pytest.raises(TimeoutError):
            await _answer_of(Silent(), Command.REGISTRY_BEAT, RegistryBeat(1), limit)  # type: ignore[arg-type]

    class Silent:
        async def request(self, command: int, header: Any) -> None:
            await asyncio.Event().wait()

    loop = make_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
        wire.close()


def test_the_only_name_server_is_not_left_while_the_session_lives() -> None:
    one, other = ServerAddress("a", 1), ServerAddress("b", 1)
    lone, pair = NameServerClient([one], "x"), NameServerClient([one, other], "x")
    assert lone._link_seconds == lone.session_seconds
    assert pair._link_seconds < pair.session_seconds / 2, "the other one has time to go on with the session"
    assert NameServerClient([one], "x", timeout=0.5)._link_seconds == 0.5
