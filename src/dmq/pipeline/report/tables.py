"""The report's tables: heads and cells as texts, the same for the terminal and for the page.

Figures stand in them as people read them, and texts of strangers as they may be shown.

What always holds: every cell is printable on one line; which columns are numbers is said here once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from dmq.pipeline.report.model import Report

__all__ = [
    "Grid",
    "contents",
    "count",
    "dead_letters",
    "differences",
    "duration",
    "groups",
    "keys",
    "listing",
    "milliseconds",
    "moment",
    "outcomes",
    "printable",
    "retries",
    "short",
    "size",
    "slowest",
    "topics",
]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TEXT_CHARS_MAX: Final = 160


@dataclass(frozen=True)
class Grid:
    """A table; `empty` is said where it has no rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int]
    empty: str
    note: str = ""
    ids: frozenset[int] = frozenset()  # columns that people copy: never broken over lines


def contents(report: Report) -> Grid:
    """What is in the archive."""
    rows = tuple(
        (one.table, count(one.rows), size(one.bytes), count(one.files), str(one.first), str(one.last))
        for one in report.contents
        if one.rows
    )
    heads = ("table", "rows", "size", "files", "first day", "last day")
    return Grid("In the archive", heads, rows, frozenset({1, 2, 3}), empty="Nothing is archived yet.")


def topics(report: Report) -> Grid:
    """What came in."""
    rows = tuple(
        (
            printable(one.topic),
            printable(", ".join(one.apps)) or "-",
            count(one.messages),
            size(one.bytes),
            count(one.peak_minute),
            milliseconds(one.p50_ms),
            milliseconds(one.p99_ms),
            milliseconds(one.max_ms),
        )
        for one in report.topics
    )
    heads = ("topic", "apps", "messages", "bytes", "peak/min", "p50", "p99", "max")
    return Grid(
        "Topics",
        heads,
        rows,
        frozenset(range(2, 8)),
        empty="No message came in this period.",
        note="From sent to stored, without delays: p50 of the typical minute, p99 of the worst one."
        f"{_left_out(len(rows), report.totals.topics)}",
    )


def groups(report: Report) -> Grid:
    """What went out."""
    rows = tuple(
        (
            printable(one.topic),
            printable(one.group),
            count(one.acked),
            count(one.retries),
            count(one.dead),
            milliseconds(one.p50_ms),
            milliseconds(one.p99_ms),
            milliseconds(one.max_ms),
            count(one.lag),
            count(one.lag_max),
        )
        for one in report.groups
    )
    heads = ("topic", "group", "acked", "retries", "dead", "p50", "p99", "max", "lag", "lag max")
    return Grid(
        "Groups",
        heads,
        rows,
        frozenset(range(2, 10)),
        empty="No group settled anything in this period.",
        note="From stored to acked: p50 of the typical minute, p99 of the worst one. Lag: at the end, and at most."
        f"{_left_out(len(rows), report.totals.groups)}",
    )


def _left_out(shown: int, total: int) -> str:
    return f" These are the largest {shown} of {count(total)}." if shown < total else ""


def retries(report: Report) -> Grid:
    """Who tries again most."""
    rows = tuple(
        (printable(one.topic), printable(one.group), count(one.retries), count(one.dead)) for one in report.retries
    )
    return Grid("Retries", ("topic", "group", "retries", "dead"), rows, frozenset({2, 3}), empty="Nothing was retried.")


def keys(report: Report) -> Grid:
    """What is most frequent."""
    rows = tuple((printable(one.topic), printable(one.key), count(one.messages)) for one in report.keys)
    empty = "No key has more than one message in this period."
    return Grid("Most frequent keys", ("topic", "key", "messages"), rows, frozenset({2}), empty=empty)


def outcomes(report: Report) -> Grid:
    """What became of the messages of the period."""
    names = sorted({name for one in report.outcomes for name, _ in one.counts})
    rows = tuple(
        (
            printable(one.topic),
            printable(one.group) if one.group is not None else "nobody yet",
            *(count(dict(one.counts).get(name, 0)) for name in names),
        )
        for one in report.outcomes
    )
    return Grid(
        "What became of them",
        ("topic", "group", *names),
        rows,
        frozenset(range(2, 2 + len(names))),
        empty="There is no trace in this period.",
        note="Messages stored in this period, by the last that is known of them with each group.",
    )


