"""The check of records: whatever passes can be read, and what was changed on the way does not pass."""

from __future__ import annotations

import struct
from itertools import accumulate

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import Message, MessageId
from dmq.records import Attributes, RecordView, attributes, batch_rules, check_batch, encode_batch, layout
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.check import VERIFY_MANY_MIN, find_corrupt, verify_few
from dmq.records.move import moved_record
from dmq.records.stand_in import placeholder, stand_in
from tests.unit.records.samples import SENT_AT_MS, batches

ENTRY = struct.Struct(">BH")
PLAIN = batch_rules("orders")
WITH_CRC = batch_rules("orders", check_crc=True)


def record(raw: bytes, *, app: bytes = b"shop", business_id: bytes = b"", flags: int = 0, body: bytes = b"x") -> bytes:
    """A record with any bytes as its attributes and names, and right checksums."""
    names = name_bytes("topic", "orders") + bytes((len(app),)) + app + bytes((len(business_id),)) + business_id
    head = record_head(flags, 0, 4)
    return build_record(head, sent_at_ms=SENT_AT_MS, body=body, body_crc=crc32c(body), names=names, attributes=raw)


def is_read(raw: bytes) -> bool:
    """Whether every reader gets along with a record: the oracle."""
    try:
        view = RecordView(raw)
        view.names()
        said = view.attributes
        moved_record(view, "retry", sent_at_ms=1, message_id=MessageId(1, 1))
    except (RecordCorrupt, InvalidMessage):
        return False
    return not view.compressed or said.raw_size is not None


def passes(records: list[bytes]) -> bool:
    data, lengths = b"".join(records), [*map(len, records)]
    try:
        check_batch(data, np.array(lengths, np.uint32), PLAIN)
    except RecordCorrupt:
        assert find_corrupt(data, np.array([0, *accumulate(lengths)][:-1]), np.array(lengths))
        return False
    assert not find_corrupt(data, np.array([0, *accumulate(lengths)][:-1]), np.array(lengths))
    return True


texts = st.sampled_from(["", "k", "key-1", "ein schlüssel", "钥匙", "a" * 130, "é" * 70])
raw_texts = (
    texts.map(str.encode) | st.sampled_from([b"\xff", b"ab\xc3", b"\x80", b"ok\xe9\x92"]) | st.binary(max_size=12)
)
kinds = st.sampled_from([1, 2, 3, 4, 6, 8, 11, 13, 14, 17, 21, 30, 63, 64, 100, 127, 0x80, 0x80, 0x80, 0x81, 255])


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """Attributes that are mostly right."""
    found = b""
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(kinds)
        shape = attributes.shape_of(kind)
        if shape >= 0 and draw(st.integers(0, 9)):
            value = draw(st.binary(min_size=shape, max_size=shape))
        elif kind == 0x80 and draw(st.integers(0, 9)):
            key = draw(st.sampled_from([b"a", b"trace-id", b"content-size", b"content-type", "größe".encode()]))
            value = bytes((len(key),)) + key + draw(raw_texts)
        else:
            value = draw(raw_texts)
        size = len(value) if draw(st.integers(0, 19)) else draw(st.integers(0, 70_000)) % 65_536
        found += ENTRY.pack(kind, size) + value
    return found if draw(st.integers(0, 19)) else found[:-1]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(entries(), raw_texts, raw_texts, st.booleans()), min_size=1, max_size=4), st.integers(0, 2**32)
)
def test_what_passes_is_read_by_every_reader_and_what_is_refused_by_none(
    parts: list[tuple[bytes, bytes, bytes, bool]], seed: int
) -> None:
    made = [
        record(raw, app=app, business_id=business_id, flags=layout.COMPRESSED if compressed else 0)
        for raw, app, business_id, compressed in parts
    ]
    is_good = all(map(is_read, made))
    assert passes(made) == is_good
    # The same among many, as columns; alike and mixed with others, anywhere.
    good = [record(b""), record(ENTRY.pack(1, 3) + b"k-1"), record(ENTRY.pack(0x80, 5) + b"\x01abcd")]
    filler = [good[(seed + number) % len(good)] for number in range(2 * VERIFY_MANY_MIN)]
    assert passes(made * VERIFY_MANY_MIN) == is_good
    at = seed % len(filler)
    assert passes(filler[:at] + made + filler[at:]) == is_good


