"""The tree of a memory file system, and what a test does to it behind the store's back.

What always holds: nothing here counts as an operation, fails on purpose, or needs a sync to survive; all of it works on
a crashed file system too, so that a test can look at what was there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dmq.testing.nodes import FileNode, FolderNode, Node

__all__ = ["DiskImage", "Space", "split"]


def split(path: str) -> list[str]:
    return [part for part in path.split("/") if part and part != "."]


class Space:
    """What a disk has and what is taken of it, in bytes; a file takes its size, until no name and no handle is left."""

    __slots__ = ("capacity_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int | None, used_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = used_bytes

    def lacking(self, growth: int) -> int:
        """How many of so many more bytes do not fit."""
        if growth <= 0 or self.capacity_bytes is None:
            return 0
        return min(growth, max(0, self.used_bytes + growth - self.capacity_bytes))

    def unlinked(self, node: FileNode) -> None:
        node.links -= 1
        if not node.links and not node.handles:
            self.used_bytes -= len(node.data)

    def closed(self, node: FileNode) -> None:
        node.handles -= 1
        if not node.links and not node.handles:
            self.used_bytes -= len(node.data)


class DiskImage:
    """Files by path."""

    def __init__(self, root: FolderNode, capacity_bytes: int | None) -> None:
        self._root = root
        nodes = {id(node): node for _, node in _walk(root, "")}
        self._space = Space(capacity_bytes, sum(len(node.data) for node in nodes.values()))

    def paths(self) -> dict[str, int]:
        """All files by path, with their sizes, sorted."""
        return {path: len(node.data) for path, node in sorted(_walk(self._root, ""), key=lambda item: item[0])}

    def read_file(self, path: str) -> bytes:
        """All bytes of a file."""
        return bytes(self._file(path).data)

    def write_file(self, path: str, data: bytes) -> None:
        """Put a file there, in folders as needed, all of it durable."""
        *parents, name = split(path)
        folder = self._root
        for part in parents:
            child = folder.entries.get(part)
            if not isinstance(child, FolderNode):
                child = FolderNode()
            folder.settle(part, child)
            folder = child
        node = folder.entries.get(name)
        if not isinstance(node, FileNode):
            node = FileNode()
            node.links = 1
        folder.settle(name, node)
        self._reset(node, bytearray(data))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and all below it, durably; fine if it is gone."""
        parent, name, node = self._find(path)
        if node is None or parent is None:
            return
        for file in [node] if isinstance(node, FileNode) else [file for _, file in _walk(node, "")]:
            self._space.unlinked(file)
        parent.settle(name, None)

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Bit rot: flip one bit (0 the lowest) of a byte. All of the file counts as durable afterwards."""
        node = self._file(path)
        data = bytearray(node.data)
        data[position] ^= 1 << bit
        self._reset(node, data)

    def cut(self, path: str, size: int) -> None:
        """Lose the end of a file. All of the file counts as durable afterwards."""
        node = self._file(path)
        self._reset(node, node.data[:size])

    def dump(self, directory: str | os.PathLike[str]) -> None:
        """Write everything, as a running process sees it, to a real directory."""
        root = Path(directory)
        for path in sorted(_folders(self._root, "")):
            (root / path).mkdir(parents=True, exist_ok=True)
        for path, node in _walk(self._root, ""):
            (root / path).write_bytes(node.data)

    def _fill(self, directory: str | os.PathLike[str]) -> None:
        root = Path(directory)
        for found in sorted(root.rglob("*")):
            path = found.relative_to(root).as_posix()
            if found.is_file():
                self.write_file(path, found.read_bytes())
            elif found.is_dir():
                parent, name, node = self._find(path)
                if parent is not None and node is None:
                    parent.settle(name, FolderNode())

    def _find(self, path: str) -> tuple[FolderNode | None, str, Node | None]:
        """The folder a path lies in (None where that is missing), the last name of it, the node (None if missing)."""
        parts = split(path)
        if not parts:
            return None, "", self._root
        folder = self._root
        for part in parts[:-1]:
            child = folder.entries.get(part)
            if not isinstance(child, FolderNode):
                return None, parts[-1], None
            folder = child
        return folder, parts[-1], folder.entries.get(parts[-1])

    def _file(self, path: str) -> FileNode:
        node = self._find(path)[2]
        if not isinstance(node, FileNode):
            raise FileNotFoundError(path)
        return node

    def _reset(self, node: FileNode, content: bytearray) -> None:
        self._space.used_bytes += len(content) - len(node.data)
        node.reset(content)


def _walk(folder: FolderNode, prefix: str) -> Iterator[tuple[str, FileNode]]:
    for name, node in folder.entries.items():
        if isinstance(node, FileNode):
            yield prefix + name, node
        else:
            yield from _walk(node, f"{prefix}{name}/")


def _folders(folder: FolderNode, prefix: str) -> Iterator[str]:
    yield prefix
    for name, node in folder.entries.items():
        if isinstance(node, FolderNode):
            yield from _folders(node, f"{prefix}{name}/")
