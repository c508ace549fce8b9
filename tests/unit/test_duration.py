"""Durations as people write them."""

from __future__ import annotations

import pytest

from dmq.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30.0), ("1.5s", 1.5), ("10m", 600.0), ("2h", 7200.0), ("7d", 604_800.0), ("0s", 0.0)],
)
def test_a_number_and_a_unit_are_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1 s", "1.s", "2w", "1h30m", "1e3s", " 1s"])
def test_anything_else_is_not(text: str) -> None:
    assert parse_duration(text) is None
