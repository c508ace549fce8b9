"""Reading: views and columns agree, and bytes that are not a record are refused without harm."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import DMQError, InvalidMessage, MessageTooLarge, RecordCorrupt
from dmq.model import Message
from dmq.records import (
    EncodeOptions,
    RecordView,
    address_text,
    batch_rules,
    check_batch,
    decode_columns,
    encode_batch,
    iter_records,
    layout,
)
from dmq.records import check as module
from tests.unit.records.samples import SENT_AT_MS, batches

MANY = module.VERIFY_MANY_MIN


def check(data: bytes | bytearray, lengths: Any, topic: str = "orders", **rules: Any) -> None:
    check_batch(data, lengths, batch_rules(topic, **rules))


def sample(count: int, topic: str = "orders") -> tuple[bytearray, list[int]]:
    made = [Message(b"body-%d" % index, key=f"k{index}", tag="paid", business_id="b") for index in range(count)]
    encoded = encode_batch(topic, "shop", made, sent_at_ms=SENT_AT_MS)
    return encoded.data, encoded.lengths.tolist()


@given(batches)
def test_columns_say_what_the_views_say(messages: list[Message]) -> None:
    """J-04."""
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=SENT_AT_MS)
    data = bytes(encoded.data)
    check(data, encoded.lengths, check_crc=True)
    starts = np.cumsum(encoded.lengths, dtype=np.int64) - encoded.lengths
    columns = decode_columns(data, starts, encoded.lengths)
    views = list(iter_records(data))
    for name in ("length", "flags", "tag_hash", "priority", "journal_offset", "queue", "queue_offset", "send_time_ms"):
        assert getattr(columns, name).tolist() == [getattr(view, name) for view in views]
    assert columns.crc.tolist() == [view.crc for view in views]
    assert [value.tobytes() for value in columns.client] == [view.client for view in views]
    for index, view in enumerate(views):
        parts = [
            data[at[index] : at[index] + size[index]]
            for at, size in (
                (columns.body_at, columns.body_size),
                (columns.topic_at, columns.topic_size),
                (columns.app_at, columns.app_size),
                (columns.business_id_at, columns.business_id_size),
                (columns.attributes_at, columns.attributes_size),
            )
        ]
        assert parts == [view.raw_body, *view.name_bytes, view.attribute_bytes]


def rules(topic: bytes = b"orders", body_bytes_max: int = 100, attributes_bytes_max: int = 62_464) -> module.BatchRules:
    return module.batch_rules(
        topic.decode(), body_bytes_max=body_bytes_max, flags_allowed=0x3F, attributes_bytes_max=attributes_bytes_max
    )


def plain_refuses(data: bytes | bytearray, starts: list[int], sizes: list[int], checked: module.BatchRules) -> bool:
    try:
        module.verify_few(data, starts, sizes, checked)
    except (InvalidMessage, RecordCorrupt):
        return True
    return False


FIELDS = [0, 3, 4, 5, 6, 7, 9, 10, 39, 55, 63, 64, 65, 66, 67]


@given(st.integers(1, 6), st.data())
def test_the_plain_paths_and_the_numpy_path_refuse_the_same_batches(count: int, data: st.DataObject) -> None:
    """J-04: any bytes changed, most of them those that lead to others."""
    buffer, sizes = sample(count)
    starts = [sum(sizes[:index]) for index in range(count)]
    for _ in range(data.draw(st.integers(0, 3))):
        record = data.draw(st.integers(0, count - 1))
        variable = sizes[record] - 40
        at = data.draw(st.sampled_from(FIELDS) | st.integers(variable, sizes[record] - 1))
        buffer[starts[record] + at] = data.draw(st.integers(0, 255))
    array = np.array(starts, np.int64), np.array(sizes, np.int64)
    refuses = plain_refuses(buffer, starts, sizes, rules())
    assert module._any_bad(buffer, *array, rules()) == refuses
    # The quick look may send a good batch to the close one, and never lets a bad one pass.
    assert module._may_be_bad_few(buffer, starts, sizes, rules()) >= refuses
    assert module._may_be_bad_few(memoryview(buffer), starts, sizes, rules()) >= refuses
    try:
        decode_columns(buffer, *array)
        refused = False
    except RecordCorrupt:
        refused = True
    try:
        for start, size in zip(starts, sizes, strict=True):
            view = RecordView(buffer, start, start + size)
            view.parts()
            if view.length != size:
                raise RecordCorrupt("length")
        corrupt = False
    except RecordCorrupt:
        corrupt = True
    assert refused == corrupt


@given(st.binary(max_size=400), st.lists(st.integers(0, 2**32 - 1) | st.integers(60, 200), max_size=40), st.booleans())
def test_any_bytes_as_a_batch_are_refused_or_accepted_but_nothing_else(
    data: bytes, lengths: list[int], check_crc: bool
) -> None:
    """J-04."""
    for sizes in (lengths, np.array(lengths, np.uint32), [len(data)]):
        try:
            check(data, sizes, "t", check_crc=check_crc)
        except (InvalidMessage, RecordCorrupt):
            pass


@given(st.binary(min_size=72, max_size=160), st.integers(-5, 200))
def test_any_bytes_with_a_right_head_are_read_or_corrupt(data: bytes, start: int) -> None:
    """J-04."""
    raw = bytearray(data)
    struct.pack_into(">IH", raw, 0, len(raw), layout.MAGIC)
    for at in (0, start):
        try:
            view = RecordView(raw, at)
            view.verify()
        except RecordCorrupt:
            pass
        for name in ("topic", "app", "business_id", "body", "key", "tag", "properties", "raw_body"):
            try:
                getattr(RecordView(raw, at), name)
            except RecordCorrupt:
                pass


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(0, 2**63 - 1))
def test_columns_of_places_where_no_record_is_are_corrupt(starts: list[int], length: int) -> None:
    data, _ = sample(3)
    places = np.array([0, *starts], np.int64)
    with pytest.raises(RecordCorrupt):
        decode_columns(data, places, np.full(len(places), min(length, 2**40), np.int64))


@pytest.mark.parametrize("count", [2, MANY + 2])
@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (layout.LENGTH_AT + 3, 73, "reaches past"),
        (layout.LENGTH_AT + 3, 90, "do not add up"),
        (layout.LENGTH_AT, 1, "claims"),
        (layout.MAGIC_AT, 0, "magic"),
        (layout.FLAGS_AT, 0x40, "system flags 0x40"),
        (layout.FLAGS_AT, 0x80, "system flags 0x80"),
        (layout.PRIORITY_AT, 10, "priority"),
        (layout.BODY_SIZE_AT, 0xFF, "reaches past"),
        (layout.BODY_SIZE_AT + 3, 0, "do not add up"),
    ],
)
def test_a_bad_record_in_a_batch_is_named_by_its_index(count: int, at: int, value: int, says: str) -> None:
    """J-04."""
    data, lengths = sample(count)
    check(data, lengths)
    data[sum(lengths[:-1]) + at] = value
    with pytest.raises((InvalidMessage, RecordCorrupt), match=f"record {count - 1} of the batch: .*{says}") as caught:
        check(data, lengths)
    assert caught.value.detail["index"] == count - 1


@pytest.mark.parametrize("count", [1, MANY])
def test_a_batch_must_keep_to_its_topic_and_limits(count: int) -> None:
    data, lengths = sample(count)
    check(data, np.array(lengths, np.uint32), check_crc=True)
    for topic in ("order", "orders2", "orderz", "", "o" * 255, "o" * 256):
        with pytest.raises(InvalidMessage, match="another topic"):
            check(data, lengths, topic)
    with pytest.raises(MessageTooLarge, match="limit is 5"):
        check(data, lengths, body_bytes_max=5)
    with pytest.raises(InvalidMessage, match="attributes take"):
        check(data, lengths, attributes_bytes_max=5)
    with pytest.raises(RecordCorrupt, match="lengths add up to"):
        check(data + b"x", lengths)
    with pytest.raises(RecordCorrupt, match="lengths add up to"):
        check(data, lengths[1:])
    encoded = encode_batch(
        "orders", "a", [Message(b"x")] * count, sent_at_ms=0, options=EncodeOptions(flags=layout.SYSTEM)
    )
    check(encoded.data, encoded.lengths)
    with pytest.raises(InvalidMessage, match="system flags 0x04 are not allowed"):
        check(encoded.data, encoded.lengths, flags_allowed=layout.COMPRESSED | layout.ORDERED)


def test_an_empty_batch_is_valid() -> None:
    check(b"", [])
    assert len(decode_columns(b"", np.empty(0, np.int64), np.empty(0, np.uint32)).length) == 0


@pytest.mark.parametrize("count", [1, MANY])
def test_each_bit_a_client_wrote_is_under_a_checksum_and_no_bit_of_the_brokers(count: int) -> None:
    """J-04."""
    data, lengths = sample(count)
    start = sum(lengths[:-1])
    brokers = {*range(10, 39), *range(47, 55)}
    for at in range(lengths[-1]):
        for bit in range(8):
            if at == layout.FLAGS_AT and 1 << bit == layout.IPV6:
                continue
            data[start + at] ^= 1 << bit
            if at in brokers:
                check(data, lengths, check_crc=True)
            else:
                with pytest.raises(DMQError):
                    check(data, lengths, check_crc=True)
            data[start + at] ^= 1 << bit


def test_verify_says_which_checksum_is_wrong() -> None:
    data, _ = sample(1)
    data[layout.BODY_AT] ^= 1
    with pytest.raises(RecordCorrupt, match="body of the record"):
        RecordView(data).verify()
    data[layout.BODY_AT] ^= 1
    data[-1] ^= 1
    with pytest.raises(RecordCorrupt, match="names, attributes or head"):
        RecordView(data).verify()


def test_records_are_iterated_up_to_the_first_that_is_none() -> None:
    data, lengths = sample(3)
    assert [view.start for view in iter_records(data, lengths[0])] == [lengths[0], lengths[0] + lengths[1]]
    assert [view.key for view in iter_records(data, 0, lengths[0])] == ["k0"]
    seen: list[str | None] = []
    with pytest.raises(RecordCorrupt, match="claims 101 bytes; 100 are left"):
        seen.extend(view.key for view in iter_records(data[:-1]))
    assert seen == ["k0", "k1"]
    with pytest.raises(RecordCorrupt, match="fewer bytes are left"):
        seen.extend(view.key for view in iter_records(data + b"tail"))
    assert seen == ["k0", "k1", "k0", "k1", "k2"]


def test_an_address_is_shown_as_people_write_it() -> None:
    assert address_text(bytes.fromhex("0a0000ff1a85")) == "10.0.0.255:6789"
