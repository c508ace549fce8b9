"""OFFSETS, LOCATE, PEEK, FIND, FETCH: reading without consuming; ARCHIVED: how far the archive has the journal.

TRACE and WHY: what happened to one message, and why it is not consumed.
"""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.delivery.reader import Read, refuse_blocks
from dmq.broker.diagnostics import inquiry
from dmq.broker.runtime.runtime import Work
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.broker.wire.session import Session
from dmq.model import MessageId
from dmq.protocol import message_history as history
from dmq.protocol import read as headers
from dmq.protocol.admin import MessageQuery
from dmq.protocol.batch import pack_records
from dmq.protocol.frame import Frame
from dmq.protocol.session import BLOCKS

__all__ = ["archived", "fetch", "fetch_of_follower", "find", "locate", "offsets", "peek", "trace", "why"]


async def offsets(broker: Broker, session: Session, frame: Frame, asked: headers.Offsets) -> None:
    session.answer(frame, await broker.reader.offsets(asked, session))


async def locate(broker: Broker, session: Session, frame: Frame, asked: headers.Locate) -> None:
    session.answer(frame, await broker.reader.locate(asked, session))


async def peek(broker: Broker, session: Session, frame: Frame, asked: headers.Peek) -> None:
    def answer(reply: headers.PeekReply, read: Read) -> None:
        session.answer(frame, reply, pack_records(read.lengths), *read.pieces)

    await broker.reader.peek(asked, session, answer)


async def find(broker: Broker, session: Session, frame: Frame, asked: headers.Find) -> None:
    def answer(reply: headers.FindReply, read: Read) -> None:
        session.answer(frame, reply, pack_records(read.lengths), *read.pieces)

    await broker.reader.find(asked, session, answer)


async def fetch(broker: Broker, session: Session, frame: Frame, asked: headers.Fetch) -> None:
    await broker.reader.fetch(
        asked,
        session,
        lambda reply, pieces: session.answer(frame, reply, *pieces),
        takes_blocks=BLOCKS in session.features,
    )


async def fetch_of_follower(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.Fetch) -> None:
    """Committed units from a member that does not lead."""
    assert dispatcher.face is not None
    reply, pieces = await dispatcher.face.committed_units(asked)
    if BLOCKS not in session.features:
        refuse_blocks(reply, pieces)
    session.answer(frame, reply, *pieces)


def archived(broker: Broker, session: Session, frame: Frame, asked: headers.Archived) -> Work | None:
    done = broker.reader.archived(asked)
    if isinstance(done, headers.ArchivedReply):
        session.answer(frame, done)
        return None
    return session.answer_with(frame, done, lambda reply: reply)


async def trace(broker: Broker, session: Session, frame: Frame, asked: MessageQuery) -> None:
    async with broker.reads.turn(session):
        found = await inquiry.trace(broker, MessageId.from_bytes(asked.message_id), asked.group)
        steps = [history.TraceStep(*step._replace(note=history.shortened(step.note))) for step in found.steps]
        session.answer(frame, history.TraceReply(steps, [*map(history.shortened, found.notes)], found.is_complete))


async def why(broker: Broker, session: Session, frame: Frame, asked: MessageQuery) -> None:
    async with broker.reads.turn(session):
        found = await inquiry.why(broker, MessageId.from_bytes(asked.message_id), asked.group)
        groups = [
            history.GroupReason(history.shortened(reason.group, 255), reason.state, history.shortened(reason.text))
            for reason in found.reasons
        ]
        text = history.shortened(found.text, history.TEXT_BYTES_MAX)
        session.answer(frame, history.WhyReply(found.state, text, groups, found.is_complete))
