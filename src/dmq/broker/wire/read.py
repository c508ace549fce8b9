"""OFFSETS, LOCATE, PEEK, FIND, FETCH: reading without consuming; ARCHIVED: how far the archive has the journal."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.delivery.reader import Read, refuse_blocks
from dmq.broker.runtime.tasks import Work
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.broker.wire.session import Session
from dmq.protocol import read as headers
from dmq.protocol.batch import pack_records
from dmq.protocol.frame import Frame
from dmq.protocol.session import BLOCKS

__all__ = ["archived", "fetch", "fetch_of_follower", "find", "locate", "offsets", "peek"]


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
