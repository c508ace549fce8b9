"""PRODUCE and PRODUCER_STATES: between frames and the publisher."""

from __future__ import annotations

from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.publish.publisher import PublishRequest
from dmq.broker.wire.session import Session
from dmq.protocol.batch import unpack_batch
from dmq.protocol.frame import Frame
from dmq.protocol.produce import Produce, ProduceFlag, ProducerStates, ProducerStatesReply
from dmq.protocol.session import FRAME_CRC

__all__ = ["produce", "producer_states"]

# As a plain number: an operation on an enum costs more than all the rest.
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
