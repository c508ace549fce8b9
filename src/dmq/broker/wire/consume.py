"""PULL, SUBSCRIBE, UNSUBSCRIBE, CREDIT, ASSIGN, SETTLE: between frames and the client's operations."""

from __future__ import annotations

from functools import partial

from dmq.broker.broker import Broker
from dmq.broker.delivery.waiters import Handed
from dmq.broker.wire.session import PushSink, RefusalTexts, Session, wire_body, wire_lease
from dmq.protocol.consume import (
    Assign,
    Credit,
    Pull,
    PullReply,
    Refusal,
    Settle,
    SettleReply,
    Subscribe,
    Unsubscribe,
)
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.header import Header

__all__ = ["assign", "credit", "pull", "settle", "subscribe", "unsubscribe"]


def pull(broker: Broker, session: Session, frame: Frame, asked: Pull) -> None:
    session.client.pull(asked, partial(_answer_pull, session, frame))


def _answer_pull(session: Session, frame: Frame, handed: Handed | None) -> None:
    if handed is None:
        session.answer(frame, PullReply())
    else:
        session.answer(frame, PullReply([wire_lease(handed)]), *wire_body(handed))


def subscribe(broker: Broker, session: Session, frame: Frame, asked: Subscribe) -> None:
    sink = PushSink(session, asked.subscription)
    session.client.subscribe(asked, sink, lambda reply: session.answer(frame, reply))


def unsubscribe(broker: Broker, session: Session, frame: Frame, asked: Unsubscribe) -> None:
    session.client.unsubscribe(asked)
    session.answer(frame, Header())


def assign(broker: Broker, session: Session, frame: Frame, asked: Assign) -> None:
    session.client.assign(asked.subscription, asked.queues)
    session.answer(frame, Header())


def credit(broker: Broker, session: Session, frame: Frame, asked: Credit) -> None:
    session.client.credit(asked)
    session.answer(frame, Header())


def settle(broker: Broker, session: Session, frame: Frame, asked: Settle) -> None:
    refused = session.client.settle(asked, is_waited_for=frame.kind == Kind.REQUEST)
    if not refused:
        session.answer(frame, SettleReply())
        return
    texts = RefusalTexts()
    session.answer(frame, SettleReply([Refusal(index, *texts.of(error)) for index, error in refused]))
