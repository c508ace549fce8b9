"""Files of the archive's tables, and the commits that name them."""

from __future__ import annotations

import gc
import resource
import threading
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from dmq.errors import ArchiveConflict, Damaged, InvalidSettings, StorageError
from dmq.pipeline.archive.parquet import Written, write_days, write_parquet
from dmq.pipeline.archive.table_store import Archive, Table
from dmq.pipeline.lookup.lookup import run_sql
from dmq.pipeline.object_store import open_parquet
from dmq.pipeline.tables import CONSUME_EVENT, METRICS_1M, SCHEMAS
from tests.object_store import ObjectStore

DAY = date(2030, 1, 31)
NEXT = date(2030, 2, 1)


def events(first: int, count: int, dt: date = DAY, *, error: str | None = None) -> pa.Table:
    at = datetime(dt.year, dt.month, dt.day, 12, tzinfo=UTC)
    rows = [
        {
            "message_id": f"{first + number:026d}",
            "topic": "orders",
            "group": "billing",
            "attempt": 1,
            "outcome": "acked",
            "at": at,
            "error": error,
            "broker": "00000000000000ab",
            "journal_offset": first + number,
            "dt": dt,
        }
        for number in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMAS[CONSUME_EVENT])


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an archive can lie."""
    if request.param == "folder":
        return str(tmp_path)
    store: ObjectStore = request.getfixturevalue("object_store")
    return f"{store.bucket()}/archive"


def table_at(uri: str) -> Table:
    return Archive.create(uri).table(CONSUME_EVENT)


def is_there(table: Table, file: Written) -> bool:
    is_file: bool = table.folder.files.get_file_info(f"{table.folder.path}/{file.path}").type == fs.FileType.File
    return is_file


def written(table: Table, first: int, count: int, dt: date = DAY) -> list[Written]:
    return write_days(events(first, count, dt), table.folder, sort_by=["message_id"])


def ids(table: Table) -> list[str]:
    return sorted(open_parquet(file).read(["message_id"])[0].to_pylist()[0] for file in table.files())


def test_a_table_that_was_never_committed_to_has_no_files_and_makes_no_folder(tmp_path: Path) -> None:
    table = table_at(str(tmp_path / "archive"))
    assert not table.exists()
    assert table.files() == []
    assert table.version_of("x") is None
    assert not (tmp_path / "archive").exists()


def test_a_version_is_committed_once(place: str) -> None:
    table = table_at(place)
    files = written(table, 0, 3)
    assert table.commit(files, app_id="x", version=10, after=None)
    assert not table.commit(written(table, 0, 3), app_id="x", version=10, after=None)
    assert table.rows() == 3
    assert table.version_of("x") == 10
    assert table.version_of("y") is None


def test_a_commit_on_another_version_than_expected_is_refused(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 3), app_id="x", version=10)
    for version, after in ((5, None), (20, 5), (20, None)):
        with pytest.raises(ArchiveConflict, match="one run at a time"):
            table.commit(written(table, 0, 3), app_id="x", version=version, after=after)
    assert table.rows() == 3


def test_of_many_writers_at_once_each_version_is_in_the_table_once(place: str) -> None:
    versions = range(1, 9)
    table_at(place).commit([], app_id="y", version=0)
    committed: list[int] = []
    conflicts: list[ArchiveConflict] = []

    def write() -> None:
        table = table_at(place)
        for version in versions:
            try:
                if table.commit(written(table, version, 1), app_id="x", version=version):
                    committed.append(version)
            except ArchiveConflict as error:
                conflicts.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = table_at(place)
    assert len(committed) == len(set(committed)) == table.rows()
    assert table.version_of("x") == versions[-1]
    assert ids(table) == [f"{version:026d}" for version in sorted(committed)]


def test_versions_of_different_apps_do_not_touch_each_other(place: str) -> None:
    table, other = table_at(place), table_at(place)
    table.commit(written(table, 0, 1), app_id="x", version=1)
    other.commit(written(other, 1, 1), app_id="y", version=7)
    table.commit(written(table, 2, 1), app_id="x", version=2, after=1)
    assert (other.version_of("x"), other.version_of("y"), other.rows()) == (2, 7, 3)


def test_versions_outlive_checkpoints_of_the_log(tmp_path: Path) -> None:
    table = table_at(str(tmp_path))
    table.commit([], app_id="early", version=3)
    for version in range(60):
        table.commit([], app_id="x", version=version)
    assert list((tmp_path / CONSUME_EVENT / "_delta_log").glob("*.checkpoint.parquet"))
    assert table_at(str(tmp_path)).version_of("early") == 3


def test_days_are_replaced_and_others_stay(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 3) + written(table, 10, 4, NEXT), app_id="x", version=1)
    assert table.replace([DAY], written(table, 100, 1), app_id="r", version=1)
    assert not table.replace([DAY], written(table, 200, 2), app_id="r", version=1)
    assert (table.rows(), ids(table)) == (5, [f"{10:026d}", f"{100:026d}"])
    table.replace([DAY, NEXT], [])
    assert table.rows() == 0
    with pytest.raises(ValueError, match="other days"):
        table.replace([DAY], written(table, 1, 1, NEXT))


def test_a_commit_whose_answer_was_lost_is_there_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 1), app_id="x", version=1)
    commit, lost = DeltaTable.create_write_transaction, 0

    def lose(*arguments: Any, **named: Any) -> None:
        nonlocal lost
        commit(*arguments, **named)
        lost += 1
        if lost % 2:
            raise CommitFailedError("somebody has committed this version")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lose)
    table.commit(written(table, 5, 1), app_id="x", version=2)
    assert ids(table) == [f"{number:026d}" for number in (0, 5)]
    table.replace([DAY], written(table, 7, 1))
    assert ids(table) == [f"{7:026d}"]
    assert lost >= 2


def test_files_are_swapped_only_while_they_are_there(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 2) + written(table, 2, 2), app_id="x", version=1)
    old = table.live_files()
    table.swap(old, written(table, 0, 4))
    assert (len(table.files()), table.rows()) == (1, 4)
    with pytest.raises(ArchiveConflict, match="replaced meanwhile"):
        table.swap(old, written(table, 0, 4))


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    table = table_at(str(tmp_path))
    table.commit(written(table, 0, 1), app_id="x", version=1)
    for entry in tmp_path.glob("*/_delta_log/*.json"):
        entry.write_text(entry.read_text()[:20])
    with pytest.raises(Damaged, match=r"the log of .* cannot be read, put _delta_log back from a copy"):
        table_at(str(tmp_path)).rows()


def test_data_files_without_a_log_are_not_taken_for_an_empty_table(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 1), app_id="x", version=1)
    metrics = Archive.create(place).table(METRICS_1M)
    metrics.folder.make(f"dt={DAY}")
    metrics.folder.files.copy_file(table.live_files()[0].uri.removeprefix("s3://"), f"{metrics.folder.path}/dt={DAY}/x")
    Archive.open(place)  # a derived table can be made again
    with pytest.raises(Damaged, match=r"metrics_1m has data files, but no log .* run the job that makes metrics_1m"):
        run_sql(place, "SELECT 1")
    table.folder.files.delete_dir(f"{table.folder.path}/_delta_log")
    for opened in (Archive.open, Archive.create):
        with pytest.raises(
            Damaged, match=r"consume_event has data files, but no log .*: put _delta_log back from a copy"
        ):
            opened(place)


def test_a_table_that_is_made_before_its_files_are_written_is_whole_at_any_moment(place: str) -> None:
    table = table_at(place)
    table.make()
    files = written(table, 0, 1)
    assert Archive.open(place).table(CONSUME_EVENT).rows() == 0, "a run that was killed here"
    table.commit(files, app_id="x", version=1)
    table.make()
    assert table_at(place).rows() == 1


def test_files_are_chosen_by_day_and_by_the_values_in_them(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 3) + written(table, 10, 3) + written(table, 20, 3, NEXT), app_id="x", version=1)
    assert len(table.files()) == 3
    assert [file.dt for file in table.live_files(NEXT)] == [NEXT]
    assert len(table.files([DAY, NEXT])) == 3
    assert len(table.files(where={"journal_offset": (11, 11)})) == 1
    assert len(table.files(where={"journal_offset": (2, 10)})) == 2
    assert len(table.files(where={"journal_offset": (None, 19)})) == 2
    assert table.files(where={"message_id": (f"{5:026d}", f"{5:026d}")}) == []
    assert table.files(where={"error": ("a", None)}) == []  # all are missing there
    assert len(table.files(DAY, where={"topic": ("orders", "orders")})) == 2


def test_a_long_text_is_found_by_its_shortened_bounds(place: str) -> None:
    table = table_at(place)
    text = "e" * 100
    table.commit(write_days(events(0, 2, error=text), table.folder), app_id="x", version=1)
    assert len(table.files(where={"error": (text, text)})) == 1
    assert table.files(where={"error": ("f", None)}) == []
    assert table.files(where={"error": (None, "e" * 31)}) == []


def test_other_engines_read_the_table_with_its_days(tmp_path: Path) -> None:
    table = table_at(str(tmp_path))
    table.commit(written(table, 0, 3) + written(table, 10, 2, NEXT), app_id="x", version=1)
    query = f"SELECT dt, count(*) FROM read_parquet({table.files()!r}) GROUP BY dt ORDER BY dt"
    by_name = duckdb.execute(query).fetchall()
    assert by_name == [(DAY, 3), (NEXT, 2)]
    seen = DeltaTable(table.uri).to_pyarrow_table()
    assert sorted(seen["dt"].to_pylist()) == [DAY] * 3 + [NEXT] * 2


def test_vacuum_takes_what_no_commit_names_and_nothing_else(place: str) -> None:
    table = table_at(place)
    table.commit(written(table, 0, 3), app_id="x", version=1)
    (orphan,) = written(table, 10, 3)
    assert table.vacuum(24) == []
    assert table.vacuum(0, dry_run=True) == [orphan.path]
    assert is_there(table, orphan)
    table.vacuum(0)
    assert not is_there(table, orphan)
    assert table.rows() == 3


def test_a_file_holds_one_day_in_order_with_what_the_log_says_of_it(tmp_path: Path) -> None:
    rows = pa.concat_tables([events(5, 2), events(0, 2)])
    found = write_parquet(rows, str(tmp_path), sort_by=["message_id"], bloom=["message_id"])
    assert (found.rows, found.dt) == (4, DAY)
    assert found.bytes == (tmp_path / found.path).stat().st_size
    read = pq.ParquetFile(tmp_path / found.path).read()
    assert read["journal_offset"].to_pylist() == [0, 1, 5, 6]
    assert read.schema.equals(SCHEMAS[CONSUME_EVENT])
    with pytest.raises(ValueError, match="one dt"):
        write_parquet(pa.concat_tables([events(0, 1), events(1, 1, NEXT)]), str(tmp_path))


def test_a_file_that_the_disk_has_no_room_for_leaves_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = events(0, 50_000, error="x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file may be larger
    try:
        with pytest.raises(StorageError, match=f"could not use {tmp_path}"):
            write_parquet(rows, str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert capfd.readouterr().err == ""
    assert write_parquet(rows, str(tmp_path)).rows == 50_000


def test_the_address_of_an_archive_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for opened in (Archive.create, Archive.open):
        with pytest.raises(InvalidSettings, match="is a file"):
            opened(str(tmp_path / "file"))
    with pytest.raises(InvalidSettings, match="no archive can lie"):
        Archive.create("gopher://x/y")
    with pytest.raises(InvalidSettings, match="has no table"):
        Archive.create(str(tmp_path)).table("nothing")
    assert Archive.create(f"file://{tmp_path}/a%20b").uri == f"{tmp_path}/a b"
