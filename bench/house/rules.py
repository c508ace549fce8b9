"""The places of a source tree that break a rule of style.

Each rule is a function that takes the tree and returns the places that break the rule. A place has a name that stays
the same when other lines are added, such as `dmq.broker.broker:Broker.start`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from bench.house.imports import Import, Kind, cycles, imports
from bench.house.source_tree import Class, Function, Module, SourceTree

__all__ = [
    "broker_takers",
    "duplicate_classes",
    "duplicate_classes_in_package",
    "half_classes",
    "import_cycles",
    "late_cycles",
    "long_files",
    "long_functions",
    "misnamed_modules",
    "packed_folders",
    "participles",
    "positional_calls",
    "silent_docstrings",
    "unlisted_modules",
    "vague_words",
    "wide_functions",
    "wrong_broker_takers",
]

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
POSITIONAL_MAX = 4
FOLDER_FILES_MAX = 15

# Words in -ing that are things.
NOUNS = {"ring", "string", "thing", "king", "wing", "spring", "sibling", "ceiling", "testing"}
BROKER = "dmq.broker.broker"
# Who may hold a whole broker: what wires it together, what serves it, and what shows all of it.
MAY_TAKE_BROKER = re.compile(r"dmq\.broker\.(server|shard_process|wire|diagnostics)(\.|$)|dmq\.(?!broker\.)")
# Modules whose `__all__` is the public interface. Its signatures are fixed, and its arguments are given by name.
DOORS = ("dmq", "dmq.aio", "dmq.outbox", "dmq.pipeline", "dmq.testing")
# Of that interface, too: what a client gives out.
GIVEN_OUT = {"Admin", "AioAdmin", "Producer"}
COMMAND_LINE = "dmq.cli"

Names = TypeVar("Names", tuple[str], tuple[str, str])


# --- names and rooms --------------------------------------------------------------------------------------------------


def participles(tree: SourceTree) -> list[str]:
    """Files whose name ends in a participle: `moving`, `source_reading`."""
    return [m.place for m in tree.modules if (word := m.parts[-1].split("_")[-1]).endswith("ing") and word not in NOUNS]


def misnamed_modules(tree: SourceTree) -> list[str]:
    """Modules that define one public class and no public function, and are not named after that class.

    A word in common is enough: `queue_index` has `QueueIndex`, and `spool.drain` has `Drainer`.
    """
    return [
        f"{module.name}:{names[0]}"
        for module in tree.modules
        if not module.is_package
        and len(names := module.public_names) == 1
        and module.defines_class(names[0])
        and not _share_word(_words(names[0]), module.parts[-1].split("_"))
    ]


def _words(class_name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", class_name)]


def _share_word(left: list[str], right: list[str]) -> bool:
    """Whether a word of one begins with a word of the other, plural or not."""
    pairs = [(a.removesuffix("s"), b.removesuffix("s")) for a in left for b in right]
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)


def packed_folders(tree: SourceTree) -> list[str]:
    """Folders of more than 15 files; `__init__` is not counted."""
    files: dict[str, int] = defaultdict(int)
    for module in tree.modules:
        files[module.folder] += not module.is_package
    return sorted(folder for folder, count in files.items() if count > FOLDER_FILES_MAX)


def unlisted_modules(tree: SourceTree) -> list[str]:
    """Modules and rooms that the docstring of the `__init__` around them does not name; `__main__` needs no mention."""
    inner = [module for module in tree.modules if len(module.parts) > 2 and module.parts[-1] != "__main__"]
    docstrings = {name: ast.get_docstring(module.tree) or "" for name, module in tree.by_name.items()}
    return [module.name for module in inner if f"`{module.parts[-1]}`" not in docstrings[".".join(module.parts[:-1])]]


def duplicate_classes(tree: SourceTree) -> list[str]:
    """Names that more than one public class has."""
    return [name for (name,) in _repeated(tree, lambda one: (one.name,))]


def duplicate_classes_in_package(tree: SourceTree) -> list[str]:
    """Names that more than one public class of a package has, as `dmq.client:Batch`."""
    return [f"{package}:{name}" for package, name in _repeated(tree, lambda one: (one.module.package, one.name))]


def _repeated(tree: SourceTree, key: Callable[[Class], Names]) -> list[Names]:
    homes: dict[Names, set[str]] = defaultdict(set)
    for one in tree.classes:
        if one.is_public:
            homes[key(one)].add(one.module.name)
    return sorted(found for found, modules in homes.items() if len(modules) > 1)


# --- size -------------------------------------------------------------------------------------------------------------


def long_files(tree: SourceTree) -> list[str]:
    return [module.place for module in tree.modules if len(module.lines) > FILE_LINES_MAX]


def long_functions(tree: SourceTree) -> list[str]:
    """Functions of more than 70 lines, from `def` to the last line, docstring included."""
    return [function.key for function in tree.functions if function.line_count > FUNCTION_LINES_MAX]


def wide_functions(tree: SourceTree) -> list[str]:
    """Functions with more than six parameters.

    The public interface is left out, and so are the commands of the command line, whose parameters are the options.
    """
    public = _public_names(tree)
    return [
        function.key
        for function in tree.functions
        if len(function.parameters) > PARAMETERS_MAX and not _is_interface(function, public)
    ]


def positional_calls(tree: SourceTree) -> list[str]:
    """Calls with more than four positional arguments of what the tree itself defines; `*args` takes any number."""
    own = {one.name for one in tree.classes}
    own |= {function.node.name for function in tree.functions if not function.node.args.vararg}
    return [
        f"{module.name}:{call.lineno} {name}"
        for module in tree.modules
        for call in module.calls
        if len(call.args) > POSITIONAL_MAX
        and (name := _called(call)) in own
        and name not in _foreign_names(tree, module)
    ]


def _foreign_names(tree: SourceTree, module: Module) -> set[str]:
    """What a module imports from outside of the tree by name."""
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in nodes if node.module not in tree.by_name for alias in node.names}


def half_classes(tree: SourceTree) -> list[str]:
    """Base classes with one child, in the same package, that nobody else needs at run time: one class in two halves."""
    found = imports(tree)
    homes = {(one.importer, one.name): one.imported for one in found if one.name}
    bases = {(one.module.name, one.name): one for one in tree.classes}
    children: dict[tuple[str, str], list[Class]] = defaultdict(list)
    for one in tree.classes:
        for name in _base_names(one):
            children[homes.get((one.module.name, name), one.module.name), name].append(one)
    return sorted(
        f"{home}:{name}"
        for (home, name), heirs in children.items()
        if (base := bases.get((home, name)))
        and len(heirs) == 1
        and heirs[0].module.package == base.module.package
        and "Protocol" not in _base_names(base)
        and _importers(found, home, name) <= {heirs[0].module.name}
        and name not in {_called(call) for call in base.module.calls}
    )


def _importers(found: Iterable[Import], home: str, name: str) -> set[str]:
    return {one.importer for one in found if (one.imported, one.name) == (home, name) and one.kind != "types"}


def _base_names(one: Class) -> list[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in one.node.bases]
    return [base.id for base in bases if isinstance(base, ast.Name)]


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _public_names(tree: SourceTree) -> set[str]:
    names = set(GIVEN_OUT)
    for door in DOORS:
        module = tree.by_name.get(door)
        for node in module.tree.body if module else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
    return names


def _is_interface(function: Function, public: set[str]) -> bool:
    if function.module.package == COMMAND_LINE and not function.name.startswith("_"):
        return True
    first, _, rest = function.name.partition(".")
    return first in public and (rest == "__init__" or not rest.startswith("_"))


# --- who knows whom ---------------------------------------------------------------------------------------------------


def broker_takers(tree: SourceTree) -> list[str]:
    """Modules that import `Broker`, be it for types only."""
    return sorted({one.importer for one in imports(tree) if one.imported == BROKER and one.name in {"", "Broker"}})


def wrong_broker_takers(tree: SourceTree) -> list[str]:
    """Modules of the broker that import `Broker` though they are neither what serves it nor what shows all of it."""
    return [taker for taker in broker_takers(tree) if not MAY_TAKE_BROKER.match(taker)]


def import_cycles(tree: SourceTree) -> list[str]:
    """Modules that import each other when imports for types only are counted."""
    return _circles(tree, ("plain", "types"))


def late_cycles(tree: SourceTree) -> list[str]:
    """Modules that import each other only when imports inside of functions are counted as well."""
    known = import_cycles(tree)
    return [circle for circle in _circles(tree, ("plain", "types", "late")) if circle not in known]


def _circles(tree: SourceTree, kinds: Iterable[Kind]) -> list[str]:
    return [" ".join(circle) for circle in cycles(imports(tree), kinds)]


# --- prose ------------------------------------------------------------------------------------------------------------


def vague_words(tree: SourceTree) -> list[str]:
    """Lines that say "whoever" instead of naming who."""
    return _lines_with(tree, re.compile(r"\bwhoever\b", re.IGNORECASE))


def silent_docstrings(tree: SourceTree) -> list[str]:
    """Docstrings that say nothing but to look elsewhere."""
    return _lines_with(tree, re.compile('"""See the ' + "module"))


def _lines_with(tree: SourceTree, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{module.place}:{number}"
        for module in tree.modules
        for number, line in enumerate(module.lines, 1)
        for _ in pattern.findall(line)
    ]
