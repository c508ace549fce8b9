"""Journals for the tests of this folder, and the plain decoder that the columns are compared with."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from crc32c import crc32c

from dmq.model import Message
from dmq.records import Attributes, Compressor, DeadReason, EncodeOptions, RecordView, encode_batch
from dmq.storage.journal.unit import MOVED, Row, Unit, parse_unit, read_header
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.read.reader import row_of
from dmq.storage.state.derived import message_id_of
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SENT_AT_MS = 1_700_000_000_000


def new_store(*topics: str) -> MessageStore:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    for topic in topics:
        store.create_topic(topic, system=topic.startswith("%"))
    return store


def batch_of(
    messages: Sequence[Message],
    *,
    topic: str = "orders",
    queue: int = 0,
    producer_id: int = 5,
    first_sequence: int = 0,
    compressor: Compressor | None = None,
    sent_at_ms: int = SENT_AT_MS,
    **more: Any,
) -> Batch:
    encoded = encode_batch(topic, "shop", messages, sent_at_ms=sent_at_ms, options=EncodeOptions(compressor=compressor))
    return Batch(
        topic=topic,
        queue=queue,
        data=encoded.data,
        lengths=encoded.lengths,
        hash_index=encoded.hash_index,
        hashes=encoded.hashes,
        producer_id=producer_id,
        first_sequence=first_sequence,
        **more,
    )


def journal(store: MessageStore) -> bytes:
    """All visible units."""
    store.flush()
    pieces, at = [], store.queries.start
    while at < store.queries.visible:
        piece, at = store.queries.read_units(at, 1 << 16)
        pieces.append(piece)
    return b"".join(pieces)


def units_of(body: bytes) -> Iterator[Unit]:
    at = 0
    while at < len(body):
        header = read_header(body, at)
        assert header is not None
        yield parse_unit(header, body[at : at + header.length])
        at += header.length


def records_of(body: bytes) -> Iterator[tuple[Unit, Row, int, int, RecordView]]:
    """Unit, row, number in the unit, number in the row, and record, one by one."""
    for unit in units_of(body):
        for index in range(unit.header.records):
            row, within = row_of(unit, index)
            yield unit, row, index, within, RecordView(unit.buffer, int(unit.offsets[index]) - unit.start)


def moment(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else EPOCH + timedelta(milliseconds=at_ms)


def address(row: Row) -> str | None:
    host = ipaddress.IPv6Address(row.address)
    if not int(host):
        return None
    mapped = host.ipv4_mapped
    return f"[{host}]:{row.port}" if mapped is None else f"{mapped}:{row.port}"


def attempts(attributes: Attributes) -> int | None:
    """Over all retries; a dead letter's own number has those before it was resent."""
    if attributes.reason_code is not None or attributes.attempts_before is None:
        return attributes.attempt
    return attributes.attempts_before + (attributes.attempt or 0)


def plain_row(unit: Unit, row: Row, index: int, within: int, record: RecordView) -> dict[str, Any]:
    """One record as a row of `message` and `copy` together."""
    attributes = record.attributes
    is_moved = bool(row.flags & MOVED)
    original_ms = attributes.original_send_time_ms if is_moved else None
    sent_at_ms = record.send_time_ms if original_ms is None else original_ms
    return {
        "message_id": str(message_id_of(unit, row, index, within)),
        "broker": f"{unit.header.journal_id:016x}",
        "journal_offset": record.journal_offset,
        "topic": record.topic,
        "topic_id": row.topic_id,
        "queue": record.queue,
        "queue_offset": record.queue_offset,
        "key": record.key,
        "business_id": record.business_id,
        "tag": record.tag,
        "app": record.app,
        "priority": record.priority,
        "flags": record.flags,
        "client": address(row),
        "sent_at": moment(sent_at_ms),
        "received_at": moment(record.receive_time_ms),
        "stored_at": moment(unit.header.stored_at_ms),
        "body_crc": crc32c(record.body),
        "headers": [{"key": k, "value": v.encode()} for k, v in record.properties.items()] or None,
        "body": record.body,
        "dt": (EPOCH + timedelta(milliseconds=unit.header.stored_at_ms)).date(),
        "origin_topic": (attributes.original_topic if is_moved else None) or attributes.target_topic,
        "group": attributes.group,
        "attempt": attempts(attributes),
        "due_at": moment(attributes.due_at_ms),
        "reason": None if attributes.reason_code is None else DeadReason(attributes.reason_code).name,
        "error": attributes.reason,
    }
