"""A file system in memory that forgets, tears, fills up and fails on demand.

What always holds: a running process sees exactly what `OsFiles` would show it, errors included; what a `sync` or
`sync_dir` returned for survives every crash; what they did not may go, in ways `dmq.testing.disk.crash` draws.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from dmq.errors import DirectoryInUse
from dmq.storage.files import DiskUsage
from dmq.testing.disk.crash import Keep, crash_state
from dmq.testing.disk.faults import Fault, Kind, Machine, Operation, Which, check_name, describe, refuse
from dmq.testing.disk.memory_file import MemoryFile
from dmq.testing.disk.nodes import FileNode, FolderNode, Node, copy_tree
from dmq.testing.disk.space import Space

__all__ = ["MemoryFiles"]

# What a disk without a capacity says it has.
_PLENTY_BYTES = 1 << 40


class MemoryFiles:
    """A data directory in memory.

    Parameters:
        capacity_bytes: what all files may take together; None for no limit.
        rng: draws how far the operation at `crash_at` gets.
        trace: how many of the last operations `trace` keeps.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        rng: random.Random | None = None,
        trace: int = 0,
        root: FolderNode | None = None,
    ) -> None:
        self._root = FolderNode() if root is None else root
        nodes = {id(node): node for _, node in _walk(self._root, "")}
        self._space = Space(capacity_bytes, sum(len(node.data) for node in nodes.values()))
        self._machine = Machine(rng or random.Random(0), trace)
        self._mutex = self._machine.mutex
        self._locked = False
        self.place_id = ""  # what tells its folders from copies of them; a test may set it

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> MemoryFiles:
        """The content of a real directory, all of it durable."""
        files = cls()
        files._fill(directory)
        return files

    @property
    def capacity_bytes(self) -> int | None:
        """What all files may take together; None for no limit."""
        return self._space.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int | None) -> None:
        self._space.capacity_bytes = capacity_bytes

    # --- what a test arranges ---------------------------------------------------------------------------------------

    @property
    def operations(self) -> int:
        """How many operations have changed something so far, or tried to."""
        return self._machine.operations

    @property
    def trace(self) -> deque[Operation]:
        """The last operations; reads carry the number of the last change."""
        return self._machine.trace

    @property
    def handles(self) -> int:
        """How many files are open."""
        return self._machine.handles

    @property
    def crash_at(self) -> int | None:
        """The number of the operation in which the power goes: before, after or, for a write, within it."""
        return self._machine.crash_at

    @crash_at.setter
    def crash_at(self, number: int | None) -> None:
        self._machine.crash_at = number

    def fail(self, kind: Kind, which: Which = 1, error: int = errno.EIO, *, written: float = 0.0) -> Fault:
        """Make operations of a kind fail.

        Parameters:
            kind: which operations; `create` is an `open` that makes the file.
            which: the how manieth from now on (1 is the next), or a predicate of path and number that picks any.
            error: what the operating system says.
            written: of a write, the share of its bytes that reaches the file before the error.
        """
        fault = Fault(kind, which, error, written)
        self._machine.faults.append(fault)
        return fault

    def heal(self, fault: Fault | None = None) -> None:
        """End a fault, or all."""
        self._machine.faults = [] if fault is None else [f for f in self._machine.faults if f is not fault]

    def copy(self) -> MemoryFiles:
        """The same files, with the same changes not yet durable; no handles, faults or lock."""
        with self._mutex:
            return self._successor(copy_tree(self._root), self.operations)

    def kill(self) -> MemoryFiles:
        """What the death of the process leaves: all it wrote, as durable as it was. This object is dead then."""
        with self._mutex:
            self._machine.dead = True
            return self.copy()

    def crash(self, rng: random.Random, keep: Keep | None = None) -> MemoryFiles:
        """What a power loss may leave, drawn by `rng`. This object is dead then, but can be asked for more states."""
        with self._mutex:
            self._machine.dead = True
            return self._successor(crash_state(self._root, rng, keep), rng.getrandbits(64))

    def _successor(self, root: FolderNode, seed: int) -> MemoryFiles:
        files = MemoryFiles(
            capacity_bytes=self.capacity_bytes,
            rng=random.Random(seed),
            trace=self._machine.trace.maxlen or 0,
            root=root,
        )
        files.place_id = self.place_id
        return files

    # --- what a test does behind the store's back: no operation, no fault, durable at once, also after a crash --------

    def paths(self) -> dict[str, int]:
        """All files by path, with their sizes, sorted."""
        return {path: len(node.data) for path, node in sorted(_walk(self._root, ""), key=lambda item: item[0])}

    def read_file(self, path: str) -> bytes:
        """All bytes of a file."""
        return bytes(self._file(path).data)

    def write_file(self, path: str, data: bytes) -> None:
        """Put a file there, in folders as needed, all of it durable."""
        *parents, name = _split(path)
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

    def spoil(self, path: str, position: int) -> None:
        """A bad block: what reads it gets EIO, until somebody writes all 512 bytes of it, or `mend`."""
        self._file(path).bad.add(position // 512 * 512)

    def mend(self, path: str) -> None:
        """All blocks of a file can be read again: it was a passing trouble."""
        self._file(path).bad.clear()

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

    # --- Files ------------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, write: bool = False) -> MemoryFile:
        with self._mutex:
            self._machine.look("open", path)
            parent, name, node = self._entry(path, "open")
            if node is None and create and parent is not None:
                check_name(name, "create", path)
                node = FileNode()
                self._add("create", path, parent, name, node=node)
            if node is None:
                raise refuse(errno.ENOENT, "open", path)
            if isinstance(node, FolderNode):
                raise refuse(errno.EISDIR, "open", path)
            return MemoryFile(self._machine, self._space, node, path, writable=write)

    def exists(self, path: str) -> bool:
        with self._mutex:
            self._machine.alive()
            return self._find(path)[2] is not None

    def is_dir(self, path: str) -> bool:
        with self._mutex:
            self._machine.alive()
            return isinstance(self._find(path)[2], FolderNode)

    def listdir(self, path: str) -> list[str]:
        with self._mutex:
            self._machine.look("listdir", path)
            folder = self._folder(path, "listdir")
            return sorted(folder.entries) if folder else []

    def size(self, path: str) -> int:
        with self._mutex:
            self._machine.alive()
            node = self._entry(path, "size")[2]
            if node is None:
                raise refuse(errno.ENOENT, "size", path)
            return len(node.data) if isinstance(node, FileNode) else 0

    def mkdir(self, path: str) -> None:
        with self._mutex:
            self._machine.alive()
            folder = self._root
            parts = _split(path)
            for i, part in enumerate(parts):
                child = folder.entries.get(part)
                if child is None:
                    check_name(part, "mkdir", path)
                    child = FolderNode()
                    self._add("mkdir", "/".join(parts[: i + 1]), folder, part, node=child)
                if isinstance(child, FileNode):
                    last = i == len(parts) - 1
                    raise refuse(errno.EEXIST if last else errno.ENOTDIR, "mkdir", path)
                folder = child

    def rename(self, source: str, target: str) -> None:
        with self._mutex:
            self._machine.alive()
            from_folder, from_name, node = self._entry(source, "rename")
            to_folder, to_name, replaced = self._entry(target, "rename")
            if node is None or from_folder is None or to_folder is None:
                raise refuse(errno.ENOENT, "rename", source)
            check_name(to_name, "rename", source)
            if node is replaced:
                return
            if isinstance(node, FolderNode) and _split(target)[: len(_split(source))] == _split(source):
                raise refuse(errno.EINVAL, "rename", source)
            if replaced is not None and type(node) is not type(replaced):
                raise refuse(errno.EISDIR if isinstance(replaced, FolderNode) else errno.ENOTDIR, "rename", source)
            if isinstance(replaced, FolderNode) and replaced.entries:
                raise refuse(errno.ENOTEMPTY, "rename", source)

            def move() -> None:
                number = self.operations
                if from_folder is to_folder:
                    to_folder.change(number, (to_name, node), (from_name, None))
                else:
                    to_folder.change(number, (to_name, node))
                    from_folder.change(number, (from_name, None), partner=to_folder, moved=node)
                if isinstance(replaced, FileNode):
                    self._space.unlinked(replaced)

            self._machine.change("rename", source, move)

    def unlink(self, path: str) -> None:
        self._remove("unlink", path, FileNode)

    def rmdir(self, path: str) -> None:
        self._remove("rmdir", path, FolderNode)

    def sync_dir(self, path: str) -> None:
        with self._mutex:
            self._machine.alive()
            folder = self._folder(path, "sync_dir")
            if folder is None:
                raise refuse(errno.ENOENT, "sync_dir", path)
            self._machine.sync("sync_dir", path, folder)

    def disk_usage(self) -> DiskUsage:
        with self._mutex:
            self._machine.alive()
            total = _PLENTY_BYTES if self.capacity_bytes is None else self.capacity_bytes
            used = min(total, self._space.used_bytes)
            return DiskUsage(used, total - used)

    def lock(self) -> None:
        with self._mutex:
            self._machine.alive()
            if self._locked:
                root = self.describe("")
                raise DirectoryInUse(f"{root} is in use: close the store that has it", path=root, pid="this process")
            self._machine.look("open", "LOCK")
            self._locked = True
            if self._find("LOCK")[2] is None:
                self.write_file("LOCK", b"")

    def unlock(self) -> None:
        with self._mutex:
            self._locked = False

    def place(self, path: str) -> str:
        return self.place_id if self.exists(path) else ""

    def describe(self, path: str) -> str:
        return describe(path)

    # --- shared by the operations -----------------------------------------------------------------------------------

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
        parts = _split(path)
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

    def _entry(self, path: str, kind: Kind) -> tuple[FolderNode | None, str, Node | None]:
        """Like `_find`, but a file in the place of a folder is refused as Linux does."""
        found = self._find(path)
        if found[0] is None and found[1]:
            parts = _split(path)
            for i in range(1, len(parts)):
                if isinstance(self._find("/".join(parts[:i]))[2], FileNode):
                    raise refuse(errno.ENOTDIR, kind, path)
        return found

    def _folder(self, path: str, kind: Kind) -> FolderNode | None:
        node = self._entry(path, kind)[2]
        if isinstance(node, FileNode):
            raise refuse(errno.ENOTDIR, kind, path)
        return node

    def _add(self, kind: Kind, path: str, parent: FolderNode, name: str, node: Node) -> None:
        def add() -> None:
            parent.change(self.operations, (name, node))
            if isinstance(node, FileNode):
                node.links += 1

        self._machine.change(kind, path, add)

    def _remove(self, kind: Kind, path: str, expected: type[FileNode] | type[FolderNode]) -> None:
        with self._mutex:
            self._machine.alive()
            parent, name, node = self._entry(path, kind)
            if node is None or parent is None:
                return
            if not isinstance(node, expected):
                raise refuse(errno.EISDIR if expected is FileNode else errno.ENOTDIR, kind, path)
            if isinstance(node, FolderNode) and node.entries:
                raise refuse(errno.ENOTEMPTY, kind, path)

            def remove() -> None:
                parent.change(self.operations, (name, None))
                if isinstance(node, FileNode):
                    self._space.unlinked(node)

            self._machine.change(kind, path, remove)


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part and part != "."]


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
