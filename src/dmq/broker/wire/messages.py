"""Messages in and out.

PULL, SUBSCRIBE, UNSUBSCRIBE, CREDIT, ASSIGN, SETTLE: between frames and the client's operations. PRODUCE and
PRODUCER_STATES: between frames and the publisher. TRANSACTION_END, _JOIN and _LIST, DELAY_LIST and DELAY_CANCEL:
messages that wait for their outcome or their time.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.delivery.waiters import Handed
from dmq.broker.publish.publisher import PublishRequest
from dmq.broker.schedule.transactions import Ending
from dmq.broker.wire.session import PushSink, RefusalTexts, Session, wire_body, wire_lease
from dmq.errors import DMQError, InvalidRequest
from dmq.model import MessageId
from dmq.protocol.admin import DelayCancel, DelayList, DelayListReply
from dmq.protocol.batch import unpack_batch
from dmq.protocol.consume import Assign, Credit, Pull, PullReply, Refusal, Settle, SettleReply, Subscribe, Unsubscribe
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.produce import (
    Produce,
    ProduceFlag,
    ProducerStates,
    ProducerStatesReply,
    TransactionEnd,
    TransactionEndReply,
    TransactionJoin,
    TransactionList,
    TransactionListReply,
    TransactionRefusal,
)
from dmq.protocol.session import FRAME_CRC

__all__ = [
    "assign",
    "cancel_delay",
    "credit",
    "end_transactions",
    "join_transactions",
    "list_delays",
    "list_transactions",
    "produce",
    "producer_states",
    "pull",
    "settle",
    "subscribe",
    "unsubscribe",
]


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
    is_waited_for = frame.kind == _REQUEST
    refused = session.client.settle(asked, is_waited_for=is_waited_for)
    if not is_waited_for:
        return
    if not refused:
        session.answer(frame, SettleReply())
        return
    texts = RefusalTexts()
    session.answer(frame, SettleReply([Refusal(index, *texts.of(error)) for index, error in refused]))


# As plain numbers: an operation on an enum costs more than all the rest.
_REQUEST: Final = int(Kind.REQUEST)
_DUES: Final = int(ProduceFlag.DUES)
_BLOCKS: Final = int(ProduceFlag.BLOCKS)


def produce(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    batch = unpack_batch(
        frame.body, asked.count, asked.keys, (asked.flags & _DUES) != 0, blocks=(asked.flags & _BLOCKS) != 0
    )
    request = PublishRequest(asked, batch, session.address16, session.port)
    request.room = frame.room
    request.check_crc = FRAME_CRC not in session.features
    request.context = session, frame
    broker.publisher.publish(request, session.published)


def producer_states(broker: Broker, session: Session, frame: Frame, asked: ProducerStates) -> None:
    session.answer(frame, ProducerStatesReply(broker.publisher.states(asked)))


_PLACE: Final = struct.Struct(">Q16s")
_DELAY_PLACE: Final = struct.Struct(">QQ")


def end_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionEnd) -> None:
    def done(ending: Ending, error: DMQError | None) -> None:
        if error is not None:
            session.refuse(frame, error)
            return
        texts = RefusalTexts()
        refused = [
            TransactionRefusal(int.from_bytes(message_id[8:], "big"), *texts.of(reason))
            for message_id, reason in ending.refused.items()
        ]
        session.answer(frame, TransactionEndReply(refused))

    broker.transactions.end(asked, done)


def join_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionJoin) -> None:
    """This connection answers checks of a producer group, or no longer does."""
    if asked.leaves:
        broker.transactions.leave(session, asked.group)
        session.producer_groups[asked.group] = max(0, session.producer_groups[asked.group] - 1)
    else:
        broker.transactions.join(session, asked.group)
        session.producer_groups[asked.group] += 1
    session.answer(frame, Header())


async def list_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionList) -> None:
    if asked.after and len(asked.after) != _PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    since_ms, message_id = _PLACE.unpack(asked.after) if asked.after else (0, b"")
    async with broker.reads.turn(session):
        infos, following = await broker.transactions.page((since_ms, message_id), asked.limit, asked.topic)
        session.answer(frame, TransactionListReply(infos, _PLACE.pack(*following) if following[1] else b""))


async def list_delays(broker: Broker, session: Session, frame: Frame, asked: DelayList) -> None:
    if asked.after and len(asked.after) != _DELAY_PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    due_ms, offset = _DELAY_PLACE.unpack(asked.after) if asked.after else (0, 0)
    async with broker.reads.turn(session):
        found, following = await broker.delays.pending((due_ms, offset), asked.limit, asked.topic)
        session.answer(frame, DelayListReply(found, _DELAY_PLACE.pack(*following) if any(following) else b""))


async def cancel_delay(broker: Broker, session: Session, frame: Frame, asked: DelayCancel) -> None:
    await broker.delays.cancel(MessageId.from_bytes(asked.message_id))
    session.answer(frame, Header())
