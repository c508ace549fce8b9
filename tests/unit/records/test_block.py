"""Body blocks: what is taken out of one is what was put in, and what was changed on the way does not pass."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import DMQError, RecordCorrupt
from dmq.model import Message
from dmq.records import (
    Alike,
    Compressor,
    EncodedBatch,
    EncodeOptions,
    RecordView,
    batch_rules,
    check_batch,
    encode_batch,
    encode_plain,
    layout,
)
from dmq.records.block import (
    BLOCK_BYTES_MAX,
    BLOCK_HEAD_BYTES,
    BodyBlocks,
    StoredBlocks,
    block_size,
    block_use,
    gather_blocks,
    make_block,
    one_block,
    plain,
    plain_records,
)
from dmq.records.check import checked_bodies, find_corrupt
from dmq.records.compression import CODEC_LZ4, CODEC_ZSTD, Mode
from tests.unit.records.samples import SENT_AT_MS

RULES = batch_rules("orders")
WITH_CRC = batch_rules("orders", check_crc=True)
WORDS = [b'{"order_id":', b'"customer":"c-', b'"status":"paid",', b'"amount":', b'"currency":"EUR"}', b"\0\xff"]


def json_bodies(count: int, size: int = 200, seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    return [
        b'{"order_id": %d, "customer": "c-%d", "status": "paid", "note": "%s"}'
        % (chance.randrange(10**9), chance.randrange(10**6), b"n" * max(0, size - 70))
        for _ in range(count)
    ]


def encoded(messages: list[Message], mode: Mode = "lz4") -> EncodedBatch:
    return encode_batch(
        "orders",
        "shop",
        messages,
        sent_at_ms=SENT_AT_MS,
        options=EncodeOptions(compressor=Compressor(mode), blocks=True),
    )


def bounds_of(batch: EncodedBatch) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(batch.lengths, dtype=np.int64)))


@st.composite
def alike(draw: st.DrawFn) -> list[Message]:
    """Messages as batches of a topic have them: bodies of any size out of a few words, and a few of any bytes."""
    chance = draw(st.randoms(use_true_random=False))
    top, most = draw(st.sampled_from(((60, 150), (300, 150), (3000, 30), (40_000, 9))))
    count = draw(st.integers(1, most))
    messages = []
    for _ in range(count):
        size = chance.randrange(top)
        body = b"".join(chance.choices(WORDS, k=1 + size // 16))[:size]
        messages.append(
            Message(
                chance.randbytes(size) if chance.random() < 0.03 else body,
                chance.choice((None, "", "k-1", "ключ", "key-" * 9)),
                chance.choice((None, "blue")),
                chance.choice((None, "b-7")),
                ordered=chance.random() < 0.1,
                priority=chance.choice((0, 4, 9)),
                properties={"a": "b"} if chance.random() < 0.1 else None,
            )
        )
    return messages


@given(alike(), st.sampled_from(("lz4", "zstd", "auto")))
@settings(max_examples=30)
def test_records_out_of_their_blocks_are_those_that_never_were_in_one(messages: list[Message], mode: Mode) -> None:
    batch = encoded(messages, mode)
    check_batch(batch.data, batch.lengths, WITH_CRC, batch.block_bytes)
    check_batch(batch.data, batch.lengths, RULES, batch.block_bytes)
    small = [message for message in messages if len(message.body) <= layout.BODY_BYTES_MAX]
    never = encode_batch("orders", "shop", small, sent_at_ms=SENT_AT_MS)
    starts = bounds_of(never)
    blocks = BodyBlocks(bytes(batch.data))
    bounds = bounds_of(batch)
    for index, (record, start) in enumerate(
        zip(plain_records(batch.data, batch.lengths), bounds.tolist(), strict=False)
    ):
        view = RecordView(bytes(batch.data), start, int(bounds[index + 1]))
        view = RecordView(bytes(batch.data), start)
        assert view.body == messages[index].body
        RecordView(record).verify()
        if view.in_block:
            assert record == never.data[starts[index] : starts[index + 1]]
            assert blocks.body(start) == messages[index].body
    raw = bytes(batch.data)
    if not any(RecordView(raw, start).compressed for start in bounds[:-1].tolist()):
        assert checked_bodies(raw, bounds, blocks) == [message.body for message in messages]
        assert checked_bodies(raw, bounds.tolist(), blocks) == [message.body for message in messages]
    assert find_corrupt(raw, bounds[:-1], np.diff(bounds)) == {}


@pytest.mark.parametrize("keys", [None, "even", "odd"])
def test_columns_and_messages_give_the_same_bytes(keys: str | None) -> None:
    bodies = [*json_bodies(300), b"small", b"", *json_bodies(3000, 400, 2)]
    named: list[str | None] = [
        None if keys is None else f"k-{index:05}" if keys == "even" else "k" * (index % 9)
        for index in range(len(bodies))
    ]
    one = encode_plain(
        "orders",
        "shop",
        Alike(bodies, named),
        sent_at_ms=SENT_AT_MS,
        options=EncodeOptions(compressor=Compressor("lz4"), blocks=True),
    )
    other = encoded([Message(body, key) for body, key in zip(bodies, named, strict=True)])
    assert one.block_bytes == other.block_bytes > 0
    assert one.data == other.data
    assert one.hashes.tolist() == other.hashes.tolist()
    assert len({*np.flatnonzero(np.diff(bounds_of(one)))}) > 2


def test_many_bodies_go_into_several_blocks_of_at_most_256_kib_each() -> None:
    bodies = json_bodies(2000, 1000)
    batch = encoded([Message(body) for body in bodies])
    at, sizes = len(batch.data) - batch.block_bytes, []
    while at < len(batch.data):
        _, size, raw_size, _ = struct.unpack_from(">B3xIII", batch.data, at)
        sizes.append(raw_size)
        at += BLOCK_HEAD_BYTES + size
    assert len(sizes) > 3
    assert max(sizes) <= BLOCK_BYTES_MAX
    assert sum(sizes) == sum(map(len, bodies))


def test_bodies_that_do_not_compress_are_as_they_were_and_cost_no_more_tries() -> None:
    chance = random.Random(5)
    tries = 0

    class Counting(Compressor):
        def _run_together(self, raw: bytes, count: int) -> tuple[int, bytes]:
            nonlocal tries
            tries += 1
            return super()._run_together(raw, count)

    compressor = Counting()
    bodies = [chance.randbytes(200) for _ in range(500)]
    for _ in range(20):
        batch = encode_plain(
            "t",
            "a",
            Alike(bodies, [None] * 500),
            sent_at_ms=1,
            options=EncodeOptions(compressor=compressor, blocks=True),
        )
        assert batch.block_bytes == 0
    tried = tries
    for _ in range(16):
        encode_plain(
            "t",
            "a",
            Alike(bodies, [None] * 500),
            sent_at_ms=1,
            options=EncodeOptions(compressor=compressor, blocks=True),
        )
    assert tries - tried <= 2
    good = json_bodies(500)
    assert any(
        encode_plain(
            "t", "a", Alike(good, [None] * 500), sent_at_ms=1, options=EncodeOptions(compressor=compressor, blocks=True)
        ).block_bytes
        for _ in range(20)
    ), "it is tried again now and then"


def test_lone_messages_and_small_batches_have_no_blocks() -> None:
    assert encoded([Message(json_bodies(1)[0])]).block_bytes == 0
    assert encoded([Message(body) for body in json_bodies(10)]).block_bytes == 0


def test_a_turned_bit_is_seen_wherever_it_is() -> None:
    batch = encoded([Message(body) for body in json_bodies(70)])
    blocks_at = len(batch.data) - batch.block_bytes
    bounds = bounds_of(batch)
    starts = bounds[:-1]
    chance = random.Random(3)
    # Every bit of the block's head, of a pointer and of the flag, and many of the data.
    pointer = range(layout.BODY_AT, layout.BODY_AT + 12)
    head = [*range(blocks_at, blocks_at + BLOCK_HEAD_BYTES), *pointer, layout.FLAGS_AT]
    places = [(at, bit) for at in head for bit in range(8)]
    places += [(chance.randrange(blocks_at, len(batch.data)), chance.randrange(8)) for _ in range(40)]
    for at, bit in places:
        raw = bytearray(batch.data)
        raw[at] ^= 1 << bit
        if at == layout.FLAGS_AT and 1 << bit == layout.IPV6:
            continue  # a broker sets it
        damaged = bytes(raw)
        with pytest.raises(DMQError):
            check_batch(damaged, batch.lengths, WITH_CRC, batch.block_bytes)
        found = find_corrupt(damaged, starts, np.diff(bounds))
        assert found, (at, bit)
        if at in pointer or at == layout.FLAGS_AT:
            assert [*found] == [0]
        assert checked_bodies(damaged, bounds, BodyBlocks(damaged)) is None or at == layout.FLAGS_AT


@pytest.mark.parametrize("codec", [CODEC_LZ4, CODEC_ZSTD, 0, 9])
@pytest.mark.parametrize("raw_size", [0, 1, 199, 201, BLOCK_BYTES_MAX, BLOCK_BYTES_MAX + 1, 0xFFFF_FFFF])
def test_a_block_that_claims_another_size_is_refused(codec: int, raw_size: int) -> None:
    data = Compressor("zstd" if codec == CODEC_ZSTD else "lz4").compress("t", b"ab" * 100, must_shrink=True)[1]
    with pytest.raises(RecordCorrupt):
        BodyBlocks(make_block(codec, raw_size, data)).expanded(0)


def hostile(
    places: list[tuple[int, int]], raw: bytes = b"x" * 400, distance: int | None = None
) -> tuple[bytes, list[int], int]:
    """A batch of records that point to these places and sizes of one block."""
    raw = b"x" * 400
    batch = encode_batch("orders", "shop", [Message(bytes(12)) for _ in places], sent_at_ms=SENT_AT_MS)
    data, at = batch.data, 0
    for (place, size), length in zip(places, batch.lengths.tolist(), strict=True):
        data[at + layout.FLAGS_AT] |= layout.BLOCK
        behind = len(data) - at if distance is None else distance
        struct.pack_into(">III", data, at + layout.BODY_AT, behind, place, size)
        struct.pack_into(">I", data, at + layout.CRC_AT + 4, crc32c(raw[place : place + size]))
        at += length
    packed = Compressor("lz4").compress("t", raw, must_shrink=True)[1]
    block = make_block(CODEC_LZ4, len(raw), packed)
    return bytes(data) + block, batch.lengths.tolist(), len(block)


@pytest.mark.parametrize(
    "places",
    [
        [(0, 400), (0, 400)],  # each body twice: a few bytes would become many
        [(0, 300), (200, 200)],
        [(0, 200), (200, 201)],
        [(1, 399)],
        [(0, 399)],
        [(200, 200), (0, 200)],
        [(0, 0xFFFF_FFFF)],
        [(0xFFFF_FFFF, 2)],
    ],
)
def test_bodies_that_do_not_fill_their_block_are_refused(places: list[tuple[int, int]]) -> None:
    data, lengths, block_bytes = hostile(places)
    with pytest.raises(RecordCorrupt):
        check_batch(data, lengths, RULES, block_bytes)


def test_what_fills_its_block_passes_and_a_wrong_distance_does_not() -> None:
    data, lengths, block_bytes = hostile([(0, 100), (100, 300)])
    check_batch(data, lengths, WITH_CRC, block_bytes)
    for distance in (0, 1, len(data), 0xFFFF_FFFF):
        data, lengths, block_bytes = hostile([(0, 400)], distance=distance)
        with pytest.raises(RecordCorrupt):
            check_batch(data, lengths, RULES, block_bytes)
        assert find_corrupt(data, np.array([0]), np.array(lengths, np.int64))
    with pytest.raises(DMQError):  # a record that points to a block, and none is there
        check_batch(data[: sum(lengths)], lengths, RULES)
    for cut in (1, BLOCK_HEAD_BYTES, block_bytes - 1):
        with pytest.raises(RecordCorrupt):
            check_batch(data[:-cut], lengths, RULES, block_bytes - cut)
    with pytest.raises(RecordCorrupt):  # a block that nobody points to
        check_batch(data + data[sum(lengths) :], lengths, RULES, 2 * block_bytes)


@given(st.integers(1, 90), st.integers(0, 89), st.integers(1, 30))
@settings(max_examples=25)
def test_any_part_of_stored_records_takes_its_blocks_along(count: int, first: int, step: int) -> None:
    bodies = json_bodies(90)
    messages = [Message(body) for body in bodies]
    journal = bytearray(1000)  # something before them
    where: list[tuple[int, int]] = []
    for _ in range(2):
        batch = encoded(messages)
        at = len(journal)
        for length in batch.lengths.tolist():
            struct.pack_into(">Q", batch.data, at - len(journal) + layout.JOURNAL_OFFSET_AT, at)
            where.append((at, length))
            at += length
        journal += batch.data
    view = memoryview(bytes(journal))
    wanted = where[first::step][:count]
    pieces = [view[at : at + length] for at, length in wanted]
    lengths = [length for _, length in wanted]
    used = block_use(lengths, pieces)
    assert used is not None
    blocks = {at: view[at : at + block_size(view[at:])] for at in used.blocks}
    raw = b"".join(gather_blocks(lengths, pieces, blocks, used))
    got = [RecordView(record) for record in plain_records(raw, lengths)]
    assert [record.body for record in got] == (bodies * 2)[first::step][:count]
    assert [record.length for record in got] == used.sizes.tolist()
    for record in got:
        record.verify()
    sizes = np.array(lengths, np.int64)
    assert find_corrupt(raw, np.cumsum(sizes) - sizes, sizes) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 69), st.integers(1, 70), st.sampled_from([0, 3]))
def test_records_of_one_block_are_handed_out_with_it_as_they_stand(first: int, count: int, small_every: int) -> None:
    bodies = json_bodies(70)
    if small_every:
        bodies[1::small_every] = [b"small"] * len(bodies[1::small_every])
    batch = encoded([Message(body) for body in bodies])
    where: list[tuple[int, int]] = []
    at = 1000  # in the journal
    for length in batch.lengths.tolist():
        struct.pack_into(">Q", batch.data, at - 1000 + layout.JOURNAL_OFFSET_AT, at)
        where.append((at, length))
        at += length
    journal = bytearray(1000) + batch.data
    view = memoryview(bytes(journal))
    wanted = where[first : first + count]
    lengths = [length for _, length in wanted]
    pieces = [view[wanted[0][0] : wanted[-1][0] + wanted[-1][1]]]
    found, used = one_block(lengths, pieces), block_use(lengths, pieces)
    if found is None:
        ends = {used.offsets[0], used.offsets[-1]} if used is not None else {0}
        assert 0 in ends, "the first or the last has its body in itself"
        return
    assert used is not None
    assert found[0] == int(used.offsets[0])
    apart = int((used.offsets == 0).sum())
    assert found[1] == int(used.sizes.sum()) - 12 * apart
    blocks = StoredBlocks({found[0]: view[found[0] : found[0] + block_size(view[found[0] :])]})
    blocks.alone = len(lengths), found[1]
    behind = blocks.behind(lengths, pieces)
    whole = gather_blocks(lengths, pieces, blocks, used)
    if behind is None:
        assert wanted[-1] != where[69] or len(b"".join(whole)) > found[1], "others stand between, or it does not pay"
    else:
        assert b"".join(behind) == b"".join(whole)
    assert blocks.behind(lengths[1:], pieces) is None
    assert blocks.behind(lengths, [*pieces, *pieces]) is None


def test_records_of_several_pieces_or_blocks_are_looked_through() -> None:
    batch = encoded([Message(body) for body in json_bodies(70)])
    piece = memoryview(bytes(batch.data))[: int(batch.lengths.sum())]
    assert one_block(batch.lengths, [piece]) is not None
    assert one_block(batch.lengths, [piece, piece]) is None
    large = encoded([Message(body) for body in json_bodies(3000)])
    assert one_block(large.lengths, [memoryview(bytes(large.data))[: int(large.lengths.sum())]]) is None


def test_plain_takes_the_body_its_pointer_says() -> None:
    batch = encoded([Message(body, "k") for body in json_bodies(70)])
    first = bytes(batch.data[: int(batch.lengths[0])])
    with pytest.raises(RecordCorrupt):
        plain(first, b"short")
