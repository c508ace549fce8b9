"""Where a client stands: which connection is in use, which are beside it, and what follows when one breaks. Pure.

Both transports ask it and do what it says; the blocking one asks under its lock.

What always holds: one connection at most to an address; `interrupted` and `resumed` alternate; once closed, for
whatever reason, it stays so, and the first reason is the one that is told.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from dmq.client.failover import Attempt, Failover
from dmq.client.url import Address
from dmq.errors import DMQError, NotConnected

__all__ = ["Loss", "Standing"]


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
    """See the module.

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
        return was_interrupted

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
        if not self._reconnect:
            self.closed_by = NotConnected(
                f"the connection is closed ({reason.message}), and reconnect=False: connect again"
            )
        return Loss(True, self._reconnect, self.closed_by)

    def rebooting(self, connection: C) -> bool:
        """A broker announced its reboot; whether to move to another one. Its connection goes on beside that."""
        has_other = self.failover.rebooting(connection.address) and self._reconnect
        if not has_other or self._current is not connection:
            return False
        self._current = None
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
