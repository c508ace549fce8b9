"""The table of features has all of them, and names modules and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROW = re.compile(r"\| ([DRTAJ]-\d\d) \|")
COUNTS = {"A": 11, "D": 23, "J": 16, "R": 14, "T": 11}


def rows(root: Path) -> list[list[str]]:
    lines = (root / "docs" / "reference" / "features.md").read_text().splitlines()
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if ROW.match(line)]


def test_every_feature_is_listed_once(root: Path) -> None:
    ids = [row[0].strip() for row in rows(root)]
    assert sorted(ids) == [f"{letter}-{n:02}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def test_every_test_that_the_rules_of_delivery_name_is_there(root: Path) -> None:
    text = (root / "docs" / "reference" / "delivery.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > 40
    assert len(named) == text.count("`tests/")
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (root / path).read_text()]
    assert not missing


def test_every_module_and_test_that_is_named_is_there(root: Path) -> None:
    missing = []
    for feature, _, modules, tests, _ in rows(root):
        paths = [f"src/dmq/{name}" for name in re.findall(r"`([^`]+)`", modules)] + re.findall(r"`([^`]+)`", tests)
        assert paths, feature
        missing += [f"{feature.strip()}: {path}" for path in paths if not (root / path).exists()]
    assert not missing
