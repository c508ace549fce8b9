"""Events of the dequeue log as rows, and the names of topics they belong to."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pyarrow as pa
import pytest

from dmq.model import TopicConfig
from dmq.pipeline.archive import settlement_join
from dmq.pipeline.archive.extract import SETTLEMENT, Settlements
from dmq.pipeline.archive.settlement_join import topic_names
from dmq.pipeline.decode.units import SystemRecord
from dmq.storage.state.events import Archived, Event, Outcome, Settled, TopicPut, encode_event

STORED_MS = 1_900_000_000_000
STORED = datetime.fromtimestamp(STORED_MS / 1000, UTC)


def settlements(*events: Event, is_snapshot: bool = False) -> Settlements:
    found = Settlements()
    found.add(
        SystemRecord(100 + number, STORED_MS, memoryview(encode_event(event)), is_snapshot)
        for number, event in enumerate(events)
    )
    return found


def test_a_lease_is_one_row_with_all_it_says() -> None:
    event = Settled("billing", 17, 3, 40, 10, Outcome.ACKED, b"", "me", 2, STORED_MS - 50, STORED_MS - 5)
    found = settlements(TopicPut(17, "orders", TopicConfig()), event, Archived(5))
    assert found.count == 10
    assert found.bounds == {17: (40, 49)}
    (row,) = found.table().to_pylist()
    assert row == {
        "topic_id": 17,
        "queue": 3,
        "first_offset": 40,
        "last_offset": 49,
        "group": "billing",
        "member": "me",
        "attempt": 2,
        "outcome": "acked",
        "leased_at": datetime.fromtimestamp((STORED_MS - 50) / 1000, UTC),
        "settled_at": datetime.fromtimestamp((STORED_MS - 5) / 1000, UTC),
        "error": None,
        "journal_offset": 101,
        "dt": date(2030, 3, 17),
    }


def test_a_bitmap_is_a_row_for_each_run_of_offsets() -> None:
    found = settlements(Settled("g", 17, 0, 100, 8, Outcome.RETRIED, bytes([0b10110011]), error="no"))
    rows = found.table().to_pylist()
    assert [(row["first_offset"], row["last_offset"]) for row in rows] == [(100, 101), (104, 105), (107, 107)]
    assert found.count == 5
    assert {(row["outcome"], row["error"], row["leased_at"]) for row in rows} == {("failed", "no", None)}
    assert {row["settled_at"] for row in rows} == {STORED}  # it did not say when


def test_outcomes_have_their_words_and_what_is_none_is_left_out() -> None:
    found = settlements(
        *(Settled("g", 17, 0, int(outcome), 1, outcome) for outcome in Outcome),
        Settled("%DRAIN", 18, 0, 0, 1, Outcome.ACKED),
        Settled("g", 17, 0, 0, 1 << 40, Outcome.SKIPPED, error="gone"),
        Settled("g", 17, 0, 9, 1, Outcome.SKIPPED, error="filtered"),
        Settled("g", 17, 0, 10, 1, 77),
    )
    rows = found.table().to_pylist()
    assert [row["outcome"] for row in rows] == ["acked", "failed", "dead", "expired", "skipped", "skipped"]
    assert found.bounds == {17: (1, 9)}


def test_what_a_snapshot_repeats_is_not_counted_again() -> None:
    found = settlements(Settled("g", 17, 0, 0, 1), is_snapshot=True)
    assert len(found) == 0
    assert found.table().schema.equals(SETTLEMENT)
    assert found.table().num_rows == 0


def test_a_retry_topic_stands_for_the_topic_that_failed() -> None:
    topics = {16: "orders", 17: "%RETRY%billing%16", 18: "%RETRY%billing%99", 19: "%DLQ%billing", 20: "it's\\odd"}
    assert topic_names(topics) == {16: "orders", 17: "orders", 20: "it's\\odd"}


def test_settlements_are_cut_into_pieces_of_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement_join, "PIECE", 10)
    runs = [(0, 3), (4, 4), (5, 30), (31, 32), (33, 33), (34, 60)]
    rows = pa.table({"first_offset": [first for first, _ in runs], "last_offset": [last for _, last in runs]})
    found = [piece.to_pylist() for piece in settlement_join.pieces(rows)]
    assert [row["first_offset"] for piece in found for row in piece] == [first for first, _ in runs]
    assert len(found) > 2
    for piece in found:
        counts = [row["last_offset"] - row["first_offset"] + 1 for row in piece]
        assert sum(counts) - max(counts) < 10  # a run is not cut
    assert [*settlement_join.pieces(rows.slice(0, 0))] == []
