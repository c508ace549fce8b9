"""Encoding: two paths that agree, and limits that hold to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, MessageTooLarge
from dmq.model import Message
from dmq.records import (
    Alike,
    Attributes,
    Compressor,
    EncodeOptions,
    encode_attributes,
    encode_batch,
    encode_lone,
    encode_plain,
    is_plain,
    iter_records,
    key_hash,
    layout,
)
from dmq.records import encoder as module
from tests.unit.records.samples import SENT_AT_MS, batches, noise

MANY = module.ENCODE_MANY_MIN


def encode(messages: list[Message], extra: bytes | list[bytes] = b"", **options: Any) -> module.EncodedBatch:
    return encode_batch(
        "orders", "shop", messages, sent_at_ms=SENT_AT_MS, options=EncodeOptions(**options), extra=extra
    )


@given(batches.filter(bool), st.booleans(), st.sampled_from([b"", encode_attributes(Attributes(expires_at_ms=9))]))
def test_the_plain_path_and_the_numpy_path_encode_the_same_bytes(
    messages: list[Message], compress: bool, extra: bytes
) -> None:
    """J-04, J-08."""
    bodies = [message.body for message in messages]
    codecs = None
    if compress:
        packed = [Compressor("lz4").compress("orders", body) for body in bodies]
        codecs, bodies = [codec for codec, _ in packed], [data for _, data in packed]
    few = module._encode_few(module._Batch("orders", "shop", 5, 0, extra), messages, bodies, codecs)
    many = module._encode_many(module._Batch("orders", "shop", 5, 0, extra), messages, bodies, codecs)
    assert few.data == many.data
    assert few.count == many.count
    for name in ("lengths", "hash_index", "hashes"):
        np.testing.assert_array_equal(getattr(few, name), getattr(many, name))
        assert getattr(few, name).dtype == getattr(many, name).dtype


@given(batches, st.sampled_from(["auto", "none", "lz4", "zstd"]))
def test_what_is_encoded_is_read_back(messages: list[Message], mode: Any) -> None:
    """J-04, J-08."""
    encoded = encode(messages, compressor=Compressor(mode))
    records = list(iter_records(encoded.data))
    assert [record.length for record in records] == encoded.lengths.tolist()
    for record, message in zip(records, messages, strict=True):
        record.verify()
        assert (record.topic, record.app, record.send_time_ms) == ("orders", "shop", SENT_AT_MS)
        assert (record.body, record.key, record.tag) == (message.body, message.key, message.tag)
        assert (record.business_id, record.ordered) == (message.business_id or None, message.ordered)
        assert (record.priority, record.properties) == (message.priority, dict(message.properties or {}))
        assert list(record.properties) == list(message.properties or {})
    keys = [(index, key_hash(message.key)) for index, message in enumerate(messages) if message.key is not None]
    assert list(zip(encoded.hash_index.tolist(), encoded.hashes.tolist(), strict=True)) == keys


def test_an_empty_batch_is_an_empty_batch() -> None:
    encoded = encode([])
    assert (encoded.count, len(encoded.data), len(encoded.lengths), len(encoded.hashes)) == (0, 0, 0, 0)


@pytest.mark.parametrize("count", [3, MANY + 3])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Message(b"", priority=10), "priority"),
        (Message(b"", priority=-1), "priority"),
        (Message(b"", priority=4.0), "priority"),  # type: ignore[arg-type]
        (Message("text"), "bytes, not str"),
        (Message(b"", key="\ud800"), "key cannot be written as UTF-8"),
        (Message(b"", tag="\ud800"), "tag cannot be written as UTF-8"),
        (Message(b"", key=5), "key must be text, not int"),  # type: ignore[arg-type]
        (Message(b"", business_id="\udfff"), "business id cannot"),
        (Message(b"", business_id="x" * 256), "business id takes 256 bytes"),
        (Message(b"", properties={"": "v"}), "property key takes 1 to 255"),
        (Message(b"", properties={"k" * 256: "v"}), "property key takes 1 to 255"),
        (Message(b"", properties={"k": "\ud800"}), "property 'k' cannot"),
        (Message(b"", properties={"k": 1}), "must be text, not int"),  # type: ignore[dict-item]
    ],
)
def test_a_message_that_breaks_a_rule_is_refused_by_its_index(count: int, wrong: Message, says: str) -> None:
    good = Message(b"fine", key="k", priority=0)
    messages = [good] * (count - 1) + [wrong]
    with pytest.raises(InvalidMessage, match=f"message {count - 1}: .*{says}") as caught:
        encode(messages)
    assert caught.value.detail["index"] == count - 1


def test_names_of_255_bytes_fit_and_256_do_not() -> None:
    name = "é" * 127 + "x"
    encoded = encode_batch(name, name, [Message(b"", business_id=name)], sent_at_ms=0)
    record = next(iter_records(encoded.data))
    assert (record.topic, record.app, record.business_id) == (name, name, name)
    for topic, app in ((name + "x", "a"), ("t", name + "x")):
        with pytest.raises(InvalidMessage, match="takes 256 bytes"):
            encode_batch(topic, app, [Message(b"")], sent_at_ms=0)


@pytest.mark.parametrize(
    "message_of",
    [
        lambda size: Message(b"", key="k" * (size - 3)),
        lambda size: Message(b"", tag="t" * (size - 3)),
        lambda size: Message(b"", properties={"p": "v" * (size - 5)}),
        lambda size: Message(b"", key="k" * 97, tag="t" * 97, properties={"p": "v" * (size - 205)}),
    ],
    ids=["key", "tag", "property", "together"],
)
def test_user_attributes_of_61440_bytes_fit_and_one_more_does_not(message_of: Any) -> None:
    message = message_of(61_440)
    record = next(iter_records(encode([message]).data))
    assert (record.key, record.tag, record.properties) == (message.key, message.tag, dict(message.properties or {}))
    with pytest.raises(InvalidMessage, match="61441 bytes"):
        encode([message_of(61_441)])


def test_a_body_of_4_mib_fits_and_one_byte_more_does_not() -> None:
    """J-08."""
    body = noise(4 * 1024 * 1024)
    assert len(next(iter_records(encode([Message(body)], compressor=Compressor()).data)).raw_body) == len(body)
    with pytest.raises(MessageTooLarge, match=r"message 1: .* 4194305 bytes .* at most 4194304 are allowed") as caught:
        encode([Message(b""), Message(body + b"x")], compressor=Compressor())
    assert (caught.value.detail["size"], caught.value.detail["limit"]) == (4_194_305, 4_194_304)


def test_the_body_limit_counts_after_compression() -> None:
    """J-08."""
    body = bytes(5 * 1024 * 1024)
    with pytest.raises(MessageTooLarge):
        encode([Message(body)])
    assert next(iter_records(encode([Message(body)], compressor=Compressor()).data)).body == body


def test_a_body_that_no_reader_would_expand_is_refused_however_small_it_compresses() -> None:
    """J-08."""
    for compressor in (None, Compressor()):
        with pytest.raises(MessageTooLarge, match="1001 bytes before compression; the limit is 1000"):
            encode([Message(bytes(1001))], compressor=compressor, raw_bytes_max=1000)
    encode([Message(bytes(1000))], compressor=Compressor(), raw_bytes_max=1000)


def test_extra_attributes_go_to_all_messages_or_to_each_its_own() -> None:
    due = [encode_attributes(Attributes(due_at_ms=at)) for at in (5, 6)]
    same = iter_records(encode([Message(b"x"), Message(b"y")], extra=due[0]).data)
    assert [record.attributes.due_at_ms for record in same] == [5, 5]
    own = iter_records(encode([Message(b"x", key="k"), Message(b"y")], extra=due).data)
    assert [record.attributes.due_at_ms for record in own] == [5, 6]


def test_flags_of_the_caller_are_set_and_those_that_follow_from_the_message_refused() -> None:
    record = next(iter_records(encode([Message(b"", ordered=True)], flags=layout.REPLAYED).data))
    assert record.flags == layout.REPLAYED | layout.ORDERED
    for flag in (layout.COMPRESSED, layout.IPV6, 0x40, 0x80):
        with pytest.raises(ValueError, match="not for the caller"):
            encode([Message(b"")], flags=flag)


def test_bytes_like_bodies_are_copied() -> None:
    body = bytearray(b"abc")
    encoded = encode([Message(body), Message(memoryview(body))])
    assert [record.body for record in iter_records(encoded.data)] == [b"abc", b"abc"]


@given(batches.filter(bool))
def test_a_lone_record_has_the_bytes_it_has_in_a_batch(messages: list[Message]) -> None:
    for message in messages:
        batch = encode([message])
        lone = encode_lone("orders", "shop", message, SENT_AT_MS, message.body)
        assert b"".join(lone.parts) == batch.data
        assert lone.length == len(batch.data)
        assert lone.key_hash == (key_hash(message.key) if message.key is not None else 0)


def test_a_lone_compressed_record_has_the_bytes_it_has_in_a_batch() -> None:
    message = Message(b"abc" * 100, key="k", tag="t")
    codec, data = Compressor("lz4").compress("orders", message.body)
    assert codec
    lone = encode_lone("orders", "shop", message, SENT_AT_MS, data, codec)
    assert b"".join(lone.parts) == encode([message], compressor=Compressor("lz4")).data


plain = st.builds(Message, body=st.binary(max_size=200), key=st.none() | st.text(max_size=6))


even = st.integers(0, 40).flatmap(
    lambda size: st.lists(
        st.builds(
            Message,
            body=st.binary(max_size=50),
            key=st.text(st.characters(max_codepoint=127), min_size=size, max_size=size),
        ),
        min_size=MANY,
        max_size=MANY + 9,
    )
)
keyless = st.lists(st.builds(Message, body=st.binary(max_size=50)), min_size=MANY, max_size=MANY + 9)


@given(st.lists(plain, max_size=MANY + 40) | even | keyless, st.sampled_from([None, "auto", "lz4"]))
def test_columns_of_bodies_and_keys_encode_the_same_bytes_as_messages(messages: list[Message], mode: Any) -> None:
    columns = encode_plain(
        "orders",
        "shop",
        Alike([message.body for message in messages], [message.key for message in messages]),
        sent_at_ms=SENT_AT_MS,
        options=EncodeOptions(compressor=Compressor(mode) if mode else None),
    )
    batch = encode(messages, compressor=Compressor(mode) if mode else None)
    assert (columns.data, columns.count) == (batch.data, batch.count)
    for name in ("lengths", "hash_index", "hashes"):
        np.testing.assert_array_equal(getattr(columns, name), getattr(batch, name))
    assert is_plain(messages) == bool(messages)


@pytest.mark.parametrize("count", [3, MANY + 3])
@pytest.mark.parametrize(("key", "says"), [("\ud800", "key cannot be written as UTF-8"), (5, "must be text, not int")])
def test_a_wrong_key_in_a_column_is_refused_by_its_index(count: int, key: Any, says: str) -> None:
    for at in (0, count - 2, count - 1):
        keys = ["k"] * count
        keys[at] = key
        with pytest.raises(InvalidMessage, match=f"message {at}: .*{says}") as caught:
            encode_plain("orders", "shop", Alike([b"x"] * count, keys), sent_at_ms=0)
        assert caught.value.detail["index"] == at


def test_a_body_over_the_limit_in_a_column_is_refused_by_its_index() -> None:
    bodies = [b"x"] * (MANY + 5)
    bodies[-1] = noise(200)
    with pytest.raises(MessageTooLarge, match=f"message {MANY + 4}: the body takes 200 bytes"):
        encode_plain(
            "orders",
            "shop",
            Alike(bodies, [None] * len(bodies)),
            sent_at_ms=0,
            options=EncodeOptions(body_bytes_max=100),
        )


@pytest.mark.parametrize(
    "message",
    [
        Message(b"", tag="t"),
        Message(b"", business_id="b"),
        Message(b"", ordered=True),
        Message(b"", priority=5),
        Message(b"", priority=4.0),  # type: ignore[arg-type]
        Message(b"", properties={"a": "b"}),
    ],
)
def test_a_message_with_anything_else_is_not_plain(message: Message) -> None:
    assert is_plain([Message(b"x", key="k")])
    assert not is_plain([message])
    assert not is_plain([message, message])


def test_a_shape_is_remembered_for_what_is_the_same_only() -> None:
    encode([Message(b"", priority=1)])
    with pytest.raises(InvalidMessage, match="priority"):
        encode([Message(b"", priority=True)])
    with pytest.raises(InvalidMessage, match="priority"):
        encode_lone("orders", "shop", Message(b"", priority=True), SENT_AT_MS, b"")
