"""Spans: bodies and keys of many records at once are those that the views read one by one."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import Message
from dmq.records import Compressor, EncodeOptions, encode_batch, iter_records, layout
from dmq.records.columns import NO_SPAN, NOTHING, find_spans
from tests.unit.records.samples import SENT_AT_MS, batches


def encoded(messages: list[Message], compressor: Compressor | None = None) -> tuple[bytes, list[int]]:
    """Records, and where they begin and end."""
    batch = encode_batch(
        "orders", "shop", messages, sent_at_ms=SENT_AT_MS, options=EncodeOptions(compressor=compressor)
    )
    return bytes(batch.data), [0, *accumulate(map(int, batch.lengths))]


@given(batches.filter(len))
def test_spans_say_what_the_views_say(messages: list[Message]) -> None:
    data, bounds = encoded(messages)
    spans = find_spans(data, bounds)
    for index, view in enumerate(iter_records(data)):
        body_end, key_end = spans.body_ends[index], spans.key_ends[index]
        assert body_end != NO_SPAN
        assert data[bounds[index] + layout.BODY_AT : body_end] == view.body
        if key_end != NO_SPAN:
            assert data[spans.key_starts[index] : key_end].decode() == view.key
        elif spans.key_starts[index] == NOTHING:
            assert view.key is None


def test_keys_are_found_and_missing_ones_are_known_to_be_missing() -> None:
    data, bounds = encoded([Message(b"a", key="first"), Message(b"b"), Message(b"", key="third"), Message(b"d")])
    spans = find_spans(data, bounds)
    found = [data[start:end] for start, end in zip(spans.key_starts, spans.key_ends, strict=True) if end]
    assert found == [b"first", b"third"]
    assert [start == NOTHING for start in spans.key_starts] == [False, True, False, True]


def test_a_compressed_body_is_left_to_the_view() -> None:
    data, bounds = encoded([Message(b"much of the same " * 200, key="k")] * 20, Compressor("zstd"))
    views = [*iter_records(data)]
    assert views[0].flags & layout.COMPRESSED
    spans = find_spans(data, bounds)
    assert set(spans.body_ends) == {NO_SPAN}
    assert NOTHING not in spans.key_starts


@given(st.data())
def test_damaged_records_have_no_spans_outside_themselves(draw: st.DataObject) -> None:
    data, bounds = encoded([Message(b"body-%d" % index, key=f"k{index}") for index in range(20)])
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 5))):
        broken[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    spans = find_spans(bytes(broken), bounds)
    for index, end in enumerate(bounds[1:]):
        assert spans.body_ends[index] <= end
        assert spans.key_ends[index] <= end


@pytest.mark.parametrize("cut", [1, 60, 70])
def test_records_that_are_cut_short_have_no_spans(cut: int) -> None:
    data, bounds = encoded([Message(b"body", key="k")] * 3)
    bounds[-1] -= cut
    spans = find_spans(data[: bounds[-1]], bounds)
    assert set(spans.body_ends) == set(spans.key_ends) == {NO_SPAN}
