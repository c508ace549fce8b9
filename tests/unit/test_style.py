"""The rules of style that a linter does not know.

`bench.house.rules` finds the places that break them, for these tests and for `./scripts/house`; the walls between rooms
are import contracts in `pyproject.toml`. `tests.unit.style_debt` has the places that are not mended yet.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from bench.house import rules
from bench.house.source_tree import SourceTree
from tests.unit import style_debt

ROOT = Path(__file__).resolve().parents[2]
TREE = SourceTree(ROOT / "src")
SOURCES = [module.path for module in TREE.modules]
CODE = sorted(path for folder in ("src", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py"))
# Put together, so that this file does not find itself.
LATER = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|X" + r"XX)\b")

Rule = Callable[[SourceTree], list[str]]

# What to do about a place that breaks the rule.
RULES: list[tuple[Rule, str]] = [
    (rules.participles, "name a file by a noun: `mover`, not `moving`"),
    (rules.misnamed_modules, "a file holds the class of its name"),
    (rules.packed_folders, "a folder of more than 15 files gets rooms"),
    (rules.unlisted_modules, "the docstring of `__init__` names the files and rooms of its folder, in reading order"),
    (rules.long_files, "a file has at most 800 lines: part it, it is two things"),
    (rules.long_functions, "a function has at most 70 lines: it has steps, and they have names"),
    (rules.half_classes, "a class is whole: join the two, or make them two objects with a seam that has a name"),
    (rules.duplicate_classes_in_package, "one word, one thing: give one of them another name"),
    (rules.wrong_broker_takers, "take what is used of the broker, not all of it"),
    (rules.import_cycles, "two modules that know each other are one, or lack a third below both"),
    (rules.late_cycles, "an import inside of a function does not hide that two modules know each other"),
    (rules.wide_functions, "more than six parameters are a struct"),
]
COUNTED: list[tuple[Rule, str]] = [
    (rules.positional_calls, "name the arguments from the fifth on"),
    (rules.vague_words, "say who: the caller, the client, the thread"),
    (rules.silent_docstrings, "leave out a docstring that says nothing"),
]


def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def id_of(value: object) -> str:
    return getattr(value, "__name__", "")


def test_there_is_something_to_check() -> None:
    assert ROOT / "src" / "dmq" / "__init__.py" in SOURCES


@pytest.mark.parametrize(("rule", "advice"), RULES, ids=id_of)
def test_the_tree_keeps_a_rule(rule: Rule, advice: str) -> None:
    assert sorted(set(rule(TREE)) - style_debt.PLACES.get(rule.__name__, set())) == [], advice


@pytest.mark.parametrize(("rule", "advice"), RULES, ids=id_of)
def test_what_is_mended_leaves_the_list_of_debts(rule: Rule, advice: str) -> None:
    assert sorted(style_debt.PLACES.get(rule.__name__, set()) - set(rule(TREE))) == [], "take it out of style_debt.py"


@pytest.mark.parametrize(("rule", "advice"), COUNTED, ids=id_of)
def test_what_is_counted_gets_no_more(rule: Rule, advice: str) -> None:
    allowed = style_debt.COUNTS.get(rule.__name__, {})
    found = Counter(layer_of(place) for place in rule(TREE))
    assert {layer: count for layer, count in found.items() if count > allowed.get(layer, 0)} == {}, advice


def layer_of(place: str) -> str:
    """`dmq.broker` of `dmq.broker.wire.session:12 Name` or `dmq/broker/wire/session.py:12`."""
    name = place.partition(":")[0].removesuffix(".py").replace("/", ".")
    return ".".join(name.split(".")[:2])


def test_every_debt_is_one_of_a_rule() -> None:
    assert style_debt.PLACES.keys() <= {rule.__name__ for rule, _ in RULES}
    assert style_debt.COUNTS.keys() <= {rule.__name__ for rule, _ in COUNTED}


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


def test_every_sampling_is_run_whole_by_soak() -> None:
    # A test without the marker is taken by ./scripts/test alone, which takes only a share.
    unmarked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bsample_size\(", text := path.read_text()) and not re.search(r"mark\.(sampled|soak)\b", text)
    ]
    assert names(unmarked) == [], "mark what uses sample_size() with pytest.mark.sampled"
