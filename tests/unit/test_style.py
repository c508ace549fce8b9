"""The rules of style that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CODE = sorted(path for folder in ("src", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py"))
# Put together, so that this file does not find itself.
LATER = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|X" + r"XX)\b")


def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_there_is_something_to_check() -> None:
    assert ROOT / "src" / "dmq" / "__init__.py" in SOURCES


def test_no_file_outgrows_800_lines() -> None:
    too_long = [path for path in SOURCES if len(path.read_text().splitlines()) > 800]
    assert names(too_long) == [], "part them: each is two things"


def test_every_module_says_what_it_is_for() -> None:
    # An empty __init__ outside of the package only makes a folder importable.
    silent = [
        path
        for path in CODE
        if (path in SOURCES or path.read_text()) and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert names(silent) == [], "give them a docstring"


def test_nothing_is_left_for_later() -> None:
    assert names(path for path in CODE if LATER.search(path.read_text())) == []


def test_every_module_is_named_after_a_thing() -> None:
    parts = {part for path in SOURCES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not parts & {"utils", "util", "helpers", "helper", "manager", "impl", "common", "misc"}
