"""The network of a shard: members reach each other over a port of their own, 9613 by default.

A follower keeps one connection to its leader: FOLLOW and its answer, then the leader pushes and the follower confirms.
STANDING and REPAIR have a connection each, which ends with the answer.

What always holds: what one side sends on a connection arrives in its order, whole and unchanged, or the connection
ends: every frame has a checksum. Nothing is handed over after the end of a connection was told. Everything is bounded:
the number of connections, how long a hello or half a frame may take, what waits to be sent to a follower, what a
follower has received and not taken, and how long nothing is heard. Bytes of the journal are not copied on their way to
the transport.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from dmq.clock import Clock, SystemClock
from dmq.errors import (
    Busy,
    Damaged,
    DMQError,
    InvalidRequest,
    NotConnected,
    NotInCluster,
    NotLeader,
    OffsetGone,
    ProtocolError,
    StaleEpoch,
    TimedOut,
    Unsupported,
)
from dmq.event_log import EventLog
from dmq.net.address import ServerAddress, check_address, parse_address
from dmq.net.connection import Connection
from dmq.net.hello import Terms, accept_hello, answer_hello
from dmq.net.link import Link, LinkLost
from dmq.net.server import ConnectionLimits, Server
from dmq.protocol.cluster.replication import (
    JOURNAL_BYTES_MAX,
    Confirm,
    Follow,
    FollowReply,
    Handover,
    Journal,
    Repair,
    RepairReply,
    Standing,
    StandingReply,
)
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head, response_head
from dmq.protocol.frame import (
    HEAD_BYTES,
    HELLO_FRAME_BYTES_MAX,
    Frame,
    Kind,
    Whole,
    frame_of,
    seal_frame,
    whole_one_way,
)
from dmq.protocol.header import UNREADABLE, Header
from dmq.protocol.session import FRAME_CRC, Heartbeat
from dmq.shard.peers import Following, Hearing
from dmq.storage.files import Buffer

__all__ = ["DEFAULT_PORT", "Network"]

log = EventLog(__name__)

DEFAULT_PORT: Final = 9613
HEARTBEAT_SECONDS: Final = 2.0  # the leader's frames without bytes and their confirmations come four times as often
SILENCE_SECONDS: Final = 3 * HEARTBEAT_SECONDS
_CONNECT_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0
_REPAIR_SECONDS: Final = 10.0
_SWEEP_SECONDS: Final = 0.5
_REPAIRS_MAX: Final = 4  # that are answered at a time
_FRAME_BYTES_MAX: Final = JOURNAL_BYTES_MAX + HELLO_FRAME_BYTES_MAX  # that a member takes from another it has asked
# A leader has at most a window under way (see `feed`): one that goes beyond has forgotten what it sent.
_OUTPUT_BYTES_MAX: Final = 32 << 20
_UNTAKEN_BYTES_MAX: Final = 16 << 20
_UNTAKEN_MAX: Final = 4096
_CONFIRM_BYTES_MAX: Final = 1 << 20
_JOIN_BYTES: Final = 16 << 10  # of a frame, which costs less to copy than to send in pieces
_LIMITS: Final = ConnectionLimits(
    connections_max=256,
    output_bytes_max=_OUTPUT_BYTES_MAX,
    hello_seconds=5.0,
    partial_seconds=5.0,
    partial_bytes_max=4 << 20,
    silence_seconds=SILENCE_SECONDS,
)

_CONFIRM: Final = int(Command.CONFIRM)
_decode_confirm: Final = msgspec.msgpack.Decoder(Confirm).decode

_Pushed: TypeAlias = tuple[Journal | Handover, Buffer]


class _Sealer:
    """Makes frames of what a leader pushes. Followers that are level get the same one, which is made once."""

    __slots__ = ("_body", "_frame", "_pieces")

    def __init__(self) -> None:
        self._frame: Journal | Handover | None = None
        self._body: Buffer = b""
        self._pieces: tuple[Buffer, ...] = ()

    def seal(self, frame: Journal | Handover, body: Buffer) -> tuple[Buffer, ...]:
        if body is not self._body or frame != self._frame:
            command = Command.JOURNAL if type(frame) is Journal else Command.HANDOVER
            pieces = seal_frame(one_way_head(command, frame, len(body)), *((body,) if len(body) else ()))
            if len(pieces) > 1 and len(body) <= _JOIN_BYTES:
                pieces = (b"".join(pieces),)
            self._frame, self._body, self._pieces = frame, body, pieces
        return self._pieces


class _Seat:
    """The leader's end of a connection; see `peers.Seat`."""

    __slots__ = ("_connection", "_early", "_sealer")

    def __init__(self, connection: Connection, sealer: _Sealer) -> None:
        self._connection = connection
        self._sealer = sealer
        self._early: list[_Pushed] | None = []  # what is pushed before FOLLOW is answered

    @property
    def is_writable(self) -> bool:
        return self._connection.is_writable

    def send(self, frame: Journal | Handover, body: Buffer = b"") -> None:
        connection = self._connection
        if self._early is not None:
            self._early.append((frame, body))
            return
        connection.send_pieces(self._sealer.seal(frame, body))  # at once: the loop may be about to wait for the disk
        if not connection.is_writable and connection.waiting_bytes > _OUTPUT_BYTES_MAX:
            log.warning("follower takes nothing: connection closed", address=connection.whence)
            connection.abort()

    def answered(self) -> None:
        """FOLLOW is answered: what is pushed may go out."""
        early, self._early = self._early, None
        for frame, body in early or ():
            self.send(frame, body)

    def close(self) -> None:
        self._connection.close()


