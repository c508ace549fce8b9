"""The index of an archive: where messages stand by what they are called."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmq.errors import Damaged
from dmq.pipeline.archive import parquet
from dmq.pipeline.archive.key_index import BUSINESS_ID, KEY, MESSAGE_ID
from dmq.pipeline.archive.parquet import write_parquet
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup import lookup
from dmq.pipeline.lookup.lookup import KeyIndex
from dmq.pipeline.tables import KEY_INDEX, MESSAGE, SCHEMAS
from tests.unit.pipeline.archives import NOON, commit_messages, message_row


def opened(archive: Archive) -> KeyIndex:
    return KeyIndex(archive, 0.0)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive.create(str(tmp_path))


def test_every_text_is_found_whatever_row_group_its_hash_is_in(archive: Archive) -> None:
    commit_messages(archive, [message_row(number, business_id="u-1") for number in range(300)], row_group_rows=7)
    found = opened(archive)
    for number in range(300):  # hashes above and below nought, and groups that have both
        (place,) = found.places(KEY, f"order-{number}", "", 10)
        assert place == (NOON.date(), 300 * number, "orders", number % 4, number // 4)
    assert found.places(KEY, "u-1", "", 10) == []  # a business id, and no key
    assert found.places(MESSAGE_ID, "u-1", "", 10) == []


def test_the_oldest_come_first_over_days_files_and_row_groups(archive: Archive) -> None:
    for part in (1, 0, 2):
        day = NOON + timedelta(days=part // 2)
        numbers = range(part * 50, (part + 1) * 50)
        rows = [message_row(number, business_id="hot", stored_at=day) for number in numbers]
        commit_messages(archive, rows, row_group_rows=20)
    found = opened(archive)
    for limit in (1, 49, 50, 60, 101, 150):
        places = found.places(BUSINESS_ID, "hot", "", limit)
        assert [place.journal_offset for place in places] == [300 * number for number in range(limit)]
    assert len(found.places(BUSINESS_ID, "hot", "", 1000)) == 150


def test_a_topic_is_told_from_others(archive: Archive) -> None:
    commit_messages(archive, [message_row(number, key="same", topic=f"t-{number}") for number in range(5)])
    found = opened(archive)
    assert [place.topic for place in found.places(KEY, "same", "t-3", 1)] == ["t-3"]
    assert len(found.places(KEY, "same", "", 10)) == 5
    assert found.places(KEY, "same", "t-9", 10) == []


def test_more_files_than_may_be_open_are_asked_all_the_same(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "OPEN_MAX", 2)
    for number in range(5):
        commit_messages(archive, [message_row(number)])
    found = opened(archive)
    for _ in range(2):
        for number in range(5):
            assert [place.journal_offset for place in found.places(KEY, f"order-{number}", "", 9)] == [300 * number]
            assert len(found._open) <= 2


def test_files_that_are_no_longer_asked_make_room(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "OPEN_MAX", 1)
    commit_messages(archive, [message_row(1)])
    found = opened(archive)
    assert found.places(KEY, "order-1", "", 9)
    (old,) = found._open
    table = archive.table(KEY_INDEX)
    table.replace(table.days(), [])
    commit_messages(archive, [message_row(2)])
    assert found.places(KEY, "order-2", "", 9)
    assert len(found._open) == 1
    assert old not in found._open


def test_a_file_that_is_gone_is_told(archive: Archive) -> None:
    commit_messages(archive, [message_row(1)])
    (path,) = archive.table(KEY_INDEX).files()
    Path(path).unlink()
    with pytest.raises(Damaged, match="cannot be read, look at"):
        opened(archive).places(KEY, "order-1", "", 9)


def test_large_rows_make_small_row_groups(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 100_000)
    rows = pa.Table.from_pylist([message_row(number, body=bytes(10_000)) for number in range(30)], SCHEMAS[MESSAGE])
    folder = archive.table(MESSAGE).folder
    written = write_parquet(rows, folder)
    said = pq.read_metadata(f"{folder.path}/{written.path}")
    assert said.num_rows == 30
    assert {said.row_group(group).num_rows for group in range(said.num_row_groups - 1)} == {9}
