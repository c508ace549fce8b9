"""Messages as `find` and `peek` show them."""

from __future__ import annotations

from dmq.client.admin.reports import StoredMessage
from dmq.model import Message, MessageId
from dmq.records import RecordView, encode_batch, moved_record

SENT_AT_MS = 1_700_000_000_000


def test_a_message_that_was_moved_shows_when_it_was_sent_first() -> None:
    encoded = encode_batch("orders", "shop", [Message(b"x", key="k")], sent_at_ms=SENT_AT_MS)
    record = RecordView(encoded.data)
    moved = RecordView(moved_record(record, "again", sent_at_ms=SENT_AT_MS + 60_000, message_id=MessageId(7, 1)))
    assert moved.send_time_ms == SENT_AT_MS + 60_000
    assert StoredMessage.of(record).sent_at_ms == StoredMessage.of(moved).sent_at_ms == SENT_AT_MS
    assert StoredMessage.of(moved).id == MessageId(7, 1)
