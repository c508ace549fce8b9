"""Frames of messages that are sent by themselves are made and read as the plain code does."""

from __future__ import annotations

from typing import Any

from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmq.broker.publish.straight_path import parse_plain
from dmq.client.producer.accumulator import Lane, LaneKey, Lone, Stream
from dmq.client.producer.straight_path import Groove, reply_plain, request_of
from dmq.model import Durability
from dmq.protocol import request_head
from dmq.protocol.batch import pack_lone
from dmq.protocol.commands import Command, produce_answer, sealed_produce_answer_plain
from dmq.protocol.frame import CRC_BYTES, HEAD_BYTES, REST_BYTES, seal_whole, whole_request_plain
from dmq.protocol.header import encode_header
from dmq.protocol.produce import Produce
from dmq.records.encoder import lone_record_plain, plain_shape
from tests.unit.compiled.extension import grown_kb, speed

u8, u32, u64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
topics = st.sampled_from(["t", "orders", "o" * 31, "o" * 32, "o" * 255])
keys = st.none() | st.binary(max_size=40)


def sealed(data: bytes) -> bytes:
    """A frame with the length and the checksum that its bytes have."""
    frame = (len(data) - 4 + CRC_BYTES).to_bytes(4, "big") + data[4:]
    return frame + crc32c(frame).to_bytes(4, "big")


def groove_of(topic: str, producer_id: int, level: int) -> Groove:
    front = b"\x98" + encode_header(topic)
    lane = Lane(LaneKey(topic, -1, Durability(level)), Stream(producer_id), 0)
    return Groove(lane, front, level, len(front) + 24, frame_bytes=REST_BYTES + len(front) + 24 + CRC_BYTES)


def frame_of(topic: str, body: bytes, key: bytes | None, *numbers: int) -> tuple[bytes, bytes]:
    """The same request by the compiled and by the plain code."""
    correlation, queue, producer_id, sequence, level, sent_at_ms = numbers
    groove, lone = groove_of(topic, producer_id, level), Lone(queue, sequence, 0)
    shape = plain_shape(topic, "shop", -1 if key is None else len(key))
    packed = pack_lone(lone_record_plain(shape, sent_at_ms, body, key))
    plain = request_of(groove, lone, correlation, (None, packed, None, 0 if key is None else 1))
    return speed.lone_frame(groove.front, shape, body, key, numbers), plain


@settings(deadline=None)
@given(topics, st.binary(max_size=300), keys, st.tuples(u32, st.integers(0, 254), u64, u64, st.integers(1, 3), u64))
def test_a_request_has_the_bytes_of_the_plain_way_and_is_read_back(
    topic: str, body: bytes, key: bytes | None, numbers: tuple[int, ...]
) -> None:
    frame, plain = frame_of(topic, body, key, *numbers)
    assert frame == plain
    whole = speed.whole_request(memoryview(frame), len(frame))
    assert whole == whole_request_plain(memoryview(frame), len(frame))
    parsed = speed.lone_request(frame, whole[3])
    assert parsed is not None
    assert (Produce(*parsed[0]), *parsed[1:]) == parse_plain(frame, whole[3])


@settings(deadline=None)
@given(u32, u8, u64, u64, st.sampled_from(Durability))
def test_an_answer_has_the_bytes_of_the_plain_way(
    correlation: int, queue: int, first_offset: int, journal_offset: int, durability: Durability
) -> None:
    numbers = correlation, queue, first_offset, journal_offset
    plain = sealed_produce_answer_plain(*numbers, durability=durability)
    assert speed.sealed_produce_answer(*numbers, durability=durability) == plain


@settings(deadline=None)
@given(
    st.sampled_from(["t", "orders", "ö", "o" * 40]),
    st.tuples(u8, st.integers(1, 2), st.integers(0, 2), u64, u32, u64, st.sampled_from(Durability)),
    st.integers(0, 1),
    st.binary(max_size=120),
    st.lists(st.tuples(st.integers(0, 200), u8), max_size=3),
)
@example("t", (0, 1, 0, 1, 0, 0, Durability.STORED), 0, b"\0\0\0\x48" + bytes(72), [])
@example("t", (0, 1, 1, 1, 0, 0, Durability.STORED), 0, b"\0\0\0\x48" + bytes(11) + b"\1" + bytes(72), [])
def test_what_it_reads_of_any_request_is_what_the_plain_way_reads(
    topic: str, fields: tuple[Any, ...], flags: int, body: bytes, turned: list[tuple[int, int]]
) -> None:
    raw = bytearray(request_head(Command.PRODUCE, Produce(*(topic, *fields, flags)), 7, len(body)) + body)
    header_end = HEAD_BYTES + int.from_bytes(raw[16:20], "big")
    for at, value in turned:
        raw[HEAD_BYTES + at % (len(raw) - HEAD_BYTES)] = value
    for frame in (sealed(bytes(raw)), sealed(short_of(bytes(raw), header_end))):
        body_at = HEAD_BYTES + int.from_bytes(frame[16:20], "big")
        parsed = speed.lone_request(frame, body_at)
        if parsed is not None:
            assert (Produce(*parsed[0]), *parsed[1:]) == parse_plain(frame, body_at)


def short_of(raw: bytes, header_end: int) -> bytes:
    """The same with a header of the eight fields that a lone message has, if its first ones are those."""
    header = b"\x98" + raw[HEAD_BYTES + 1 : header_end][:-5]
    return raw[:16] + len(header).to_bytes(4, "big") + header + raw[header_end:]


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(-1, 90))
def test_bytes_that_are_no_request_are_none(data: bytes, body_at: int) -> None:
    assert speed.lone_request(data, body_at) is None
    for frame in (data, sealed(data) if len(data) >= 4 else b""):
        if len(frame) >= HEAD_BYTES + CRC_BYTES:
            view = memoryview(frame)
            assert speed.whole_request(view, len(frame)) == whole_request_plain(view, len(frame))
        assert speed.whole_request(memoryview(frame), len(frame) + 1) is None


@settings(deadline=None)
@given(u32, u8, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 4), st.booleans(), st.data())
def test_an_answer_is_read_as_the_plain_way_reads_it(
    correlation: int, queue: int, offset: int, journal_offset: int, level: int, is_duplicate: bool, data: st.DataObject
) -> None:
    answer = seal_whole(
        produce_answer(correlation, queue, offset, journal_offset, durability=level, is_duplicate=is_duplicate)
    )
    read = speed.lone_answer(answer, correlation)
    assert read == (None if level > 3 else (queue, offset, level))
    assert read is None or read == reply_plain(answer, correlation)
    assert speed.lone_answer(answer, correlation ^ 1) is None
    bit = data.draw(st.integers(0, 8 * len(answer) - 1))
    turned = bytearray(answer)
    turned[bit >> 3] ^= 1 << (bit & 7)
    assert speed.lone_answer(bytes(turned), correlation) is None
    mended = sealed(bytes(turned)[:-CRC_BYTES])
    read = speed.lone_answer(mended, correlation)
    assert read is None or read == reply_plain(mended, correlation)
    for size in range(0, len(answer), 5):
        assert speed.lone_answer(answer[:size], correlation) is None


def test_it_keeps_no_memory() -> None:
    def work() -> None:
        frame, _ = frame_of("orders", bytes(200), b"key", 1, 2, 3, 4, 1, 6)
        whole = speed.whole_request(memoryview(frame), len(frame))
        speed.lone_request(frame, whole[3])
        speed.lone_request(frame, whole[3] - 1)
        speed.lone_answer(frame, 1)

    assert grown_kb(work, 20_000) < 600
