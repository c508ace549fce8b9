"""OFFSETS, PEEK, FIND, FETCH: reading without consuming.

ARCHIVED: the archive says how far it has taken the journal, so that retention need not wait for it any longer.
"""

from __future__ import annotations

import asyncio
import functools

from dmq.broker.broker import Broker, Work
from dmq.broker.delivery.group import hashes_of, normalised
from dmq.broker.wire.consume import point_offset
from dmq.broker.wire.session import Session
from dmq.errors import InvalidRequest, OffsetGone
from dmq.model import MessageId
from dmq.protocol import read as headers
from dmq.protocol.batch import pack_records
from dmq.protocol.frame import Buffer, Frame
from dmq.protocol.read import Archived, ArchivedReply
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.read.reader import Found, Slice, TagFilter
from dmq.storage.read.record_origin import IdRun, OriginRun
from dmq.storage.state import events
from dmq.storage.state.state import Topic

__all__ = ["archived", "fetch", "find", "offsets", "peek"]


def archived(broker: Broker, session: Session, frame: Frame, asked: Archived) -> Work | None:
    """Keep it, for good when this is answered; it never goes back."""
    queries = broker.store.queries
    if asked.journal_offset and asked.journal_id != queries.journal_id:
        raise InvalidRequest(
            f"this broker has journal {queries.journal_id:016x}, not {asked.journal_id:016x}: "
            "tell the one it was read from"
        )
    if asked.journal_offset > queries.visible:
        raise OffsetGone(
            f"the journal has offsets {queries.start} to {queries.visible}: nobody can have archived it up to "
            f"{asked.journal_offset}",
            first=queries.start,
            next=queries.visible,
        )

    def answer() -> None:
        durable = min(queries.flushed, queries.visible)
        session.answer(
            frame, ArchivedReply(queries.journal_id, queries.archived_to, queries.start, durable, queries.visible)
        )

    async def keep() -> None:
        await broker.write([events.Archived(asked.journal_offset)])
        answer()

    if asked.journal_offset > queries.archived_to:
        return keep()
    answer()
    return None


_BYTES = 4 << 20
_BYTES_MAX = 15 << 20  # a frame has room for it
_MESSAGES_MAX = 32_768  # a header has room for as many ids
_ORIGINS_MAX = 16_384  # and for as many ids with origins
_BREATH = 64


def _queues(topic: Topic, queue: int) -> list[int]:
    return list(range(topic.config.queues)) if queue == ANY_QUEUE else [queue]


async def offsets(broker: Broker, session: Session, frame: Frame, asked: headers.Offsets) -> None:
    topic = broker.store.queries.topic(asked.topic)

    def look() -> list[headers.QueueOffsets]:
        return [
            headers.QueueOffsets(
                queue, *broker.store.queries.bounds(topic.name, queue), point_offset(broker, topic, queue, asked.at)
            )
            for queue in _queues(topic, asked.queue)
        ]

    async with broker.reads.turn(session):
        rows = await broker.reads.ask(look)
    session.answer(frame, headers.OffsetsReply(rows, broker.store.queries.start, broker.store.queries.visible))


async def peek(broker: Broker, session: Session, frame: Frame, asked: headers.Peek) -> None:
    topic = broker.store.queries.topic(asked.topic)
    hashes = hashes_of(normalised(asked.tags))
    tag_filter = None if hashes is None else TagFilter(hashes)
    messages = min(asked.max_messages, _ORIGINS_MAX if asked.with_origins else _MESSAGES_MAX)
    size = min(asked.max_bytes or _BYTES, _BYTES_MAX)
    spans: list[headers.Span] = []
    lengths: list[int] = []
    pieces: list[Buffer] = []

    def look(queue: int, messages: int, size: int) -> tuple[int, Slice, list[IdRun], list[OriginRun]]:
        start = point_offset(broker, topic, queue, asked.at)
        found = broker.store.queries.read(topic.name, queue, start, messages, max_bytes=size, tags=tag_filter)
        ids = broker.store.queries.id_runs(topic, queue, found.offsets.tolist(), found.pieces)
        origins = broker.store.queries.origins(topic, queue, found.offsets, found.pieces) if asked.with_origins else []
        return start, found, ids, origins

    async with broker.reads.turn(session), broker.reads.bulk():
        for queue in _queues(topic, asked.queue):
            if messages <= 0 or size <= 0:
                break
            start, found, ids, origins = await broker.reads.ask(functools.partial(look, queue, messages, size))
            mine = found.lengths.tolist()
            spans.append(headers.Span(queue, start, found.next_offset, len(mine), ids, origins))
            lengths += mine
            pieces += found.pieces
            messages -= len(mine)
            size -= sum(mine)
        session.answer(frame, headers.PeekReply(spans), pack_records(lengths), *pieces)