def dead_letters(report: Report) -> Grid:
    """What died, and why."""
    rows = tuple(
        (
            printable(one.topic),
            printable(one.group) or "-",
            printable(one.reason) or "-",
            count(one.count),
            "; ".join(f"{printable(error)} ({count(times)})" for error, times in one.errors) or "-",
            printable(one.samples[0]) if one.samples else "-",
        )
        for one in report.dead_letters
    )
    heads = ("topic", "group", "reason", "count", "top errors", "for example")
    note = "By whole days, those that the period begins and ends in included."
    return Grid(
        "Dead letters",
        heads,
        rows,
        frozenset({3}),
        empty="No message died on these days.",
        note=note,
        ids=frozenset({5}),
    )


def slowest(report: Report) -> Grid:
    """What took longest."""
    rows = tuple(
        (
            printable(one.message_id),
            printable(one.topic),
            printable(one.group),
            moment(one.stored_at),
            milliseconds(one.delivery_ms),
            milliseconds(one.ack_ms),
            count(one.attempts),
        )
        for one in report.slowest
    )
    heads = ("message", "topic", "group", "stored", "delivered after", "acked after", "attempts")
    empty = "Nothing was acked in this period."
    return Grid("Slowest", heads, rows, frozenset({4, 5, 6}), empty=empty, ids=frozenset({0, 3}))


def differences(report: Report) -> Grid:
    """What tables and archive disagree on."""
    found = report.reconciled
    rows = tuple(
        (
            printable(one.problem).replace("_", " "),
            printable(one.topic),
            printable(one.group),
            printable(one.business_id),
            printable(one.send_id),
            printable(one.detail),
        )
        for one in (found.first if found is not None else ())
    )
    heads = ("problem", "topic", "group", "business id", "send id", "detail")
    if found is None:
        return Grid("Reconciliation", heads, (), frozenset(), empty="Never compared with outbox tables.")
    totals = ", ".join(f"{count(times)} {problem.replace('_', ' ')}" for problem, times in found.counts)
    said = f"Compared at {moment(found.at)}: {totals or 'everything agreed'}."
    return Grid("Reconciliation", heads, rows, frozenset(), empty=said, note=said if rows else "", ids=frozenset({4}))


def count(value: float | None) -> str:
    """1,234,567 or 12.3 or -."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def short(value: float) -> str:
    """A number for an axis: 1.2M, 300k, 7."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def size(value: int) -> str:
    """Bytes: 512 B, 1.5 MiB."""
    scaled, unit = float(value), 0
    while scaled >= 1024 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return (
        f"{value} B"
        if unit == 0
        else f"{scaled:.3g} {_UNITS[unit]}"
        if scaled < 1000
        else f"{scaled:.0f} {_UNITS[unit]}"
    )


def milliseconds(value: float | None) -> str:
    """12 ms, 3.4 s, 5 min, 2 h."""
    if value is None:
        return "-"
    if abs(value) < 1000:
        return f"{value:.3g} ms" if abs(value) < 100 else f"{value:.0f} ms"
    return duration(timedelta(milliseconds=value))


def duration(value: timedelta) -> str:
    """A length of time in its largest unit."""
    seconds = value.total_seconds()
    for limit, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if abs(seconds) >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds:.3g} s"


def moment(at: datetime) -> str:
    """A moment to the second; all times of a report are UTC."""
    return at.strftime("%Y-%m-%d %H:%M:%S")


def printable(text: str | None) -> str:
    """On one line, not too long, with everything that could steer a terminal or a page written out."""
    if text is None:
        return "-"
    shown = "".join(map(_visible, text))
    return shown if len(shown) <= _TEXT_CHARS_MAX else f"{shown[: _TEXT_CHARS_MAX - 1]}…"


def listing(text: str) -> str:
    """The same of a text with lines, which are kept, as long as it is."""
    return "".join(char if char == "\n" else _visible(char) for char in text)


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
