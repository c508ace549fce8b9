"""Files and folders in memory, each with what a power loss may take from it.

What always holds, for a file: `data` is what a running process reads; `base` followed by the `SAVED` changes, in order,
is what the disk surely has; `base` followed by all `changes` equals `data`. For a folder the same holds of `entries`
and `saved`.

A change is `LOOSE` until it is synced, `SAVED` after that, or `DOOMED` when the sync that should have saved it failed:
Linux then takes the pages for clean, so no later sync writes them. Saved changes are folded into the base at once, but
those behind a doomed one stay listed, since their order matters.

Copies share the byte arrays; the first that is written to makes its own.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "DOOMED",
    "LOOSE",
    "SAVED",
    "Change",
    "EntryChange",
    "FileNode",
    "FolderNode",
    "Node",
    "apply",
    "copy_tree",
    "edit",
]

LOOSE, SAVED, DOOMED = 0, 1, 2


class Change(NamedTuple):
    """A write of `data` at `position`, or, where `data` is None, a truncation to `position`."""

    number: int
    position: int
    data: bytes | None
    state: int


class EntryChange(NamedTuple):
    """Names of one folder set to a node or, with None, removed; all of `edits` happens or none.

    A move to another folder is two of these with one number: the removal names the folder that got the node as
    `partner`, and the node as `moved`.
    """

    number: int
    edits: tuple[tuple[str, Node | None], ...]
    state: int
    partner: FolderNode | None = None
    moved: Node | None = None


def apply(data: bytearray, position: int, piece: bytes | memoryview | None) -> None:
    """Write a piece into a file's bytes, or truncate them; a gap before the piece reads as zeros."""
    if piece is None:
        if position < len(data):
            del data[position:]
        else:
            data.extend(bytes(position - len(data)))
    elif len(piece):
        if position > len(data):
            data.extend(bytes(position - len(data)))
        data[position : position + len(piece)] = piece


class FileNode:
    """What Linux calls an inode: the bytes, whatever names lead to them."""

    __slots__ = ("_owns_base", "_owns_data", "bad", "base", "changes", "data", "handles", "links")

    def __init__(self, content: bytearray | None = None) -> None:
        # `content` may be shared with other nodes: it is copied before this node changes it.
        self.data = self.base = bytearray() if content is None else content
        self._owns_data = self._owns_base = False
        self.changes: list[Change] = []
        self.bad: set[int] = set()  # blocks that cannot be read, by where they begin
        self.links = 0
        self.handles = 0

    def change(self, number: int, position: int, piece: bytes | None) -> None:
        """Write or truncate, as the running process sees it."""
        if piece is not None and not piece:
            return
        if not self._owns_data:
            self.data = bytearray(self.data)
            self._owns_data = True
        apply(self.data, position, piece)
        self.changes.append(Change(number, position, piece, LOOSE))

    def sync(self) -> None:
        changes = self.changes
        if not changes:
            return
        done = next((i for i, change in enumerate(changes) if change.state == DOOMED), len(changes))
        if done:
            if not self._owns_base:
                self.base = bytearray(self.base)
                self._owns_base = True
            for change in changes[:done]:
                apply(self.base, change.position, change.data)
        self.changes = [c._replace(state=SAVED) if c.state == LOOSE else c for c in changes[done:]]

    def doom(self) -> None:
        """A sync failed: no later one saves what this one should have saved."""
        self.changes = [c._replace(state=DOOMED) if c.state == LOOSE else c for c in self.changes]

    def reset(self, content: bytearray) -> None:
        """Take this content, as durable as if it had always been there."""
        self.data = self.base = content
        self._owns_data = self._owns_base = False
        self.changes = []

    def copy(self) -> FileNode:
        twin = FileNode(self.data)
        twin.base = self.base
        twin.changes = list(self.changes)
        twin.bad = set(self.bad)
        self._owns_data = self._owns_base = False
        return twin


class FolderNode:
    """A folder: names, and the nodes they lead to."""

    __slots__ = ("changes", "entries", "saved")

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.saved: dict[str, Node] = {}
        self.changes: list[EntryChange] = []

    def change(
        self,
        number: int,
        *edits: tuple[str, Node | None],
        partner: FolderNode | None = None,
        moved: Node | None = None,
    ) -> None:
        """Set or remove names, as the running process sees it."""
        edit(self.entries, edits)
        self.changes.append(EntryChange(number, edits, LOOSE, partner, moved=moved))

    def sync(self) -> None:
        changes = self.changes
        done = next((i for i, change in enumerate(changes) if change.state == DOOMED), len(changes))
        for change in changes[:done]:
            edit(self.saved, change.edits)
        self.changes = [c._replace(state=SAVED) if c.state == LOOSE else c for c in changes[done:]]

    def doom(self) -> None:
        self.changes = [c._replace(state=DOOMED) if c.state == LOOSE else c for c in self.changes]

    def settle(self, name: str, node: Node | None) -> None:
        """Set or remove a name durably, whatever else of this folder is not."""
        edit(self.entries, [(name, node)])
        edit(self.saved, [(name, node)])
        rest = [c._replace(edits=tuple(e for e in c.edits if e[0] != name)) for c in self.changes]
        self.changes = [c for c in rest if c.edits]


Node = FileNode | FolderNode


def edit(names: dict[str, Node], edits: tuple[tuple[str, Node | None], ...] | list[tuple[str, Node | None]]) -> None:
    for name, node in edits:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def copy_tree(root: FolderNode) -> FolderNode:
    """A copy of everything reachable, with all that is not yet durable still so; open handles stay behind."""
    twins: dict[int, Node] = {}

    def twin_of(node: Node) -> Node:
        twin = twins.get(id(node))
        if twin is not None:
            return twin
        if isinstance(node, FileNode):
            twins[id(node)] = file = node.copy()
            return file
        return folder_twin(node)

    def folder_twin(node: FolderNode) -> FolderNode:
        twin = twins.get(id(node))
        if isinstance(twin, FolderNode):
            return twin
        twins[id(node)] = folder = FolderNode()
        folder.saved = {name: twin_of(child) for name, child in node.saved.items()}
        folder.entries = {name: twin_of(child) for name, child in node.entries.items()}
        for child in folder.entries.values():
            if isinstance(child, FileNode):
                child.links += 1
        for c in node.changes:
            edits = tuple((name, None if child is None else twin_of(child)) for name, child in c.edits)
            partner = None if c.partner is None else folder_twin(c.partner)
            moved = None if c.moved is None else twin_of(c.moved)
            folder.changes.append(EntryChange(c.number, edits, c.state, partner, moved=moved))
        return folder

    return folder_twin(root)
