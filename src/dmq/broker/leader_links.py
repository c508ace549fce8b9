"""Links to the leaders of other shards, over which this one asks them to follow a change of metadata.

What always holds: there is at most one link to an address, and at most `LINKS_MAX` of them; one that fails is closed
and made anew by the next question.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dmq.clock import Clock
from dmq.errors import InvalidSettings, NotConnected
from dmq.net.address import parse_address
from dmq.net.link import Link, LinkLost
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header

__all__ = ["LINKS_MAX", "LeaderLinks"]

LINKS_MAX: Final = 64
_ANSWER_SECONDS: Final = 5.0


class LeaderLinks:
    """The links of one member.

    Parameters:
        owner: our name.
    """

    def __init__(self, owner: str, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock
        self._links: dict[str, Link] = {}  # used longest ago first
        self._opening: dict[str, asyncio.Lock] = {}

    async def ask(self, address: str, command: int, header: Header) -> Any:
        """The header of a broker's answer.

        Raises:
            NotConnected: it does not answer.
            DMQError: what it answered.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                link = await self._link(address)
                return await link.request(command, header)
        except (OSError, TimeoutError, LinkLost, InvalidSettings) as error:
            self._drop(address)
            raise NotConnected(f"the broker at {address} does not answer: {error}", address=address) from error

    async def _link(self, address: str) -> Link:
        lock = self._opening.setdefault(address, asyncio.Lock())
        async with lock:
            link = self._links.pop(address, None)
            if link is None or link.closed.done():
                link = await Link.open(
                    parse_address(address), self._owner, clock=self._clock, peer="broker", on_push=_ignore
                )
            self._links[address] = link
        if not lock.locked():
            self._opening.pop(address, None)
        while len(self._links) > LINKS_MAX:
            self._drop(next(iter(self._links)))
        return link

    def _drop(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.close(NotConnected("it is not needed any more"))

    def close(self) -> None:
        """End all of them."""
        for address in [*self._links]:
            self._drop(address)


def _ignore(frame: Frame) -> None:
    """Nothing that a broker says by itself is of interest here."""
