"""Figures as people read them, and texts of strangers as they may be shown."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

__all__ = ["count", "duration", "listing", "milliseconds", "moment", "printable", "short", "size"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TEXT_CHARS_MAX: Final = 160


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
