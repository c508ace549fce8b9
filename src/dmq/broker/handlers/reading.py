"""OFFSETS, PEEK, FIND, FETCH: reading without consuming."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.handlers.consume import point_offset
from dmq.broker.session import Session
from dmq.broker.tags import hashes_of, normalised
from dmq.errors import DMQError, InvalidRequest, OffsetGone
from dmq.model import MessageId
from dmq.protocol import reading as headers
from dmq.protocol.batch import pack_records
from dmq.protocol.frame import Buffer, Frame
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.state import Topic

__all__ = ["fetch", "find", "offsets", "peek"]

_BYTES = 4 << 20
_BYTES_MAX = 16 << 20


def _queues(topic: Topic, queue: int) -> list[int]:
    return list(range(topic.config.queues)) if queue == ANY_QUEUE else [queue]


def offsets(broker: Broker, session: Session, frame: Frame, asked: headers.Offsets) -> None:
    topic = broker.store.topic(asked.topic)
    rows = []
    for queue in _queues(topic, asked.queue):
        first, following = broker.store.bounds(topic.name, queue)
        rows.append(headers.QueueOffsets(queue, first, following, point_offset(broker, topic, queue, asked.at)))
    session.answer(frame, headers.OffsetsReply(rows, broker.store.start, broker.store.visible))


def peek(broker: Broker, session: Session, frame: Frame, asked: headers.Peek) -> None:
    topic = broker.store.topic(asked.topic)
    tags = hashes_of(normalised(asked.tags))
    messages, size = asked.max_messages, min(asked.max_bytes or _BYTES, _BYTES_MAX)
    spans: list[headers.Span] = []
    lengths: list[int] = []
    pieces: list[Buffer] = []
    for queue in _queues(topic, asked.queue):
        if messages <= 0 or size <= 0:
            break
        start = point_offset(broker, topic, queue, asked.at)
        found = broker.store.read(topic.name, queue, start, messages, size, tags)
        mine = found.lengths.tolist()
        spans.append(headers.Span(queue, start, found.next_offset, len(mine)))
        lengths += mine
        pieces += found.pieces
        messages -= len(mine)
        size -= sum(mine)
    session.answer(frame, headers.PeekReply(spans), pack_records(lengths), *pieces)


def find(broker: Broker, session: Session, frame: Frame, asked: headers.Find) -> None:
    if (asked.key is None) == (asked.message_id is None):
        raise InvalidRequest("look up by a key or by an id: exactly one of them")
    if asked.topic:
        broker.store.topic(asked.topic)
    message_id = None if asked.message_id is None else MessageId.from_bytes(asked.message_id)
    everything = broker.store.find(key=asked.key, message_id=message_id, topic=asked.topic or None)
    found = everything[: asked.max_messages]
    rows = [
        headers.Found(f.topic, f.record.queue, f.record.queue_offset, f.journal_offset, f.message_id.to_bytes())
        for f in found
    ]
    pieces = [broker.store.raw_record(f) for f in found]
    session.answer(
        frame,
        headers.FindReply(rows, len(found) == len(everything)),
        pack_records([len(piece) for piece in pieces]),
        *pieces,
    )


def fetch(broker: Broker, session: Session, frame: Frame, asked: headers.Fetch) -> None:
    """Whole visible units, verbatim; waits for some if asked to."""
    store = broker.store
    deadline_ms = broker.now_ms + asked.wait_ms
    if not store.start <= asked.journal_offset <= store.visible:
        raise OffsetGone(
            f"the journal has offsets {store.start} to {store.visible}, not {asked.journal_offset}",
            first=store.start,
            next=store.visible,
        )

    def attempt() -> None:
        size = min(asked.max_bytes or _BYTES, broker.settings.frame_bytes_max // 2)
        data, end = store.read_units(asked.journal_offset, size)
        if not data and broker.now_ms < deadline_ms and session.connection.is_open and not broker.is_stopping:
            broker.when_visible(again)
            return
        reply = headers.FetchReply(end - len(data), end, store.start, store.visible, store.epoch, store.journal_id)
        session.answer(frame, reply, data)

    def again() -> None:
        try:
            attempt()
        except DMQError as error:
            session.refuse(frame, error)

    attempt()
