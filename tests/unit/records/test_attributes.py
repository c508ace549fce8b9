"""Attributes: what is written is read, and what cannot be read is said to be corrupt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import MessageId
from dmq.records import Attributes, decode_attributes, encode_attributes, read_entries

U8, U32, U64 = (st.none() | st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
TEXT = st.none() | st.text(max_size=20)
attributes = st.builds(
    Attributes,
    key=TEXT,
    tag=TEXT,
    expires_at_ms=U64,
    message_id=st.none() | st.builds(MessageId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    original_topic=TEXT,
    original_queue=U8,
    original_send_time_ms=U64,
    original_queue_offset=U64,
    original_journal_offset=U64,
    due_at_ms=U64,
    target_topic=TEXT,
    target_queue=U8,
    attempt=U32,
    group=TEXT,
    reason=TEXT,
    reason_code=U8,
    first_error=TEXT,
    attempts_before=U32,
    replay=TEXT,
    mark=U64,
    transaction=U64,
    properties=st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=9), max_size=4),
    unknown=st.lists(
        st.tuples(st.integers(23, 0x7F), st.binary(max_size=9)), max_size=3, unique_by=lambda pair: pair[0]
    ).map(tuple),
)


@given(attributes)
def test_attributes_are_read_as_they_were_written(given_attributes: Attributes) -> None:
    """J-04."""
    read = decode_attributes(encode_attributes(given_attributes))
    assert read == given_attributes
    assert list(read.properties) == list(given_attributes.properties)


def test_compression_is_told_with_its_size() -> None:
    """J-08."""
    raw = encode_attributes(Attributes(codec=2, raw_size=70_000))
    assert raw.hex() == "0d0005" + "02" + "00011170"
    assert (decode_attributes(raw).codec, decode_attributes(raw).raw_size) == (2, 70_000)


def check_readable_or_corrupt(raw: bytes) -> None:
    """What is read is written again and read as the same; anything else is said to be corrupt."""
    try:
        found = decode_attributes(raw)
    except RecordCorrupt:
        return
    assert decode_attributes(encode_attributes(found)) == found


@given(st.binary(max_size=60))
def test_any_bytes_are_attributes_or_corrupt(raw: bytes) -> None:
    check_readable_or_corrupt(raw)


@given(attributes, st.data())
def test_damaged_attributes_are_read_or_corrupt(given_attributes: Attributes, data: st.DataObject) -> None:
    raw = bytearray(encode_attributes(given_attributes) or b"\0")
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    check_readable_or_corrupt(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("01", "end inside the head"),
        ("01 00", "end inside the head"),
        ("01 0002 61", "claims 2 bytes, 1 are left"),
        ("01 0001 61 01 0001 62", "attribute 1 occurs twice"),
        ("20 0000 20 0000", "attribute 32 occurs twice"),
        ("01 0001 ff", "not UTF-8"),
        ("03 0007 00000000000000", "7 bytes instead of 8"),
        ("04 0001 00", "1 bytes instead of 16"),
        ("0d 0001 01", "1 bytes instead of 5"),
        ("80 0000", "key is empty or longer"),
        ("80 0001 00", "key is empty or longer"),
        ("80 0002 02 61", "key is empty or longer"),
        ("80 0002 01 61 80 0002 01 61", "property 'a' occurs twice"),
        ("80 0003 01 61 ff", "not UTF-8"),
    ],
)
def test_malformed_attributes_say_what_is_wrong(raw: str, says: str) -> None:
    with pytest.raises(RecordCorrupt, match=says):
        decode_attributes(bytes.fromhex(raw))


def test_entries_keep_their_order_and_kinds_nobody_knows() -> None:
    raw = bytes.fromhex("7f 0001 aa 01 0001 6b 80 0002 01 61")
    assert read_entries(raw) == [(0x7F, b"\xaa"), (1, b"k"), (0x80, b"\x01a")]
    assert decode_attributes(raw).unknown == ((0x7F, b"\xaa"),)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Attributes(target_queue=256), "target_queue 256 does not fit"),
        (Attributes(due_at_ms=-1), "due_at_ms -1 does not fit"),
        (Attributes(reason="x" * 65_536), "65536 bytes"),
        (Attributes(reason="x" * 40_000, group="x" * 40_000), "at most 65535"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(wrong: Attributes, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        encode_attributes(wrong)
