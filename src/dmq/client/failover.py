"""Failover: which broker to try next, and when. Pure: times in, decisions out.

A round tries every address once, in the order of the URL, beginning after the one that was lost; between rounds it
waits, twice as long each time up to a maximum, with a random part so that a thousand clients do not come back in one
moment. A broker that announced its reboot is out of use (D-09): it is left out of the first round if there is anybody
else, and comes last in the others, until it says that it is healthy or a connection to it succeeds.

What always holds: with at least one address there is always a next attempt; a round never tries an address twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from dmq.client.url import Address, parse_address
from dmq.errors import DMQError, InvalidSettings, NotConnected

__all__ = ["Attempt", "Backoff", "Failover", "nobody_answers"]

BACKOFF_MIN: Final = 0.1
# A try costs little, and a broker that is back for a moment only must be met in it.
BACKOFF_MAX: Final = 1.5


class Backoff:
    """Growing pauses: the first is `lowest`, each twice the one before, none over `highest`; a quarter is random."""

    def __init__(self, lowest: float = BACKOFF_MIN, highest: float = BACKOFF_MAX, *, seed: int | None = None) -> None:
        self._lowest, self._highest = lowest, highest
        self._random = random.Random(seed)
        self._next = lowest

    def take(self) -> float:
        """The next pause."""
        pause = self._next
        self._next = min(pause * 2, self._highest)
        return pause * self._random.uniform(0.75, 1.0)

    def reset(self) -> None:
        self._next = self._lowest


class Attempt(NamedTuple):
    """Try this address, after this pause."""

    address: Address
    pause: float


class Failover:
    """The servers of one client.

    Parameters:
        addresses: of the URL, in its order.
        backoff: the pauses between rounds.
    """

    def __init__(self, addresses: Sequence[Address], backoff: Backoff | None = None) -> None:
        assert addresses
        self.addresses: Final = tuple(addresses)
        self._backoff = backoff or Backoff()
        self._names: dict[str, Address] = {}  # brokers that answered, by the name they gave
        self._out: set[Address] = set()
        self._turn = 0
        self._round: list[Address] = []
        self._is_first = True

    def next_attempt(self) -> Attempt:
        """Whom to try now; a pause stands before each round but the first."""
        pause = 0.0
        if not self._round:
            ordered = self.addresses[self._turn :] + self.addresses[: self._turn]
            self._round = [address for address in ordered if address not in self._out]
            if not self._is_first:
                pause = self._backoff.take()
            if not self._is_first or not self._round:
                self._round += [address for address in ordered if address in self._out]
            self._is_first = False
        return Attempt(self._round.pop(0), pause)

    @property
    def is_round_over(self) -> bool:
        """Whether every address of this round was tried."""
        return not self._round and not self._is_first

    def others(self, address: Address) -> list[Address]:
        """Whom else one could ask: those in use, in the order of the URL."""
        return [other for other in self.addresses if other != address and other not in self._out]

    def connected(self, address: Address, broker: str) -> None:
        """An address answered, under this name; its past is forgotten."""
        self._names[broker] = address
        self._out.discard(address)
        self._start_rounds(self.addresses.index(address))

    def lost(self, address: Address) -> None:
        """The connection to an address broke: the next round begins with the one after it."""
        self._start_rounds((self.addresses.index(address) + 1) % len(self.addresses))

    def _start_rounds(self, turn: int) -> None:
        self._turn = turn
        self._round = []
        self._is_first = True
        self._backoff.reset()

    def rebooting(self, address: Address) -> bool:
        """A broker announced its reboot; whether there is another one to move to."""
        self._out.add(address)
        return len(self._out) < len(self.addresses)

    def healthy(self, broker: str, address: str = "") -> Address | None:
        """A broker may be used again; which of ours it is, if any."""
        found = self._names.get(broker)
        if found is None and address:
            try:
                found = parse_address(address)
            except InvalidSettings:
                return None
        if found is None or found not in self.addresses:
            return None
        self._out.discard(found)
        return found

    def is_in_use(self, address: Address) -> bool:
        return address not in self._out


def nobody_answers(errors: dict[Address, DMQError]) -> DMQError:
    """What to raise when no address could be connected to, with what each of them said."""
    if len(errors) == 1:
        (cause,) = errors.values()
        if not isinstance(cause, NotConnected):
            return cause
        return NotConnected(f"{cause.message}: start a broker there, or check the URL", **cause.detail)
    causes = "; ".join(error.message for error in errors.values())
    return NotConnected(f"none of the brokers answers ({causes}): start one, or check the URL")
