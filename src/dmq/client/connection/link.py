"""Links: what senders and consumers see of connections, and what the blocking and the asyncio connection share.

What always holds: `submit` either raises, and nothing was sent, or calls `on_answer` exactly once; an error that the
receiver of an answer or of a push raises is logged, and does not keep the others from theirs.

The health of shards as a client meets it: which of them messages that may go anywhere avoid for a while. Pure.

A shard that fails is avoided, twice as long each time it fails again. One that answers well above what the others take
is slow, and avoided, too; then it is tried anew.

What always holds: an answer in good time ends what failures began; nothing is avoided for longer than `FAILED_MAX`;
what is kept is a few numbers for each shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, Generic, Protocol, TypeVar

from dmq.client.connection.session import OnAnswer, Pending, Push, Session
from dmq.client.connection.url import Address
from dmq.errors import DMQError, NotLeader
from dmq.event_log import EventLog
from dmq.protocol import Buffer, Frame, Header, Status, error_from_status
from dmq.protocol.cluster.route import TopicRoute
from dmq.protocol.consume import Push as MessagePush
from dmq.protocol.session import HelloReply, Limits

__all__ = ["ConnectionOwner", "Link", "Links", "NamedLink", "Peer", "ShardHealth", "call_with"]

log = EventLog(__name__)

_NOT_LEADER: Final = int(Status.NOT_LEADER)


class Link(Protocol):
    """A connection, as far as senders see it."""

    @property
    def address(self) -> Address: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def features(self) -> frozenset[str]: ...

    @property
    def shard(self) -> int:
        """The number of the broker's shard; 0 of a lone broker."""
        ...

    @property
    def is_member(self) -> bool:
        """Whether it leads to a shard: what another member of it may have stored can go over this link too."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether a request may still be submitted."""
        ...

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = ...,
        *,
        on_answer: OnAnswer,
        flags: int = ...,
        attended: bool = ...,
    ) -> Pending: ...

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ...) -> None: ...

    def forget(self, pending: Pending) -> bool: ...


class NamedLink(Link, Protocol):
    """A connection, as far as consumers see it."""

    @property
    def client_id(self) -> str: ...

    @property
    def shard(self) -> int: ...

    @property
    def answered_since(self) -> float:
        """What was sent before this moment, by the clock since boot, has arrived."""
        ...

    def tell_and_submit(
        self,
        told: Sequence[tuple[int, Header]],
        command: int,
        header: Header,
        *,
        on_answer: OnAnswer,
        attended: bool = ...,
    ) -> Pending: ...


class Links(Protocol):
    """All connections of a client, as far as senders see them: what a router is to them."""

    def link_for(self, topic: str, queue: int = ...) -> Link | None:
        """The link to the broker that has a queue; None while there is none. Left out, the queue is any."""
        ...

    def reachable(self, topic: str, queues: int, wanted: int = ...) -> Sequence[int]:
        """The places that a message of a topic with so many queues may be sent to now, to be taken in turn.

        Parameters:
            wanted: one queue of whichever shard (`dmq.client.connection.route_book.any_shard`); left out, any.
        """
        ...

    @property
    def is_single(self) -> bool:
        """Whether everything is at one broker."""
        ...

    @property
    def health(self) -> ShardHealth:
        """What senders have met at the shards of a cluster."""
        ...

    def topic_route(self, topic: str) -> TopicRoute | None:
        """What is known of a topic in a cluster."""
        ...

    def away(self, topic: str, queue: int = ...) -> Sequence[str]:
        """The names of the shards of a cluster that have a place, or any of the topic, and are not connected."""
        ...

    def closed(self, topic: str) -> DMQError | None:
        """Why nowhere in a cluster messages of a topic are taken; None if they are somewhere, connected or not."""
        ...

    def stale(self, topic: str) -> None:
        """A broker says that what is known of a topic is old: have it asked for."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether any broker is connected."""
        ...

    def has_other(self, link: Link) -> bool:
        """Whether another address than this link's could be asked instead."""
        ...

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a link to another address, or None if none answers. Does not block."""
        ...

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""
        ...


C = TypeVar("C")  # the connection's own class: what its owner is called with
T = TypeVar("T", contravariant=True)  # the same


class PushTaker(Protocol[T]):
    """Who takes what a broker sends by itself."""

    def pushed(self, connection: T, push: Push) -> None: ...


class ConnectionOwner(PushTaker[T], Protocol[T]):
    """Who is told what happens on a connection, by the thread that reads it, and of all pushes but messages."""

    @property
    def consumers(self) -> Mapping[int, PushTaker[Any]]:
        """Who takes the messages of each subscription, by its number; those of others are dropped."""
        ...

    def lost(self, connection: T, reason: DMQError) -> None:
        """It broke; its requests have their answers. Not called for one that never came to be."""
        ...

    def deposed(self, connection: T, error: NotLeader) -> None:
        """The broker does not lead its shard any more. Called before those who asked get this answer."""
        ...


class Peer(Generic[C]):
    """A broker at the other end of a connection.

    Parameters:
        is_interruptible: signals' handlers may raise in the middle of what is done here; on an event loop they do not.
    """

    def __init__(
        self, address: Address, session: Session, owner: ConnectionOwner[C], *, is_interruptible: bool = False
    ) -> None:
        self._is_interruptible = is_interruptible
        self.address: Final = address
        self._session = session
        self._owner = owner
        self._is_open = False  # the hello was answered, and the owner knows the connection
        self.is_closed = False

    def adopt(self, owner: ConnectionOwner[C]) -> None:
        """Have somebody else told what happens from now on. Not while anybody reads."""
        self._owner = owner

    @property
    def reply(self) -> HelloReply:
        """What the broker answered to the hello."""
        assert self._session.reply is not None
        return self._session.reply

    @property
    def broker(self) -> str:
        """The broker's name."""
        return self.reply.broker

    @property
    def client_id(self) -> str:
        """Ours, as the broker knows it."""
        return self.reply.client_id

    @property
    def limits(self) -> Limits:
        return self._session.limits

    @property
    def features(self) -> frozenset[str]:
        """What is in force on the connection beyond the protocol's version."""
        return self._session.features

    @property
    def answered_since(self) -> float:
        """As of the session."""
        return self._session.answered_since

    @property
    def is_member(self) -> bool:
        """Whether the broker is a member of a shard."""
        return self.reply.shard is not None

    @property
    def shard(self) -> int:
        """The number of the broker's shard; 0 of a lone broker."""
        shard = self.reply.shard
        return 0 if shard is None else shard.number

    @property
    def is_usable(self) -> bool:
        """Whether a request may still be submitted."""
        session = self._session
        return not self.is_closed and session.closed_by is None and session.reply is not None

    @property
    def outstanding(self) -> int:
        return self._session.outstanding

    def _hand_out(self: C, answers: list[tuple[Pending, Frame]], pushes: Iterable[Push]) -> None:
        owner: ConnectionOwner[C] = self._owner  # type: ignore[attr-defined]
        is_interruptible: bool = self._is_interruptible  # type: ignore[attr-defined]
        if len(answers) > 1:
            answers.reverse()
        while answers:
            pending, frame = answers[-1]
            if frame.status == _NOT_LEADER:
                error = error_from_status(frame.status, frame.header)
                assert isinstance(error, NotLeader)
                owner.deposed(self, error)
            call_with(pending.on_answer, frame, is_interruptible=is_interruptible)
            answers.pop()  # only now: who was interrupted in the middle is told of the end of the connection
        for push in pushes:
            header = push.header
            taker = owner.consumers.get(header.subscription) if isinstance(header, MessagePush) else owner
            if taker is None:
                continue  # the consumer is closed
            try:
                taker.pushed(self, push)
            except Exception as error:
                log.exception("a push was not taken", once_for=push.command, command=push.command)
                if is_interruptible and may_be_signalled() and not isinstance(error, DMQError):  # it is no handler's
                    raise


