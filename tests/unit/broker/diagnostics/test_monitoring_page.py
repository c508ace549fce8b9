"""The page on monitoring has every metric as it is, and its alerts name metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

from dmq.broker.diagnostics.metrics import FIGURES, SERIES


def test_every_metric_is_documented_as_it_is(root: Path) -> None:
    lines = (root / "docs" / "guide" / "monitoring.md").read_text().splitlines()
    documented = [line for line in lines if line.startswith("| `dmq_")]
    assert documented == [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for table in (FIGURES, SERIES)
        for metric in sorted(table.values(), key=lambda metric: metric.name)
    ]


def test_the_guides_name_metrics_that_exist(root: Path) -> None:
    known = {metric.name for metric in (*FIGURES.values(), *SERIES.values())}
    for page in (root / "docs").rglob("*.md"):
        named = set(
            re.findall(
                r"\bdmq_(?!broker\b|outbox_|inbox_|nameserver_)\w+(?:_total|_seconds|_bytes|_messages|_ratio)\b",
                page.read_text(),
            )
        )
        assert named <= known, page
