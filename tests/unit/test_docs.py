"""What the documentation shows works: its Python blocks are run, in order, against a broker in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dmq
import dmq.aio
from dmq.testing import TestBroker

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
NEED_SPARK = ("spark", "archive")  # run in tests/spark, where there is a session
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "dmq://127.0.0.1:9611"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in NEED_SPARK], ids=lambda page: page.stem)
def test_what_a_page_shows_works(
    page: Path,
    dmq_broker: TestBroker,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # for pages that name a directory
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            source = "\n" * line + match[1].replace(ADDRESS, dmq_broker.url)
            exec(compile(source, str(page), "exec"), names)
        for name, value in [*names.items()]:
            if name.startswith("test_"):
                with TestBroker() as broker:
                    value(broker)
    finally:
        for value in names.values():
            if isinstance(value, dmq.Client):
                value.close()


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{page.name}: {link}"
        for page in [ROOT / "docs" / "README.md", *PAGES]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []
