"""A session: one connection that said hello.

It knows who is there, answers its requests, and is what the rooms of the broker talk to: a sink for pushed messages, a
client that asks large questions, a producer that can be asked about transactions.

What always holds: every request gets exactly one answer, in any order; texts of refusals of one answer take at most
`TEXT_BYTES_MAX`, so that with as many refusals as a list may have the answer fits into the head of a frame.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from dmq.broker.catalog.changes import Change
from dmq.broker.delivery.client import Client
from dmq.broker.delivery.waiters import Handed
from dmq.broker.publish.publisher import PublishRequest
from dmq.broker.publish.straight_path import sender_at
from dmq.compiled import find
from dmq.errors import DMQError, NotConnected, NotLeader, StoreClosed
from dmq.net.connection import Connection
from dmq.protocol.batch import pack_records
from dmq.protocol.commands import (
    Command,
    error_frame,
    one_way_head,
    produce_answer,
    request_head,
    response_head,
    shard_produce_answer,
)
from dmq.protocol.consume import GroupMembers, Push, SubscriptionEnded
from dmq.protocol.consume import Lease as WireLease
from dmq.protocol.frame import Buffer, Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.produce import TransactionCheck
from dmq.protocol.session import Heartbeat
from dmq.protocol.status import status_of
from dmq.storage.journal.unit_draft import Placement

__all__ = [
    "TEXT_BYTES_MAX",
    "PushSink",
    "RefusalTexts",
    "Session",
    "SessionVoice",
    "refuse_request",
    "wire_body",
    "wire_lease",
]

TEXT_BYTES_MAX: Final = 64 << 10
_MANY: Final = 8
_SMALL_BYTES: Final = 2048

_REQUEST: Final = int(Kind.REQUEST)  # as a plain number: an operation on an enum costs more than all the rest
_sealed_push: Final[Callable[..., bytes] | None] = find("sealed_push")
_SIGN_OF_LIFE: Final = request_head(Command.HEARTBEAT, Heartbeat(0), 1)

T = TypeVar("T")


def refuse_request(connection: Connection, frame: Frame, error: BaseException) -> None:
    """Answer that a request did not work.

    NotConnected and StoreClosed get no answer, and the connection ends. The store closes under a request only while
    the broker stops: an error would fail what the client's next connection, to the broker when it is back, can do.
    So it is with acks and credit that a member which does not lead is told without being asked to answer: a client that
    gets another answer over the same connection takes them for heard. It tells them again over the next one.
    """
    if isinstance(error, NotConnected | StoreClosed):
        connection.close()
    elif frame.kind == Kind.REQUEST:
        connection.send(error_frame(error, frame.command, frame.correlation))
    elif isinstance(error, NotLeader) and frame.command != Command.PRODUCE:
        connection.close()


class RefusalTexts:
    """The texts of the refusals of one answer."""

    def __init__(self) -> None:
        self._left = TEXT_BYTES_MAX

    def of(self, error: DMQError) -> tuple[int, str]:
        """Status and text of an error; no text when there was much to say before."""
        status, header = status_of(error)
        self._left -= len(header.message.encode())
        return status, header.message if self._left >= 0 else ""


class Session:
    """One client on one connection.

    Parameters:
        counters: the dispatcher's; errors are counted there.

    Attributes:
        client: what it consumes; there while there is a Broker.
        producer_groups: whose transactions it can be asked about, and for how many producers.
        reading, asked, is_open, is_writable: as of `Asker`.
        working: requests that go on by themselves.
        subscribing: subscriptions that wait for a change.
        sender: the client's address, as units and records have it.
        features: in force on the connection, by the names of `dmq.protocol.session`.
        shard: number and epoch of what the broker leads; None of a lone broker.
    """

    client: Client

    def __init__(self, connection: Connection, app: str, client_id: str, counters: dict[str, int]) -> None:
        self.connection = connection
        self.app = app
        self.client_id = client_id
        self.counters = counters
        self.producer_groups: Counter[str] = Counter()
        self.reading = asyncio.Lock()
        self.asked = 0
        self.working = 0
        self.subscribing: dict[int | None, Change] = {}
        self.features: frozenset[str] = frozenset()
        self.shard: tuple[int, int] | None = None
        self.address16, self.port = _packed_address(connection.address)
        self.sender = sender_at(self.address16, self.port)

    @property
    def address(self) -> str:
        host, port = self.connection.address
        return f"{host}:{port}" if host else ""

    @property
    def who(self) -> str:
        """The client, for the log."""
        return f"{self.client_id}@{self.address}"

    @property
    def is_open(self) -> bool:
        return self.connection.is_open

    @property
    def is_writable(self) -> bool:
        return self.connection.is_writable

    @property
    def is_ready(self) -> bool:
        """Whether more may be pushed to it, or asked of it."""
        return self.connection.is_writable and self.connection.is_open

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, frame: Frame, header: Header, *body: Buffer) -> None:
        """Answer a request; says nothing where none was asked."""
        if frame.kind == Kind.REQUEST:
            size = sum(map(len, body))
            self.connection.send(response_head(frame.command, header, frame.correlation, size), *_unpinned(body))

    def refuse(self, frame: Frame, error: BaseException) -> None:
        """Answer that it did not work."""
        self.counters["errors"] += 1
        refuse_request(self.connection, frame, error)

    @staticmethod
    def published(request: PublishRequest, placement: Placement | None, error: DMQError | None) -> None:
        """Answer a PRODUCE; the context of its request is the session and the frame."""
        session, frame = request.context
        if placement is None:
            session.refuse(frame, error)
        elif frame.kind == _REQUEST and session.shard is not None:
            session.connection.send(
                shard_produce_answer(
                    frame.correlation,
                    (placement.queue, placement.first_offset, placement.unit_start),
                    request.asked.durability,
                    is_duplicate=placement.duplicate,
                    shard=session.shard,
                )
            )
        elif frame.kind == _REQUEST:
            session.connection.send(
                produce_answer(
                    frame.correlation,
                    placement.queue,
                    placement.first_offset,
                    placement.unit_start,
                    durability=request.asked.durability,
                    is_duplicate=placement.duplicate,
                )
            )

    async def answer_with(
        self, frame: Frame, work: Coroutine[Any, Any, T], reply: Callable[[T], Header] = lambda _: Header()
    ) -> None:
        """Answer a request with what an operation gives."""
        self.answer(frame, reply(await work))

    def check(self, question: TransactionCheck, record: bytes) -> None:
        """Ask what became of a transaction."""
        self.connection.send(one_way_head(Command.TRANSACTION_CHECK, question, len(record)), record)


class SessionVoice:
    """Where one hears of the client of a session: its connection."""

    __slots__ = ("_connection",)

    def __init__(self, session: Session) -> None:
        self._connection = session.connection

    @property
    def heard(self) -> int:
        return self._connection.heard

    def ask(self) -> None:
        # The client answers it by itself, in order: so it has read what was pushed before.
        self._connection.send(_SIGN_OF_LIFE)


class PushSink:
    """Where the messages of a subscription go: onto its connection."""

    __slots__ = ("_connection", "_number", "_session")

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self._connection = session.connection
        self._number = number

    @property
    def is_ready(self) -> bool:
        return self._connection.is_writable and self._connection.is_open

    @property
    def address(self) -> str:
        return self._session.address

    def push(self, handed: Handed) -> None:
        connection, (queue, lease, lengths, pieces, size, ids, sought, topic) = self._connection, handed
        if (
            _sealed_push is not None and size < _SMALL_BYTES and type(lengths) is list and len(pieces) == len(ids) == 1
            and not topic and connection.parser.is_checked
        ):  # fmt: skip
            numbers = (
                self._number, queue, lease.epoch, lease.number, lease.start, lease.stop, lease.attempt,
                lease.deadline_ms - lease.leased_at_ms, sought,
            )  # fmt: skip
            connection.send_sealed(_sealed_push(numbers, ids[0], lengths, pieces[0]))
        else:
            self._push(handed)

    def _push(self, handed: Handed) -> None:
        body = [pack_records(handed.lengths), *handed.pieces]  # as `wire_body`
        size = sum(map(len, body))
        head = one_way_head(Command.CONSUMER_PUSH, Push(self._number, [wire_lease(handed)]), size)
        if size < _SMALL_BYTES:
            self._connection.send(b"".join((head, *body)))
        else:
            self._connection.send(head, *_unpinned(body))

    def tell_members(self, queues: int, names: Sequence[str]) -> None:
        self._connection.send(one_way_head(Command.GROUP_MEMBERS, GroupMembers(self._number, queues, [*names])))

    def end(self, error: DMQError) -> None:
        status, header = status_of(error)
        ended = SubscriptionEnded(self._number, status, header.message)
        self._connection.send(one_way_head(Command.SUBSCRIPTION_ENDED, ended))


def wire_body(handed: Handed) -> list[Buffer]:
    """The messages of a lease as the body of a PULL's answer or of a push, in pieces."""
    return [pack_records(handed.lengths), *handed.pieces]


def wire_lease(handed: Handed) -> WireLease:
    """A lease that begins now, as the protocol says it."""
    lease = handed.lease
    return WireLease(
        handed.queue,
        lease.epoch,
        lease.number,
        lease.start,
        end_offset=lease.stop,
        count=len(handed.lengths),
        attempt=lease.attempt,
        lease_ms=lease.deadline_ms - lease.leased_at_ms,
        topic=handed.topic,
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
