"""The compiled check of a batch vouches for what the plain one finds right, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import Message
from dmq.records import attributes, batch_rules, encode_batch, layout
from dmq.records.check import BatchRules, verify_few
from tests.sampling import sample_size
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import SENT_AT_MS, batches
from tests.unit.records.test_check import ENTRY, entries, raw_texts, record

RULES = [
    batch_rules("orders"),
    batch_rules("orders", check_crc=True),
    batch_rules("orders", body_bytes_max=100, attributes_bytes_max=40),
    batch_rules("orders", flags_allowed=layout.COMPRESSED | layout.MOVED),
    batch_rules("ord"),
    batch_rules("ö" * 200),  # too long a name: no record can have it
]


def is_right(data: bytes, lengths: Sequence[int], rules: BatchRules) -> bool:
    """The oracle: the look at each record by itself."""
    places = [*accumulate(lengths, initial=0)]
    if places.pop() != len(data) or min(lengths, default=layout.RECORD_BYTES_MIN) < layout.RECORD_BYTES_MIN:
        return False
    try:
        verify_few(data, places, lengths, rules)
    except (RecordCorrupt, InvalidMessage):
        return False
    return bool(lengths)


def check_agreement(data: bytes, lengths: list[int]) -> None:
    """Both look at the same bytes, whatever they come in."""
    columns: list[Any] = [tuple(lengths), lengths]
    if all(0 <= length < 1 << 32 for length in lengths):
        columns += [np.array(lengths, np.uint32), np.array(lengths, ">u4"), np.array(lengths, np.int64)]
    for rules in RULES:
        expected = is_right(data, lengths, rules)
        for column in columns:
            assert speed.are_right(data, column, rules) == (
                expected or (not lengths and not data and rules.named != b"")
            )
        assert speed.are_right(memoryview(bytearray(b"??" + data))[2:], lengths, rules) == speed.are_right(
            data, lengths, rules
        )


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(st.lists(st.tuples(entries(), raw_texts, raw_texts, st.integers(0, 255)), max_size=4), st.data())
def test_any_names_attributes_and_flags(parts: list[tuple[bytes, bytes, bytes, int]], data: st.DataObject) -> None:
    made = [
        record(raw, app=app, business_id=name, flags=flags & data.draw(st.sampled_from([0, 1, 0x3F, 0xFF])))
        for raw, app, name, flags in parts
    ]
    check_agreement(b"".join(made), [*map(len, made)])


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(batches, st.data())
def test_any_bytes_of_a_batch_changed_and_any_length(messages: list[Message], data: st.DataObject) -> None:
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=SENT_AT_MS)
    changed, lengths = bytearray(encoded.data), encoded.lengths.tolist()
    for _ in range(data.draw(st.integers(0, 3)) if changed else 0):
        start = data.draw(st.sampled_from([0, *accumulate(lengths)][:-1]))
        at = data.draw(st.integers(0, 80).map(start.__add__) | st.integers(0, len(changed) - 1))
        changed[min(at, len(changed) - 1)] = data.draw(st.integers(0, 255))
    if lengths and not data.draw(st.integers(0, 4)):
        lengths[data.draw(st.integers(0, len(lengths) - 1))] = data.draw(
            st.sampled_from([0, 71, 72, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**70, -1]) | st.integers(0, 500)
        )
    cut = data.draw(st.just(0) | st.integers(0, 90))
    check_agreement(bytes(changed[: len(changed) - cut]), lengths)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 2**32 - 1) | st.integers(60, 200), max_size=5))
def test_any_bytes_at_all(data: bytes, lengths: list[int]) -> None:
    check_agreement(data, lengths)
    check_agreement(data, [len(data)])


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_a_record_of_more_properties_than_are_compared_is_left_to_the_close_look(count: int) -> None:
    made = record(b"".join(ENTRY.pack(0x80, 5) + b"\x03%03dv" % number for number in range(count)))
    assert is_right(made, [len(made)], RULES[0])
    assert speed.are_right(made, (len(made),), RULES[0]) == (count <= 16)


def test_it_knows_the_kinds_of_attributes() -> None:
    known = {attributes.TEXT_SHAPE: -1, attributes.ANY_SHAPE: -2}
    shapes = [attributes.shape_of(kind) for kind in range(attributes.PROPERTY)]
    assert [speed.shape_of(kind) for kind in range(attributes.PROPERTY)] == [
        known.get(shape, shape) for shape in shapes
    ]


def test_it_keeps_nothing() -> None:
    made = record(ENTRY.pack(1, 5) + "größ".encode()[:5])
    bad = record(ENTRY.pack(1, 2) + b"\xff\xff")
    few, many = (len(made),) * 3, np.array([len(made)] * 40, np.uint32)

    def work() -> None:
        speed.are_right(made * 3, few, RULES[1])
        speed.are_right(made * 40, many, RULES[1])
        speed.are_right(bad, [len(bad)], RULES[1])
        speed.are_right(bad, [1 << 80], RULES[1])

    assert grown_kb(work, sample_size(share=20_000, whole=200_000)) < 1024
