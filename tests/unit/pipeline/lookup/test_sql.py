"""SQL that somebody else wrote, over the archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmq.errors import Damaged, InvalidRequest, LimitReached, TimedOut
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Bounds
from dmq.pipeline.lookup.lookup import run_sql
from dmq.pipeline.tables import SCHEMAS
from tests.unit.pipeline.archives import commit_messages, message_row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("archive"))
    commit_messages(Archive.create(folder), [message_row(number) for number in range(100)])
    return folder


def test_tables_go_by_their_names_whether_they_have_files_or_not(folder: str) -> None:
    for name, schema in SCHEMAS.items():
        table, is_cut = run_sql(folder, f'SELECT * FROM "{name}" LIMIT 1')
        assert table.column_names == schema.names
        assert not is_cut
    found = run_sql(folder, "SELECT queue, count(*) AS n FROM message GROUP BY queue ORDER BY queue").table
    assert found.to_pylist() == [{"queue": queue, "n": 25} for queue in range(4)]


def test_no_more_rows_come_than_asked_for_and_that_is_said(folder: str) -> None:
    table, is_cut = run_sql(folder, "SELECT * FROM message ORDER BY journal_offset", Bounds(rows=7))
    assert (table["journal_offset"].to_pylist(), is_cut) == ([300 * number for number in range(7)], True)
    table, is_cut = run_sql(folder, "SELECT * FROM message", Bounds(rows=100))
    assert (table.num_rows, is_cut) == (100, False)


def test_no_more_bytes_come_than_allowed(folder: str) -> None:
    query = "SELECT repeat('x', 1000) AS filler FROM message"
    table, is_cut = run_sql(folder, query, Bounds(bytes=10_000))
    assert is_cut
    assert 1 <= table.num_rows <= 10


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_parquet('{folder}/../**/*.parquet')",
    ],
)
def test_no_other_file_is_read(folder: str, query: str) -> None:
    with pytest.raises(InvalidRequest, match="the query cannot be answered"):
        run_sql(folder, query.format(folder=folder))


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{file}'",
        "CREATE TABLE t (a int)",
        "DELETE FROM message",
        "ATTACH '{folder}/x.db'",
        "SET threads = 1",
        "INSTALL httpfs",
        "SELECT 1; SELECT 2",
        "",
    ],
)
def test_nothing_but_one_select_is_allowed(folder: str, query: str) -> None:
    file = Archive(folder).table("message").files()[0]
    before = Path(file).read_bytes()
    with pytest.raises(InvalidRequest, match="one SELECT is allowed"):
        run_sql(folder, query.format(file=file, folder=folder))
    assert Path(file).read_bytes() == before
    assert sorted(path.name for path in Path(folder).iterdir()) == ["key_index", "message"]


def test_a_mistake_is_told_in_one_line(folder: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run_sql(folder, "SELECT nothing FROM message")
    assert "nothing" in caught.value.message
    assert "\n" not in caught.value.message


def test_memory_is_bounded(folder: str) -> None:
    query = "SELECT list(a.journal_offset + b.range) FROM message a, range(10000000) b"
    with pytest.raises(LimitReached, match="64 MiB"):
        run_sql(folder, query, Bounds(memory_bytes=64 << 20))


def test_time_is_bounded(folder: str) -> None:
    query = "SELECT sum(sin(a.range * b.range)) FROM range(100000000) a, range(100000000) b"
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        run_sql(folder, query, Bounds(seconds=0.2))


@pytest.mark.parametrize("harm", ["gone", "cut", "undecodable"])
def test_a_file_that_is_gone_or_damaged_is_told(tmp_path: Path, harm: str) -> None:
    rows = [message_row(number, body=b"x" * number) for number in range(100)]
    commit_messages(Archive.create(str(tmp_path)), rows)
    (file,) = tmp_path.glob("message/dt=*/*.parquet")
    if harm == "gone":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[4:2000] = bytes(1996)  # the pages at the beginning
        file.write_bytes(raw[:-500] if harm == "cut" else raw)
    with pytest.raises(Damaged, match="a file of the archive is gone or damaged, put it back from a copy"):
        run_sql(str(tmp_path), "SELECT message_id, topic, body FROM message")
