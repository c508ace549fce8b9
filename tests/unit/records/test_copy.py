"""Copies of messages that failed say what a move says, however they are made."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import RecordCorrupt
from dmq.model import Message, MessageId
from dmq.records import (
    Attributes,
    DeadReason,
    RecordView,
    Stamp,
    encode_attributes,
    encode_batch,
    moved_record,
    stamp_few,
)
from dmq.records.copy import CopyPlan, copy_record, read_failed
from tests.unit.records.samples import SENT_AT_MS, messages

ID = MessageId(0xABCDEF, 12)
ADDRESS = b"\x0a\x00\x00\x01\x12\x34"
NOW_MS = SENT_AT_MS + 5000


def stored(message: Message, extra: bytes = b"") -> bytes:
    encoded = encode_batch("orders", "shop", [message], sent_at_ms=SENT_AT_MS, extra=extra)
    return stamped(encoded.data)


def stamped(data: bytes | bytearray, queue: int = 5, offset: int = 77) -> bytes:
    buffer = bytearray(data)
    stamp_few(buffer, [0], [9_000], Stamp(queue, offset, ADDRESS, ADDRESS, SENT_AT_MS + 1, SENT_AT_MS + 2, ipv6=True))
    return bytes(buffer)


def plan() -> CopyPlan:
    says = Attributes(group="billing", reason="boom")
    return CopyPlan("%RETRY%billing%17", NOW_MS, ("orders", 5), error="boom", says=says)


@given(messages, st.booleans(), st.integers(1, 40))
def test_a_copy_says_what_a_move_says(message: Message, expires: bool, attempt: int) -> None:
    """J-05."""
    raw = stored(message, encode_attributes(Attributes(expires_at_ms=SENT_AT_MS + 50)) if expires else b"")
    failed = read_failed(raw, is_retry=False)
    copied = copy_record(failed, plan(), ID.to_bytes(), attempt)
    moved = moved_record(
        RecordView(raw),
        "%RETRY%billing%17",
        sent_at_ms=NOW_MS,
        message_id=ID,
        says=Attributes(attempt=attempt, group="billing", reason="boom", first_error="boom"),
    )
    ours, theirs = RecordView(copied.record), RecordView(moved)
    ours.verify()
    assert ours.attributes == theirs.attributes
    assert (ours.body, ours.topic, ours.app, ours.business_id) == (
        theirs.body,
        theirs.topic,
        theirs.app,
        theirs.business_id,
    )
    assert (ours.flags, ours.tag_hash, ours.priority) == (theirs.flags, theirs.tag_hash, theirs.priority)
    assert ours.send_time_ms == NOW_MS
    assert copied.message_id == ID.to_bytes()
    assert copied.key == (None if message.key is None else message.key.encode())
    assert failed.expires_at_ms == (SENT_AT_MS + 50 if expires else None)


@given(messages)
def test_a_copy_of_a_retry_keeps_place_id_and_first_error_and_counts_on(message: Message) -> None:
    once = copy_record(read_failed(stored(message), is_retry=False), plan(), ID.to_bytes(), 3)
    failed = read_failed(stamped(once.record, queue=1, offset=4), is_retry=True)
    assert failed.attempts == 3
    assert failed.message_id == ID.to_bytes()
    dead = CopyPlan(
        "%DLQ%billing",
        NOW_MS + 9,
        None,
        error="bang",
        says=Attributes(group="billing", reason="bang", reason_code=DeadReason.REJECTED),
    )
    twice = RecordView(copy_record(failed, dead, b"", 4).record)
    twice.verify()
    before = RecordView(once.record).attributes
    assert twice.attributes == msgspec.structs.replace(
        before, attempt=4, reason="bang", reason_code=int(DeadReason.REJECTED)
    )
    assert before.original_queue == 5
    assert before.original_queue_offset == 77
    assert before.first_error == "boom"


def test_a_copy_out_of_the_topic_names_the_place_there() -> None:
    """A message that was delayed, or resent, stood somewhere else before."""
    first = copy_record(read_failed(stored(Message(b"x")), is_retry=False), plan(), ID.to_bytes(), 1)
    failed = read_failed(stamped(first.record, queue=2, offset=8), is_retry=False)
    assert failed.attempts == 0
    again = CopyPlan(
        "%SCHEDULE%", NOW_MS, ("orders", 2), says=Attributes(due_at_ms=NOW_MS + 1000, target_topic="t", target_queue=2)
    )
    attributes = RecordView(copy_record(failed, again, b"", 1).record).attributes
    assert (attributes.original_topic, attributes.original_queue, attributes.original_queue_offset) == ("orders", 2, 8)
    assert attributes.message_id == ID
    assert attributes.original_send_time_ms == SENT_AT_MS
    assert (attributes.due_at_ms, attributes.target_topic, attributes.target_queue) == (NOW_MS + 1000, "t", 2)


def test_a_topic_that_gives_its_messages_a_time_gives_it_to_the_copy() -> None:
    raw = stored(Message(b"x"))
    copied = copy_record(read_failed(raw, is_retry=False), plan(), ID.to_bytes(), 1, expires_at_ms=99)
    assert RecordView(copied.record).attributes.expires_at_ms == 99
    raw = stored(Message(b"x"), encode_attributes(Attributes(expires_at_ms=50)))
    copied = copy_record(read_failed(raw, is_retry=False), plan(), ID.to_bytes(), 1, expires_at_ms=99)
    assert RecordView(copied.record).attributes.expires_at_ms == 50


def test_an_origin_that_a_client_invented_is_not_believed() -> None:
    invented = Attributes(
        message_id=MessageId(1, 1), original_topic="x", attempt=7, first_error="mine", attempts_before=9
    )
    failed = read_failed(stored(Message(b"x", key="k"), encode_attributes(invented)), is_retry=True)
    assert (failed.message_id, failed.attempts, failed.attempts_before, failed.has_error) == (None, 0, 0, False)
    attributes = RecordView(copy_record(failed, plan(), ID.to_bytes(), 1).record).attributes
    assert (attributes.message_id, attributes.original_topic, attributes.first_error) == (ID, "orders", "boom")
    assert attributes.attempts_before is None
    assert attributes.key == "k"


@given(st.data())
def test_a_record_that_is_cut_is_refused(data: st.DataObject) -> None:
    raw = stored(Message(b"body", key="k", tag="t"))
    with pytest.raises(RecordCorrupt):
        read_failed(raw[: data.draw(st.integers(67, len(raw) - 1))], is_retry=False)
