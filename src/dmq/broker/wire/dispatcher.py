"""The dispatcher: takes a frame to the handler of its command. It is the `Peer` of the connections.

It outlives the Broker: connections stay open while there is none, commands that need none are answered, and the others
are refused with an error that can be retried.

What always holds: a connection is served only after its hello; a command that fails is answered with its error and
harms no other; requests about a topic or group that is being changed wait for that, in their order, and are served once
or refused, unless their connection is gone. A client has at most `WORKING_MAX` requests that go on by themselves,
changes apart, which have a bound of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from dmq.broker.broker import Broker
from dmq.broker.catalog.changes import Change, Changes, Later
from dmq.broker.delivery.client import Client
from dmq.broker.maintenance import ClientRow
from dmq.broker.runtime.runtime import Tasks, Work
from dmq.broker.wire.session import Session, SessionVoice, refuse_request
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DMQError, FrameCorrupt, InvalidRequest, NotLeader
from dmq.event_log import EventLog
from dmq.net.connection import Connection, WriteCoalescer
from dmq.protocol.cluster.route import TOPICS_MAX, RouteChanged, RouteReply
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head
from dmq.protocol.frame import Buffer, Frame, Kind
from dmq.protocol.read import Fetch, FetchReply
from dmq.protocol.session import BLOCKS, FRAME_CRC, BrokerInfo, ServerHealth, ServerReboot, ShardInfo
from dmq.settings import Settings
from dmq.shard.admin.operations import Operations

__all__ = ["WORKING_MAX", "CommandEntry", "Dispatcher", "Handler", "ShardFace"]

log = EventLog(__name__)

# A coroutine begins only at the end of the turn, and thousands of requests may come in one: without a bound here, they
# would all be in memory before the first of them could be refused or answered.
WORKING_MAX: Final = 256
_AGAIN_MS: Final = 50
_RESPONSE: Final = int(Kind.RESPONSE)  # as a plain number: to name a member of an enum costs as much as a call

# Takes the Broker, or the dispatcher if it needs none. The work it returns goes on by itself; requests are begun in the
# order they came in.
Handler = Callable[[Any, Session, Frame, Any], Work | None]


class CommandEntry:
    """How a command is served.

    Attributes:
        needs_broker: it takes the Broker, and is refused while there is none; else it takes the dispatcher.
        follower: what serves it in a member of a shard that has no Broker, from the dispatcher.
        is_coroutine: the handler begins nothing before its work runs.
    """

    __slots__ = ("follower", "handler", "is_coroutine", "needs_broker")

    def __init__(self, handler: Handler, *, needs_broker: bool = True, follower: Handler | None = None) -> None:
        self.handler = handler
        self.follower = follower
        self.needs_broker = needs_broker
        self.is_coroutine = inspect.iscoroutinefunction(handler)


class ShardFace(Protocol):
    """What clients are told of a shard by one of its members."""

    def info(self) -> ShardInfo:
        """Whom it takes for the leader."""
        ...

    def brokers(self) -> list[BrokerInfo]:
        """The other members that are known."""
        ...

    def figures(self) -> dict[str, float]:
        """Gauges and counters, by name."""
        ...

    async def routes(self, topics: Sequence[str]) -> RouteReply:
        """The shards of the cluster, and where these topics are."""
        ...

    async def committed_units(self, asked: Fetch) -> tuple[FetchReply, list[Buffer]]:
        """Units of the journal, from a member that does not lead."""
        ...


class Dispatcher:
    """The connections of one server, and the Broker they are served by, if there is one.

    Parameters:
        commands: how each command is served; the hello is `hello`, since it has no session.

    Attributes:
        address: where clients reach the server.
        face: the shard that the server is a member of, for its clients; None of a lone broker.
        outbox: what is sent in one turn goes out together.
        shards: what can be done to the shards of the cluster; None in a broker that belongs to none.
        route_watchers: clients that want to hear when a route becomes another.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        commands: Mapping[int, CommandEntry],
        hello: Callable[[Dispatcher, Connection, Frame], None],
    ) -> None:
        self.settings = settings
        self.clock = clock
        self._commands = commands
        self._hello = hello
        self.broker: Broker | None = None
        self.address = ""
        self.face: ShardFace | None = None
        self._shard: ShardInfo | None = None
        self.outbox = WriteCoalescer()
        self.shards: Operations | None = None
        self._tasks: Tasks | None = None
        self.sessions: set[Session] = set()
        self.route_watchers: set[Session] = set()
        self.counters = dict.fromkeys(("connections", "requests", "errors", "frames_damaged"), 0)

    @property
    def shard(self) -> ShardInfo | None:
        """What clients are told of the shard with their hello; None of a lone broker."""
        return self._shard if self.face is None else self.face.info()

    @shard.setter
    def shard(self, info: ShardInfo | None) -> None:
        self._shard = info

    # --- the broker -------------------------------------------------------------------------------------------------

    def attach(self, broker: Broker) -> None:
        """Serve with this Broker from now on."""
        assert self.broker is None, "there is one"
        self.broker = broker
        for session in self.sessions:
            self._bind(session, broker)

    def detach(self) -> Broker | None:
        """There is no Broker any more for the clients that stay; returns the one there was."""
        broker, self.broker = self.broker, None
        for session in self.sessions:
            session.subscribing.clear()
            session.connection.straight = session.connection.straight_batch = None
        return broker

    def _bind(self, session: Session, broker: Broker) -> None:
        session.client = Client(
            broker.channels, session.client_id, session.app, session.address, voice=SessionVoice(session)
        )
        leadership = broker.leadership
        session.shard = None if leadership is None else (leadership.shard, leadership.epoch)
        session.client.takes_blocks = BLOCKS in session.features
        if broker.straight.is_on and FRAME_CRC in session.features:
            session.connection.straight = partial(broker.straight.take, session)
            session.connection.straight_batch = partial(broker.straight.take_batch, session)
            session.connection.straight_command = int(Command.PRODUCE)
        for group, count in session.producer_groups.items():
            for _ in range(count):
                broker.transactions.join(session, group)

    # --- connections ------------------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.counters["connections"] += 1

    def refused(self, connection: Connection, error: DMQError) -> None:
        self.counters["frames_damaged"] += isinstance(error, FrameCorrupt)

    def begin(self, session: Session) -> None:
        """A connection has said hello."""
        session.connection.session = session
        self.sessions.add(session)
        if self.broker is not None:
            self._bind(session, self.broker)

    def received(self, connection: Connection, frame: Frame) -> None:
        self.counters["requests"] += 1
        session = connection.session
        try:
            if isinstance(session, Session):
                self._serve(session, frame)
            elif frame.command == Command.HELLO and frame.kind == Kind.REQUEST:
                self._hello(self, connection, frame)
            else:
                error = InvalidRequest("say hello first")
                _tell_refused(connection, error)
                connection.send(error_frame(error, frame.command, frame.correlation))
                connection.close()
        except DMQError as error:
            if session is None:
                _tell_refused(connection, error)
            self._refuse(connection, frame, error)
        except Exception as error:
            log.exception("a command failed", once_for=frame.command, command=frame.command)
            self._refuse(connection, frame, error)

    def _serve(self, session: Session, frame: Frame) -> None:
        if frame.kind == _RESPONSE:
            return  # an answer to nothing we asked is ignored (D-23)
        header = decode_request(frame)
        entry = self._commands.get(frame.command)
        if entry is None:
            raise InvalidRequest(f"command {Command(frame.command).name} is not served by this broker")
        if not entry.needs_broker:
            self._begin(entry, session, frame, entry.handler(self, session, frame, header))
            return
        broker = self.broker
        if broker is None:
            if entry.follower is None or self.face is None:
                raise self.no_broker()
            self._begin(entry, session, frame, entry.follower(self, session, frame, header))
            return
        if broker.leadership is not None:
            broker.leadership.check_serving()
        try:
            if broker.changes.under_way:
                _check_changes(broker.changes, session, header)
            work = entry.handler(broker, session, frame, header)
        except Later as later:
            self._wait_for(broker, later.change, session, frame, header=header)
        else:
            if work is not None:
                self._go_on(broker.runtime.tasks, entry, session, frame, work=work)

    def _begin(self, entry: CommandEntry, session: Session, frame: Frame, work: Work | None) -> None:
        """Let what needs no Broker go on by itself."""
        if work is not None:
            self._tasks = self._tasks or Tasks()
            self._go_on(self._tasks, entry, session, frame, work=work)

    def no_broker(self) -> DMQError:
        """What is answered to what needs a Broker, while there is none."""
        shard = self.shard
        if shard is None:
            return BrokerStopping("this server has no broker right now: use another one, or try again when it has one")
        where = f"ask the one at {shard.leader}" if shard.leader else "ask the others, or try again after the election"
        return NotLeader(
            f"this member of shard {shard.shard!r} does not lead it: {where}", leader=shard.leader, epoch=shard.epoch
        )

    def _refuse(self, connection: Connection, frame: Frame, error: BaseException) -> None:
        """Answer that a request did not work."""
        self.counters["errors"] += 1
        refuse_request(connection, frame, error)

    def _go_on(self, tasks: Tasks, entry: CommandEntry, session: Session, frame: Frame, work: Work) -> None:
        """Let a request go on by itself.

        Raises:
            Busy: the client has too many of them.
        """
        # A handler that is not a coroutine has begun a change already, and ends it only by going on.
        if session.working >= WORKING_MAX and entry.is_coroutine:
            work.close()
            raise Busy(
                f"{session.working} requests of this connection are under way: wait for some of the answers",
                retry_after_ms=_AGAIN_MS,
            )
        session.working += 1

        def ended() -> None:
            session.working -= 1

        tasks.run(work, lambda error: self._refuse(session.connection, frame, error), ended)

    async def finish(self) -> None:
        """The server stops: end the requests that need no Broker and are still under way."""
        if self._tasks is not None:
            await self._tasks.finish(0.0)

    def _wait_for(self, broker: Broker, change: Change, session: Session, frame: Frame, header: Any) -> None:
        """Serve a request once a change is done.

        Raises:
            Busy: too many wait already.
        """
        number = header.subscription if frame.command == Command.SUBSCRIBE else None

        def resume(error: DMQError | None) -> None:
            if number is not None:
                session.subscribing.pop(number, None)
            if not session.connection.is_open:
                return
            if error is not None:
                self._refuse(session.connection, frame, error)
            else:
                self.received(session.connection, frame)

        broker.changes.wait(change, resume, len(frame.body))
        if number is not None:
            session.subscribing[number] = change

    def writable(self, connection: Connection) -> None:
        session = connection.session
        if isinstance(session, Session) and self.broker is not None:
            session.client.wake()

    def disconnected(self, connection: Connection) -> None:
        session = connection.session
        if not isinstance(session, Session):
            return
        self.sessions.discard(session)
        self.route_watchers.discard(session)
        if self.broker is not None:
            self.broker.transactions.leave(session)
            grace_ms = int(self.settings.broker.grace_seconds * 1000)
            session.client.leave(grace_ms, is_silent=connection.is_silent)

    # --- the clients as an audience -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.sessions)

    def rows(self) -> list[ClientRow]:
        """Each client that is connected."""
        now = self.clock.monotonic()
        rows = []
        for session in self.sessions:
            connection = session.connection
            silent = 0 if connection.heard != connection.heard_before else int(now - connection.heard_at)
            client = None if self.broker is None else session.client
            consumes = 0 if client is None else len(client.subscriptions) + len(client.pulling)
            rows.append(ClientRow(session.client_id, session.app, session.address, consumes, silent_seconds=silent))
        return rows

    def figures(self) -> dict[str, float]:
        """Of the member of a shard, by name; none of a broker by itself."""
        return {} if self.face is None else self.face.figures()

    def reboot_notice(self, grace_ms: int, reason: str) -> bytes:
        """What clients of a broker that goes out of use are told."""
        return one_way_head(Command.SERVER_REBOOT, ServerReboot(self.settings.broker.name, grace_ms, reason))

    def tell_reboot(self, grace_ms: int, reason: str) -> None:
        """The broker goes out of use, or stops."""
        self._tell(self.reboot_notice(grace_ms, reason))

    def send_away(self) -> None:
        """End all connections: another broker may have the answers that these clients wait for."""
        for session in [*self.sessions]:
            session.connection.close()

    def tell_back(self) -> None:
        """The broker is back in use."""
        self._tell(one_way_head(Command.SERVER_HEALTH, ServerHealth(self.settings.broker.name, self.address)))

    def tell_routes(self, topics: Iterable[str] = ()) -> None:
        """The routes of these topics have become others; those of the shards if none is named."""
        names = sorted(topics)
        head = one_way_head(Command.ROUTE_CHANGED, RouteChanged(names if len(names) <= TOPICS_MAX else []))
        for session in self.route_watchers:
            session.connection.send(head)

    def _tell(self, head: bytes) -> None:
        for session in self.sessions:
            session.connection.send(head)


def _tell_refused(connection: Connection, error: DMQError) -> None:
    host = connection.address[0]
    log.warning(
        "connection refused",
        once_for=(host, type(error)),
        code=error.code,
        reason=error.message,
        address=connection.whence,
    )


def _check_changes(changes: Changes, session: Session, header: Any) -> None:
    """Raises Later if a request is about something that is being changed."""
    changes.check(("topic", getattr(header, "topic", "")), ("group", getattr(header, "group", "")))
    waiting = session.subscribing.get(getattr(header, "subscription", None))
    if waiting is not None:
        raise Later(waiting)
