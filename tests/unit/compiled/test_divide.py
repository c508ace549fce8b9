"""The compiled loop divides the columns of a batch as the plain code does, and refuses the same."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.protocol.batch import divide_columns_plain
from tests.sampling import sample_size
from tests.unit.compiled.extension import speed

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(st.data())
def test_it_gives_what_the_plain_code_gives(draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, 40))
    lengths = draw.draw(st.lists(U32, min_size=count, max_size=count))
    index = sorted(draw.draw(st.sets(st.integers(0, count - 1))))
    hashes = draw.draw(st.lists(st.integers(1, 2**64 - 1), min_size=len(index), max_size=len(index)))
    if draw.draw(st.booleans()) and index:
        index[draw.draw(st.integers(0, len(index) - 1))] = draw.draw(st.integers(0, count) | U32)
    if draw.draw(st.booleans()) and index:
        hashes[draw.draw(st.integers(0, len(index) - 1))] = draw.draw(st.just(0) | U64)
    body = struct.pack(f">{count}I{len(index)}I{len(index)}Q", *lengths, *index, *hashes) + b"records"
    plain, compiled = (divide(body, count, len(index)) for divide in (divide_columns_plain, speed.divide_columns))
    assert (plain is None) == (compiled is None)
    if plain is not None and compiled is not None:
        assert [part.tobytes() for part in plain[:3]] == [bytes(part) for part in compiled[:3]]
        assert plain[3] == compiled[3] == sum(lengths)
        assert np.frombuffer(compiled[2], np.uint64).tolist() == hashes


@pytest.mark.parametrize(("count", "keys"), [(3, 0), (1, 1), (2, 3), (-1, 0), (1, -1), (2**62, 0), (2**62, 2**62)])
def test_no_byte_outside_of_the_body_is_read(count: int, keys: int) -> None:
    assert speed.divide_columns(b"12345678", count, keys) is None
