"""Failover: which address to try next, and when; and which connection is in use. Pure: times in, decisions out.

A round tries every address once, in the order of the URL, beginning after the one that was lost. Between rounds it
waits, twice as long each time up to a maximum, with a random part so that a thousand clients do not come back in one
moment. A broker that announced its reboot is out of use (D-09): it is left out of the first round if there is another,
and comes last in later rounds, until it says that it is healthy or a connection to it succeeds.

Both pools ask `Standing` which connection is in use, which are beside it, and what follows when one breaks. The
blocking pool asks under its lock.

What always holds: with at least one address there is always a next attempt; a round never tries an address twice;
there is at most one connection to an address; `interrupted` and `resumed` alternate; what is closed stays closed, and
the first reason is the one that is told.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from dmq.client.connection.url import Address, parse_address
from dmq.errors import DMQError, InvalidSettings, NotConnected
from dmq.event_log import EventLog

__all__ = ["Attempt", "Backoff", "Failover", "Loss", "Standing", "nobody_answers"]

log = EventLog(__name__)


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


class AnyConnection(Protocol):
    """A connection of either kind."""

    @property
    def address(self) -> Address: ...

    @property
    def broker(self) -> str: ...

    @property
    def is_usable(self) -> bool: ...


C = TypeVar("C", bound=AnyConnection)


class Loss(NamedTuple):
    """What follows from a connection that broke."""

    is_interruption: bool  # the listeners are to be told
    must_connect: bool  # begin to look for another one
    closed_by: DMQError | None  # set in plain mode: there will be none


class Standing(Generic[C]):
    """The connections of one pool.

    Parameters:
        failover: whom to try.
        reconnect: whether a broken connection is replaced at all.
    """

    def __init__(self, failover: Failover, reconnect: bool) -> None:
        self.failover = failover
        self._reconnect = reconnect
        self._current: C | None = None
        self._others: dict[Address, C] = {}
        self._is_interrupted = False
        self._is_connecting = False
        self._left: tuple[Address, str] | None = None  # the broker that was in use before, and why it no longer is
        self.closed_by: DMQError | None = None

    def current(self) -> C | None:
        """The connection in use; None while there is none."""
        connection = self._current
        return connection if connection is not None and connection.is_usable else None

    def known(self, address: Address) -> C | None:
        """The connection to an address, if there is one that can be used."""
        for connection in (self._current, self._others.get(address)):
            if connection is not None and connection.address == address and connection.is_usable:
                return connection
        return None

    def connections(self) -> list[C]:
        """All of them."""
        return [*self._others.values(), *([self._current] if self._current is not None else [])]

    # --- connecting -------------------------------------------------------------------------------------------------

    def begin_connecting(self) -> bool:
        """Whether somebody is to look for a connection from now on; True once until `use`."""
        if self._is_connecting or self.closed_by is not None:
            return False
        self._is_connecting = True
        return True

    def next_attempt(self) -> Attempt:
        return self.failover.next_attempt()

    def use(self, connection: C) -> bool:
        """Put a connection in use; whether that ends an interruption. Not to be asked once closed."""
        assert self.closed_by is None
        self.failover.connected(connection.address, connection.broker)
        self._current = connection
        self._others.pop(connection.address, None)
        self._is_connecting = False
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        left, self._left = self._left, None
        if left is not None:
            self._tell_back(connection, *left)
        return was_interrupted

    def _tell_back(self, connection: C, before: Address, reason: str) -> None:
        to = str(connection.address)
        if before == connection.address:
            log.warning("connection restored", once_for=to, address=to, broker=connection.broker, lost=reason)
        else:
            log.warning(
                "failed over to another broker",
                once_for=(str(before), to),
                before=str(before),
                now=to,
                broker=connection.broker,
                reason=reason,
            )

    def keep_beside(self, connection: C) -> C | None:
        """Keep a connection to another broker: the one to use instead if there was one already, None once closed."""
        if self.closed_by is not None:
            return None
        return self.known(connection.address) or self._put_beside(connection)

    def _put_beside(self, connection: C) -> C:
        self._others[connection.address] = connection
        return connection

    def others(self, address: Address) -> list[Address]:
        """Which other brokers could be asked than the one at this address."""
        return self.failover.others(address) if self._reconnect else []

    # --- losing -----------------------------------------------------------------------------------------------------

    def lost(self, connection: C, reason: DMQError) -> Loss:
        """A connection broke."""
        if self._others.get(connection.address) is connection:
            del self._others[connection.address]
        if self._current is connection:
            self._current = None
            self.failover.lost(connection.address)
        # A broker that reboots may go before another one is found: that is an interruption too.
        if self._current is not None or self.closed_by is not None or self._is_interrupted:
            return Loss(False, False, None)
        self._is_interrupted = True
        self._left = self._left or (connection.address, reason.message)
        address = str(connection.address)
        log.warning("connection lost", once_for=address, address=address, reason=reason.message)
        if not self._reconnect:
            self.closed_by = NotConnected(
                f"the connection is closed ({reason.message}), and reconnect=False: connect again"
            )
        return Loss(True, self._reconnect, self.closed_by)

    def rebooting(self, connection: C, reason: str = "") -> bool:
        """A broker announced its reboot; whether to move to another one. Its connection goes on beside that."""
        address = str(connection.address)
        log.info("the broker goes out of use", once_for=address, address=address, reason=reason)
        has_other = self.failover.rebooting(connection.address) and self._reconnect
        if not has_other or self._current is not connection:
            return False
        self._current = None
        self._left = (connection.address, reason)
        self._others[connection.address] = connection
        return True

    def is_retired(self, connection: C, outstanding: int, is_late: bool) -> bool:
        """Whether a connection that was moved away from may be closed."""
        return connection is not self._current and self.current() is not None and (outstanding == 0 or is_late)

    def close(self, reason: DMQError) -> list[C]:
        """No more: the connections that are to be closed."""
        self.closed_by = self.closed_by or reason
        connections = self.connections()
        self._current = None
        self._others.clear()
        return connections
