"""The table of bars: its ratios follow from its rounds, and a verdict from median, bar and noise."""

from __future__ import annotations

from typing import Any

import pytest

from bench.race.bar import Bar, Outcome
from bench.race.contest import Result
from bench.race.load import TASKS
from bench.race.rows import ROWS
from bench.race.table import HEAD, lines_of, markdown, plain


def speed(seconds: float, count: int = 100, **more: Any) -> dict[str, Any]:
    return {"count": count, "seconds": seconds, "client": seconds / 2, "broker": seconds / 4, **more}


@pytest.mark.parametrize(
    ("ratios", "to_itself", "bar", "verdict"),
    [
        ((0.30, 0.29, 0.1), (1.01,), Bar(0.28, 0.4), "met"),
        ((0.27, 0.2), (1.0,), Bar(0.28, 0.4), "missed"),
        ((0.27,), (0.9,), Bar(0.28, 0.4), "unsure"),
        ((3.4,), (1.0,), Bar(3.5, 2.6, is_most=True), "met"),
        ((3.6,), (), Bar(3.5, 2.6, is_most=True), "missed"),
        ((3.6,), (), Bar(), ""),
    ],
)
def test_the_median_meets_the_bar_unless_the_same_code_differs_more(
    ratios: tuple[float, ...], to_itself: tuple[float, ...], bar: Bar, verdict: str
) -> None:
    assert Outcome(ratios, to_itself).verdict(bar, has_extension=False) == verdict


def test_the_extension_has_bars_of_its_own() -> None:
    bar = Bar(0.28, 0.4)
    assert Outcome((0.3,), ()).verdict(bar, has_extension=True) == "missed"
    assert (bar.shown(False), bar.shown(True), Bar(is_most=True).shown(True)) == (">= 0.28", ">= 0.4", "")


def test_a_round_compares_the_row_with_its_own_baseline_and_with_itself() -> None:
    result = Result([speed(1.0), speed(2.0)], [speed(2.0), speed(2.0)], [speed(0.5), speed(0.25)])
    outcome = result.outcome(ROWS["many-500"].lines[0])
    assert list(outcome.ratios) == pytest.approx([0.375, 0.125])
    assert list(outcome.to_itself) == pytest.approx([2.0, 1.0])
    assert result.figures()["per_second"] == pytest.approx([100, 50, 50, 50])
    assert result.figures()["client_us"] == pytest.approx([5000, 10000, 10000, 10000])
    slower = Result([speed(2.0), speed(4.0)], [speed(4.0), speed(4.0)], result.base)
    assert result.to(slower)["per_second"] == pytest.approx(2.0)
    assert result.to(slower)["broker_us"] == pytest.approx(0.5)


def test_sends_count_in_echoes_flushes_in_fdatasyncs_and_deliveries_in_relays() -> None:
    lone = {"samples": {"send": [30.0, 35.0, 900.0], "echo": [10.0, 10.0, 10.0]}}
    assert ROWS["lone"].lines[0].ratio(lone, lone) == 3.5
    flushed = {"samples": {"stored": [50.0], "flushed": [180.0], "fdatasync": [100.0]}}
    assert ROWS["flushed"].lines[0].ratio(flushed, flushed) == pytest.approx(1.3)
    own = {"samples": {"end_to_end": [100.0] * 98 + [300.0, 400.0]}}
    relay = {"samples": {"relay": [50.0] * 98 + [100.0, 100.0]}}
    assert [line.ratio(own, relay) for line in ROWS["relay-1000"].lines] == [2.0, 4.0, 4.0]
    assert ROWS["disk"].lines[0].ratio({"disk_bytes": 230, "body_bytes": 200}, {}) == 1.15


def test_every_row_asks_for_a_load_that_is_there() -> None:
    for row in ROWS.values():
        for task in (row.own, row.floor, row.beside):
            assert task is None or task.name in TASKS


def test_a_table_has_a_line_for_each_tree_and_says_how_they_compare() -> None:
    ours = Result([speed(1.0)], [speed(1.0)], [speed(0.4)])
    theirs = Result([speed(2.0)], [speed(2.0)], [speed(0.4)])
    results = {"here": ours, "other": theirs}
    shown = list(lines_of(ROWS["many-500"], results, {"here": False, "other": False}))
    assert len(shown) == 3
    assert "met" in shown[0]
    assert "missed" in shown[1]
    assert "here of other: per_second 2" in shown[2]
    assert HEAD.split()[:3] == ["what", "beside", "tree"]
    found: Any = plain(ROWS["many-500"], results, {"here": False, "other": False})
    assert found["lines"][0]["trees"]["here"]["verdict"] == "met"
    assert found["shares"]["other"]["client_us"] == 0.5
    tree = {"version": "dmq 1", "python": "3.11", "is_debian_python": True, "is_optimized": True}
    machine = {"trees": {"here": tree, "other": tree}, "loop_ns": 20.0, "processor": "x", "cpus": 2, "load": [0.1]}
    settings = {"rounds": 1, "scale": 1.0, "seed": 7}
    page = list(markdown({"machine": machine, "settings": settings, "rows": {"many-500": found}}))
    assert "Debian's build" in page[0]
    assert page[-1].startswith("| send_many by 500, 200 B | floor | >= 0.28, >= 0.4 | 0.4 (0.4-0.4) | 1.00 | met | ")
    assert page[-1].count("|") == page[-2].count("|") == page[-3].count("|")
