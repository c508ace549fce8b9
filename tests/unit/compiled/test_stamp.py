"""Records that the compiled loop stamps have the bytes that the plain code gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import Message
from dmq.records import Stamp, encode_batch, stamp_few
from dmq.storage.journal import unit_draft
from dmq.storage.journal.unit import NO_ADDRESS, Part, Row
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import batches
from tests.unit.records.test_stamp import CLIENT, SERVER, starts_of

numbers = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(batches, st.integers(0, 2**63), st.integers(0, 255), numbers, numbers, numbers, st.booleans())
def test_it_gives_the_bytes_and_tags_of_the_plain_way(
    messages: list[Message], base: int, queue: int, sent: int, received: int, stored: int, ipv6: bool
) -> None:
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=sent)
    lengths = encoded.lengths.tolist()
    starts = starts_of(lengths)
    stamp = Stamp(queue, base // 3, CLIENT, SERVER, received, stored, ipv6)
    plain = bytearray(encoded.data)
    tags = stamp_few(plain, starts, [base + start for start in starts], stamp)
    columns: list[Any] = [tuple(lengths), lengths, encoded.lengths, encoded.lengths.astype(np.int64)]
    for column in columns:
        buffer = bytearray(b"before") + encoded.data + b"behind"
        found, offsets = speed.stamp_run(buffer, 6, column, base, stamp)
        assert buffer == b"before" + plain + b"behind"
        assert np.frombuffer(found, np.uint16).tolist() == tags
        assert np.frombuffer(offsets, np.uint64).tolist() == [(base + start) % 2**64 for start in starts]


@settings(deadline=None, max_examples=50)
@given(batches, st.integers(0, 9), st.integers(0, 9))
def test_it_writes_the_lengths_where_it_is_told_to(messages: list[Message], before: int, between: int) -> None:
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=5)
    stamp = Stamp(1, 2, CLIENT, SERVER, 3, 4)
    table = encoded.lengths.astype(">u4").tobytes()
    at = before + len(table) + between
    buffer = bytearray(b"\xee" * at) + encoded.data
    tags = speed.stamp_run(buffer, at, encoded.lengths, 9, stamp, before)
    plain = bytearray(encoded.data)
    assert speed.stamp_run(plain, 0, encoded.lengths, 9, stamp) == tags
    assert buffer == b"\xee" * before + table + b"\xee" * between + plain


@pytest.mark.parametrize("table_at", [93, 100, 101, 2**62])
def test_lengths_that_would_reach_into_the_records_are_not_written(table_at: int) -> None:
    buffer = bytearray(b"\xee" * 300)
    with pytest.raises(IndexError):
        speed.stamp_run(buffer, 100, (100, 100), 9, Stamp(1, 2, CLIENT, SERVER, 3, 4), table_at)
    assert buffer == b"\xee" * 300


address = st.sampled_from([NO_ADDRESS, bytes(10) + b"\xff\xff\x7f\x00\x00\x01", b"\x20\x01" + bytes(14)])
batches_of_unit = st.lists(st.tuples(batches.filter(bool), address, st.integers(0, 2**40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(batches_of_unit, st.integers(0, 2**50), st.booleans())
def test_the_parts_of_a_unit_are_stamped_each_with_its_own(
    drawn: list[tuple[list[Message], bytes, int]], start: int, are_arrays: bool
) -> None:
    parts: list[Part] = []
    offsets: list[int] = []
    buffer, at = bytearray(100), 100
    for number, (messages, client, received) in enumerate(drawn):
        made = encode_batch("orders", "shop", messages, sent_at_ms=received - received % 7)
        row = Row(number, 0, 0, len(messages), 1, number, 0, 0, number * 1000, client, 4711)
        lengths: Any = made.lengths if are_arrays else tuple(made.lengths.tolist())
        parts.append(Part(row, made.data, lengths, received))
        offsets += [start + at + each for each in starts_of(made.lengths.tolist())]
        buffer += made.data
        at += len(made.data)
    one, few, many = bytearray(buffer), bytearray(buffer), bytearray(buffer)
    origin = (SERVER, 2**40)
    tags = unit_draft.stamp_parts(speed.stamp_run, one, parts, offsets, start=start, origin=origin).tolist()
    assert unit_draft.stamp_parts_few(few, parts, offsets, start, origin=origin) == tags
    assert unit_draft.stamp_parts_many(many, parts, np.array(offsets), start, origin=origin).tolist() == tags
    assert one == few == many


@pytest.mark.parametrize(
    ("at", "lengths"), [(0, (101,)), (1, (100,)), (-1, (60,)), (0, (60, 41)), (0, (54,)), (0, (-1,)), (2**62, (60,))]
)
def test_nothing_outside_of_the_buffer_is_written(at: int, lengths: tuple[int, ...]) -> None:
    whole = bytearray(b"\xee" * 300)
    stamp = Stamp(1, 2, CLIENT, SERVER, 3, 4)
    with pytest.raises(IndexError):
        speed.stamp_run(memoryview(whole)[100:200], at, lengths, 9, stamp)
    assert whole[:100] == whole[200:] == b"\xee" * 100


def test_what_cannot_be_written_to_is_refused() -> None:
    with pytest.raises((BufferError, ValueError, TypeError)):
        speed.stamp_run(bytes(100), 0, (100,), 9, Stamp(1, 2, CLIENT, SERVER, 3, 4))
    with pytest.raises(ValueError, match="six bytes"):
        speed.stamp_run(bytearray(100), 0, (100,), 9, Stamp(1, 2, b"", SERVER, 3, 4))


def test_it_keeps_nothing() -> None:
    buffer, stamp = bytearray(200), Stamp(1, 2, CLIENT, SERVER, 3, 4)
    column = np.array([100, 100], np.uint32)

    def work() -> None:
        speed.stamp_run(buffer, 0, (100, 100), 9, stamp)
        speed.stamp_run(buffer, 0, column, 9, stamp)
        try:
            speed.stamp_run(buffer, 1, column, 9, stamp)
        except IndexError:
            pass

    assert grown_kb(work, 20_000) < 1024
