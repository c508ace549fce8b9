"""A moved message keeps what it was, however often it is moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import Message, MessageId
from dmq.records import (
    ANY_QUEUE,
    Attributes,
    Compressor,
    DeadReason,
    EncodeOptions,
    RecordView,
    Stamp,
    encode_attributes,
    encode_batch,
    layout,
    moved_record,
    stamp_few,
)
from dmq.records.move import REASON_BYTES_MAX, shorten
from tests.unit.records.samples import SENT_AT_MS, messages

ID = MessageId(0xABCDEF, 12)
ADDRESS = b"\x0a\x00\x00\x01\x12\x34"


def stored(message: Message, topic: str = "orders", extra: bytes = b"", app: str = "shop") -> RecordView:
    encoded = encode_batch(
        topic, app, [message], sent_at_ms=SENT_AT_MS, options=EncodeOptions(compressor=Compressor("lz4")), extra=extra
    )
    stamp_few(encoded.data, [0], [9_000], Stamp(5, 77, ADDRESS, ADDRESS, SENT_AT_MS + 1, SENT_AT_MS + 2, ipv6=True))
    return RecordView(encoded.data)


@given(messages)
def test_a_moved_record_keeps_the_message_and_tells_its_origin(message: Message) -> None:
    """J-04."""
    record = stored(message, extra=encode_attributes(Attributes(expires_at_ms=SENT_AT_MS + 50)))
    moved = RecordView(
        moved_record(
            record,
            "%RETRY%billing",
            sent_at_ms=SENT_AT_MS + 1_000,
            message_id=ID,
            says=Attributes(
                due_at_ms=SENT_AT_MS + 5_000,
                target_topic="orders",
                target_queue=ANY_QUEUE,
                attempt=2,
                group="billing",
                reason="handler raised",
            ),
        )
    )
    moved.verify()
    assert moved.raw_body == record.raw_body
    assert (moved.body, moved.key, moved.tag, moved.properties) == (
        message.body,
        message.key,
        message.tag,
        dict(message.properties or {}),
    )
    assert (moved.topic, moved.app, moved.business_id) == ("%RETRY%billing", "shop", record.business_id)
    assert (moved.send_time_ms, moved.priority, moved.tag_hash) == (
        SENT_AT_MS + 1_000,
        message.priority,
        record.tag_hash,
    )
    assert moved.flags == record.flags & ~layout.IPV6 | layout.MOVED
    assert (moved.journal_offset, moved.queue, moved.queue_offset, moved.client) == (0, 0, 0, bytes(6))
    said = moved.attributes
    assert (said.message_id, said.original_topic, said.original_queue) == (ID, "orders", 5)
    assert (said.original_queue_offset, said.original_journal_offset) == (77, 9_000)
    assert (said.original_send_time_ms, said.expires_at_ms) == (SENT_AT_MS, SENT_AT_MS + 50)
    assert (said.due_at_ms, said.target_topic, said.target_queue) == (SENT_AT_MS + 5_000, "orders", ANY_QUEUE)
    assert (said.attempt, said.group, said.reason) == (2, "billing", "handler raised")


def test_moving_again_keeps_the_first_origin_and_forgets_the_last_move() -> None:
    """J-04."""
    once = moved_record(
        stored(Message(b"x", key="k")), "a", sent_at_ms=1, message_id=ID, says=Attributes(attempt=1, reason="first")
    )
    twice = RecordView(moved_record(RecordView(once), "b", sent_at_ms=2, says=Attributes(attempt=2)))
    assert (twice.message_id, twice.attributes.original_topic, twice.attributes.original_queue) == (ID, "orders", 5)
    assert (twice.attributes.original_send_time_ms, twice.attributes.original_queue_offset) == (SENT_AT_MS, 77)
    assert (twice.attributes.attempt, twice.attributes.reason, twice.key) == (2, None, "k")
    assert twice.flags == layout.MOVED


def test_the_first_error_and_the_attempts_of_before_stay_and_the_reason_is_of_the_last_move() -> None:
    once = moved_record(
        stored(Message(b"x")), "a", sent_at_ms=1, message_id=ID, says=Attributes(reason="first", first_error="first")
    )
    twice = RecordView(
        moved_record(
            RecordView(once),
            "b",
            sent_at_ms=2,
            says=Attributes(reason="second", reason_code=DeadReason.REJECTED, first_error="second", attempts_before=3),
        )
    )
    said = twice.attributes
    assert (said.first_error, said.reason, said.reason_code, said.attempts_before) == ("first", "second", 5, 3)
    said = RecordView(moved_record(twice, "c", sent_at_ms=3, says=Attributes(attempts_before=8))).attributes
    assert (said.first_error, said.reason, said.reason_code, said.attempts_before) == ("first", None, None, 8)
    said = RecordView(moved_record(twice, "c", sent_at_ms=3)).attributes
    assert said.attempts_before == 3


def test_what_a_client_says_of_its_errors_is_not_believed() -> None:
    invented = encode_attributes(Attributes(first_error="forged", attempts_before=9))
    said = RecordView(moved_record(stored(Message(b"x"), extra=invented), "a", sent_at_ms=1, message_id=ID)).attributes
    assert (said.first_error, said.attempts_before) == (None, None)


def test_attributes_this_version_does_not_know_are_carried_along() -> None:
    """J-04."""
    extra = encode_attributes(Attributes(unknown=((0x55, b"new"),)))
    moved = moved_record(stored(Message(b"x"), extra=extra), "a", sent_at_ms=1, message_id=ID)
    assert RecordView(moved).attributes.unknown == ((0x55, b"new"),)


def test_an_origin_that_a_client_invented_is_not_believed() -> None:
    invented = encode_attributes(Attributes(message_id=MessageId(6, 6), original_topic="forged"))
    moved = RecordView(moved_record(stored(Message(b"x"), extra=invented), "a", sent_at_ms=1, message_id=ID))
    assert (moved.message_id, moved.attributes.original_topic) == (ID, "orders")


def test_a_record_that_was_never_moved_needs_its_id() -> None:
    with pytest.raises(InvalidMessage, match="pass the message's id"):
        moved_record(stored(Message(b"x")), "a", sent_at_ms=1)


def test_the_largest_message_that_can_be_sent_can_be_moved_with_everything_said() -> None:
    """J-04."""
    name, body = "n" * 255, bytes(1_000)
    extra = layout.CLIENT_ATTRIBUTES_BYTES_MAX - layout.USER_ATTRIBUTES_BYTES_MAX - 8
    message = Message(body, key="k" * (layout.USER_ATTRIBUTES_BYTES_MAX - 3), business_id=name)
    unknown = encode_attributes(Attributes(unknown=((0x55, bytes(extra - 3)),)))
    record = stored(message, topic=name, extra=unknown, app=name)
    for _ in range(3):
        record = RecordView(
            moved_record(
                record,
                name,
                sent_at_ms=1,
                message_id=ID,
                says=Attributes(
                    due_at_ms=1,
                    target_topic=name,
                    target_queue=1,
                    attempt=1,
                    group=name,
                    reason="é" * 5_000,
                    reason_code=DeadReason.EXPIRED,
                    first_error="é" * 5_000,
                    attempts_before=7,
                ),
            )
        )
        record.verify()
    assert record.body == body
    with pytest.raises(InvalidMessage, match="attributes take 62465 bytes"):
        stored(message, extra=unknown + b"x")


def test_a_damaged_body_does_not_get_a_fresh_seal_by_being_moved() -> None:
    record = stored(Message(b"precious"))
    broken = bytearray(record.buffer)
    broken[layout.BODY_AT] ^= 1
    moved = RecordView(moved_record(RecordView(broken), "a", sent_at_ms=1, message_id=ID))
    with pytest.raises(RecordCorrupt, match="body"):
        moved.verify()


@given(st.text(max_size=2_000) | st.just("\ud800" * 2_000))
def test_a_long_reason_is_cut_visibly_and_stays_text(reason: str) -> None:
    cut = shorten(reason)
    assert len(cut.encode()) <= REASON_BYTES_MAX
    if len(reason.encode("utf-8", "replace")) > REASON_BYTES_MAX:
        assert cut.endswith("…")
        assert len(cut.encode()) >= REASON_BYTES_MAX - 3
