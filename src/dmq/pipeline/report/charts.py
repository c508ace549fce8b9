"""Charts as SVG, drawn here: lines over time, columns and bars. No script, no other file.

What always holds: every text that comes from outside is escaped; every chart has a title and a description for those
who do not see it; colours are classes, so that the page decides what they are in light and in dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final, NamedTuple

from dmq.pipeline.report.format import printable, short
from dmq.pipeline.report.model import Point, Series

__all__ = ["bars", "columns", "lines", "nice_ticks", "scaled", "time_ticks"]

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
