"""The figures of a source tree beside what they were and what they should be.

*Before* is the tree that had one folder for each layer and files of at most 500 lines, measured by this same code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.house import rules
from bench.house.source_tree import SourceTree

__all__ = ["Row", "routes", "rows", "show"]

ROUTE = Path(__file__).with_name("route.py")
ROOMY = ("dmq.broker", "dmq.client", "dmq.storage", "dmq.pipeline", "dmq.outbox")


@dataclass(frozen=True)
class Row:
    """One figure, as text, and the places behind it."""

    name: str
    before: str
    now: str
    aim: str
    places: Sequence[str] = field(default=())


def rows(src: Path, *, trace: bool = True) -> list[Row]:
    """Every figure of the tree below a folder such as `src`; with `trace` a broker of it is run for the routes."""
    tree = SourceTree(src)
    return [*(routes(tree) if trace else ()), *_counts(tree), *_rules(tree)]


def routes(tree: SourceTree) -> list[Row]:
    """The ways of a message through the files."""
    own = tree.root.parent / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    # Nothing is written into the tree that is measured, and it is found before one that is installed.
    environment = os.environ | {"PYTHONPATH": str(tree.root), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run([python, "-P", str(ROUTE)], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(answer.stdout)

    def row(name: str, route: str, before: str, aim: str) -> Row:
        files, switches = found[route]["files"], found[route]["switches"]
        calls = [line for stays in found[route]["threads"] for line in ("a thread:", *(f"  {stay}" for stay in stays))]
        pairs = [f"{count:3} {pair}" for pair, count in found[route]["pairs"]]
        return Row(name, before, f"{len(files)} ({switches})", aim, [*calls, "switches between two files:", *pairs])

    return [
        row("files a lone send passes, client to ack (file switches)", "send", "51 (130)", "about 30 (under 70)"),
        row("files of send + push + ack", "send_push_ack", "83 (361)", "about 50"),
        row("files of pull + ack", "pull_ack", "68 (247)", "about 45"),
    ]


def _counts(tree: SourceTree) -> list[Row]:
    roomy = [module for module in tree.modules if module.package in ROOMY and not module.is_package]
    by_room = [f"{room}: {sum(module.package == room for module in roomy)}" for room in ROOMY]
    written = sum(len(module.lines) for module in tree.modules if not module.is_generated)
    generated = [module for module in tree.modules if module.is_generated]
    generated_lines = sum(len(module.lines) for module in generated)
    return [
        Row("modules in broker, client, storage, pipeline, outbox", "296", str(len(roomy)), "about 230", by_room),
        Row("lines of src, without generated ones", "65,710", f"{written:,}", "60,000"),
        Row("lines of generated files", "0", f"{generated_lines:,}", "", [module.place for module in generated]),
    ]


def _rules(tree: SourceTree) -> list[Row]:
    def row(name: str, before: int | str, places: Sequence[str], aim: str = "0") -> Row:
        return Row(name, str(before), str(len(places)), aim, places)

    cycles = rules.import_cycles(tree)
    sizes = ", ".join(str(len(circle.split())) for circle in cycles)
    return [
        row("files named by a participle", 82, rules.participles(tree)),
        row("files that are not named after their only class", 8, rules.misnamed_modules(tree)),
        row("public class names defined more than once", 65, rules.duplicate_classes(tree), "0 within a package"),
        row("… within a package", 11, rules.duplicate_classes_in_package(tree)),
        row("base classes that only halve a class", 7, rules.half_classes(tree)),
        row("modules that take the whole Broker", 37, rules.broker_takers(tree), "broker, server, wire/, diagnostics/"),
        row("… others than those", 36, rules.wrong_broker_takers(tree)),
        Row(
            "circles of imports, those for types counted (their sizes)",
            "5 (15, 5, 2, 2, 2)",
            f"{len(cycles)} ({sizes})" if cycles else "0",
            "0",
            cycles,
        ),
        row("… and more when those inside of functions count", 2, rules.late_cycles(tree)),
        row("files over 800 lines", 0, rules.long_files(tree)),
        row("functions over 70 lines", 2, rules.long_functions(tree)),
        row("functions with more than six parameters", 73, rules.wide_functions(tree)),
        row("calls with more than four positional arguments", 419, rules.positional_calls(tree)),
        row("folders with more than 15 files", 8, rules.packed_folders(tree)),
        row("modules their folder's __init__ does not name", 351, rules.unlisted_modules(tree)),
        row("lines with “whoever”", 103, rules.vague_words(tree)),
        row("docstrings “See the module.”", 67, rules.silent_docstrings(tree)),
    ]


def show(table: Sequence[Row], *, detail: bool = False) -> str:
    """The table as text, and with `detail` the places behind each figure."""
    cells = [("", "before", "now", "aim"), *((row.name, row.before, row.now, row.aim) for row in table)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if detail:
        for row in table:
            lines += ["", f"{row.name}: {row.now}", *(f"  {place}" for place in row.places)]
    return "\n".join(lines)
