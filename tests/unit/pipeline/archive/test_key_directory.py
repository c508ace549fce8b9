"""The directory of the index: which files a lookup opens, and what it finds whatever became of the directory."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from dmq.pipeline.archive import key_index
from dmq.pipeline.archive.key_index import BUSINESS_ID, KEY, MESSAGE_ID, cover, hash_prefix, is_names, text_hash
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup import lookup as lookup_module
from dmq.pipeline.lookup.lookup import KeyIndex, Lookup
from dmq.pipeline.tables import KEY_DIRECTORY, KEY_INDEX
from tests.object_store import ObjectStore
from tests.unit.pipeline.archives import NOON, commit_messages, message_row

EACH = 5  # messages of a file


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive.create(str(tmp_path))


def add_files(archive: Archive, parts: Iterable[int]) -> None:
    """A file of messages and one of the index for each number, four a day."""
    for part in parts:
        numbers = range(part * EACH, (part + 1) * EACH)
        at = NOON + timedelta(days=part // 4)
        commit_messages(
            archive, [message_row(number, business_id=f"u-{number % 7}", stored_at=at) for number in numbers]
        )


def opened_by(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, limit: int = 1000
) -> tuple[int, int]:
    """How many places are found, and how many files of the index are opened for that."""
    opened: list[str] = []
    real = lookup_module._File

    def count(path: str) -> object:
        opened.append(path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(lookup_module, "_File", count)
        found = KeyIndex(archive, 0.0).places(kind, text, "", limit)
    return len(found), len(opened)


def test_a_lookup_opens_the_files_that_have_it_and_no_others(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    add_files(archive, range(20))
    assert opened_by(archive, monkeypatch, KEY, "order-42") == (1, 20)
    assert cover(archive) == (20, 1)
    assert opened_by(archive, monkeypatch, KEY, "order-42") == (1, 1)
    assert opened_by(archive, monkeypatch, KEY, "absent") == (0, 0)
    found, files = opened_by(archive, monkeypatch, BUSINESS_ID, "u-3")
    assert (found, files) == (14, 14)
    with Lookup(archive.uri) as lookup:
        for number in range(20 * EACH):
            assert [row["key"] for row in lookup.by_key(f"order-{number}")] == [f"order-{number}"]


def test_files_that_are_not_named_yet_are_opened_all_the_same(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_files(archive, range(16))
    assert cover(archive) == (16, 1)
    add_files(archive, range(16, 19))
    assert cover(archive) == (0, 1)  # too few for a run
    assert opened_by(archive, monkeypatch, KEY, "order-3") == (1, 4)
    assert opened_by(archive, monkeypatch, KEY, "order-90") == (1, 3)


def test_an_open_lookup_sees_what_is_named_since(archive: Archive) -> None:
    add_files(archive, range(4))
    index = KeyIndex(archive, 0.0)
    for turn in range(1, 5):
        cover(archive, files_min=1)
        for number in range(4 * turn * EACH):
            assert len(index.places(KEY, f"order-{number}", "", 9)) == 1
        add_files(archive, range(4 * turn, 4 * turn + 4))


def test_runs_are_merged_so_that_there_are_few(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(24):
        add_files(archive, [part])
        assert cover(archive, files_min=1).runs <= 4
    for number in range(0, 24 * EACH, 7):
        assert opened_by(archive, monkeypatch, MESSAGE_ID, message_row(number)["message_id"]) == (1, 1)


def test_a_large_run_is_cut_by_hash_and_each_entry_is_in_one_file(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "ENTRIES_MAX", 40)
    monkeypatch.setattr(key_index, "GROUP_ROWS", 8)
    add_files(archive, range(20))
    assert cover(archive) == (20, 1)
    table = archive.table(KEY_DIRECTORY)
    entries = [path for path in table.files() if not is_names(path)]
    assert len(entries) > 3
    for number in range(20 * EACH):
        assert opened_by(archive, monkeypatch, KEY, f"order-{number}") == (1, 1)
        prefix = hash_prefix(text_hash(f"order-{number}"))
        assert len(table.files(where={"hash": (prefix, prefix), "file": (0, 19)})) <= 2  # and that of the names


def test_files_that_are_gone_are_passed_over_and_leave_the_directory(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_files(archive, range(20))
    cover(archive)
    index = archive.table(KEY_INDEX)
    days = index.days()
    index.replace(days[:3], [])
    assert opened_by(archive, monkeypatch, KEY, "order-3") == (0, 0)
    assert opened_by(archive, monkeypatch, KEY, "order-90") == (1, 1)
    index.replace(days[:4], [])
    assert cover(archive) == (0, 1)
    (names,) = (path for path in archive.table(KEY_DIRECTORY).files() if is_names(path))
    assert {row[:13] for row in key_index.read_names(archive.folder, names.removeprefix(archive.uri + "/"))} == {
        f"dt={days[4]}"
    }
    index.replace(days, [])
    assert cover(archive) == (0, 0)
    assert archive.table(KEY_DIRECTORY).files() == []


def test_without_the_directory_everything_is_found(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    add_files(archive, range(16))
    cover(archive)
    directory = archive.table(KEY_DIRECTORY)
    directory.replace(directory.days(), [])
    assert opened_by(archive, monkeypatch, KEY, "order-3") == (1, 16)


def test_two_that_name_files_at_once_do_no_harm(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    add_files(archive, range(16))
    real = key_index._new_run

    def beaten(*given: object) -> object:
        made = real(*given)  # type: ignore[arg-type]
        monkeypatch.setattr(key_index, "_new_run", real)
        cover(Archive.create(archive.uri))
        return made

    monkeypatch.setattr(key_index, "_new_run", beaten)
    cover(archive)
    assert opened_by(archive, monkeypatch, KEY, "order-3") == (1, 1)


def test_a_hot_key_opens_only_the_oldest_files(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(5)
    parts = chosen.sample(range(24), 24)
    add_files(archive, parts)
    cover(archive)
    places = KeyIndex(archive, 0.0).places(BUSINESS_ID, "u-0", "", 3)
    assert [place.journal_offset for place in places] == [0, 300 * 7, 300 * 14]
    assert opened_by(archive, monkeypatch, BUSINESS_ID, "u-0", 3)[1] <= 4
    assert opened_by(archive, monkeypatch, BUSINESS_ID, "u-0")[1] > 15


def test_the_directory_lies_in_an_object_store_like_the_index(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive.create(f"{object_store.bucket()}/archive")
    for parts in (range(2), range(2, 4)):
        add_files(archive, parts)
        assert cover(archive, files_min=2) == (2, 1)  # the second time, two runs are merged
    assert opened_by(archive, monkeypatch, KEY, "order-13") == (1, 1)
    with Lookup(archive.uri) as lookup:
        assert [row["key"] for row in lookup.by_key("order-13")] == ["order-13"]
