"""Maintenance: a broker is taken out of use without being stopped, and put back.

What always holds: a drained broker takes no messages and no subscriptions, changes no topics and hands nothing out; it
goes on to take acks and to answer questions. Its clients are told, those that connect later too. The state lives in
memory: a broker that is started again is in use.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dmq.broker.delivery.channels import Channels
from dmq.broker.runtime.runtime import Readiness
from dmq.event_log import EventLog
from dmq.net.connection import WriteCoalescer

__all__ = ["Audience", "ClientRow", "Maintenance"]

log = EventLog(__name__)


class ClientRow(NamedTuple):
    """A client that is connected, for people."""

    client_id: str
    app: str
    address: str
    consumes: int  # subscriptions and groups it pulls from
    silent_seconds: int


class Audience(Protocol):
    """The clients that are connected, as far as a broker has to know.

    Attributes:
        address: where they reach it.
        counters: connections, requests, errors and damaged frames so far.
        outbox: what is sent to them in one turn goes out together.
    """

    address: str
    counters: dict[str, int]
    outbox: WriteCoalescer

    def __len__(self) -> int: ...

    def rows(self) -> list[ClientRow]:
        """Each of them."""
        ...

    def figures(self) -> dict[str, float]:
        """Of the shard that they reach by this server, and of its member's journal; none of a broker by itself."""
        ...

    def tell_reboot(self, grace_ms: int, reason: str) -> None:
        """The broker goes out of use, or stops."""
        ...

    def send_away(self) -> None:
        """End all connections: another broker may have the answers that these clients wait for."""
        ...

    def tell_back(self) -> None:
        """The broker is back in use."""
        ...


class Maintenance:
    """The drain of one broker."""

    def __init__(self, readiness: Readiness, channels: Channels, audience: Audience) -> None:
        self._readiness = readiness
        self._channels = channels
        self._audience = audience

    def begin_drain(self, grace_ms: int, reason: str, by: str = "") -> None:
        """Take the broker out of use. A second call tells the clients again.

        Raises:
            BrokerStopping: it is stopping.
        """
        self._readiness.check_open()
        if not self._readiness.is_draining:
            log.warning("drain begun", reason=reason, by=by, leased=self._channels.out, clients=len(self._audience))
        self._readiness.is_draining = True
        self._audience.tell_reboot(grace_ms, reason)

    def end_drain(self, by: str = "") -> None:
        """Put it back in use.

        Raises:
            BrokerStopping: it is stopping.
        """
        self._readiness.check_open()
        if not self._readiness.is_draining:
            return
        log.warning("drain ended: the broker is in use again", by=by)
        self._readiness.is_draining = False
        self._audience.tell_back()
        self._channels.pump_all()
