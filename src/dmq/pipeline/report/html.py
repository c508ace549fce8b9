"""The report as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

It is made for light and dark, wide and narrow screens, and paper.

What always holds: every text from the archive is escaped; a page opened from a disk without a network is the same page.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from dmq.pipeline.report import tables
from dmq.pipeline.report.charts import bars, lines, scaled
from dmq.pipeline.report.format import count, duration, moment, printable, short, size
from dmq.pipeline.report.model import Report
from dmq.pipeline.report.tables import Grid

__all__ = ["STYLE", "as_html"]


STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6675; --rule: #e1e5ea; --grid: #e9ecf0;
  --c0: #2563c9; --c1: #c2410c; --c2: #0f8a5f; --c3: #8b3fc4; --c4: #a16207; --c5: #b91c5c; --warn: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa6b5; --rule: #2c3540; --grid: #262e38;
    --c0: #6ea8fe; --c1: #fb923c; --c2: #4ade9f; --c3: #c792f5; --c4: #eab94d; --c5: #f47aa8; --warn: #ff8a7a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 10px; }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0; padding: 0;
}
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles .warn dd { color: var(--warn); }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px; margin: 0 0 16px;
}
.pair {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px; margin: 0 0 16px;
}
.pair section { margin: 0; }
figure { margin: 0; }
figcaption { font-weight: 600; margin: 0 0 8px; }
.unit { color: var(--soft); font-weight: 400; font-size: 13px; margin-left: 6px; }
svg { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .mark { stroke: var(--soft); stroke-width: 1; }
svg text { fill: var(--ink); font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg polyline { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg circle { fill: var(--line); }
svg .area { fill: var(--c0); opacity: 0.12; }
svg .bar { fill: var(--c0); }
.s0 { --line: var(--c0); } .s1 { --line: var(--c1); } .s2 { --line: var(--c2); }
.s3 { --line: var(--c3); } .s4 { --line: var(--c4); } .s5 { --line: var(--c5); }
.s1 polyline { stroke-dasharray: 6 3; } .s2 polyline { stroke-dasharray: 2 3; }
.s3 polyline { stroke-dasharray: 9 3 2 3; }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 0; padding: 0; font-size: 13px;
}
.legend li { display: flex; align-items: center; gap: 7px; overflow-wrap: anywhere; }
.legend .key { width: 20px; flex: none; } .legend .key polyline { stroke-width: 2.4; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 70px; }
.note, .none { color: var(--soft); font-size: 13px; margin: 10px 0 0; }
.notes { border-left: 3px solid var(--c4); padding-left: 12px; margin: 0 0 16px; }
@media print { body { background: #fff; } section, .tiles div { break-inside: avoid; } }
"""


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
