"""The report as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

It is made for light and dark, wide and narrow screens, and paper. Its charts are SVG, drawn here: lines over time,
columns and bars.

What always holds: every text from the archive is escaped; a page opened from a disk without a network is the same page.
Every chart has a title and a description for those who do not see it; colours are classes, so that the page decides
what they are in light and in dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final, NamedTuple

from dmq.pipeline.report import tables
from dmq.pipeline.report.model import Point, Report, Series
from dmq.pipeline.report.tables import Grid, count, duration, listing, moment, printable, short, size

__all__ = ["STYLE", "as_html", "bars", "columns", "lines", "nice_ticks", "scaled", "time_ticks"]

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
  display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: 12px; margin: 22px 0; padding: 0;
}
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 20px; font-weight: 600; white-space: nowrap; }
.tiles .warn dd { color: var(--warn); }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px; margin: 0 0 16px;
}
.pair {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px; margin: 0 0 16px;
}
.pair section { margin: 0; }
figure { margin: 0; }
figcaption { font-weight: 600; font-size: 17px; margin: 0 0 8px; }
.unit { color: var(--soft); font-weight: 400; font-size: 13px; margin-left: 6px; }
svg { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .mark { stroke: var(--soft); stroke-width: 1; }
svg text { fill: var(--ink); font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg polyline { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg circle { fill: var(--line); }
svg .area { fill: var(--c0); opacity: 0.12; }
svg .bar { fill: var(--c0); } svg .peak { fill: var(--c1); }
.chart { overflow-x: auto; } .chart svg { min-width: 460px; } .chart svg.wide { min-width: 760px; }
.bars { list-style: none; margin: 0; padding: 0; font-size: 14px; }
.bars li {
  display: grid; grid-template-columns: minmax(0, 42%) 1fr minmax(44px, auto); gap: 2px 12px; align-items: center;
  padding: 3px 0;
}
.bars .label { overflow-wrap: anywhere; line-height: 1.3; }
.bars .value { text-align: right; font-variant-numeric: tabular-nums; }
.bars .track { height: 14px; }
@media (max-width: 560px) {
  .bars li { grid-template-columns: 1fr minmax(44px, auto); } .bars .label { grid-column: 1 / -1; }
}
details { margin: 12px 0 0; font-size: 13px; color: var(--soft); } summary { cursor: pointer; width: max-content; }
pre {
  margin: 8px 0 0; padding: 10px 12px; background: var(--page); border: 1px solid var(--rule); border-radius: 6px;
  overflow-x: auto; color: var(--ink); font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
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
th, td { text-align: left; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 130px; } td.n { min-width: 0; }
.note, .none { color: var(--soft); font-size: 13px; margin: 10px 0 0; }
.notes { border-left: 3px solid var(--c4); padding-left: 12px; margin: 0 0 16px; }
@media print { body { background: #fff; } section, .tiles div { break-inside: avoid; } }
"""


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
    yield from _charts(report)
    yield _grid(report, "topics", tables.topics(report))
    yield _grid(report, "groups", tables.groups(report))
    yield _grid(report, "dead_letters", tables.dead_letters(report))
    yield _grid(report, "slowest", tables.slowest(report))
    yield _grid(report, "outcomes", tables.outcomes(report))
    yield _grid(report, "differences", tables.differences(report))
    yield _grid(report, "", tables.contents(report))
    yield "</main>\n</body>\n</html>\n"


def _charts(report: Report) -> Iterator[str]:
    """The charts, the most important first; each with the command that gives what it shows."""
    step = duration(report.step)

    def chart(name: str, inside: str) -> str:
        return _section(inside + _query(report, name))

    throughput = lines("Throughput", report.throughput, unit=f"messages/s, by {step}", name="throughput", is_wide=True)
    yield chart("throughput", throughput)
    yield '<div class="pair">'
    yield chart("lag", lines("Lag", report.lag, unit="messages", name="lag"))
    latency, unit = scaled(report.latency)
    yield chart("latency", lines("Latency, stored to acked, p99", latency, unit=unit, name="latency"))
    yield chart("throughput", lines("Retries and dead letters", report.trouble, unit=f"by {step}", name="trouble"))
    hours = {one.hour: float(one.messages) for one in report.hours}
    shown = [(f"{hour:02d}:00", hours.get(hour, 0.0)) for hour in range(24)]
    yield chart("hours", columns("Busiest hours", shown, unit="messages in, by hour of the day, UTC", name="hours"))
    retries = [(one.group, one.topic, float(one.retries)) for one in report.retries]
    yield chart(
        "retries", bars("Retries by group", retries, count) or _none("Retries by group", "Nothing was retried.")
    )
    reasons = [(_reason(reason), "", float(times)) for reason, times in report.reasons]
    title = "Dead letters by reason"
    yield chart("reasons", bars(title, reasons, count) or _none(title, "No message died on these days."))
    yield "</div>\n"
    keys = [(one.key, one.topic, float(one.messages)) for one in report.keys]
    title = "Most frequent keys"
    yield chart("keys", bars(title, keys, count) or _none(title, "No key has more than one message in this period."))