class _Visitor:
    """A connection that said hello: another member's."""

    __slots__ = ("connection", "name", "seat")

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.seat: _Seat | None = None


class _Following:
    """The follower's end of a connection; see `peers.Following`. Hears the link's pushes from its hello on."""

    def __init__(self) -> None:
        self._untaken: deque[_Pushed] = deque()
        self._untaken_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._link: Link | None = None
        self._reply: FollowReply | None = None

    def begin(self, link: Link, reply: FollowReply) -> None:
        """FOLLOW was answered on this connection."""
        self._link, self._reply = link, reply
        link.closed.add_done_callback(self._wake)

    @property
    def reply(self) -> FollowReply:
        assert self._reply is not None
        return self._reply

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    def hear(self, frame: Frame) -> None:
        """The leader pushed a frame."""
        if frame.command not in (Command.JOURNAL, Command.HANDOVER):
            return
        if len(frame.body) > JOURNAL_BYTES_MAX:
            raise ProtocolError(f"a leader sends at most {JOURNAL_BYTES_MAX} bytes at a time, not {len(frame.body)}")
        self._untaken.append((decode_request(frame), frame.body))
        self._untaken_bytes += len(frame.body)
        if self._is_full and self._link is not None:
            self._link.pause()
        self._wake()

    @property
    def _is_full(self) -> bool:
        return self._untaken_bytes > _UNTAKEN_BYTES_MAX or len(self._untaken) > _UNTAKEN_MAX

    @property
    def has_next(self) -> bool:
        return bool(self._untaken)

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> _Pushed:
        link = self.link
        while not self._untaken:
            if link.closed.done():
                raise NotConnected(link.closed.result().message)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pushed = self._untaken.popleft()
        self._untaken_bytes -= len(pushed[1])
        if link.is_paused and not self._is_full:
            link.resume()
        return pushed

    def confirm(self, confirm: Confirm) -> None:
        link = self.link
        link.send(one_way_head(Command.CONFIRM, confirm))
        if link.waiting_bytes > _CONFIRM_BYTES_MAX:
            link.close(NotConnected("the leader takes no confirmations"))

    def close(self) -> None:
        self._untaken.clear()
        self._untaken_bytes = 0
        self.link.close(NotConnected("this member has closed the connection"))


