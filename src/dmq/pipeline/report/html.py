"""The report as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

What always holds: every text from the archive is escaped; a page opened from a disk without a network is the same page.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from dmq.pipeline.report import tables
from dmq.pipeline.report.charts import bars, lines, scaled
from dmq.pipeline.report.model import Report
from dmq.pipeline.report.style import STYLE
from dmq.pipeline.report.tables import Grid
from dmq.pipeline.report.words import count, duration, moment, printable, short, size

__all__ = ["as_html"]

_BARS_MAX = 8


def as_html(report: Report) -> str:
    """The whole page."""
    return "".join(_page(report))


def _page(report: Report) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    # Nothing may be fetched or run, whatever got into the page.
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    yield f"<title>DMQ archive, {moment(report.since)} to {moment(report.until)}</title>\n"
    yield f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
    yield "<header><h1>DMQ archive report</h1>"
    yield f"<p>{moment(report.since)} to {moment(report.until)} UTC ({duration(report.until - report.since)}), "
    yield f"made {moment(report.made_at)}, of {escape(printable(report.tables))}</p></header>\n"
    yield _tiles(report)
    if report.notes:
        yield '<div class="notes">' + "".join(f"<p>{escape(note)}</p>" for note in report.notes) + "</div>\n"
    step = duration(report.step)
    yield _section(lines("Throughput", report.throughput, unit=f"messages/s, by {step}", name="throughput", area=True))
    yield '<div class="pair">'
    yield _section(lines("Lag", report.lag, unit="messages", name="lag"))
    latency, unit = scaled(report.latency)
    yield _section(lines("Latency, stored to acked, p99", latency, unit=unit, name="latency"))
    yield "</div>\n"
    yield _grid(tables.topics(report))
    yield _grid(tables.groups(report))
    if report.trouble:
        yield _section(lines("Retries and dead letters", report.trouble, unit=f"by {step}", name="trouble"))
    yield _letters(report)
    yield _grid(tables.slowest(report))
    yield _grid(tables.outcomes(report))
    yield _grid(tables.differences(report))
    yield _grid(tables.contents(report))
    yield "</main>\n</body>\n</html>\n"


def _tiles(report: Report) -> str:
    stored = next((one for one in report.contents if one.table == "message"), None)
    days = 0
    if stored is not None and stored.first is not None and stored.last is not None:
        days = (stored.last - stored.first).days + 1
    found = [
        ("messages archived", short(stored.rows) if stored else "0", ""),
        ("on disk", size(sum(one.bytes for one in report.contents)), ""),
        ("days", count(days), ""),
        ("archive is behind", duration(report.made_at - report.newest) if report.newest else "-", ""),
        ("in, this period", short(sum(one.messages for one in report.topics)), ""),
        ("acked", short(sum(one.acked for one in report.groups)), ""),
        ("retries", short(sum(one.retries for one in report.groups)), ""),
        ("dead", short(sum(one.dead for one in report.groups)), "warn" if any(g.dead for g in report.groups) else ""),
    ]
    tiles = "".join(
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value, kind in found
    )
    return f'<dl class="tiles">{tiles}</dl>\n'


def _letters(report: Report) -> str:
    grid = tables.dead_letters(report)
    rows = [
        (f"{one.topic} → {one.group or '-'}, {one.reason.lower().replace('_', ' ')}", float(one.count))
        for one in report.dead_letters[:_BARS_MAX]
    ]
    return _grid(grid, bars("By topic, group and reason", rows, name="dead", show=count))


def _section(inside: str) -> str:
    return f"<section>{inside}</section>\n"


def _grid(grid: Grid, chart: str = "") -> str:
    title = f"<h2>{escape(grid.title)}</h2>"
    if not grid.rows:
        return _section(f'{title}<p class="none">{escape(grid.empty)}</p>')

    def cells(tag: str, row: tuple[str, ...], end: str) -> str:
        number = tag.replace(">", ' class="n">')
        return "".join(
            f"{number if index in grid.numbers else tag}{escape(cell)}{end}" for index, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells('<th scope=col>', grid.heads, '</th>')}</tr></thead>"
    body = "".join(f"<tr>{cells('<td>', row, '</td>')}</tr>" for row in grid.rows)
    note = f'<p class="note">{escape(grid.note)}</p>' if grid.note else ""
    table = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
    return _section(f"{title}{chart}{table}{note}")
