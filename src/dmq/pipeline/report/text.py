"""The report as text, for a terminal or a pipe.

What always holds: in a pipe nothing is cut and no colour is written; what a stranger wrote cannot steer the terminal.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dmq.pipeline.report import tables
from dmq.pipeline.report.model import Report, Series
from dmq.pipeline.report.tables import Grid, duration, milliseconds, moment, printable, short

__all__ = ["as_text"]

_WIDE: Final = 100_000
_SHADES: Final = "▁▂▃▄▅▆▇█"
_SPARK_CHARS: Final = 60
_LINES: Final = 3  # of a chart


def as_text(report: Report, *, width: int | None = None, color: bool = False) -> str:
    """The whole report.

    Parameters:
        width: of the terminal; None is a pipe.
        color: whether it may have colours.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(
        file=io.StringIO(), width=width or _WIDE, force_terminal=color, no_color=not color, highlight=False, emoji=False
    )
    with console.capture() as captured:
        console.print(Text("DMQ archive report", style="bold"))
        for line in _head(report):
            console.print(Text(line))
        for line in _charts(report):
            console.print(Text(line))
        for grid in _grids(report):
            console.print()
            console.print(Text(grid.title, style="bold"))
            if not grid.rows:
                console.print(Text(grid.empty))
                continue
            table = Table(box=None if width is None else box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
            for index, head in enumerate(grid.heads):
                is_number, is_whole = index in grid.numbers, width is None or index in grid.numbers | grid.ids
                table.add_column(head, justify="right" if is_number else "left", no_wrap=is_whole, overflow="fold")
            for row in grid.rows:
                table.add_row(*map(Text, row))
            console.print(table)
            if grid.note:
                console.print(Text(grid.note, style="dim"))
        console.print()
        console.print(Text("The queries behind these figures are in the other forms: --format html, or json."))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _head(report: Report) -> Iterator[str]:
    yield f"{report.tables}, made {moment(report.made_at)} UTC"
    yield f"period    {moment(report.since)} to {moment(report.until)} UTC, {duration(report.until - report.since)}"
    if report.newest is None:
        yield "archived  no message yet"
    else:
        yield f"archived  up to {moment(report.newest)}, {duration(report.made_at - report.newest)} before this report"
    for note in report.notes:
        yield f"note      {note}"


def _charts(report: Report) -> Iterator[str]:
    """Each line of a chart as a row of blocks with its highest value."""
    shown: Sequence[tuple[str, Callable[[float], str], Sequence[Series]]] = (
        ("messages/s", short, report.throughput),
        ("p99", milliseconds, report.latency[:_LINES]),
        ("lag", short, report.lag[:_LINES]),
        ("trouble", short, report.trouble),
    )
    names = [(f"{what} {printable(one.name)}", show, one) for what, show, series in shown for one in series]
    if names:
        yield ""
    room = max((len(name) for name, _, _ in names), default=0)
    if report.hours:
        hours = {one.hour: float(one.messages) for one in report.hours}
        peak = max(report.hours, key=lambda one: one.messages)
        most = f"most from {peak.hour:02d}:00 UTC on, {short(peak.messages)}"
        yield f"{'by hour of the day':<{room}}  {_blocks([hours.get(hour, 0.0) for hour in range(24)])}  {most}"
    for name, show, one in names:
        values = [point.value for point in one.points]
        greatest = max((value for value in values if value is not None), default=0.0)
        yield f"{name:<{room}}  {_blocks(values)}  at most {show(greatest)}"


def _blocks(values: Sequence[float | None]) -> str:
    """Values as blocks, each as high as the highest of its share of the line."""
    per = max(1, -(-len(values) // _SPARK_CHARS))
    shares = [values[start : start + per] for start in range(0, len(values), per)]
    tops = [max((value for value in share if value is not None), default=None) for share in shares]
    greatest = max((top for top in tops if top is not None), default=0.0)
    if greatest <= 0:
        return "".join(" " if top is None else _SHADES[0] for top in tops)
    last = len(_SHADES) - 1
    return "".join(" " if top is None else _SHADES[round(top / greatest * last)] for top in tops)


def _grids(report: Report) -> Iterator[Grid]:
    yield tables.contents(report)
    yield tables.topics(report)
    yield tables.groups(report)
    yield tables.retries(report)
    yield tables.outcomes(report)
    yield tables.dead_letters(report)
    yield tables.keys(report)
    yield tables.slowest(report)
    yield tables.differences(report)
