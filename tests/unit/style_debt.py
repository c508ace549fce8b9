"""Places that break a rule of style and are not mended yet; see `tests/unit/test_style.py`.

A place that is mended has to leave its list, and none may be added: these lists only get shorter.
"""

from __future__ import annotations

# By the name of the rule in `bench.house.rules`.
PLACES: dict[str, set[str]] = {}

# How many there are at most, by layer.
COUNTS: dict[str, dict[str, int]] = {}
