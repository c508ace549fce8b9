"""A session: one connection that said hello, and what it has going on.

What always holds: every request gets exactly one answer, in any order; a session's subscriptions end with it.

Refusals: what of a request did not work, while the rest did.

Pure code. An answer names every refusal with its status; texts are said as long as there is room for them, since a
request may name many things and the head of a frame is bounded.

What always holds: texts of one answer take at most `TEXT_BYTES_MAX`, so that with as many refusals as a list may have
the answer fits into the head of a frame.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dmq.broker.catalog.changes import Change
from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import Member
from dmq.broker.delivery.waiters import Handed
from dmq.errors import DMQError
from dmq.net.connection import Connection
from dmq.protocol.batch import pack_records
from dmq.protocol.commands import Command, error_frame, one_way_head, response_head
from dmq.protocol.consume import Lease as WireLease
from dmq.protocol.consume import Push
from dmq.protocol.frame import Buffer, Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.status import status_of

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["TEXT_BYTES_MAX", "Pusher", "RefusalTexts", "Session", "wire_lease"]


TEXT_BYTES_MAX: Final = 64 << 10


class RefusalTexts:
    """The texts of the refusals of one answer."""

    def __init__(self) -> None:
        self._left = TEXT_BYTES_MAX

    def of(self, error: DMQError) -> tuple[int, str]:
        """Status and text of an error; no text when there was much to say before."""
        status, header = status_of(error)
        self._left -= len(header.message.encode())
        return status, header.message if self._left >= 0 else ""


_MANY: Final = 8
_SMALL_BYTES: Final = 2048


class Session:
    """See the module."""

    def __init__(self, broker: Broker, connection: Connection, app: str, client_id: str) -> None:
        self.broker = broker
        self.connection = connection
        self.app = app
        self.client_id = client_id
        self.pushers: dict[int, Pusher] = {}
        self.pulling: set[tuple[Consumption, Member]] = set()
        self.reading = asyncio.Lock()
        self.asked = 0  # questions with large answers that are open
        self.working = 0  # requests that go on by themselves
        self.subscribing: dict[int | None, Change] = {}  # subscriptions that wait for a change
        self.address16, self.port = _packed_address(connection.address)

    def answer(self, frame: Frame, header: Header, *body: Buffer) -> None:
        """Answer a request; says nothing where none was asked."""
        if frame.kind == Kind.REQUEST:
            size = sum(map(len, body))
            self.connection.send(response_head(frame.command, header, frame.correlation, size), *_unpinned(body))

    def refuse(self, frame: Frame, error: BaseException) -> None:
        """Answer that it did not work."""
        if frame.kind == Kind.REQUEST:
            self.connection.send(error_frame(error, frame.command, frame.correlation))

    def member_name(self, asked: str) -> str:
        return asked or self.client_id

    def leave_groups(self, grace_ms: int) -> None:
        """The connection is gone: what its members hold stays theirs for the grace time."""
        for pusher in self.pushers.values():
            if pusher.consumption.sinks.get(pusher.member.name) is pusher:
                self._away(pusher.consumption, pusher.member.name, grace_ms)
        for consumption, member in self.pulling:
            consumption.cancel_pulls(self)
            if self.is_last_of(consumption, member):
                self._away(consumption, member.name, grace_ms)

    def is_last_of(self, consumption: Consumption, member: Member) -> bool:
        """Whether a member that pulled here is one, and gets nothing over another connection either."""
        return (
            consumption.group.members.get(member.name) is member
            and member.name not in consumption.sinks
            and not any((consumption, member) in other.pulling for other in self.broker.sessions)
        )

    def _away(self, consumption: Consumption, name: str, grace_ms: int) -> None:
        now_ms = self.broker.now_ms
        consumption.sinks.pop(name, None)
        member = consumption.group.disconnect(name, now_ms, grace_ms)
        if member is not None:
            for cursor in consumption.cursors.values():
                cursor.disconnect(member, now_ms, grace_ms)
            self.broker.dividing.changed(consumption)


class Pusher:
    """Where a subscription's messages go."""

    def __init__(
        self,
        session: Session,
        number: int,
        consumption: Consumption,
        member: Member,
        batch: int,
        lease_ms: int,
        allowed: int,
    ) -> None:
        self.session = session
        self.number = number
        self.consumption = consumption
        self.member = member
        self.batch = batch
        self.lease_ms = lease_ms
        self.allowed = allowed

    @property
    def is_ready(self) -> bool:
        return self.session.connection.is_writable and self.session.connection.is_open

    def push(self, handed: Handed) -> None:
        lengths = pack_records(handed.lengths)
        head = one_way_head(
            Command.CONSUMER_PUSH,
            Push(self.number, [wire_lease(handed, self.lease_ms)]),
            len(lengths) + handed.size,
        )
        self.session.connection.send(head, lengths, *_unpinned(handed.pieces))


def wire_lease(handed: Handed, lease_ms: int) -> WireLease:
    """A lease as the protocol says it."""
    lease = handed.lease
    return WireLease(
        handed.queue,
        lease.epoch,
        lease.number,
        lease.start,
        lease.stop,
        len(handed.lengths),
        lease.attempt,
        lease_ms,
        handed.topic,
        ids=handed.ids,
        sought=handed.sought,
    )


def _unpinned(pieces: Sequence[Buffer]) -> Sequence[Buffer]:
    """Pieces to be sent, as copies where they are small parts of what they are views of.

    A reader that stalls keeps what waits for it in memory, and would keep the whole unit with it. Many small ones are
    cheaper to send as one.
    """
    if len(pieces) > _MANY and sum(map(len, pieces)) < _SMALL_BYTES * len(pieces):
        return (b"".join(pieces),)
    return [
        bytes(piece) if isinstance(piece, memoryview) and len(piece.obj) > 2 * len(piece) else piece  # type: ignore[arg-type]
        for piece in pieces
    ]


def _packed_address(address: tuple[str, int]) -> tuple[bytes, int]:
    """An address as units keep it: IPv6, or IPv4 mapped into it."""
    try:
        parsed = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return bytes(16), 0
    if parsed.version == 4:
        return bytes(10) + b"\xff\xff" + parsed.packed, address[1]
    return parsed.packed, address[1]
