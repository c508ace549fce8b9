"""The figures of `./scripts/house`: each rule finds what breaks it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from bench.house import rules
from bench.house.source_tree import SourceTree
from bench.house.table import rows, show

Rule = Callable[[SourceTree], list[str]]


def tree_of(folder: Path, files: dict[str, str]) -> SourceTree:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        for above in path.relative_to(folder).parents:
            if above != Path() and not (folder / above / "__init__.py").exists():
                (folder / above / "__init__.py").write_text("")
    return SourceTree(folder)


LONG = "def long():\n" + "    pass\n" * 70
FITTING = "def fitting():\n" + "    pass\n" * 69

CASES: list[tuple[Rule, dict[str, str], list[str]]] = [
    (
        rules.participles,
        {"dmq/broker/moving.py": "", "dmq/storage/index_reading.py": "", "dmq/storage/ring.py": "", "dmq/mover.py": ""},
        ["dmq/broker/moving.py", "dmq/storage/index_reading.py"],
    ),
    (
        rules.misnamed_modules,
        {
            "dmq/broker/channel.py": "class Consumption: ...\nclass _Own: ...",
            "dmq/storage/queue_indexes.py": "class QueueIndex: ...",
            "dmq/spool/drain.py": "class Drainer: ...",
            "dmq/model.py": "class Message: ...\nclass Receipt: ...",
            "dmq/hashes.py": "class Seed: ...\ndef hash_of(): ...",
        },
        ["dmq.broker.channel:Consumption"],
    ),
    (
        rules.packed_folders,
        {f"dmq/{room}/file{n}.py": "" for room, count in (("full", 16), ("fits", 15)) for n in range(count)},
        ["dmq.full"],
    ),
    (
        rules.unlisted_modules,
        {
            "dmq/broker/__init__.py": '"""In reading order: `cursor`."""',
            "dmq/broker/cursor.py": "",
            "dmq/broker/lease.py": "",
        },
        ["dmq.broker.lease"],
    ),
    (
        rules.duplicate_classes_in_package,
        {
            "dmq/client/a.py": "class Batch: ...\nclass _Own: ...",
            "dmq/client/room/b.py": "class Batch: ...\nclass _Own: ...\nclass Once: ...",
            "dmq/broker/c.py": "class Once: ...",
        },
        ["dmq.client:Batch"],
    ),
    (
        rules.duplicate_classes,
        {"dmq/client/a.py": "class Batch: ...", "dmq/broker/b.py": "class Batch: ...\nclass Once: ..."},
        ["Batch"],
    ),
    (rules.long_files, {"dmq/long.py": "x = 1\n" * 801, "dmq/fits.py": "x = 1\n" * 800}, ["dmq/long.py"]),
    (rules.long_functions, {"dmq/a.py": LONG + FITTING}, ["dmq.a:long"]),
    (
        rules.wide_functions,
        {
            "dmq/a.py": """
                def wide(a, b, c, d, e, f, *, g): ...
                def fits(a, b, c, d, e, f, *args, **kwargs): ...
                class One:
                    def fits(self, a, b, c, d, e, f): ...
                    @staticmethod
                    def wide(a, b, c, d, e, f, g): ...
                class Door:
                    def send(self, a, b, c, d, e, f, g): ...
                    def _own(self, a, b, c, d, e, f, g): ...
                """,
            "dmq/__init__.py": '__all__ = ["Door"]',
            "dmq/cli/send.py": "def send(a, b, c, d, e, f, g): ...\ndef _own(a, b, c, d, e, f, g): ...",
        },
        ["dmq.a:wide", "dmq.a:One.wide", "dmq.a:Door._own", "dmq.cli.send:_own"],
    ),
    (
        rules.positional_calls,
        {
            "dmq/a.py": """
                from elsewhere import Table
                def own(a, b, c, d, e): ...
                def many(*args): ...
                own(1, 2, 3, 4, 5)
                own(1, 2, 3, 4, e=5)
                many(1, 2, 3, 4, 5)
                Table(1, 2, 3, 4, 5)
                """,
            "dmq/b.py": "class Table: ...",
        },
        ["dmq.a:5 own"],
    ),
    (
        rules.half_classes,
        {
            "dmq/broker/base.py": """
                class Half: ...
                class Seam(Protocol): ...
                class Used: ...
                class Typed: ...
                class Two: ...
                class Near: ...
                class Own(Near): ...
                """,
            "dmq/broker/child.py": """
                from dmq.broker.base import Half, Seam, Two, Typed, Used
                class Whole(Half): ...
                class Real(Seam): ...
                class More(Used): ...
                class Other(Typed): ...
                class First(Two): ...
                class Second(Two): ...
                """,
            "dmq/broker/user.py": """
                from dmq.broker.base import Used
                if TYPE_CHECKING:
                    from dmq.broker.base import Typed
                """,
        },
        ["dmq.broker.base:Half", "dmq.broker.base:Near", "dmq.broker.base:Typed"],
    ),
    (
        rules.wrong_broker_takers,
        {
            "dmq/broker/broker.py": "class Broker: ...",
            "dmq/broker/delivery/channel.py": "if TYPE_CHECKING:\n    from dmq.broker.broker import Broker",
            "dmq/broker/wire/session.py": "from dmq.broker.broker import Broker",
            "dmq/broker/server.py": "from dmq.broker.broker import Broker",
        },
        ["dmq.broker.delivery.channel"],
    ),
    (
        rules.import_cycles,
        {
            "dmq/a.py": "import dmq.b",
            "dmq/b.py": "from dmq.c import x",
            "dmq/c.py": "if TYPE_CHECKING:\n    from dmq import a",
            "dmq/d.py": "import dmq.e",
            "dmq/e.py": "def late():\n    import dmq.d",
        },
        ["dmq.a dmq.b dmq.c"],
    ),
    (
        rules.late_cycles,
        {"dmq/d.py": "import dmq.e", "dmq/e.py": "def late():\n    import dmq.d", "dmq/f.py": "import dmq.d"},
        ["dmq.d dmq.e"],
    ),
    (rules.vague_words, {"dmq/a.py": "x = 1\n# Whoever waits, and whoever asks."}, ["dmq/a.py:2", "dmq/a.py:2"]),
    (rules.silent_docstrings, {"dmq/a.py": '"""See the ' + 'module."""'}, ["dmq/a.py:1"]),
]


@pytest.mark.parametrize(("rule", "files", "found"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_finds_what_breaks_it(rule: Rule, files: dict[str, str], found: list[str], tmp_path: Path) -> None:
    assert rule(tree_of(tmp_path, files)) == found


def test_every_rule_has_a_case_and_a_figure(tmp_path: Path) -> None:
    assert {rule.__name__ for rule, _, _ in CASES} | {"broker_takers"} == set(rules.__all__)


def test_generated_lines_are_counted_apart(tmp_path: Path) -> None:
    tree_of(tmp_path, {"dmq/a.py": "# Generated by a script.\nx = 1\n", "dmq/b.py": "x = 1\n"})
    figures = {row.name: row.now for row in rows(tmp_path, trace=False)}
    assert figures["lines of src, without generated ones"] == "1"
    assert figures["lines of generated files"] == "2"


def test_the_table_lists_the_places_behind_a_figure_on_request(tmp_path: Path) -> None:
    tree_of(tmp_path, {"dmq/broker/moving.py": ""})
    table = rows(tmp_path, trace=False)
    assert "dmq/broker/moving.py" not in show(table)
    assert "dmq/broker/moving.py" in show(table, detail=True)