def _reason(reason: str) -> str:
    return reason.lower().replace("_", " ") or "without a reason"


def _none(title: str, said: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="none">{escape(said)}</p>'


def _query(report: Report, name: str) -> str:
    """The command that gives the rows behind a part of the report, folded."""
    command = report.commands.get(name)
    if command is None:
        return ""
    return f'<details><summary>Query</summary><pre tabindex="0">{escape(listing(command))}</pre></details>'


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
        ("in, this period", short(report.totals.messages), ""),
        ("acked", short(report.totals.acked), ""),
        ("retries", short(report.totals.retries), ""),
        ("dead", short(report.totals.dead), "warn" if report.totals.dead else ""),
    ]
    tiles = "".join(
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value, kind in found
    )
    return f'<dl class="tiles">{tiles}</dl>\n'


def _section(inside: str) -> str:
    return f"<section>{inside}</section>\n"


def _grid(report: Report, name: str, grid: Grid) -> str:
    if not grid.rows:
        return _section(_none(grid.title, grid.empty))

    def cells(tag: str, row: tuple[str, ...], end: str) -> str:
        number = tag.replace(">", ' class="n">')
        return "".join(
            f"{number if index in grid.numbers else tag}{escape(cell)}{end}" for index, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells('<th scope=col>', grid.heads, '</th>')}</tr></thead>"
    body = "".join(f"<tr>{cells('<td>', row, '</td>')}</tr>" for row in grid.rows)
    note = f'<p class="note">{escape(grid.note)}</p>' if grid.note else ""
    table = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
    return _section(f"<h2>{escape(grid.title)}</h2>{table}{note}{_query(report, name)}")


_WIDTH: Final = 560  # about as wide as it is shown, so that texts have the size that they say
_WIDE: Final = 1120
_HEIGHT: Final = 240
_LEFT: Final = 52
_RIGHT: Final = 16
_TOP: Final = 12
_BOTTOM: Final = 28
_TICKS: Final = 4
_TIME_STEPS: Final = [
    timedelta(minutes=n) for n in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 43200)
]
_LABELS_MAX: Final = 8
_UNITS: Final = [(3_600_000.0, "h"), (60_000.0, "min"), (1000.0, "s")]  # by milliseconds


class _Frame(NamedTuple):
    """Where values lie on the picture."""

    since: datetime
    until: datetime
    top: float
    width: int

    def x(self, at: datetime) -> float:
        share = (at - self.since) / (self.until - self.since)
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return _level(value, self.top)


def nice_ticks(greatest: float) -> list[float]:
    """Round values from 0 up to the first that is not below the greatest."""
    if greatest <= 0 or not math.isfinite(greatest):
        return [0.0, 1.0]
    rough = greatest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999999)
    return [round(step * n, 10) for n in range(math.ceil(greatest / step - 1e-9) + 1)]


def time_ticks(since: datetime, until: datetime) -> list[tuple[datetime, str]]:
    """Round moments with what to write below them; a new day is written as its date."""
    length = until - since
    step = next((step for step in _TIME_STEPS if length / step <= _LABELS_MAX), length / _LABELS_MAX)
    midnight = since.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight + step * math.ceil((since - midnight) / step)
    found = []
    while at <= until:
        is_day = at.hour == at.minute == 0
        found.append((at, at.strftime("%b %d" if is_day else "%H:%M")))
        at += step
    return found


def scaled(series: Sequence[Series]) -> tuple[list[Series], str]:
    """Milliseconds in the unit that makes them readable, and its name."""
    greatest = max((_greatest(one) for one in series), default=0.0)
    per, unit = next((found for found in _UNITS if greatest >= 2 * found[0]), (1.0, "ms"))
    return [
        Series(one.name, tuple(Point(at, None if value is None else value / per) for at, value in _values(one)))
        for one in series
    ], unit


def _values(series: Series) -> Iterator[tuple[datetime, float | None]]:
    return ((point.at, point.value) for point in series.points)


def lines(title: str, series: Sequence[Series], *, unit: str, name: str, is_wide: bool = False) -> str:
    """A chart of lines over time.

    Parameters:
        unit: what the values are, for the axis and the description.
        name: of the picture in its page, for its title's id.
        is_wide: over the whole page, with the first line filled below.
    """
    points = [point for one in series for point in one.points]
    values = [point.value for point in points if point.value is not None]
    if not values:
        return _nothing(title)
    ticks = nice_ticks(max(values))
    last = max(point.at for point in points)
    steps = sorted({point.at for point in points})
    until = last + (steps[1] - steps[0] if len(steps) > 1 else timedelta(minutes=1))
    frame = _Frame(steps[0], until, ticks[-1], _WIDE if is_wide else _WIDTH)
    most = "; ".join(f"{printable(one.name)}: at most {short(_greatest(one))} {unit}" for one in series)
    parts = [
        _head(title, unit, name, most, width=frame.width),
        *_levels(ticks, frame.width),
        *_moments(frame),
    ]
    if is_wide:
        parts.append(_area(series[0].points, frame))
    for index, one in enumerate(series):
        tip = escape(f"{printable(one.name)}: at most {short(_greatest(one))} {unit}")
        parts.append(f'<g class="s{index}"><title>{tip}</title>{"".join(_strokes(one.points, frame))}</g>')
    parts.append(f"</svg></div>{_legend([one.name for one in series])}</figure>")
    return "".join(parts)


