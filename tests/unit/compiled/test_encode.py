"""Records that the compiled loop makes have the bytes that the plain code gives them, or are left to it."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import lz4.block
import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.client.producer.core import simple_size_plain
from dmq.errors import InvalidMessage
from dmq.model import DEFAULT_PRIORITY, Message
from dmq.protocol import pack_batch
from dmq.records import encoder
from dmq.records.assembler import EncodedBatch, attach_blocks
from dmq.records.compression import CODEC_LZ4, Together, sizes_of_plain
from dmq.records.encoder import (
    _Batch,
    encode_alike_compiled,
    encode_alike_plain,
    plain_columns,
    plain_columns_plain,
)
from tests.sampling import sample_size
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import SENT_AT_MS, messages, texts


def batch(flags: int = 0, extra: bytes = b"") -> _Batch:
    return _Batch("orders", "shöp", SENT_AT_MS, flags, extras=extra)


def compiled(like: Message, bodies: list[bytes], keys: list[Any], **of: Any) -> EncodedBatch | None:
    return encode_alike_compiled(speed.assemble_alike, batch(**of), like, bodies, keys=keys)


def same(one: EncodedBatch, other: EncodedBatch) -> bool:
    columns = ("lengths", "hash_index", "hashes")
    return (one.data, one.count) == (other.data, other.count) and all(
        getattr(one, name).dtype == getattr(other, name).dtype
        and getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in columns
    )


keys_of_any_size = st.none() | texts | st.text(min_size=30, max_size=70) | st.just("鍵" * 200)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(messages, st.lists(st.tuples(st.binary(max_size=80), keys_of_any_size), min_size=1, max_size=20), st.booleans())
def test_it_gives_the_bytes_of_the_plain_ways(like: Message, rows: list[tuple[bytes, Any]], is_even: bool) -> None:
    bodies, keys = [body for body, _ in rows], [key for _, key in rows]
    if is_even:
        keys = [keys[0]] * len(rows)
    found = compiled(like, bodies, keys, flags=0x08, extra=b"\x03\x00\x0812345678")
    assert found is not None
    sizes = [*map(len, bodies)]
    of = batch(0x08, b"\x03\x00\x0812345678")
    plain = encode_alike_plain(of, like, bodies, sizes, keys=keys)
    assert same(found, plain)
    assert b"".join(pack_batch(found)) == b"".join(pack_batch(plain))
    assert speed.sizes_of(bodies) == sizes_of_plain(bodies)
    alike = [msgspec.structs.replace(like, body=body, key=key) for body, key in rows]
    if not is_even:
        assert same(found, encoder._encode_few(of, alike, bodies, None))


@pytest.mark.parametrize(
    ("bodies", "keys"),
    [
        ([b"x", bytearray(b"y")], [None, None]),
        ([b"x", "y"], [None, None]),
        ([b"x"], ["\ud800"]),
        ([b"x", b"y"], ["k", 5]),
        ([b"x", b"y"], ["k", b"k"]),
        ([b"x"], ["k" * 40_000]),
        ([b"x"], ["é" * 20_000]),
        ([b"x", b"y"], ["k"]),
        ([b"x"], ["k", "k"]),
    ],
    ids=str,
)
def test_what_is_odd_is_left_to_the_plain_code(bodies: list[Any], keys: list[Any]) -> None:
    assert compiled(Message(b""), bodies, keys) is None


def test_a_message_that_breaks_a_rule_is_refused_in_the_words_of_the_plain_code() -> None:
    with pytest.raises(InvalidMessage, match="priority is 0 to 9"):
        compiled(Message(b"", priority=12), [b"x"], [None])


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_checksums_are_those_of_the_libraries(bodies: list[bytes]) -> None:
    bodies = [*bodies, b"", b"x" * 7, b"y" * 8, b"z" * 5000]
    assert speed.plain_crcs_of(bodies) == [(crc32c(body), zlib.crc32(body)) for body in bodies]


@pytest.mark.sampled
@settings(max_examples=sample_size(share=100, whole=3000), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), keys_of_any_size, st.sampled_from([0, 0, 0, 1, 2])), min_size=2, max_size=40
    )
)
def test_bodies_in_blocks_are_as_the_plain_ways_put_them(rows: list[tuple[int, Any, int]]) -> None:
    bodies = [bytes([number & 0xFF]) * size for number, (size, _, _) in enumerate(rows)]
    keys = [key for _, key, _ in rows]
    together = []
    for block in (0, 1):  # 2 is in none
        last = max((at for at, row in enumerate(rows) if row[2] == 0), default=-1)
        indexes = [at for at, row in enumerate(rows) if row[2] == block and (not block or at > last)]
        if indexes:
            raw = b"".join(bodies[at] for at in indexes)
            chosen = range(len(rows)) if len(indexes) == len(rows) else indexes
            together.append(Together(chosen, CODEC_LZ4, len(raw), lz4.block.compress(raw, store_size=False)))
    like, of = Message(b""), batch()
    found = encode_alike_compiled(speed.assemble_alike, of, like, bodies, keys=keys, together=together)
    assert found is not None
    swapped = encoder._Swapped(bodies, together) if together else None
    stand = bodies if swapped is None else swapped.bodies
    crcs = None if swapped is None else swapped.crcs
    plain = encode_alike_plain(of, like, stand, [*map(len, stand)], keys=keys, crcs=crcs)
    if swapped is not None:
        plain = attach_blocks(plain, together, swapped.sizes)
    assert same(found, plain)
    assert found.block_bytes == plain.block_bytes


@pytest.mark.parametrize("runs", [[(1, 0)], [(5, 7)], [(1, -1), (2, 9)], [(2, -1)], [(0, 3), (0, 4), (2, 5)]], ids=str)
def test_any_runs_are_safe(runs: list[tuple[int, int]]) -> None:
    head, tail, _ = batch().template(0, Message(b""), -1, 0)
    data, lengths, _, _, _ = speed.assemble_alike([b"a" * 30, b"b" * 5], [None, "k"], head, tail, runs)
    assert len(data) == sum(int.from_bytes(lengths[at : at + 4], sys.byteorder) for at in (0, 4))


@settings(max_examples=200)
@given(st.binary(max_size=60), st.binary(max_size=80))
def test_any_template_is_safe(head: bytes, tail: bytes) -> None:
    for front in (head, head[:51].ljust(51)):
        found = speed.assemble_alike([b"a", b"b"], ["k", None], front, tail, [])
        if found is None:
            continue  # left to the plain code
        data, lengths, _, _ = found
        assert len(data) == sum(int.from_bytes(lengths[at : at + 4], sys.byteorder) for at in (0, 4))


def test_it_keeps_nothing() -> None:
    good, keys = [b"x" * 200] * 20, [f"ключ-{number}" for number in range(20)]
    bad = [*keys[:-1], "\ud800"]

    def work() -> None:
        compiled(Message(b""), good, keys)
        compiled(Message(b""), good, bad)

    assert grown_kb(work, sample_size(share=10_000, whole=100_000)) < 1024


odd_messages = st.sampled_from(
    [
        Message(b"x", tag="t"),
        Message(b"x", business_id=""),
        Message(b"x", ordered=True),
        Message(b"x", priority=5),
        Message(b"x", priority=4.0),  # type: ignore[arg-type]
        Message(b"x", properties={}),
        Message("text"),
        Message(bytearray(b"x")),
    ]
)


@given(st.lists(st.builds(Message, st.binary(max_size=9), st.none() | texts) | odd_messages, max_size=6))
def test_plain_messages_are_told_from_others(drawn: list[Message]) -> None:
    assert speed.bind_message(Message, DEFAULT_PRIORITY)
    for some in (drawn, drawn[:1], [each for each in drawn if each.tag is None]):
        expected = plain_columns_plain(some)
        if some:
            assert speed.plain_columns(some) == expected
        assert plain_columns(some) == plain_columns(tuple(some)) == expected
        bare = all(each == Message(each.body, each.key) and type(each.priority) is int for each in some)
        assert encoder.is_plain(some) == (bare and bool(some)) == encoder.is_plain(tuple(some))


def test_what_is_no_message_is_not_read_as_one() -> None:
    class Other(Message, frozen=True):
        pass

    for odd in (None, b"x", object(), Other(b"x"), Message):
        assert speed.plain_columns([Message(b"x"), odd]) is None

    class Bare:
        body = key = tag = business_id = ordered = priority = properties = None

    assert not speed.bind_message(Bare, 4)
    assert speed.plain_columns([Message(b"x")]) is not None


@given(messages, st.integers(0, 2**64 - 1))
def test_a_lone_record_has_the_bytes_of_the_plain_way(message: Message, sent_at_ms: int) -> None:
    key = None if message.key is None else message.key.encode()
    key_size = -1 if key is None else len(key)
    shape = encoder.make_shape(encoder.names_of("orders", "shop"), message, key_size)
    plain = encoder.lone_record_plain(shape, sent_at_ms, message.body, key)
    record, key_hash = speed.lone_record(shape.front, shape.tail, sent_at_ms, message.body, key)
    assert (b"".join(plain.parts), plain.length, plain.key_hash) == (record, len(record), key_hash)
    with pytest.raises(ValueError, match="not parts"):
        speed.lone_record(shape.front[1:], shape.tail, sent_at_ms, message.body, key)


class Text(str):
    """No text that the compiled loop knows."""


bodies_of_any_kind = st.binary(max_size=12) | st.sampled_from([None, "text", bytearray(b"x"), memoryview(b"x"), 7])
keys_of_any_kind = st.none() | st.text(max_size=12) | st.text("ab", max_size=12) | st.sampled_from([b"k", 7, Text("k")])


@settings(max_examples=300, deadline=None)
@given(bodies_of_any_kind, keys_of_any_kind, st.integers(0, 12), st.integers(0, 12))
def test_the_size_of_a_simple_message_is_that_of_the_plain_way(
    body: object, key: object, body_bytes_max: int, key_max: int
) -> None:
    limits = body_bytes_max, key_max
    assert speed.simple_size(body, key, *limits) == simple_size_plain(body, key, *limits)


def test_a_message_up_to_both_limits_is_simple() -> None:
    for size in (speed.simple_size, simple_size_plain):
        assert size(b"body", "key", 4, 3) == 4
        assert size(b"", None, 0, 0) == 0
        assert size(b"body", "key", 3, 3) == size(b"body", "key", 4, 2) == size(b"body", "k\xe9y", 4, 3) == -1
