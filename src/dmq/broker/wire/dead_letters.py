"""DEAD_LETTER_LIST, DEAD_LETTER_RESEND, DEAD_LETTER_DELETE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmq.broker.broker import Broker
from dmq.broker.wire.session import Session
from dmq.errors import DMQError
from dmq.model import MessageId
from dmq.protocol import dead_letters as headers
from dmq.protocol.batch import pack_records
from dmq.protocol.frame import Frame
from dmq.protocol.status import status_of

if TYPE_CHECKING:
    from dmq.deadletters.letter import DeadLetter

__all__ = ["delete_dead_letters", "list_dead_letters", "resend_dead_letters"]


async def list_dead_letters(broker: Broker, session: Session, frame: Frame, asked: headers.DeadLetterList) -> None:
    from dmq.deadletters.letter import LetterFilter

    given = asked.filter
    wanted = LetterFilter(
        topic=given.topic,
        group=given.group,
        reason=given.reason,
        since_ms=given.since_ms,
        until_ms=given.until_ms,
        state=given.state,
        message_ids=tuple(map(MessageId.from_bytes, given.message_ids)),
        numbers=tuple(given.numbers),
    )
    async with broker.reads.turn(session):
        page = await broker.dead_letters.page(wanted, asked.after, asked.limit, asked.bodies)
        bodies = [letter.body for letter in page.letters]
        reply = headers.DeadLetterListReply([_info(letter) for letter in page.letters], page.more)
        session.answer(frame, reply, pack_records([len(body) for body in bodies]), *bodies)


def _info(letter: DeadLetter) -> headers.DeadLetterInfo:
    return headers.DeadLetterInfo(
        number=letter.number,
        message_id=letter.message_id.to_bytes(),
        topic=letter.topic,
        reason=letter.reason,
        group=letter.group,
        attempts=letter.attempts,
        queue=255 if letter.queue is None else letter.queue,
        offset=letter.offset or 0,
        key=letter.key,
        tag=letter.tag,
        business_id=letter.business_id,
        app=letter.app,
        priority=letter.priority,
        properties=letter.properties,
        first_error=letter.first_error,
        last_error=letter.last_error,
        body_bytes=letter.body_bytes,
        codec=letter.codec,
        sent_at_ms=letter.sent_at_ms,
        dead_at_ms=letter.dead_at_ms,
        state=letter.state,
        changed_by=letter.changed_by or "",
        changed_at_ms=letter.changed_at_ms or 0,
        broker=letter.broker,
    )


async def resend_dead_letters(broker: Broker, session: Session, frame: Frame, asked: headers.DeadLetterResend) -> None:
    outcomes = await broker.dead_letters.resend.resend(asked.numbers, _who(session))
    session.answer(frame, _reply(asked.numbers, outcomes))


async def delete_dead_letters(broker: Broker, session: Session, frame: Frame, asked: headers.DeadLetterDelete) -> None:
    outcomes = await broker.dead_letters.resend.delete(asked.numbers, _who(session))
    session.answer(frame, _reply(asked.numbers, outcomes))


def _who(session: Session) -> str:
    return f"{session.app}/{session.client_id}"


def _reply(numbers: list[int], outcomes: dict[int, DMQError | None]) -> headers.DeadLetterReply:
    rows = []
    for number in numbers:
        error = outcomes[number]
        if error is None:
            rows.append(headers.DeadLetterOutcome(number))
        else:
            status, header = status_of(error)
            rows.append(headers.DeadLetterOutcome(number, status, header.message))
    return headers.DeadLetterReply(rows)
