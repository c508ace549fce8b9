"""Questions to one member, without a client: a client follows the leader by itself."""

from __future__ import annotations

import asyncio

from dmq.clock import SystemClock
from dmq.errors import DMQError, NotConnected
from dmq.net.address import ServerAddress
from dmq.net.link import Link, LinkLost
from dmq.protocol.commands import Command
from dmq.protocol.header import Header

__all__ = ["ask"]


def ask(port: int, command: Command, header: Header, *, raises: bool = False) -> Header | None:
    """What a member answers; None if it does not.

    Parameters:
        raises: an error that it answers is raised.
    """

    async def asked() -> Header:
        link = await Link.open(
            ServerAddress("127.0.0.1", port), "looker", clock=SystemClock(), peer="member", on_push=lambda frame: None
        )
        try:
            answer = await link.request(command, header)
            assert isinstance(answer, Header)
            return answer
        finally:
            link.close(NotConnected("asked"))

    try:
        return asyncio.run(asyncio.wait_for(asked(), 10))
    except (OSError, LinkLost, TimeoutError):
        return None
    except DMQError:
        if raises:
            raise
        return None
