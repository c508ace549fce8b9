"""Who imports whom inside of a source tree, and the circles in it.

An import is `plain`, for `types` only (below `if TYPE_CHECKING`) or `late` (inside of a function). Importing a package
counts as importing its `__init__`; importing a module does not count as importing the packages around it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from bench.house.source_tree import Module, SourceTree

__all__ = ["Import", "cycles", "imports"]

Kind = Literal["plain", "types", "late"]


@dataclass(frozen=True)
class Import:
    """One name that a module takes from another; an empty name is the module itself."""

    importer: str
    imported: str
    name: str
    kind: Kind


@cache
def imports(tree: SourceTree) -> list[Import]:
    """Every import of one module of the tree by another."""
    return [found for module in tree.modules for found in _imports_of(tree, module)]


def _imports_of(tree: SourceTree, module: Module) -> Iterator[Import]:
    for node, kind in _statements(module.tree, "plain"):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        else:
            assert node.level == 0, f"{module.place}:{node.lineno}: a relative import"
            pairs = [(node.module or "", alias.name) for alias in node.names]
        for home, name in pairs:
            if f"{home}.{name}" in tree.by_name:
                yield Import(module.name, f"{home}.{name}", "", kind)
            elif home in tree.by_name:
                yield Import(module.name, home, name, kind)


def _statements(node: ast.AST, kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, "late")
        elif isinstance(child, ast.If) and kind == "plain" and _is_type_checking(child.test):
            for statement in child.body:
                yield from _statements(ast.Module([statement], []), "types")
            for statement in child.orelse:
                yield from _statements(ast.Module([statement], []), kind)
        else:
            yield from _statements(child, kind)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def cycles(found: Iterable[Import], kinds: Iterable[Kind]) -> list[list[str]]:
    """The sets of modules that import each other, directly or by way of others; the largest first."""
    allowed = set(kinds)
    graph: dict[str, set[str]] = {}
    for one in found:
        if one.kind in allowed and one.importer != one.imported:
            graph.setdefault(one.importer, set()).add(one.imported)
            graph.setdefault(one.imported, set())
    reached = {name: _reached(graph, name) for name in graph}
    parts = {frozenset(other for other in there if name in reached[other]) for name, there in reached.items()}
    return sorted((sorted(part) for part in parts if part), key=lambda part: (-len(part), part))


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What can be reached from a module in one step or more; itself only by a circle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen
