"""HELLO, HEARTBEAT, STATS, CLUSTER, DRAIN."""

from __future__ import annotations

import secrets

from dmq import __version__
from dmq.broker.broker import Broker
from dmq.broker.diagnostics.metrics import numbers
from dmq.broker.maintenance import begin_drain, end_drain, reboot_notice, state_of
from dmq.broker.wire.session import Session
from dmq.errors import NotAuthenticated, VersionMismatch
from dmq.model import check_name
from dmq.net.connection import Connection
from dmq.protocol import session as headers
from dmq.protocol.commands import Command, decode_request, response_head
from dmq.protocol.frame import Frame

__all__ = ["cluster", "drain", "heartbeat", "hello", "stats"]


def hello(broker: Broker, connection: Connection, frame: Frame) -> None:
    """Who is there (J-16): the first request of a connection."""
    broker.check_open()
    asked: headers.Hello = decode_request(frame)
    version = headers.choose_version(asked)
    if version is None:
        raise VersionMismatch(
            f"the client speaks protocol {asked.version_min}-{asked.version_max}, this broker "
            f"{headers.PROTOCOL_VERSION_MIN}-{headers.PROTOCOL_VERSION}: upgrade the older side"
        )
    if asked.auth_mechanism:
        raise NotAuthenticated(f"this broker has no authentication called {asked.auth_mechanism!r}: connect without")
    check_name(asked.app, "app")
    client_id = asked.client_id or f"{asked.app}-{secrets.token_hex(6)}"
    session = Session(broker, connection, asked.app, client_id)
    connection.session = session
    connection.parser.frame_bytes_max = broker.settings.frame_bytes_max
    broker.sessions.add(session)
    settings = broker.settings
    limits = headers.Limits(
        settings.frame_bytes_max,
        broker.store.settings.body_bytes_max,
        int(settings.heartbeat_seconds * 1000),
        settings.prefetch_messages,
        settings.prefetch_bytes,
        int(settings.partial_seconds * 1000),
    )
    reply = headers.HelloReply(
        settings.name,
        broker.address,
        version,
        limits,
        headers.choose_features(asked),
        client_id,
        f"dmq {__version__}",
        broker.clock.now_ms(),
    )
    connection.send(response_head(Command.HELLO, reply, frame.correlation))
    if broker.is_draining:
        connection.send(reboot_notice(broker, 0, "the broker is drained"))


def heartbeat(broker: Broker, session: Session, frame: Frame, asked: headers.Heartbeat) -> None:
    session.answer(frame, headers.Heartbeat(broker.clock.now_ms()))


def stats(broker: Broker, session: Session, frame: Frame, asked: headers.Stats) -> None:
    values = {name: float(value) for name, value in numbers(broker).items()}
    if asked.prefixes:
        values = {name: v for name, v in values.items() if name.startswith(tuple(asked.prefixes))}
    session.answer(frame, headers.StatsReply(values, broker.clock.now_ms()))


def cluster(broker: Broker, session: Session, frame: Frame, asked: headers.Cluster) -> None:
    me = headers.BrokerInfo(
        broker.settings.name,
        broker.address,
        state=state_of(broker),
        is_writable=not (broker.is_stopping or broker.is_draining),
        epoch=broker.store.queries.epoch,
    )
    session.answer(frame, headers.ClusterReply([me]))


def drain(broker: Broker, session: Session, frame: Frame, asked: headers.Drain) -> None:
    """Take the broker out of use or put it back, or only tell how far it is (D-09)."""
    match asked.action:
        case headers.DrainAction.BEGIN:
            begin_drain(broker, asked.grace_ms, asked.reason or "the broker is taken out of use")
        case headers.DrainAction.END:
            end_drain(broker)
        case headers.DrainAction.STOP:
            begin_drain(broker, asked.grace_ms, asked.reason or "the broker is stopped")
            broker.stop_asked.set()
        case _:
            pass
    session.answer(
        frame,
        headers.DrainReply(
            "stopping" if asked.action == headers.DrainAction.STOP else state_of(broker),
            broker.out,
            broker.writer.waiting_bytes,
            broker.changes.waiting,
            len(broker.sessions),
        ),
    )
