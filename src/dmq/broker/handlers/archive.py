"""ARCHIVED: the archive says how far it has taken the journal, so that retention need not wait for it any longer."""

from __future__ import annotations

from dmq.broker.broker import Broker, Work
from dmq.broker.session import Session
from dmq.errors import InvalidRequest, OffsetGone
from dmq.protocol.frame import Frame
from dmq.protocol.reading import Archived, ArchivedReply
from dmq.storage import events

__all__ = ["archived"]


def archived(broker: Broker, session: Session, frame: Frame, asked: Archived) -> Work | None:
    """Keep it, for good when this is answered; it never goes back."""
    store = broker.store
    if asked.journal_offset and asked.journal_id != store.journal_id:
        raise InvalidRequest(
            f"this broker has journal {store.journal_id:016x}, not {asked.journal_id:016x}: "
            "tell the one it was read from"
        )
    if asked.journal_offset > store.visible:
        raise OffsetGone(
            f"the journal has offsets {store.start} to {store.visible}: nobody can have archived it up to "
            f"{asked.journal_offset}",
            first=store.start,
            next=store.visible,
        )

    def answer() -> None:
        durable = min(store.flushed, store.visible)
        session.answer(frame, ArchivedReply(store.journal_id, store.archived_to, store.start, durable, store.visible))

    async def keep() -> None:
        await broker.write([events.Archived(asked.journal_offset)])
        answer()

    if asked.journal_offset > store.archived_to:
        return keep()
    answer()
    return None
