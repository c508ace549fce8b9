"""The time that the tests of each folder took, for the end of a run.

The times of all worker processes are added, so that they are more than the run itself took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

__all__ = ["FolderTimes"]

DEPTH = 3
"""How many parts of a path name its folder: tests/integration/broker."""


class FolderTimes:
    """A plugin for pytest; registered in the process that prints, not in its workers."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        self._seconds[folder] += report.duration
        self._tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) > 1:
            terminalreporter.section("seconds by folder, of all processes together")
            for line in self.lines():
                terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        """A line for each folder, the longest first, and one for all of them."""
        for folder, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
            yield f"{seconds:8.1f} {len(self._tests[folder]):6,} tests  {folder}"
        yield f"{sum(self._seconds.values()):8.1f} {sum(map(len, self._tests.values())):6,} tests  in all"


def folder_of(nodeid: str) -> str:
    """The folder of a test, at most `DEPTH` parts of it."""
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[:-1][:DEPTH]) or "."
