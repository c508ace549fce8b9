"""What jobs decide before Spark is asked: what is new, what is merged, what is kept, what options say."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable

from dmq.errors import InvalidSettings
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive, LiveFile
from dmq.pipeline.jobs import JOBS, compact
from dmq.pipeline.jobs.changes import News, added, news_of, remember
from dmq.pipeline.jobs.compact import portions, waiting_files
from dmq.pipeline.jobs.frames import BLOOM, SORT
from dmq.pipeline.jobs.job import KNOWN, JobContext, check_options, count_option, flag_option
from dmq.pipeline.jobs.retain import DERIVED, RAW, oldest_kept
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, SCHEMAS, TRACE
from tests.archive_rows import FIRST, MIDNIGHT, Days, archive_rows, arrow, made

NOW = datetime(2030, 2, 2, 12, tzinfo=UTC)


def live(name: str, size: int, day: int = 1) -> LiveFile:
    return LiveFile(name, f"/a/{name}", 1, size, date(2030, 1, day))


def context(**options: str) -> JobContext:
    return JobContext("/nowhere", NOW, options={name.replace("__", "."): value for name, value in options.items()})


# --- news -------------------------------------------------------------------------------------------------------------


def test_what_was_read_is_no_news_and_what_comes_later_is(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    message, trace = archive.table(MESSAGE), archive.table(TRACE)
    assert news_of(message, trace) == News(-1, frozenset(), ())
    archive_rows(archive, made(count=40), 1)
    first = news_of(message, trace)
    assert first.dts == frozenset(message.days())
    assert set(first.files) == set(message.files())
    remember(trace, {message: first})
    assert news_of(message, trace) == News(first.version, frozenset(), ())
    more = Days()
    more.message("orders", 0, 9000, MIDNIGHT)
    known = set(message.files())
    archive_rows(archive, more, 2)
    later = news_of(message, trace)
    assert later.dts == {MIDNIGHT.date()}
    assert set(later.files) == set(message.files()) - known
    assert news_of(message, trace, everything=True).dts == frozenset(message.days())


def test_each_source_is_remembered_by_itself(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=40), 1)
    message, event, trace = archive.table(MESSAGE), archive.table(CONSUME_EVENT), archive.table(TRACE)
    remember(trace, {message: news_of(message, trace)})
    assert not news_of(message, trace).dts
    assert news_of(event, trace).dts == frozenset(event.days())


def test_merged_files_are_no_news_but_hold_what_was_new_before(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    message, trace = archive.table(MESSAGE), archive.table(TRACE)
    archive_rows(archive, made(count=10), 1)
    remember(trace, {message: news_of(message, trace)})
    days = made(seed=2, count=10)
    archive_rows(archive, days, 2)
    (dt,) = {row["dt"] for row in days.messages} & {FIRST}
    files = message.live_files(dt)
    rows = arrow(MESSAGE, [row for row in made(count=10).messages + days.messages if row["dt"] == dt])
    message.swap(files, write_days(rows, message.folder))
    found = news_of(message, trace)
    assert dt in found.dts
    assert set(message.files(dt)) <= set(found.files)
    remember(trace, {message: found})
    message.swap(message.live_files(dt), write_days(rows, message.folder))
    assert news_of(message, trace).dts == frozenset()


def test_days_that_were_dropped_meanwhile_are_no_news(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    message, trace = archive.table(MESSAGE), archive.table(TRACE)
    archive_rows(archive, made(count=40), 1)
    gone = message.days()[0]
    message.replace([gone], [])
    assert gone not in news_of(message, trace).dts


def test_where_the_log_is_cut_everything_is_news(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    message, trace = archive.table(MESSAGE), archive.table(TRACE)
    archive_rows(archive, made(count=40), 1)
    remember(trace, {message: news_of(message, trace)})
    for version in (2, 3):
        archive_rows(archive, Days([Days().message("orders", 0, version, MIDNIGHT)]), version)
    assert news_of(message, trace).dts == {MIDNIGHT.date()}
    DeltaTable(message.uri).create_checkpoint()
    for commit in range(message.version()):
        Path(f"{message.uri}/_delta_log/{commit:020d}.json").unlink()
    again = Archive(str(tmp_path))
    found = news_of(again.table(MESSAGE), again.table(TRACE))
    assert found.dts == frozenset(again.table(MESSAGE).days())
    assert len(found.dts) > 1


def test_only_files_with_new_rows_count_as_added() -> None:
    lines = [
        '{"commitInfo":{"operation":"WRITE"}}',
        '{"add":{"path":"a","partitionValues":{"dt":"2030-01-30"},"dataChange":true}}',
        '{"add":{"path":"b","partitionValues":{"dt":"2030-01-31"},"dataChange":false}}',
        '{"remove":{"path":"c","dataChange":true,"partitionValues":{"dt":"2030-01-31"}}}',
    ]
    assert added(lines) == {"a": date(2030, 1, 30)}


# --- what is merged and kept ------------------------------------------------------------------------------------------


def test_days_with_many_small_files_are_merged_and_large_files_left() -> None:
    files = [live(f"s{n}", 10) for n in range(4)] + [live("large", 900)] + [live(f"t{n}", 10, 2) for n in range(3)]
    (found,) = portions(files, files_min=4, file_bytes=100)
    assert (found.dt, {file.path for file in found.files}, found.parts) == (
        date(2030, 1, 1),
        {"s0", "s1", "s2", "s3"},
        1,
    )


def test_many_small_files_become_as_many_as_their_size_needs() -> None:
    (found,) = portions([live(f"s{n}", 20) for n in range(16)], file_bytes=100)
    assert found.parts == 4


def test_files_of_another_size_are_not_written_again_for_a_few_small_ones() -> None:
    sizes, written = [1 << 20], 0
    for _ in range(200):
        sizes += [1000]
        files = [live(f"f{n}", size) for n, size in enumerate(sizes)]
        for found in portions(files):
            merged = [file.bytes for file in found.files]
            written += sum(merged)
            sizes = [size for n, size in enumerate(sizes) if f"f{n}" not in {file.path for file in found.files}]
            sizes.append(sum(merged))
    assert len(sizes) <= 13
    assert written <= 200 * 1000 * 4  # each byte once for each power of four that it has passed


def test_files_that_a_derived_table_has_still_to_take_in_wait_unless_nobody_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(str(tmp_path))
    message, trace = archive.table(MESSAGE), archive.table(TRACE)
    archive_rows(archive, made(count=10), 1)
    assert waiting_files(archive, MESSAGE) == frozenset()  # nothing was ever made of it
    remember(trace, {message: news_of(message, trace)})
    taken = set(message.files())
    archive_rows(archive, Days([Days().message("orders", 0, 1, MIDNIGHT)]), 2)
    assert waiting_files(archive, MESSAGE) == set(message.files()) - taken != set()
    monkeypatch.setattr(compact, "WAITING_MAX", 0)
    assert waiting_files(archive, MESSAGE) == frozenset()


def test_one_file_is_never_merged_with_itself() -> None:
    assert portions([live("one", 1)], files_min=1) == []


def test_today_is_the_first_of_the_days_that_are_kept() -> None:
    assert oldest_kept(NOW, 1) == date(2030, 2, 2)
    assert oldest_kept(NOW, 3) == date(2030, 1, 31)


def test_every_table_has_its_retention_and_its_order() -> None:
    assert sorted((*RAW, *DERIVED)) == sorted(SCHEMAS) == sorted(SORT)
    for name, columns in (*SORT.items(), *BLOOM.items()):
        assert set(columns) <= set(SCHEMAS[name].names)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_are_numbers_or_flags_or_refused() -> None:
    assert count_option(context(), "retain.days", 7) == 7
    assert count_option(context(retain__days="12"), "retain.days", 7) == 12
    assert flag_option(context(reconcile__resend="true"), "reconcile.resend")
    assert not flag_option(context(), "reconcile.resend")
    with pytest.raises(InvalidSettings, match=r"reconcile\.resend is true or false, not 'yes'"):
        flag_option(context(reconcile__resend="yes"), "reconcile.resend")


@pytest.mark.parametrize("value", ["0", "-1", "two", "²", ""])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidSettings, match=r"retain\.days is a whole number over 0"):
        count_option(context(retain__days=value), "retain.days", 7)


def test_an_option_that_no_job_has_is_refused_and_every_one_is_documented(root: Path) -> None:
    check_options(KNOWN)
    with pytest.raises(InvalidSettings, match=r"no job has an option 'retain\.day': there are .*retain\.days"):
        check_options(["retain.day"])
    guide = (root / "docs" / "guide" / "archive.md").read_text()
    assert [name for name in KNOWN if f"| `{name}` |" not in guide] == []


def test_jobs_run_in_an_order_in_which_each_finds_what_it_needs() -> None:
    assert [*JOBS] == ["rollup", "trace", "dead-letters", "reconcile", "compact", "retain"]
