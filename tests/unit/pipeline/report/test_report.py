"""The report: that its figures are those of the rows, and that what strangers wrote stays what it is."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dmq.cli import main
from dmq.errors import InvalidSettings, StorageError
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.report import collector
from dmq.pipeline.report.collector import collect
from dmq.pipeline.report.html import as_html, bars, columns, lines, nice_ticks, scaled, time_ticks
from dmq.pipeline.report.model import Point, Report, Series
from dmq.pipeline.report.tables import count, duration, milliseconds, printable, short, size
from dmq.pipeline.report.text import as_text
from tests.archive_rows import MIDNIGHT, Days, archive_rows, made
from tests.spark import plain_tables
from tests.unit.pipeline.report_archive import COMPARED, put_all, put_differences

NOW = datetime(2030, 2, 2, 4, tzinfo=UTC)
NASTY = '<script>alert("x")</script>&\x1b[31m\u202e'


@pytest.fixture(scope="module")
def days() -> Days:
    return made(seed=5)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, days: Days) -> str:
    archive = Archive(str(tmp_path_factory.mktemp("archive")))
    put_all(archive, days)
    put_differences(archive, ["no_result"] * 7 + ["not_sent"])
    return archive.uri


@pytest.fixture(scope="module")
def whole(tables: str) -> Report:
    """A report on all there is."""
    return collect(tables, NOW, MIDNIGHT - timedelta(days=2), MIDNIGHT + timedelta(days=3))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_what_came_in_and_went_out_is_what_the_rows_say(whole: Report, days: Days) -> None:
    for topic in ("orders", "payments"):
        rows = [row for row in days.messages if row["topic"] == topic]
        found = next(one for one in whole.topics if one.topic == topic)
        assert (found.messages, found.bytes) == (len(rows), sum(len(row["body"]) for row in rows))
        assert found.max_ms == max(plain_tables.ms(row["stored_at"], plain_tables.offered(row)) for row in rows)
        assert found.apps == ("app-0", "app-1")
    for one in whole.groups:
        mine = [row["outcome"] for row in days.events if (row["topic"], row["group"]) == (one.topic, one.group)]
        assert (one.acked, one.retries, one.dead) == tuple(mine.count(what) for what in ("acked", "failed", "dead"))
    assert len(whole.groups) == 4


def test_lag_at_the_end_is_that_of_the_last_minute(whole: Report, days: Days) -> None:
    for one in whole.groups:
        minutes = [key[0] for key in plain_tables.metrics_out(days) if key[1:] == (one.topic, one.group)]
        assert one.lag == plain_tables.lag(days, one.topic, one.group, max(minutes))
        assert one.lag_max == max(plain_tables.lag(days, one.topic, one.group, minute) for minute in minutes)


def test_the_slowest_come_first(whole: Report, days: Days) -> None:
    took = sorted((row["ack_latency_ms"] for row in plain_tables.trace(days) if row["acked_at"]), reverse=True)
    assert [one.ack_ms for one in whole.slowest] == took[:10]


def test_dead_letters_of_several_days_add_up(whole: Report, days: Days) -> None:
    reasons = [row["reason"] for row in days.copies]
    assert {one.reason: one.count for one in whole.dead_letters} == {name: reasons.count(name) for name in set(reasons)}
    for one in whole.dead_letters:
        errors = [row["error"].split("\n")[0] for row in days.copies if row["reason"] == one.reason]
        assert dict(one.errors) == {error: errors.count(error) for error, _ in one.errors}
        assert one.errors[0][1] == max(errors.count(error) for error in errors)
        assert set(one.samples) <= {row["message_id"] for row in days.copies}


def test_charts_have_a_point_for_every_step_and_hold_everything(whole: Report, days: Days) -> None:
    (came,) = (one for one in whole.throughput if one.name == "in")
    seconds = whole.step.total_seconds()
    assert sum(point.value or 0 for point in came.points) * seconds == pytest.approx(len(days.messages))
    assert len(came.points) == (whole.until - whole.since) / whole.step
    failed = sum(row["outcome"] == "failed" for row in days.events)
    (retries,) = (one for one in whole.trouble if one.name == "retries")
    assert sum(point.value or 0 for point in retries.points) == failed


def test_without_a_period_it_is_the_last_day_the_archive_has(tables: str, days: Days) -> None:
    found = collect(tables, NOW)
    newest = max(row["stored_at"] for row in days.messages)
    assert found.newest == newest
    assert found.since <= newest < found.until
    assert found.until - found.since == timedelta(hours=24)
    rows = [row for row in days.messages if found.since <= row["stored_at"] < found.until]
    assert 0 < sum(one.messages for one in found.topics) == len(rows) < len(days.messages)


def test_of_an_archive_that_has_just_begun_the_period_is_what_it_has(tmp_path: Path) -> None:
    for minutes, length in ((1, 10), (90, 92)):
        archive, few = Archive(str(tmp_path / str(minutes))), Days()
        for number, at in enumerate((MIDNIGHT, MIDNIGHT + timedelta(minutes=minutes, seconds=30))):
            few.message("orders", 0, number, at)
        archive_rows(archive, few, 1)
        found = collect(archive.uri, NOW)
        assert found.until == MIDNIGHT + timedelta(minutes=minutes + 1)
        assert found.until - found.since == timedelta(minutes=length - (minutes > 10))


def test_the_last_comparison_is_told_also_if_everything_agreed(tables: str, tmp_path: Path) -> None:
    found = collect(tables, NOW).reconciled
    assert found is not None
    assert (found.at, dict(found.counts)) == (COMPARED, {"no_result": 7, "not_sent": 1})
    archive = Archive(str(tmp_path))
    put_differences(archive, ["not_sent"])
    later = COMPARED + timedelta(days=1)
    archive.table("reconcile_diff").commit([], app_id="dmq-reconcile", version=round(later.timestamp() * 1000))
    agreed = collect(archive.uri, NOW).reconciled
    assert agreed is not None
    assert (agreed.at, agreed.counts, agreed.first) == (later, (), ())


def test_missing_tables_are_named_with_the_job_that_makes_them(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=5), 1)
    found = collect(archive.uri, NOW)
    assert not found.topics
    assert not found.slowest
    assert any("--job rollup" in note for note in found.notes)
    assert "--job rollup" in as_text(found)
    assert "--job rollup" in as_html(found)


def test_no_archive_and_no_period_are_told_in_a_sentence(tables: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no archive at"):
        collect(str(tmp_path / "nothing"), NOW)
    with pytest.raises(InvalidSettings, match="is not before"):
        collect(tables, NOW, NOW, NOW)


def test_totals_cover_what_the_lists_leave_out(tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    for number in range(130):
        message = days.message(f"topic-{number:03d}", 0, 0, MIDNIGHT, key="same")
        days.settle(message, "all", "failed", MIDNIGHT, error="no")
    put_all(archive, days)
    found = collect(archive.uri, NOW)
    assert (found.totals.topics, found.totals.groups, found.totals.messages, found.totals.retries) == (130,) * 4
    assert len(found.topics) == len(found.groups) == 50
    assert "These are the largest 50 of 130." in as_text(found)
    assert found.keys == ()  # a key is one of its topic


def test_charts_of_keys_hours_retries_and_reasons_are_what_the_rows_say(tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), made(seed=3)
    for number, row in enumerate(days.messages):
        row["key"] = None if number % 3 == 0 else f"k-{number % 7 if number % 2 else number}"
    put_all(archive, days)
    found = collect(archive.uri, NOW, MIDNIGHT - timedelta(days=2), MIDNIGHT + timedelta(days=3))
    keys = Counter((row["topic"], row["key"]) for row in days.messages if row["key"])
    assert [(one.topic, one.key, one.messages) for one in found.keys] == [
        (*key, times) for key, times in sorted(keys.items(), key=lambda one: (-one[1], one[0])) if times > 1
    ][:10]
    hours = Counter(row["stored_at"].hour for row in days.messages)
    assert {one.hour: one.messages for one in found.hours} == hours
    failed = Counter((row["topic"], row["group"]) for row in days.events if row["outcome"] == "failed")
    assert {(one.topic, one.group): one.retries for one in found.retries} == failed
    assert dict(found.reasons) == Counter(row["reason"] for row in days.copies)


def test_frequent_keys_of_a_large_archive_are_found_by_a_sample(
    tables: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    for number in range(30_000):
        at = MIDNIGHT + timedelta(milliseconds=number)
        days.message("orders", 0, number, at, key=f"k-{number}" if number % 10 else "hot")
    put_all(archive, days)
    monkeypatch.setattr(collector, "_COUNTED_MAX", 3000)
    (one,) = collect(archive.uri, NOW).keys
    assert (one.topic, one.key, one.messages) == ("orders", "hot", 3000)


def test_every_part_names_a_command_that_gives_its_rows(
    whole: Report, tables: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"throughput", "lag", "latency", "retries", "reasons", "keys", "hours", "topics"} <= whole.commands.keys()
    rows: dict[str, list[dict[str, object]]] = {}
    for name, command in whole.commands.items():
        program, *arguments = shlex.split(command)
        assert program == "dmq"
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--format", "json"])
        assert ended.value.code == 0, capsys.readouterr().err
        rows[name] = json.loads(capsys.readouterr().out)
        assert name == "totals" or escape(command) in as_html(whole)
    assert rows["retries"] == [asdict(one) for one in whole.retries]
    assert rows["hours"] == [asdict(one) for one in whole.hours]
    assert rows["totals"] == [asdict(whole.totals)]
    assert [row["topic"] for row in rows["topics"]] == [one.topic for one in whole.topics]
    known = {(one.name, point.at.isoformat()): point.value for one in whole.lag for point in one.points}
    for row in rows["lag"]:
        at = datetime.fromisoformat(str(row["starts_at"])).isoformat()
        assert known[f"{row['group']} of {row['topic']}", at] == row["value"]


# --- how it looks -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Sees that every tag is closed, and keeps texts and pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def svgs(page: str) -> list[ElementTree.Element]:
    parts = page.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>") for part in parts]


def test_the_page_is_whole_and_needs_nothing_else(whole: Report) -> None:
    text = as_html(whole)
    page = Page(text)
    assert page.open == []
    assert not page.tags & {"script", "img", "link", "iframe"}
    assert "http://" not in text
    assert "https://" not in text
    pictures = [one for one in svgs(text) if one.get("role") == "img"]
    assert len(pictures) == 5
    for picture in pictures:
        titled = (picture.get("aria-labelledby") or "").split()
        assert [one.get("id") for one in picture if one.tag in ("title", "desc")] == titled
    assert text.count("id=") == len({part.partition('"')[0] for part in text.split('id="')[1:]})


def test_what_strangers_wrote_steers_neither_page_nor_terminal(tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    message = days.message(NASTY, 0, 0, MIDNIGHT, app=NASTY)
    days.settle(message, NASTY, "failed", MIDNIGHT, error=NASTY)
    days.settle(message, NASTY, "acked", MIDNIGHT + timedelta(seconds=1), attempt=2)
    days.dead(message, NASTY, MIDNIGHT, "REJECTED", NASTY)
    put_all(archive, days)
    found = collect(archive.uri, NOW)
    page, text = as_html(found), as_text(found)
    assert Page(page).open == []
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for shown in (page, text):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    svgs(page)


def test_an_empty_report_is_still_a_report(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    put_differences(archive, ["not_sent"])
    found = collect(archive.uri, NOW)
    assert Page(as_html(found)).open == []
    assert "no message yet" in as_text(found)


def test_in_a_pipe_a_row_is_a_line_and_on_a_terminal_it_fits(whole: Report) -> None:
    piped = as_text(whole).splitlines()
    assert sum(line.startswith("orders    clumsy") for line in piped) >= 1
    narrow = as_text(whole, width=100).splitlines()
    assert max(map(len, narrow)) <= 110  # ids are never broken


def test_lines_are_cut_where_nothing_is_known() -> None:
    values = [1.0, 2.0, None, 4.0, None, 1.0, 1.0]
    points = tuple(Point(MIDNIGHT + timedelta(minutes=n), value) for n, value in enumerate(values))
    (picture,) = [
        one for one in svgs(lines("t", [Series("a", points)], unit="u", name="n")) if one.get("role") == "img"
    ]
    (group,) = (one for one in picture if one.get("class") == "s0")
    assert [one.tag for one in group] == ["title", "polyline", "circle", "polyline"]


def test_a_chart_without_values_says_so() -> None:
    points = (Point(MIDNIGHT, None),)
    assert "Nothing in this period" in lines("Lag", [Series("a", points)], unit="u", name="n")
    assert "Nothing in this period" in columns("Hours", [("00:00", 0.0)], unit="u", name="n")
    assert bars("b", []) == ""


def test_names_beside_bars_are_whole() -> None:
    name, owner = "a-group-with-a-name-" + "x" * 100, "订单" * 40
    assert escape(f"{name} ") + f'<span class="unit">of {owner}</span>' in bars("b", [(name, owner, 3.0)])


def test_the_highest_column_is_marked() -> None:
    rows = [(f"{hour:02d}:00", float(hour % 7)) for hour in range(24)]
    (picture,) = svgs(columns("Hours", rows, unit="u", name="n"))
    drawn = [one for one in picture if one.tag == "rect"]
    assert [index for index, one in enumerate(drawn) if one.get("class") == "peak"] == [6]
    assert len(drawn) == 24
    tops = [float(one.get("y") or 0) for one in drawn]
    assert min(tops) == tops[6] >= 0


@pytest.mark.parametrize(
    ("greatest", "ticks"),
    [
        (0, [0, 1]),
        (1, [0, 0.25, 0.5, 0.75, 1]),
        (7, [0, 2, 4, 6, 8]),
        (100, [0, 25, 50, 75, 100]),
        (0.03, [0, 0.01, 0.02, 0.03]),
    ],
)
def test_axes_have_round_values(greatest: float, ticks: list[float]) -> None:
    assert nice_ticks(greatest) == pytest.approx(ticks)


@pytest.mark.parametrize("hours", [0.1, 1, 5, 24, 24 * 9, 24 * 400])
def test_times_below_a_chart_are_few_and_round(hours: float) -> None:
    since = MIDNIGHT + timedelta(minutes=7)
    until = since + timedelta(hours=hours)
    found = time_ticks(since, until)
    assert 2 <= len(found) <= 10
    assert all(since <= at <= until for at, _ in found)


def test_latencies_are_drawn_in_a_unit_that_fits() -> None:
    def drawn(value: float) -> tuple[float | None, str]:
        series, unit = scaled([Series("a", (Point(MIDNIGHT, value),))])
        return series[0].points[0].value, unit

    assert drawn(900) == (900, "ms")
    assert drawn(9000) == (9, "s")
    assert drawn(600_000) == (10, "min")
    assert drawn(36_000_000) == (10, "h")
    assert scaled([]) == ([], "ms")


def test_figures_read_well() -> None:
    assert [count(1234567), count(0.5), count(None)] == ["1,234,567", "0.5", "-"]
    assert [short(1_234_567), short(999), short(1500)] == ["1.23M", "999", "1.5k"]
    assert [size(0), size(1023), size(1536), size(1020 * 1024)] == ["0 B", "1023 B", "1.5 KiB", "1020 KiB"]
    assert [milliseconds(12.3456), milliseconds(999.4), milliseconds(90_000)] == ["12.3 ms", "999 ms", "1.5 min"]
    assert duration(timedelta(days=3)) == "3 d"
    assert len(printable("x" * 1000)) == 160


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["archive", "report", *arguments])
    return ended.value.code


def test_the_command_writes_what_the_file_is_called(
    tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, begins in (("r.html", "<!doctype html>"), ("r.json", "{"), ("r.txt", "DMQ archive report")):
        assert run("--tables", tables, "--output", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_text().startswith(begins)
    facts = json.loads((tmp_path / "r.json").read_text())
    assert facts["reconciled"]["at"] == "2030-02-02T03:00:00Z"
    capsys.readouterr()
    assert run("--tables", tables, "--from", "2030-01-30T00:00:00Z") == 0
    assert "period    2030-01-30 00:00:00 to" in capsys.readouterr().out


def test_the_command_says_in_a_sentence_what_it_cannot_do(
    tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--tables", str(tmp_path / "nothing")) == 1
    assert "dmq archive run" in capsys.readouterr().err
    assert run("--tables", tables, "--output", str(tmp_path / "no" / "r.html")) == 1
    assert "cannot be written" in capsys.readouterr().err
