"""Durations as people write them: `1.5s`, `10m`, `2h`, `7d`. Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_duration"]

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float | None:
    """The seconds of a duration; None if the text is not a number with a unit (ms, s, m, h or d)."""
    found = _DURATION.fullmatch(text)
    return None if found is None else float(found[1]) * _SECONDS[found[2]]