@settings(max_examples=100)
@given(batches.filter(bool), st.data())
def test_a_bit_that_turned_is_refused_or_changes_nothing(messages: list[Message], data: st.DataObject) -> None:
    """Of a peer without a checksum over frames: everything a client writes is under one of a record's two."""
    if data.draw(st.booleans()):
        messages = messages * VERIFY_MANY_MIN
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=SENT_AT_MS)
    lengths = encoded.lengths
    good = bytes(encoded.data)
    check_batch(good, lengths, WITH_CRC)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    try:
        check_batch(bad, lengths, WITH_CRC)
    except (RecordCorrupt, InvalidMessage):
        return
    # Only what the broker is about to write itself may have changed.
    starts = [0, *accumulate(lengths.tolist())][:-1]
    within = min(bit // 8 - start for start in starts if start <= bit // 8)
    assert layout.JOURNAL_OFFSET_AT <= within < layout.SEND_TIME_AT or 47 <= within < layout.CRC_AT


def verdict(data: bytes, lengths: list[int], *, one_by_one: bool) -> tuple[type[Exception], object] | None:
    """What the check says of a batch: the kind of error, and the record it is about."""
    try:
        if one_by_one:
            verify_few(data, [0, *accumulate(lengths)][:-1], lengths, PLAIN)
        else:
            check_batch(data, np.array(lengths, np.uint32), PLAIN)
    except (RecordCorrupt, InvalidMessage) as error:
        return type(error), error.detail["index"]
    return None


@settings(max_examples=300)
@given(
    st.sampled_from([1, 2, VERIFY_MANY_MIN - 1, VERIFY_MANY_MIN, 3 * VERIFY_MANY_MIN]),
    st.sampled_from([0, 1, 5]),
    st.data(),
)
def test_records_made_alike_are_checked_as_strictly_as_any(count: int, key_digits: int, data: st.DataObject) -> None:
    """Whatever byte is changed, at any of the ways a batch is looked at, the verdict is that of a close look."""
    keys = [str(number)[-key_digits:] if key_digits else "" for number in range(count)]
    made = [record(ENTRY.pack(1, len(key)) + key.encode() if key else b"") for key in keys]
    lengths = [*map(len, made)]
    changed = bytearray(b"".join(made))
    assert verdict(bytes(changed), lengths, one_by_one=False) is None
    which = data.draw(st.integers(0, count - 1))
    within = data.draw(st.sampled_from([*range(7), 9, *range(layout.BODY_SIZE_AT, lengths[which])]))
    changed[sum(lengths[:which]) + within] = data.draw(st.integers(0, 255))
    assert verdict(bytes(changed), lengths, one_by_one=False) == verdict(bytes(changed), lengths, one_by_one=True)


@pytest.mark.parametrize("count", [1, 2, VERIFY_MANY_MIN + 3])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(ENTRY.pack(1, 300) + b"k"), "claims 300 bytes"),
        (record(ENTRY.pack(1, 1)[:2]), "inside the head of an entry"),
        (record(ENTRY.pack(1, 2) + b"\xff\xfe"), "attribute 1 is not UTF-8"),
        (record(ENTRY.pack(1, 1) + b"a" + ENTRY.pack(1, 1) + b"a"), "attribute 1 occurs twice"),
        (record(ENTRY.pack(3, 7) + b"1234567"), "7 bytes instead of 8"),
        (record(ENTRY.pack(0x80, 2) + b"\x05a"), "longer than its entry"),
        (record(ENTRY.pack(0x80, 3) + b"\x01a\xff"), "attribute 128 is not UTF-8"),
        (record((ENTRY.pack(0x80, 3) + b"\x01ab") * 2), "property 'a' occurs twice"),
        (record((ENTRY.pack(0x80, 14) + b"\x0ccontent-size1") * 2), "property 'content-size' occurs twice"),
        (record(b"", app=b"\xff"), "a name in the record"),
        (record(b"", business_id=b"\xc3"), "a name in the record"),
        (record(b"", flags=layout.COMPRESSED), "does not say how"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_by_its_index_and_why(count: int, bad: bytes, says: str) -> None:
    records = [record(ENTRY.pack(1, 1) + b"k")] * (count - 1) + [bad]
    with pytest.raises(RecordCorrupt, match=f"record {count - 1} of the batch: .*{says}.*send it again") as caught:
        check_batch(b"".join(records), [*map(len, records)], PLAIN)
    assert caught.value.detail["index"] == count - 1


@pytest.mark.parametrize("count", [1, 3, VERIFY_MANY_MIN + 3])
def test_texts_of_any_language_and_many_properties_pass(count: int) -> None:
    messages = [
        Message(
            b"x",
            key=f"鍵-{number}",
            tag="bezahlt-ü",
            business_id="пользователь",
            properties={f"p{number}-{index}": "wert-ä" * (index % 3) for index in range(number % 14)},
        )
        for number in range(count)
    ]
    encoded = encode_batch("orders", "café", messages, sent_at_ms=SENT_AT_MS)
    check_batch(encoded.data, encoded.lengths, WITH_CRC)


def test_attributes_of_very_different_sizes_pass() -> None:
    messages = [Message(b"x", key="k", properties={"p": "v" * (60_000 if number == 7 else 1)}) for number in range(40)]
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=SENT_AT_MS)
    check_batch(encoded.data, encoded.lengths, WITH_CRC)


