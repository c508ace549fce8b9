"""HELLO, HEARTBEAT, STATS, CLUSTER, ROUTE, DRAIN. All but DRAIN are answered without a Broker."""

from __future__ import annotations

from dmq import __version__
from dmq.broker.broker import Broker
from dmq.broker.diagnostics.disk_report import disk_warnings
from dmq.broker.diagnostics.metrics import numbers
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.broker.wire.session import Session
from dmq.errors import InvalidRequest
from dmq.net.connection import Connection
from dmq.net.hello import accept_hello
from dmq.protocol import session as headers
from dmq.protocol.cluster.route import Route, RouteReply, ShardRoute
from dmq.protocol.commands import Command, response_head
from dmq.protocol.frame import Frame

__all__ = ["cluster", "drain", "heartbeat", "hello", "route", "stats"]

_STANDBY = "standby"  # the state of a server that has no Broker


def hello(dispatcher: Dispatcher, connection: Connection, frame: Frame) -> None:
    """Who is there (J-16): the first request of a connection."""
    broker = dispatcher.broker
    if broker is not None:
        broker.readiness.check_open()
    known = headers.FEATURES if dispatcher.settings.store.takes_blocks else headers.FEATURES - {headers.BLOCKS}
    greeting = accept_hello(connection, frame, "broker", known)
    if greeting is None:
        return
    settings = dispatcher.settings.broker
    connection.parser.frame_bytes_max = settings.frame_bytes_max
    session = Session(connection, greeting.app, greeting.client_id, dispatcher.counters)
    session.features = frozenset(greeting.features)
    dispatcher.begin(session)
    shard, heartbeat_seconds = dispatcher.shard, settings.heartbeat_seconds
    if shard is not None:  # a leader that hangs is replaced, and its clients must notice
        heartbeat_seconds = min(heartbeat_seconds, dispatcher.settings.shard.promise_seconds)
    limits = headers.Limits(
        settings.frame_bytes_max,
        dispatcher.settings.store.body_bytes_max,
        int(heartbeat_seconds * 1000),
        settings.prefetch_messages,
        prefetch_bytes=settings.prefetch_bytes,
        partial_ms=int(settings.partial_seconds * 1000),
    )
    reply = headers.HelloReply(
        settings.name,
        dispatcher.address,
        greeting.version,
        limits,
        features=greeting.features,
        client_id=greeting.client_id,
        software=f"dmq {__version__}",
        now_ms=dispatcher.clock.now_ms(),
        shard=shard,
    )
    connection.send(response_head(Command.HELLO, reply, frame.correlation))
    if broker is not None and broker.readiness.is_draining:
        connection.send(dispatcher.reboot_notice(0, "the broker is drained"))


def heartbeat(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.Heartbeat) -> None:
    session.answer(frame, headers.Heartbeat(dispatcher.clock.now_ms()))


def stats(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.Stats) -> None:
    values = {name: float(value) for name, value in numbers(dispatcher, dispatcher.broker).items()}
    if dispatcher.broker is not None:
        left = dispatcher.broker.straight.left
        values |= {f"broker_straight_left_{reason}": float(count) for reason, count in left.items()}
    if asked.prefixes:
        values = {name: v for name, v in values.items() if name.startswith(tuple(asked.prefixes))}
    warnings = [] if dispatcher.broker is None else disk_warnings(dispatcher.broker)
    session.answer(frame, headers.StatsReply(values, dispatcher.clock.now_ms(), warnings))


def cluster(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.Cluster) -> None:
    broker, shard = dispatcher.broker, dispatcher.shard
    me = headers.BrokerInfo(
        dispatcher.settings.broker.name,
        dispatcher.address,
        shard="" if shard is None else shard.shard,
        is_leader=shard is None or shard.is_leader,
        state=_STANDBY if broker is None else broker.readiness.state,
        is_writable=broker is not None and broker.readiness.is_running,
        epoch=(0 if shard is None else shard.epoch) if broker is None else broker.store.queries.epoch,
    )
    others = [] if dispatcher.face is None else dispatcher.face.brokers()
    session.answer(frame, headers.ClusterReply([me, *others]))


async def route(dispatcher: Dispatcher, session: Session, frame: Frame, asked: Route) -> None:
    if asked.is_watched:
        dispatcher.route_watchers.add(session)
    face = dispatcher.face
    session.answer(frame, _lone_routes(dispatcher, asked) if face is None else await face.routes(asked.topics))


def _lone_routes(dispatcher: Dispatcher, asked: Route) -> RouteReply:
    """A broker by itself: shard 0, of no cluster."""
    broker, address = dispatcher.broker, dispatcher.address
    row = ShardRoute(0, "", leader="" if broker is None else address, members=[address])
    rows = [] if broker is None else [broker.catalog.route(name, shard=0) for name in asked.topics]
    return RouteReply(0, [row], [one for one in rows if one is not None])


def drain(broker: Broker, session: Session, frame: Frame, asked: headers.Drain) -> None:
    """Take the broker out of use or put it back, or only tell how far it is (D-09)."""
    state = ""
    if broker.leadership is not None and asked.action is headers.DrainAction.BEGIN:
        raise InvalidRequest(
            "a shard's leader is not drained but replaced: 'dmq shard handover' lets another member lead, and then "
            "this one can be stopped"
        )
    match asked.action:
        case headers.DrainAction.BEGIN:
            broker.maintenance.begin_drain(
                asked.grace_ms, asked.reason or "the broker is taken out of use", session.who
            )
        case headers.DrainAction.END:
            broker.maintenance.end_drain(session.who)
        case headers.DrainAction.STOP:
            if broker.leadership is None:
                broker.maintenance.begin_drain(asked.grace_ms, asked.reason or "the broker is stopped", session.who)
            broker.stop_asked.set()
            state = "stopping"
        case _:
            pass
    reply = headers.DrainReply(
        state or broker.readiness.state,
        broker.channels.out,
        broker.writer.waiting_bytes,
        broker.changes.waiting,
        clients=len(broker.audience),
    )
    session.answer(frame, reply)
