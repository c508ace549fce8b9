"""Small archives for tests: rows as dictionaries, committed as the archive job does."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from dmq.model import MessageId
from dmq.pipeline.archive.key_index import index_rows
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.tables import CONSUME_EVENT, COPY, KEY_INDEX, MESSAGE, SCHEMAS

BROKER = "0123456789abcdef"
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
SORTED = {
    MESSAGE: ("topic", "queue", "queue_offset"),
    KEY_INDEX: ("bucket", "hash"),
    COPY: ("journal_offset",),
    CONSUME_EVENT: ("journal_offset",),
}


def message_row(number: int, **given: Any) -> dict[str, Any]:
    """A message; what is given replaces what it has otherwise."""
    body = given.get("body", b"body %d" % number)
    stored_at = given.get("stored_at", NOON + timedelta(seconds=number))
    return {
        "message_id": str(MessageId(7, number)),
        "broker": BROKER,
        "journal_offset": 300 * number,
        "topic": "orders",
        "topic_id": 3,
        "queue": number % 4,
        "queue_offset": number // 4,
        "key": f"order-{number}",
        "business_id": None,
        "tag": None,
        "app": "shop",
        "priority": 4,
        "flags": 0,
        "client": "127.0.0.1:5000",
        "sent_at": stored_at - timedelta(milliseconds=3),
        "received_at": stored_at,
        "stored_at": stored_at,
        "body_crc": crc32c(body),
        "headers": None,
        "body": body,
        "dt": stored_at.date(),
    } | given


def commit_rows(archive: Archive, table: str, rows: Iterable[dict[str, Any]], **how: Any) -> None:
    """Append rows to a table, as its next commit."""
    schema = SCHEMAS[table]
    _commit(archive, table, pa.Table.from_pylist([*rows], schema), **how)


def commit_messages(archive: Archive, rows: Iterable[dict[str, Any]], *, index: bool = True, **how: Any) -> None:
    """Append messages, and what they are found by."""
    messages = pa.Table.from_pylist([*rows], SCHEMAS[MESSAGE])
    _commit(archive, MESSAGE, messages, **how)
    if index:
        _commit(archive, KEY_INDEX, index_rows(messages), **how)


def _commit(archive: Archive, name: str, rows: pa.Table, **how: Any) -> None:
    table = archive.table(name)
    written = write_days(rows, table.folder, sort_by=SORTED[name], **how)
    assert table.commit(written, app_id="test", version=table.version() + 1)
