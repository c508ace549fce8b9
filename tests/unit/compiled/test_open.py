"""Bodies and keys that a compiled loop takes out are those that views read, and it gives nothing else."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import RecordCorrupt
from dmq.model import Message
from dmq.records import Compressor, EncodeOptions, RecordView, encode_batch, layout
from dmq.records.block import BodyBlocks
from dmq.records.check import many_bodies
from tests.sampling import sample_size
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import SENT_AT_MS, batches
from tests.unit.records.test_block import alike, json_bodies
from tests.unit.records.test_block import encoded as block_batch

MESSAGES = [Message(b"body-%d" % index, key=f"k{index}" if index % 3 else None) for index in range(20)]


def encoded(messages: list[Message], compressor: Compressor | None = None) -> tuple[bytes, list[int]]:
    """Records, and where they begin and end."""
    batch = encode_batch(
        "orders", "shop", messages, sent_at_ms=SENT_AT_MS, options=EncodeOptions(compressor=compressor)
    )
    return bytes(batch.data), [0, *accumulate(map(int, batch.lengths))]


def views(data: bytes, starts: list[int]) -> list[RecordView]:
    return [RecordView(data, start, end) for start, end in pairwise(starts)]


@given(batches.filter(len), st.booleans())
def test_it_takes_out_what_the_views_read(messages: list[Message], is_checked: bool) -> None:
    data, starts = encoded(messages)
    found = speed.open_records(data, starts, 0, len(messages), None, is_checked)
    known = views(data, starts)
    assert found == ([view.body for view in known], [view.key for view in known])


def test_it_takes_out_some_of_them() -> None:
    data, starts = encoded(MESSAGES)
    bodies, keys = speed.open_records(data, starts, 5, 9, None, True)
    assert bodies == [message.body for message in MESSAGES[5:9]]
    assert keys == [message.key for message in MESSAGES[5:9]]


def test_what_is_outside_is_not_looked_at() -> None:
    data, starts = encoded(MESSAGES)
    for first, stop in ((-1, 3), (3, 3), (4, 3), (0, 21), (19, 30)):
        assert speed.open_records(data, starts, first, stop, None, True) is None
    for places in ([-1, 90], [0, len(data) + 1], [90, 0], [0, 0], [0, 1 << 62]):
        assert speed.open_records(data, places, 0, 1, None, True) is None


@pytest.mark.sampled
@given(alike(), st.booleans())
@settings(max_examples=sample_size(share=30, whole=1000), deadline=None)
def test_bodies_come_out_of_their_blocks(messages: list[Message], is_checked: bool) -> None:
    batch = block_batch(messages)
    data, starts = bytes(batch.data), [0, *accumulate(map(int, batch.lengths))]
    found = speed.open_records(data, starts, 0, len(messages), BodyBlocks(data).expanded, is_checked)
    known = [RecordView(data, start) for start in starts[:-1]]
    if any(view.compressed for view in known):
        assert found is None
    else:
        assert found == ([message.body for message in messages], [view.key for view in known])
    if any(view.in_block for view in known):
        assert speed.open_records(data, starts, 0, len(messages), None, is_checked) is None


def test_a_block_that_cannot_be_expanded_gives_nothing() -> None:
    batch = block_batch([Message(body, key="k") for body in json_bodies(200)])
    data, starts = bytes(batch.data), [0, *accumulate(map(int, batch.lengths))]
    broken = data[:-1] + bytes([data[-1] ^ 1])
    assert speed.open_records(data, starts, 0, 200, BodyBlocks(data).expanded, False) is not None
    assert speed.open_records(broken, starts, 0, 200, BodyBlocks(broken).expanded, False) is None


def test_compressed_bodies_are_left_to_the_views() -> None:
    data, starts = encoded([Message(b"much of the same " * 200, key="k")] * 20, Compressor("zstd"))
    assert data[layout.FLAGS_AT] & layout.COMPRESSED
    assert speed.open_records(data, starts, 0, 20, None, False) is None
    assert not speed.have_bodies(data, starts, None)


@pytest.mark.sampled
@given(alike(), st.data())
@settings(max_examples=sample_size(share=60, whole=3000), deadline=None)
def test_records_have_bodies_if_the_plain_way_finds_them(messages: list[Message], draw: st.DataObject) -> None:
    batch = block_batch(messages)
    bounds = np.concatenate(([0], np.cumsum(batch.lengths, dtype=np.int64)))
    data = bytearray(batch.data)
    at = int(bounds[draw.draw(st.integers(0, len(messages) - 1))]) + layout.BODY_AT
    if draw.draw(st.booleans()):  # a pointer or a size is damaged, or a body, which nothing notices
        data[at + draw.draw(st.integers(-4, 11))] ^= 1 << draw.draw(st.integers(0, 7))
    found = speed.have_bodies(bytes(data), bounds.tolist(), BodyBlocks(bytes(data)).expanded)
    if found:
        assert many_bodies(bytes(data), bounds[:-1], BodyBlocks(bytes(data))) is not None
    elif data == batch.data:
        assert any(RecordView(batch.data, int(start)).compressed for start in bounds[:-1])


def test_records_whose_block_or_body_is_not_there_have_none() -> None:
    batch = block_batch([Message(body, key="k") for body in json_bodies(200)])
    data, starts = bytes(batch.data), [0, *accumulate(map(int, batch.lengths))]
    assert speed.have_bodies(data, starts, BodyBlocks(data).expanded)
    assert not speed.have_bodies(data, starts, None)
    assert not speed.have_bodies(data, [], None)
    broken = data[:-1] + bytes([data[-1] ^ 1])
    assert not speed.have_bodies(broken, starts, BodyBlocks(broken).expanded)
    last = starts[-2] + layout.BODY_AT
    for at, size in ((last + 8, 1 << 20), (last + 4, 1 << 20), (last, 1), (last - 4, 11), (last - 4, 1 << 20)):
        longer = data[:at] + size.to_bytes(4, "big") + data[at + 4 :]
        assert not speed.have_bodies(longer, starts, BodyBlocks(longer).expanded)
    for places in ([-1, 90], [0, len(data) + 1], [90, 0], [0, 0], [0, 20], [0, 1 << 62]):
        assert not speed.have_bodies(data, places, BodyBlocks(data).expanded)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(st.data())
def test_of_damaged_records_it_takes_out_what_the_views_read_or_nothing(draw: st.DataObject) -> None:
    data, starts = encoded(MESSAGES)
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 5))):
        broken[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    damaged = bytes(broken)
    found = speed.open_records(damaged, starts, 0, len(MESSAGES), None, False)
    if found is not None:
        for view, body, key in zip(views(damaged, starts), *found, strict=True):
            assert view.body == body
            try:
                known = view.key
            except RecordCorrupt:
                continue  # something behind the key
            assert known == key
    checked = speed.open_records(damaged, starts, 0, len(MESSAGES), None, True)
    if checked is not None:
        assert checked[0] == [message.body for message in MESSAGES]


def test_a_body_that_fails_its_checksum_is_not_taken_out() -> None:
    data, starts = encoded(MESSAGES)
    broken = bytearray(data)
    broken[starts[7] + layout.BODY_AT] ^= 1
    assert speed.open_records(bytes(broken), starts, 0, 20, None, True) is None
    assert speed.open_records(bytes(broken), starts, 0, 7, None, True) is not None
    assert speed.open_records(bytes(broken), starts, 0, 20, None, False) is not None


def test_it_keeps_nothing() -> None:
    data, starts = encoded(MESSAGES)
    broken = bytearray(data)
    broken[starts[15] + layout.BODY_AT] ^= 1
    assert grown_kb(lambda: speed.open_records(data, starts, 0, 20, None, True), 20_000) < 1000
    assert grown_kb(lambda: speed.open_records(bytes(broken), starts, 0, 20, None, True), 20_000) < 1000
    assert grown_kb(lambda: speed.have_bodies(data, starts, None), 20_000) < 1000
