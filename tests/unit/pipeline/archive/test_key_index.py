"""The index by key, business id and message id."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dmq.pipeline.archive.key_index import BUCKETS, KINDS, bucket_of, index_rows, text_hash, text_hashes
from dmq.pipeline.tables import KEY_INDEX, MESSAGE, SCHEMAS
from tests.unit.pipeline.archives import message_row


@given(st.lists(st.text(max_size=40), max_size=20), st.integers(0, 3))
def test_many_texts_have_the_hashes_that_each_of_them_has(texts: list[str], skipped: int) -> None:
    array = pa.array([*["x"] * skipped, *texts], pa.string()).slice(skipped)
    assert text_hashes(array).view(np.int64).tolist() == [text_hash(text) for text in texts]


def test_a_hash_is_part_of_the_format() -> None:
    assert [text_hash(text) for text in ("", "a", "order-12345678")] == HASHES


HASHES = [-2152535657050944081, 6774081908283191102, -7819778251338889968]


def test_texts_that_differ_in_zeros_at_their_end_differ() -> None:
    assert len({text_hash("a" + "\0" * zeros) for zeros in range(20)}) == 20


def test_sorting_by_bucket_and_hash_is_sorting_by_the_unsigned_hash() -> None:
    hashes = [text_hash(f"key {number}") for number in range(1000)]
    pairs = sorted((bucket_of(value), value) for value in hashes)
    assert [value for _, value in pairs] == sorted(hashes, key=lambda value: value % (1 << 64))
    assert {bucket for bucket, _ in pairs} == set(range(BUCKETS))


def test_each_message_has_a_row_for_its_id_and_for_what_it_has_beside_it() -> None:
    rows = [message_row(1, business_id="u-1"), message_row(2, key=None), message_row(3)]
    index = index_rows(pa.Table.from_pylist(rows, SCHEMAS[MESSAGE]))
    assert index.schema == SCHEMAS[KEY_INDEX]
    found = index.to_pylist()
    assert [(row["kind"], row["key"]) for row in found] == [
        ("key", "order-1"),
        ("key", "order-3"),
        ("business_id", "u-1"),
        *(("message_id", row["message_id"]) for row in rows),
    ]
    assert {row["kind"] for row in found} == set(KINDS)
    for row in found:
        assert row["hash"] == text_hash(row["key"])
        assert row["bucket"] == bucket_of(row["hash"])
        mine = next(one for one in rows if one["message_id"] == row["message_id"])
        for name in ("topic", "queue", "queue_offset", "broker", "journal_offset", "dt"):
            assert row[name] == mine[name]


def test_no_messages_have_no_rows() -> None:
    assert index_rows(SCHEMAS[MESSAGE].empty_table()).num_rows == 0