def call_with(on_answer: OnAnswer, answer: Frame | DMQError, *, is_interruptible: bool = False) -> None:
    """Hand over an answer.

    Parameters:
        is_interruptible: what a signal's handler raises in the middle of it is not for us to keep.
    """
    try:
        on_answer(answer)
    except Exception:
        log.exception("an answer was not taken", once_for=())
        if is_interruptible and may_be_signalled():
            raise


def may_be_signalled() -> bool:
    """Whether signals' handlers run in this thread: then nobody knows whose an exception is."""
    return threading.current_thread() is threading.main_thread()


FAILED_MIN: Final = 0.5
FAILED_MAX: Final = 15.0
SLOW_SECONDS: Final = 5.0  # for which a slow one is avoided
SLOW_MIN: Final = 0.2  # an answer sooner than this is never slow
SLOW_FACTOR: Final = 4.0  # above what the others take
SAMPLES_MIN: Final = 5
_WEIGHT: Final = 0.2  # of the newest answer in the mean


class _Record:
    __slots__ = ("count", "failures", "mean", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0  # on the monotonic clock
        self.mean = 0.0  # seconds that an answer takes
        self.count = 0


class ShardHealth:
    """What a client's senders have met. To be called under one lock, or by one thread; a lost update does no harm."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self.changes = 0
        """Rises when another shard is to be avoided."""

    def _of(self, shard: int) -> _Record:
        record = self._records.get(shard)
        if record is None:
            record = self._records[shard] = _Record()
        return record

    def failed(self, shard: int, now: float, seconds: float | None = None) -> None:
        """A shard refused a message for the moment, or its connection broke.

        Parameters:
            seconds: after which it wants to be asked again, if it said so.
        """
        record = self._of(shard)
        if now < record.until and seconds is None:
            return  # of the same trouble
        pause = min(FAILED_MAX, FAILED_MIN * 2**record.failures)
        record.failures = min(record.failures + 1, 10)
        record.until = now + (pause if seconds is None else min(seconds, FAILED_MAX))
        self.changes += 1

    def answered(self, shard: int, seconds: float, now: float) -> None:
        """A shard has stored a message, after so long."""
        record = self._of(shard)
        record.failures = 0
        record.count += 1
        record.mean = seconds if record.count == 1 else record.mean + _WEIGHT * (seconds - record.mean)
        if record.mean < SLOW_MIN or record.count < SAMPLES_MIN:
            return
        others = [other.mean for other in self._records.values() if other is not record and other.count >= SAMPLES_MIN]
        if others and record.mean > SLOW_FACTOR * median(others):
            record.until = now + SLOW_SECONDS
            self.changes += 1
            record.count = 0  # it gets another chance then

    def avoided(self, shards: Iterable[int], now: float) -> list[int]:
        """Which of these are to be avoided now."""
        records = self._records
        return [shard for shard in shards if (record := records.get(shard)) is not None and record.until > now]
