"""A batch goes through a frame without a change, and a hostile one goes nowhere."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from dmq.errors import InvalidRequest
from dmq.protocol import (
    FRAME_BYTES_MAX,
    FrameParser,
    decode_request,
    pack_batch,
    pack_records,
    place_records,
    unpack_batch,
    unpack_records,
)
from dmq.records import batch_rules, check_batch
from tests.sampling import SEED, sample_size
from tests.unit.protocol.samples import batch_of, produce_frame

COUNTS = [1, 2, 15, 16, 17, 500]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("dues", [False, True])
def test_a_batch_comes_back_as_it_was(count: int, keys: bool, dues: bool) -> None:
    batch = batch_of(count, keys=keys)
    due_times = [1_700_000_000_000 + index for index in range(count)] if dues else []
    pieces = pack_batch(batch, np.array(due_times, np.uint64) if count % 2 else due_times)
    assert pieces[1] is batch.data
    back = unpack_batch(b"".join(pieces), count, len(batch.hashes), dues)
    assert back.data == batch.data
    assert [*back.lengths] == [*batch.lengths]
    assert [*back.hash_index] == [*batch.hash_index]
    assert [*back.hashes] == [*batch.hashes]
    assert [*back.dues] == due_times
    check_batch(back.data, back.lengths, batch_rules("orders"))


def test_few_records_give_tuples_and_many_give_native_arrays() -> None:
    few, many = (batch_of(count) for count in (15, 16))
    assert type(unpack_batch(b"".join(pack_batch(few)), 15, 15).lengths) is tuple
    lengths = unpack_batch(b"".join(pack_batch(many)), 16, 16).lengths
    assert isinstance(lengths, np.ndarray)
    assert lengths.dtype == np.uint32
    assert lengths.dtype.isnative


def test_columns_have_these_bytes() -> None:
    body = b"".join(pack_batch(batch_of(1), [0x0102030405060708]))
    lengths, index, hashes, dues = struct.unpack_from(">IIQQ", body)
    assert (lengths, index, dues) == (len(body) - 24, 0, 0x0102030405060708)
    assert hashes == batch_of(1).hashes[0]


def test_a_batch_that_came_in_a_large_frame_is_not_copied() -> None:
    batch = batch_of(500, body=bytes(1000))
    (frame,) = FrameParser(FRAME_BYTES_MAX).feed(produce_frame(batch))
    header = decode_request(frame)
    back = unpack_batch(frame.body, header.count, header.keys)
    assert isinstance(frame.body, memoryview)
    assert np.shares_memory(np.frombuffer(frame.body, np.uint8), np.frombuffer(back.data, np.uint8))


@pytest.mark.parametrize("count", COUNTS)
def test_records_handed_out_come_back_as_they_were(count: int) -> None:
    batch = batch_of(count)
    lengths, data = unpack_records(pack_records(batch.lengths) + batch.data, count)
    assert [*lengths] == [*batch.lengths]
    assert data == batch.data


def test_no_records_are_no_bytes() -> None:
    assert unpack_records(pack_records([]), 0) == ((), b"")
    with pytest.raises(InvalidRequest):
        unpack_records(b"x", 0)


@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize(
    ("column", "index", "value"),
    [
        ("lengths", 0, 0),
        ("lengths", 1, 0xFFFF_FFFF),
        ("hash_index", 0, 1),  # twice
        ("hash_index", 1, 0),  # falling
        ("hash_index", -1, "count"),  # outside
        ("hash_index", -1, 0xFFFF_FFFF),
        ("hashes", 1, 0),
        ("dues", 1, 1 << 63),
    ],
)
def test_a_column_that_does_not_fit_is_refused(count: int, column: str, index: int, value: int | str) -> None:
    body = bytearray(b"".join(pack_batch(batch_of(count), [5] * count)))
    at = {"lengths": 0, "hash_index": 4 * count, "hashes": 8 * count, "dues": 16 * count}[column]
    wide = column in ("hashes", "dues")
    number = count if value == "count" else value
    struct.pack_into(">Q" if wide else ">I", body, at + (index % count) * (8 if wide else 4), number)
    with pytest.raises(InvalidRequest):
        unpack_batch(body, count, count, True)


@pytest.mark.parametrize("count", [0, 4, 0xFFFF_FFFF])
@pytest.mark.parametrize("keys", [0, 3, 0xFFFF_FFFF])
@pytest.mark.parametrize("dues", [False, True])
def test_counts_that_do_not_fit_the_body_are_refused(count: int, keys: int, dues: bool) -> None:
    for body in (b"", b"\0\0\0\0", b"".join(pack_batch(batch_of(3)))):
        with pytest.raises(InvalidRequest):
            unpack_batch(body, count, keys, dues)


@pytest.mark.sampled
def test_hostile_columns_give_sound_batches_or_errors() -> None:
    for seed in range(SEED, SEED + sample_size(share=3000, whole=200_000)):
        dice = random.Random(seed)
        count = dice.choice((1, 3, 15, 16, 40))
        body = bytearray(b"".join(pack_batch(batch_of(count), [5] * count)))
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(24 * count)] = dice.randrange(256)
        try:
            batch = unpack_batch(body, dice.choice((count, count + 1)), dice.choice((count, count - 1)), True)
        except InvalidRequest:
            continue
        assert sum(map(int, batch.lengths)) == len(batch.data), f"seed {seed}"
        assert all(0 <= index < count for index in batch.hash_index), f"seed {seed}"


@pytest.mark.parametrize("count", [1, 15, 16, 300])
def test_records_are_placed_where_their_lengths_say_with_blocks_behind_them(count: int) -> None:
    lengths = [72 + number % 7 for number in range(count)]
    body = pack_records(lengths) + bytes(sum(lengths)) + b"block"
    for buffer in (body, memoryview(body)):
        bounds, data = place_records(buffer, count)
        assert [int(bound) for bound in bounds] == [sum(lengths[:number]) for number in range(count + 1)]
        assert bytes(data) == bytes(sum(lengths)) + b"block"


@pytest.mark.parametrize(
    ("body", "count"), [(b"x", 0), (b"\0\0\0\x01", 1), (b"\0\0", 1), (b"\0\0\0\x02x", 1), (b"x" * 63, 16)]
)
def test_records_that_do_not_fit_their_body_are_refused(body: bytes, count: int) -> None:
    with pytest.raises(InvalidRequest):
        place_records(body, count)


def test_an_answer_without_messages_has_no_records() -> None:
    assert place_records(b"", 0) == ([0], b"")
