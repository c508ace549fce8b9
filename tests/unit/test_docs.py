"""What the documentation shows works: its Python blocks are run, in order, against a broker in memory.

A reader comes from the README, and has run what it shows on the same broker: so does a guide here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dmq
import dmq.aio
from dmq.testing import TestBroker

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
# Run in tests/spark, where there is a session, and in tests/integration/cli, where there is a shard.
ELSEWHERE = ("spark", "archive", "replication")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "dmq://127.0.0.1:9611"


def run_blocks(page: Path, url: str, names: dict[str, Any], without: str | None = None) -> None:
    """Run the Python blocks of a page, one after the other, but for those with a word in them."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if without is None or without not in match[1]:
            line = text.count("\n", 0, match.start()) + 1
            exec(compile("\n" * line + match[1].replace(ADDRESS, url), str(page), "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_what_a_page_shows_works(
    page: Path,
    dmq_broker: TestBroker,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # for pages that name a directory
    names: dict[str, Any] = {"__name__": __name__}  # a module that exists: dataclasses look it up
    try:
        run_blocks(README, dmq_broker.url, {}, without="spark")
        run_blocks(page, dmq_broker.url, names)
        for name, value in [*names.items()]:
            if name.startswith("test_"):
                with TestBroker() as broker:
                    value(broker)
    finally:
        for value in names.values():
            if isinstance(value, dmq.Client):
                value.close()


@pytest.mark.parametrize(
    "page", sorted({README, *(ROOT / "docs").rglob("*.md")}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_fences_of_a_page_stand_alone_and_close(page: Path) -> None:
    """A block that lost its line breaks would be no block, and would be run by nobody."""
    fences = [line.strip() for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert [line for line in fences if not re.fullmatch(r"```\w*", line)] == []
    assert [line for line in fences[1::2] if line != "```"] == []
    assert len(fences) % 2 == 0


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{page.name}: {link}"
        for page in [ROOT / "docs" / "README.md", *PAGES, *(ROOT / "docs" / "internals").glob("*.md")]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "internals").glob("*.md")), ids=lambda page: page.stem)
def test_every_file_that_a_page_for_engineers_names_exists(page: Path) -> None:
    files = [f"/{path.relative_to(ROOT)}" for path in (ROOT / "src").rglob("*.py")]
    named = set(re.findall(r"(?<![\w/.])[\w/]+\.py\b", page.read_text()))
    named = {path for path in named if not (ROOT / path).exists()}
    assert sorted(path for path in named if not any(file.endswith(f"/{path}") for file in files)) == []


GLOSSARY = (ROOT / "docs" / "internals" / "glossary.md").read_text()
ENTRY = re.compile(r"^\| ([^|]+) \| [^|]+ \| `([\w/]+(?:\.py|/))` \|$", re.MULTILINE)


def test_every_entry_of_the_glossary_names_a_file_that_exists() -> None:
    entries = ENTRY.findall(GLOSSARY)
    lines = [line for line in GLOSSARY.splitlines() if line.startswith("| ") and "| where |" not in line]
    assert len(entries) == len(lines), "an entry has a word, a meaning and one path in backticks"
    assert [path for _, path in entries if not (ROOT / "src" / "dmq" / path).exists()] == []


def test_a_word_stands_once_in_the_glossary() -> None:
    words = [word for word, _ in ENTRY.findall(GLOSSARY)]
    assert sorted({word for word in words if words.count(word) > 1}) == []


def test_every_room_has_a_word_in_the_glossary() -> None:
    package = ROOT / "src" / "dmq"
    rooms = {path.parent.relative_to(package) for path in package.glob("*/*/__init__.py")}
    named = {room for _, path in ENTRY.findall(GLOSSARY) for room in (Path(path), Path(path).parent)}
    # Rooms of the command line hold commands, and those of the tests' tools no word of the broker's.
    assert sorted(str(room) for room in rooms - named if room.parts[0] not in ("cli", "testing")) == []