def _nothing(title: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="none">Nothing in this period.</p>'


def _head(title: str, unit: str, name: str, said: str, width: int = _WIDTH) -> str:
    """The beginning of a chart, up to what is drawn."""
    kind = "wide" if width > _WIDTH else "plain"
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span></figcaption><div class="chart">'
        f'<svg class="{kind}" viewBox="0 0 {width} {_HEIGHT}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(said)}</desc>'
    )


def _greatest(series: Series) -> float:
    return max((point.value for point in series.points if point.value is not None), default=0.0)


def _level(value: float, top: float) -> float:
    return round(_HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM), 1)


def _levels(ticks: Sequence[float], width: int = _WIDTH) -> Iterator[str]:
    for value in ticks:
        y = _level(value, ticks[-1])
        yield f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{short(value)}</text>'


def _moments(frame: _Frame) -> Iterator[str]:
    for at, label in time_ticks(frame.since, frame.until):
        x = frame.x(at)
        yield f'<line class="mark" x1="{x}" x2="{x}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 4}"/>'
        if x < frame.width - _RIGHT - 8:
            yield f'<text class="tick" x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{label}</text>'


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Unbroken stretches: where nothing is known the line is cut."""
    run: list[Point] = []
    for point in points:
        if point.value is None:
            if run:
                yield run
            run = []
        else:
            run.append(point)
    if run:
        yield run


def _strokes(points: Sequence[Point], frame: _Frame) -> Iterator[str]:
    for run in _runs(points):
        if len(run) == 1:
            yield f'<circle cx="{frame.x(run[0].at)}" cy="{frame.y(run[0].value or 0.0)}" r="2.5"/>'
        else:
            yield f'<polyline points="{_path(run, frame)}"/>'


def _path(points: Sequence[Point], frame: _Frame) -> str:
    return " ".join(f"{frame.x(point.at)},{frame.y(point.value or 0.0)}" for point in points)


def _area(points: Sequence[Point], frame: _Frame) -> str:
    known = [point for point in points if point.value is not None]
    floor = frame.y(0.0)
    if len(known) < 2:
        return ""
    first, last = frame.x(known[0].at), frame.x(known[-1].at)
    return f'<polygon class="area" points="{first},{floor} {_path(known, frame)} {last},{floor}"/>'


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<li><svg class="key s{index}" viewBox="0 0 18 8" aria-hidden="true"><polyline points="1,4 17,4"/></svg>'
        f"{escape(printable(name))}</li>"
        for index, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def bars(title: str, rows: Sequence[tuple[str, str, float]], show: Callable[[float], str] = short) -> str:
    """Horizontal bars, each with a name and what that belongs to, which may be empty.

    Names and values are text of the page, which wraps where a picture clips.
    """
    if not rows:
        return ""
    greatest = max(value for _, _, value in rows) or 1.0
    items = "".join(
        f'<li><span class="label">{escape(printable(label))}{_owner(owner)}</span>'
        '<svg class="track" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar" width="{max(0.5, value / greatest * 100):.1f}" height="10"/></svg>'
        f'<span class="value">{escape(show(value))}</span></li>'
        for label, owner, value in rows
    )
    return f'<figure><figcaption>{escape(title)}</figcaption><ol class="bars">{items}</ol></figure>'


def _owner(owner: str) -> str:
    return f' <span class="unit">of {escape(printable(owner))}</span>' if owner else ""


def columns(title: str, rows: Sequence[tuple[str, float]], *, unit: str, name: str) -> str:
    """Upright bars, one for each name, in their order; the highest is marked with its value."""
    if not any(value for _, value in rows):
        return _nothing(title)
    greatest = max(value for _, value in rows)
    ticks = nice_ticks(greatest)
    floor, width = _HEIGHT - _BOTTOM, (_WIDTH - _LEFT - _RIGHT) / len(rows)
    every = -(-len(rows) // _LABELS_MAX)
    peak = next(label for label, value in rows if value == greatest)
    parts = [_head(title, unit, name, f"most at {peak}: {short(greatest)} {unit}"), *_levels(ticks)]
    for index, (label, value) in enumerate(rows):
        left, height = round(_LEFT + index * width, 1), round(value / ticks[-1] * (floor - _TOP), 1)
        tip = f"<title>{escape(f'{label}: {short(value)} {unit}')}</title>"
        kind = "peak" if label == peak else "bar"
        shape = f'x="{left + width * 0.14:.1f}" y="{floor - height:.1f}" width="{width * 0.72:.1f}" height="{height}"'
        parts.append(f'<rect class="{kind}" {shape}>{tip}</rect>')
        if index % every == 0:
            x = round(left + width / 2, 1)
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>')
    parts.append("</svg></div></figure>")
    return "".join(parts)