def test_stored_records_are_looked_at_whatever_their_topics_and_flags() -> None:
    plain = record(attributes.encode_attributes(Attributes(key="k")))
    moved = moved_record(RecordView(plain), "%RETRY%g", sent_at_ms=1, message_id=MessageId(7, 8))
    broken = bytearray(plain)
    broken[layout.BODY_AT] ^= 1
    for count in (2, 40):
        records = [plain, moved] * count + [bytes(broken)]
        lengths = np.array([*map(len, records)])
        found = find_corrupt(b"".join(records), np.cumsum(lengths) - lengths, lengths)
        assert [*found] == [2 * count]
        assert "body" in found[2 * count]


@settings(max_examples=200)
@given(entries(), raw_texts, raw_texts, st.data())
def test_a_stand_in_can_be_read_whatever_it_stands_for(
    raw: bytes, app: bytes, business_id: bytes, data: st.DataObject
) -> None:
    bad = bytearray(record(raw, app=app, business_id=business_id, flags=data.draw(st.integers(0, 255))))
    for _ in range(data.draw(st.integers(0, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(bad[: data.draw(st.just(len(bad)) | st.integers(0, len(bad)))])
    for made in (stand_in(cut), placeholder(cut, "why ü")):
        assert is_read(made)
        view = RecordView(made)
        view.verify()
        view.body  # noqa: B018  expanded here
    assert RecordView(placeholder(cut, "why")).attributes.reason == "why"


def test_a_stand_in_keeps_what_can_be_read() -> None:
    entry = ENTRY.pack(1, 3) + b"k-1" + ENTRY.pack(2, 1) + b"\xff" + ENTRY.pack(0x80, 3) + b"\x01ab"
    bad = bytearray(record(entry + ENTRY.pack(14, 900) + b"x", business_id=b"b\xff7", body=b"hello"))
    layout.stamp_few(bad, [0], [77], layout.Stamp(3, 42, b"abcdef", b"ghijkl", SENT_AT_MS + 2, SENT_AT_MS + 5))
    view = RecordView(stand_in(bytes(bad)))
    assert (view.key, view.tag, view.properties) == ("k-1", None, {"a": "b"})
    assert (view.body, view.topic, view.app, view.business_id) == (b"hello", "orders", "shop", "b\ufffd7")
    assert (view.journal_offset, view.queue, view.queue_offset) == (77, 3, 42)
    assert view.store_time_ms == SENT_AT_MS + 5
