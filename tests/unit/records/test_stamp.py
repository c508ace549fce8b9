"""Stamping fills in the broker's fields and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import Message
from dmq.records import RecordView, Stamp, encode_batch, gather, iter_records, layout, stamp_few
from dmq.records.layout import ADDRESSES_DTYPE, StampColumns, stamp_columns
from tests.unit.records.samples import SENT_AT_MS, batches

CLIENT, SERVER = b"\x0a\x00\x00\x01\x12\x34", b"\x0a\x00\x00\x02\x56\x78"


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def stamp_many(buffer: bytearray, starts: list[int], journal_offsets: list[int], stamp: Stamp) -> list[int]:
    """As `stamp_few`, column by column."""
    queue, first, client, server, received_at_ms, stored_at_ms, ipv6 = stamp
    columns = StampColumns(
        queue,
        np.arange(first, first + len(starts), dtype=np.uint64),
        np.frombuffer(client + server, ADDRESSES_DTYPE),
        received_at_ms,
        stored_at_ms,
        ipv6,
    )
    positions, offsets = np.array(starts, np.int64), np.array(journal_offsets, np.uint64)
    tags: list[int] = stamp_columns(buffer, positions, offsets, columns).tolist()
    return tags


@given(
    batches,
    st.integers(0, 2**63),
    st.integers(0, 255),
    st.integers(0, 2**63),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_the_plain_path_and_the_numpy_path_stamp_the_same_bytes(
    messages: list[Message], base: int, queue: int, offset: int, sent: int, received: int, stored: int, ipv6: bool
) -> None:
    """J-04."""
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=sent)
    starts = starts_of(encoded.lengths.tolist())
    offsets = [base + start for start in starts]
    few, many = bytearray(encoded.data), bytearray(encoded.data)
    stamp = Stamp(queue, offset, CLIENT, SERVER, received, stored, ipv6)
    tags = stamp_few(few, starts, offsets, stamp)
    assert stamp_many(many, starts, offsets, stamp) == tags
    assert few == many
    for index, record in enumerate(iter_records(few)):
        record.verify()
        assert record.queue_offset == offset + index
        assert record.journal_offset == offsets[index]
        assert record.queue == queue
        assert (record.client, record.server) == (CLIENT, SERVER)


@pytest.mark.parametrize("stamp_all", [stamp_few, stamp_many])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize(
    ("late_ms", "expected"),
    [(-1, 0), (0, 0), (7, 7), (2**32 - 1, 2**32 - 1), (2**32, 2**32 - 1)],
)
def test_relative_times_saturate_at_both_ends(
    stamp_all: Callable[..., list[int]], count: int, late_ms: int, expected: int
) -> None:
    """J-04: clocks differ, and spools are old."""
    encoded = encode_batch("t", "a", [Message(b"x")] * count, sent_at_ms=SENT_AT_MS)
    starts = starts_of(encoded.lengths.tolist())
    at_ms = SENT_AT_MS + late_ms
    stamp_all(encoded.data, starts, starts, Stamp(0, 0, CLIENT, SERVER, at_ms, at_ms))
    for record in iter_records(encoded.data):
        assert record.receive_time_ms - SENT_AT_MS == record.store_time_ms - SENT_AT_MS == expected


def test_a_record_marked_as_ipv6_still_matches_its_checksum() -> None:
    encoded = encode_batch("t", "a", [Message(b"x")], sent_at_ms=SENT_AT_MS)
    stamp_few(encoded.data, [0], [0], Stamp(0, 0, bytes(6), SERVER, SENT_AT_MS, SENT_AT_MS, ipv6=True))
    record = RecordView(encoded.data)
    record.verify()
    assert record.flags & layout.IPV6


def test_gathering_past_the_end_is_an_error_and_reads_nothing() -> None:
    buffer = bytes(range(16))
    assert gather(buffer, np.array([0, 8]), 4, ">u4").tolist() == [0x04050607, 0x0C0D0E0F]
    with pytest.raises(IndexError):
        gather(buffer, np.array([9]), 4, ">u4")
    with pytest.raises(IndexError):
        gather(b"", np.array([0]), 0, "u1")
