"""The compiled check of a batch with blocks gives the verdict of a close look at each record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import Message
from dmq.records import Compressor, EncodeOptions, batch_rules, encode_batch
from dmq.records.block import check_blocks
from dmq.records.check import check_batch, verify_few
from dmq.records.encoder import EncodedBatch
from tests.sampling import sample_size
from tests.unit.compiled.extension import speed

TEXT = b'{"state": "paid", "amount": 12.50, "currency": "EUR", "lines": [1, 2, 3], "id": %d}'
COUNT = 300


def with_blocks(count: int = COUNT) -> EncodedBatch:
    messages = [Message(TEXT % number * 3, key=f"k-{number}") for number in range(count)]
    made = encode_batch(
        "orders", "shop", messages, sent_at_ms=1, options=EncodeOptions(compressor=Compressor(), blocks=True)
    )
    assert made.block_bytes
    return made


WITH_BLOCKS = with_blocks()


def verdict(data: bytearray, made: EncodedBatch, rules: Any, *, compiled: bool) -> Any:
    """What is said of a batch with blocks."""
    blocks_at = len(data) - made.block_bytes
    starts = np.cumsum(made.lengths, dtype=np.int64) - made.lengths
    allowed = rules.with_blocks()
    try:
        if not compiled or not speed.are_right(memoryview(data)[:blocks_at], made.lengths, allowed):
            verify_few(data, starts.tolist(), made.lengths.tolist(), allowed)
        check_blocks(data, starts, blocks_at, rules.body_bytes_max, check_crc=rules.check_crc)
    except (RecordCorrupt, InvalidMessage) as error:
        return type(error), error.message
    return None


def checked(data: bytearray, made: EncodedBatch, rules: Any) -> Any:
    """What `check_batch` says of it."""
    try:
        check_batch(data, made.lengths, rules, made.block_bytes)
    except (RecordCorrupt, InvalidMessage) as error:
        return type(error), error.message
    return None


def change(data: bytearray, draw: st.DataObject) -> None:
    for _ in range(draw.draw(st.integers(0, 3)) if data else 0):
        at = draw.draw(st.integers(0, len(data) - 1) | st.sampled_from([0, 4, 6, 59, 63, 64, 66, 67, 70, 71, 75, 79]))
        data[min(at, len(data) - 1)] = draw.draw(st.integers(0, 255))


@pytest.mark.sampled
@settings(max_examples=sample_size(share=60, whole=3000), deadline=None)
@given(st.data())
def test_any_bytes_of_records_with_blocks_changed(draw: st.DataObject) -> None:
    made = WITH_BLOCKS
    data = bytearray(made.data)
    size = int(made.lengths[0])
    record = draw.draw(st.integers(0, COUNT - 1))
    if draw.draw(st.booleans()):
        head = bytearray(data[record * size : record * size + 90])
        change(head, draw)
        data[record * size : record * size + 90] = head
    else:
        change(data, draw)
    for rules in (batch_rules("orders"), batch_rules("orders", check_crc=True)):
        said = verdict(data, made, rules, compiled=False)
        assert verdict(data, made, rules, compiled=True) == said
        assert checked(data, made, rules) == said


@pytest.mark.parametrize("field", [67, 71, 75], ids=["distance", "place", "size"])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_pointer_that_is_off_by_one_is_not_vouched_for(field: int, step: int) -> None:
    made = WITH_BLOCKS
    at = int(made.lengths[:7].sum()) + field
    data = bytearray(made.data)
    data[at : at + 4] = (int.from_bytes(data[at : at + 4], "big") + step).to_bytes(4, "big")
    records, raw_size = memoryview(data)[: -made.block_bytes], sum(len(TEXT % number * 3) for number in range(COUNT))
    rules = batch_rules("orders").with_blocks()
    assert not speed.are_right(records, made.lengths, rules, raw_size)
    right = memoryview(bytes(made.data))[: -made.block_bytes]
    assert speed.are_right(right, made.lengths, rules, raw_size)
    assert not speed.are_right(right, made.lengths, rules, raw_size + step)
    with pytest.raises(RecordCorrupt):
        check_batch(data, made.lengths, batch_rules("orders"), made.block_bytes)


def test_records_with_blocks_are_vouched_for_where_they_are_allowed() -> None:
    data = bytes(WITH_BLOCKS.data)
    check_batch(data, WITH_BLOCKS.lengths, batch_rules("orders", check_crc=True), WITH_BLOCKS.block_bytes)
    records = memoryview(data)[: -WITH_BLOCKS.block_bytes]
    assert speed.are_right(records, WITH_BLOCKS.lengths, batch_rules("orders", check_crc=True).with_blocks())
    assert not speed.are_right(records, WITH_BLOCKS.lengths, batch_rules("orders"))
