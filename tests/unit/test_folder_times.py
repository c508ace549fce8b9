"""The times at the end of a run of tests."""

from __future__ import annotations

import pytest

from tests.folder_times import FolderTimes, folder_of


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, (nodeid, None, ""), {}, "passed", None, when, duration=duration)  # type: ignore[arg-type]


def test_a_test_is_of_the_first_folders_of_its_path() -> None:
    assert folder_of("tests/unit/broker/wire/test_flood.py::test_a") == "tests/unit/broker"
    assert folder_of("tests/unit/test_clock.py::TestClock::test_a[/]") == "tests/unit"
    assert folder_of("test_here.py::test_a") == "."


def test_times_of_setup_and_call_are_added_and_a_test_counts_once() -> None:
    times = FolderTimes()
    times.pytest_runtest_logreport(report("tests/unit/test_a.py::test_a", "setup", 0.5))
    times.pytest_runtest_logreport(report("tests/unit/test_a.py::test_a", "call", 1.0))
    times.pytest_runtest_logreport(report("tests/fault/store/test_b.py::test_b", "call", 10.0))
    assert [line.split() for line in times.lines()] == [
        ["10.0", "1", "tests", "tests/fault/store"],
        ["1.5", "1", "tests", "tests/unit"],
        ["11.5", "2", "tests", "in", "all"],
    ]