class Network:
    """The way to the other members, and what they ask of this one.

    Parameters:
        name: of this broker, for the other side.
        host, port: where it listens; port 0 takes any.
        insecure: another address than loopback is meant.

    Attributes:
        hearing: the member, which answers; until it is set, others are told to ask again.
        address: where it listens, once it does.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        clock: Clock | None = None,
        insecure: bool = False,
    ) -> None:
        check_address(host, insecure)
        self._name = name
        self._host = host
        self._port = port
        self._clock = clock or SystemClock()
        self._server = Server(self, self._clock, _LIMITS)
        self._sealer = _Sealer()
        self._followings: set[_Following] = set()
        self._repairs: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.hearing: Hearing | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            PortTaken, CannotListen.
        """
        self.address = str(ServerAddress(*await self._server.listen(self._host, self._port)))
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close every connection, whatever is under way."""
        for task in (self._sweeper, *self._repairs):
            if task is not None:
                task.cancel()
        for following in [*self._followings]:
            following.close()
        await self._server.close()

    async def _sweep(self) -> None:
        """End connections that stall or are silent."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._server.sweep()
            silent = self._clock.monotonic() - SILENCE_SECONDS
            for following in [*self._followings]:
                link = following.link
                if link.heard_at < silent and not link.is_paused:
                    link.close(NotConnected(f"the leader was silent for {SILENCE_SECONDS:g} s"))

    # --- to other members -------------------------------------------------------------------------------------------

    async def follow(self, address: str, request: Follow) -> Following:
        """See `peers.Peers`."""
        following = _Following()
        link = await self._open(address, following)
        try:
            reply, _ = await self._ask(address, link, Command.FOLLOW, request, seconds=_ANSWER_SECONDS)
        except BaseException:
            link.close(NotConnected("it cannot be followed"))
            raise
        following.begin(link, reply)
        self._followings.add(following)
        link.closed.add_done_callback(lambda _: self._followings.discard(following))
        return following

    async def standing(self, address: str, asked: Standing, seconds: float) -> StandingReply:
        """See `peers.Peers`."""
        reply: StandingReply = (await self._ask_once(address, Command.STANDING, asked, seconds))[0]
        return reply

    async def repair(self, address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        """See `peers.Peers`."""
        return await self._ask_once(address, Command.REPAIR, asked, _REPAIR_SECONDS)

    async def _ask_once(self, address: str, command: Command, asked: Header, seconds: float) -> tuple[Any, Buffer]:
        """Ask on a connection of its own."""
        try:
            async with asyncio.timeout(seconds):
                link = await self._open(address, None)
                try:
                    return await self._ask(address, link, command, asked, seconds=seconds)
                finally:
                    link.close(NotConnected("it was answered"))
        except TimeoutError:
            raise _timed_out(address, seconds) from None

    async def _open(self, address: str, following: _Following | None) -> Link:
        """Connect and say hello.

        Raises:
            NotConnected: nobody answers there, or not as a member of a shard.
        """
        hear = _ignore if following is None else following.hear
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await Link.open(
                    parse_address(address),
                    self._name,
                    clock=self._clock,
                    peer="member",
                    on_push=hear,
                    frame_bytes_max=_FRAME_BYTES_MAX,
                )
        except TimeoutError:
            raise NotConnected(
                f"no member answers at {address} within {_CONNECT_SECONDS:g} s: check that it runs"
            ) from None
        except (OSError, DMQError) as error:
            reason = error.message if isinstance(error, DMQError) else error.strerror or str(error)
            raise NotConnected(
                f"no member answers at {address} ({reason}): check that it runs, and its replication address"
            ) from error

    async def _ask(
        self, address: str, link: Link, command: Command, asked: Header, *, seconds: float
    ) -> tuple[Any, Buffer]:
        """Ask over a connection; errors are those that `peers.Peers` names."""
        try:
            async with asyncio.timeout(seconds):
                return await link.exchange(command, asked)
        except TimeoutError:
            raise _timed_out(address, seconds) from None
        except LinkLost:
            raise NotConnected(f"the member at {address} did not answer: {link.closed.result().message}") from None
        except (NotLeader, StaleEpoch, NotInCluster, OffsetGone, Damaged, NotConnected):
            raise
        except DMQError as error:
            raise NotConnected(f"the member at {address} cannot answer: {error.message}") from error

    # --- from other members -----------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """See `net.connection.Peer`, as for the next three."""

    def refused(self, connection: Connection, error: DMQError) -> None:
        pass

    def writable(self, connection: Connection) -> None:
        visitor = connection.session
        if isinstance(visitor, _Visitor) and visitor.seat is not None and self.hearing is not None:
            self.hearing.writable(visitor.seat)

    def disconnected(self, connection: Connection) -> None:
        visitor = connection.session
        if isinstance(visitor, _Visitor) and visitor.seat is not None and self.hearing is not None:
            seat, visitor.seat = visitor.seat, None
            self.hearing.left(seat)

    def received(self, connection: Connection, frame: Frame) -> None:
        visitor = connection.session
        try:
            if isinstance(visitor, _Visitor):
                if frame.kind != Kind.RESPONSE:
                    self._serve(visitor, frame)
            elif frame.command == Command.HELLO and frame.kind == Kind.REQUEST:
                self._greet(connection, frame)
            else:
                connection.refuse(InvalidRequest("say hello first"))
        except Exception as error:
            self._fail(connection, frame, error)

    def _fail(self, connection: Connection, frame: Frame, error: Exception) -> None:
        if not isinstance(error, DMQError):
            log.exception("a command failed", once_for=frame.command, command=frame.command)
        self._refuse(connection, frame, error)

    def _greet(self, connection: Connection, frame: Frame) -> None:
        greeting = accept_hello(connection, frame, "member of a shard", frozenset({FRAME_CRC}))
        if greeting is None:
            return
        if FRAME_CRC not in greeting.features:
            connection.refuse(
                Unsupported("members of a shard put checksums behind their frames: upgrade the older one")
            )
            return
        connection.session = _Visitor(connection, greeting.client_id)
        terms = Terms(self._name, self.address, HELLO_FRAME_BYTES_MAX, _LIMITS)
        answer_hello(connection, frame, greeting, terms, clock=self._clock)

    def _refuse(self, connection: Connection, frame: Frame, error: BaseException) -> None:
        """Answer with an error; what cannot be answered ends the connection."""
        if frame.kind == Kind.REQUEST:
            connection.send(error_frame(error, frame.command, frame.correlation))
            return
        reason = error.message if isinstance(error, DMQError) else type(error).__name__
        log.warning("follower refused: connection closed", once_for=reason, address=connection.whence, reason=reason)
        connection.abort()

    def _serve(self, visitor: _Visitor, frame: Frame) -> None:
        asked = decode_request(frame)
        hearing = self.hearing
        if frame.command == Command.CONFIRM:
            if visitor.seat is None:
                raise InvalidRequest("only a follower confirms: FOLLOW comes first")
            if hearing is not None:
                hearing.confirmed(visitor.seat, asked)
        elif frame.kind != Kind.REQUEST:
            pass  # nothing else is said without a question
        elif frame.command == Command.HEARTBEAT:
            _answer(visitor.connection, frame, Heartbeat(self._clock.now_ms()))
        elif frame.command not in (Command.FOLLOW, Command.STANDING, Command.REPAIR):
            raise Unsupported(
                f"this is the replication port of a broker, which does not serve command {frame.command:#06x}: "
                "clients use another port, 9611 by default"
            )
        elif hearing is None:
            raise NotLeader("this member starts, and does not lead: ask again")
        elif frame.command == Command.FOLLOW:
            self._seat(hearing, visitor, frame, asked)
        elif frame.command == Command.STANDING:
            _answer(visitor.connection, frame, hearing.standing(asked))
        else:
            self._repair(hearing.repair(asked), visitor.connection, frame)

    def _confirmed(self, visitor: _Visitor, whole: Whole) -> bool:
        """A follower said a word that nobody answers, by itself: nearly always a confirmation."""
        data, command, _, body_at = whole
        seat, hearing = visitor.seat, self.hearing
        try:
            confirm = _decode_confirm(data[HEAD_BYTES:body_at]) if command == _CONFIRM else None
        except UNREADABLE:
            confirm = None
        if confirm is None or seat is None or hearing is None:
            self.received(visitor.connection, frame_of(whole, Kind.ONE_WAY))
            return True
        try:
            hearing.confirmed(seat, confirm)
        except Exception as error:
            self._fail(visitor.connection, frame_of(whole, Kind.ONE_WAY), error)
        return True

    def _seat(self, hearing: Hearing, visitor: _Visitor, frame: Frame, asked: Follow) -> None:
        """A follower asks for the journal."""
        if visitor.seat is not None:
            raise InvalidRequest("this connection follows already: open another one")
        seat = _Seat(visitor.connection, self._sealer)
        reply = hearing.follow(asked, seat)
        visitor.seat = seat
        visitor.connection.parser.whole = whole_one_way  # what comes from now on are confirmations
        visitor.connection.straight = partial(self._confirmed, visitor)
        _answer(visitor.connection, frame, reply)
        seat.answered()

    def _repair(
        self, work: Coroutine[Any, Any, tuple[RepairReply, Buffer]], connection: Connection, frame: Frame
    ) -> None:
        """Answer once the bytes are read."""
        if len(self._repairs) >= _REPAIRS_MAX:
            work.close()
            raise Busy(f"{_REPAIRS_MAX} repairs are under way: ask again")

        async def answer() -> None:
            try:
                reply, body = await work
            except Exception as error:
                if not isinstance(error, DMQError):
                    log.exception("a repair failed", once_for=())
                self._refuse(connection, frame, error)
            else:
                connection.send(response_head(frame.command, reply, frame.correlation, len(body)), body)

        task = asyncio.create_task(answer())
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)


def _answer(connection: Connection, frame: Frame, header: Header) -> None:
    connection.send(response_head(frame.command, header, frame.correlation))


def _ignore(frame: Frame) -> None:
    """A push on a connection that asks one thing only."""


def _timed_out(address: str, seconds: float) -> TimedOut:
    return TimedOut(f"the member at {address} did not answer within {seconds:g} s: check that it runs")