async def find(broker: Broker, session: Session, frame: Frame, asked: headers.Find) -> None:
    if (asked.key is None) == (asked.message_id is None):
        raise InvalidRequest("look up by a key or by an id: exactly one of them")
    if asked.topic:
        broker.store.queries.topic(asked.topic)
    message_id = None if asked.message_id is None else MessageId.from_bytes(asked.message_id)

    def is_meant(found: Found) -> bool:
        return asked.topic in ("", found.topic) and (
            found.record.key == asked.key if message_id is None else found.message_id == message_id
        )

    def look(place: int) -> tuple[Found, memoryview] | None:
        # What retention took since the places were looked up is not there any more.
        found = broker.store.queries.record_at(place) if place >= broker.store.queries.start else None
        return None if found is None or not is_meant(found) else (found, broker.store.queries.raw_record(found))

    rows: list[headers.Found] = []
    pieces: list[memoryview] = []
    size = 0
    is_complete = True
    async with broker.reads.turn(session):
        places = await broker.reads.ask(lambda: broker.store.queries.places(key=asked.key, message_id=message_id))
        for number, place in enumerate(places):
            hit = await broker.reads.ask(functools.partial(look, place))
            if number % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)  # others want to be served, too
            if hit is None:
                continue
            found, piece = hit
            if len(rows) >= asked.max_messages or (rows and size + len(piece) > _BYTES_MAX):
                is_complete = False
                break
            size += len(piece)
            pieces.append(piece)
            rows.append(
                headers.Found(
                    found.topic,
                    found.record.queue,
                    found.record.queue_offset,
                    found.journal_offset,
                    found.message_id.to_bytes(),
                )
            )
        lengths = pack_records([len(piece) for piece in pieces])
        session.answer(frame, headers.FindReply(rows, is_complete), lengths, *pieces)


async def fetch(broker: Broker, session: Session, frame: Frame, asked: headers.Fetch) -> None:
    """Whole visible units, verbatim; waits for some if asked to."""
    deadline_ms = broker.now_ms + asked.wait_ms
    if await _fetched(broker, session, frame, asked, deadline_ms):
        return
    with broker.arrivals.waits():
        while not await _fetched(broker, session, frame, asked, deadline_ms):
            await broker.arrivals.more()


async def _fetched(broker: Broker, session: Session, frame: Frame, asked: headers.Fetch, deadline_ms: int) -> bool:
    """Answer if there is something, or nothing more to wait for."""
    store = broker.store
    size = min(asked.max_bytes or _BYTES, _BYTES, broker.settings.frame_bytes_max // 2)
    async with broker.reads.turn(session), broker.reads.bulk():
        if not store.queries.start <= asked.journal_offset <= store.queries.visible:
            raise OffsetGone(
                f"the journal has offsets {store.queries.start} to {store.queries.visible}, not {asked.journal_offset}",
                first=store.queries.start,
                next=store.queries.visible,
            )
        data, end = await broker.reads.ask(lambda: store.queries.read_units(asked.journal_offset, size))
        if not data and broker.now_ms < deadline_ms and session.connection.is_open and not broker.is_stopping:
            return False
        reply = headers.FetchReply(
            end - len(data),
            end,
            store.queries.start,
            store.queries.visible,
            store.queries.epoch,
            store.queries.journal_id,
        )
        session.answer(frame, reply, data)
        return True
