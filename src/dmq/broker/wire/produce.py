"""PRODUCE and PRODUCER_STATES: between frames and the publisher."""

from __future__ import annotations

from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.publish.publisher import PublishRequest
from dmq.broker.wire.session import Session
from dmq.errors import DMQError
from dmq.protocol.batch import unpack_batch
from dmq.protocol.commands import produce_answer
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.produce import Produce, ProduceFlag, ProducerStates, ProducerStatesReply
from dmq.protocol.session import FRAME_CRC
from dmq.storage.journal.unit_draft import Placement

__all__ = ["produce", "producer_states"]

# As plain numbers: an operation on an enum costs more than all the rest.
_DUES: Final = int(ProduceFlag.DUES)
_BLOCKS: Final = int(ProduceFlag.BLOCKS)
_REQUEST: Final = int(Kind.REQUEST)


def produce(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    batch = unpack_batch(
        frame.body, asked.count, asked.keys, (asked.flags & _DUES) != 0, blocks=(asked.flags & _BLOCKS) != 0
    )
    request = PublishRequest(asked, batch, session.address16, session.port)
    request.room = frame.room
    request.check_crc = FRAME_CRC not in session.features
    request.context = session, frame
    broker.publisher.publish(request, _answer)


def _answer(request: PublishRequest, placement: Placement | None, error: DMQError | None) -> None:
    session, frame = request.context
    if placement is None:
        session.refuse(frame, error)
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


def producer_states(broker: Broker, session: Session, frame: Frame, asked: ProducerStates) -> None:
    session.answer(frame, ProducerStatesReply(broker.publisher.states(asked)))
