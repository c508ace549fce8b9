"""Choosing one of the many things a power loss may leave behind.

What always holds: everything durable is there; every other change is there, not there or, if it is a write, there in
part, whole 512-byte sectors at a time, where a sector that was lost reads as it did before (as zeros where the file had
ended); a sector that took a later write took the earlier ones too, as the disk got it from one page; the same random
numbers give the same state. A doomed write owes its sector's later writes nothing: it is lost or kept on its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from dmq.testing.disk.nodes import DOOMED, SAVED, Change, EntryChange, FileNode, FolderNode, Node, apply, edit

__all__ = ["SECTOR_BYTES", "Keep", "crash_state"]

SECTOR_BYTES = 512

# Which of the changes that are not durable reach the disk:
#   nothing, everything;
#   sizes: the files have grown, the data is zeros;
#   prefix: up to some moment, the last one perhaps torn;   gap: all but one, that one perhaps torn;
#   lone: none but one;   files: whole files' worth;   subset: some;   sectors: some sectors of each.
Keep = Literal["nothing", "everything", "sizes", "prefix", "gap", "lone", "files", "subset", "sectors"]

_KEEPS: tuple[Keep, ...] = get_args(Keep)


class _Plan(NamedTuple):
    """The chance of each change, by its number, to reach the disk (a write with a chance between 0 and 1 is torn), and
    the chance that a file has grown although the data did not arrive."""

    chance: dict[int, float]
    grow: float


def crash_state(root: FolderNode, rng: random.Random, keep: Keep | None) -> FolderNode:
    """A tree as the disk may have it; `keep` says how to choose, None lets the random numbers choose that as well."""
    files: list[FileNode] = []
    folders: list[FolderNode] = []
    for node in _reachable(root):
        if node.changes:
            if isinstance(node, FileNode):
                files.append(node)
            else:
                folders.append(node)
    writes = [(c.number, i) for i, file in enumerate(files) for c in file.changes if c.state != SAVED]
    moves = [(c.number, -1 - i) for i, folder in enumerate(folders) for c in folder.changes if c.state != SAVED]
    mode = rng.choice(_KEEPS) if keep is None else keep
    if keep is None and rng.random() < 0.5:
        # Data and names fare differently: a rename may survive the data it was to publish.
        data_plan = _plan(writes, rng, mode)
        names_plan = _plan(moves, rng, rng.choice(_KEEPS))
    else:
        # One story for both, in the order of the operations.
        data_plan = _plan(writes + moves, rng, mode)
        names_plan = _plan(moves, rng, "everything") if mode == "sizes" else data_plan
    kept = _kept_names(folders, names_plan, rng)
    # In the order of the walk, so that the numbers drawn depend on the state only.
    contents = {id(file): _content(file, data_plan, rng) for file in files}
    return _Builder(kept, contents).folder(root)


def _reachable(root: FolderNode) -> Iterator[Node]:
    """Every node that some crash could bring up, once."""
    seen: set[int] = set()
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, FolderNode):
            stack.extend(node.saved.values())
            stack.extend(child for c in node.changes for _, child in c.edits if child is not None)


def _plan(changes: list[tuple[int, int]], rng: random.Random, keep: Keep) -> _Plan:
    numbers = sorted({number for number, _ in changes})
    grow = rng.choice((0.0, 0.5, 1.0))
    if not numbers or keep == "nothing":
        return _Plan(dict.fromkeys(numbers, 0.0), 0.0)
    if keep == "everything":
        return _Plan(dict.fromkeys(numbers, 1.0), 0.0)
    if keep == "sizes":
        return _Plan(dict.fromkeys(numbers, 0.0), 1.0)
    if keep == "prefix":
        end = rng.randrange(len(numbers))
        chance = {number: float(i < end) for i, number in enumerate(numbers)}
        chance[numbers[end]] = rng.choice((0.0, 0.5, 0.9, 1.0))
        return _Plan(chance, grow)
    if keep in ("gap", "lone"):
        chance = dict.fromkeys(numbers, float(keep == "gap"))
        chance[rng.choice(numbers)] = rng.choice((0.0, 0.5, 0.9)) if keep == "gap" else 1.0
        return _Plan(chance, grow)
    if keep == "files":
        owners = {owner: float(rng.random() < 0.5) for owner in sorted({owner for _, owner in changes})}
        return _Plan({number: owners[owner] for number, owner in changes}, grow)
    share = rng.choice((0.1, 0.5, 0.9))
    if keep == "subset":
        return _Plan({number: float(rng.random() < share) for number in numbers}, grow)
    return _Plan(dict.fromkeys(numbers, share), grow)


def _kept_names(folders: list[FolderNode], plan: _Plan, rng: random.Random) -> set[tuple[int, int]]:
    """The folder changes that survive, as (folder, number)."""
    kept: set[tuple[int, int]] = set()
    lost: set[tuple[int, int]] = set()
    halves: list[tuple[FolderNode, EntryChange]] = []
    for folder in folders:
        for change in folder.changes:
            if change.state != SAVED and change.partner is not None:
                halves.append((folder, change))
            elif change.state == SAVED or rng.random() < plan.chance[change.number]:
                kept.add((id(folder), change.number))
            else:
                lost.add((id(folder), change.number))
    for folder, change in halves:
        # A name that moved to another folder never goes from the old one before it is in the new one.
        arrived = (id(change.partner), change.number) not in lost
        # A folder is never in two places.
        if arrived and (isinstance(change.moved, FolderNode) or rng.random() < plan.chance[change.number]):
            kept.add((id(folder), change.number))
    return kept


def _content(file: FileNode, plan: _Plan, rng: random.Random) -> bytearray:
    kept: list[tuple[Change, list[int] | None]] = []
    whole = True
    later: set[int] = set()
    for change in reversed(file.changes):
        chance = 1.0 if change.state == SAVED else plan.chance[change.number]
        if change.data is None:
            # A truncation zeroes the rest of its page, so what came before it shares nothing with what came after.
            later.clear()
            if chance >= 1.0 or rng.random() < chance:
                kept.append((change, None))
            else:
                whole = False
            continue
        first, end = change.position // SECTOR_BYTES, -(-(change.position + len(change.data)) // SECTOR_BYTES)
        if chance >= 1.0:
            kept.append((change, None))
            later.update(range(first, end))
            continue
        some = _torn(first, end, chance, rng)
        sectors = sorted(some | later.intersection(range(first, end))) if change.state != DOOMED else sorted(some)
        whole = whole and len(sectors) == end - first
        kept.append((change, sectors))
        later.update(sectors)
    if whole:
        return file.data
    content = bytearray(file.base)
    for change, part in reversed(kept):
        if change.data is None or part is None:
            apply(content, change.position, change.data)
            continue
        _apply_sectors(content, change.position, change.data, part)
        end = change.position + len(change.data)
        if end > len(content) and plan.grow and rng.random() < plan.grow:
            apply(content, end, None)
    return content


def _torn(first: int, end: int, chance: float, rng: random.Random) -> set[int]:
    """The sectors of a write that reach the disk; scattered ones are not enough, as a large write then always lacks
    many of them."""
    sectors = range(first, end)
    if chance <= 0.0:
        return set()
    how = rng.randrange(4)
    if how == 0:
        return {sector for sector in sectors if rng.random() < chance}
    at = rng.choice(sectors)
    if how == 1:
        return set(range(first, at))
    if how == 2:
        return set(range(at + 1, end))
    return {sector for sector in sectors if sector != at}


def _apply_sectors(content: bytearray, position: int, data: bytes, sectors: list[int]) -> None:
    view = memoryview(data)
    for sector in sectors:
        start = max(sector * SECTOR_BYTES, position)
        end = min((sector + 1) * SECTOR_BYTES, position + len(data))
        apply(content, start, view[start - position : end - position])


class _Builder:
    """Builds the surviving tree, in which all is durable."""

    def __init__(self, kept: set[tuple[int, int]], contents: dict[int, bytearray]) -> None:
        self._kept = kept
        self._contents = contents
        self._files: dict[int, FileNode] = {}

    def folder(self, old: FolderNode) -> FolderNode:
        names = dict(old.saved)
        for change in old.changes:
            if (id(old), change.number) in self._kept:
                edit(names, change.edits)
        new = FolderNode()
        new.saved = {
            name: self._file(node) if isinstance(node, FileNode) else self.folder(node) for name, node in names.items()
        }
        new.entries = dict(new.saved)
        return new

    def _file(self, old: FileNode) -> FileNode:
        new = self._files.get(id(old))
        if new is None:
            self._files[id(old)] = new = FileNode(self._contents.get(id(old), old.base))
        new.links += 1
        return new
