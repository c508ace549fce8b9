"""The tree of a registry in memory: entries by path, and writes that apply whole or not at all. Pure code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dmq.registry.registry import (
    ROOT,
    Check,
    Create,
    Delete,
    Entry,
    Operation,
    Put,
    Reason,
    conflict,
    parent_of,
    unknown_entry,
)

__all__ = ["Applied", "Tree"]


class Applied(NamedTuple):
    """What a write has done."""

    versions: tuple[int | None, ...]
    changed: tuple[str, ...]


class Tree:
    """Entries, the root among them: all of a registry, or those that a write is about."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[str, Entry] = {ROOT: Entry(ROOT, b"", 0)}
        self._children: dict[str, set[str]] = {}  # paths below each path that has some
        for entry in entries:
            self._set(entry.path, entry)

    def read(self, path: str) -> Entry | None:
        return self._entries.get(path)

    def children(self, path: str) -> list[Entry]:
        """The entries right below, in the order of their names.

        Raises:
            UnknownEntry: the path does not exist.
        """
        if path not in self._entries:
            raise unknown_entry(path)
        return [self._entries[child] for child in sorted(self._children.get(path, ()))]

    def apply(self, operations: Sequence[Operation], session: int) -> Applied:
        """Carry out a write.

        Raises:
            RegistryConflict: nothing has changed.
        """
        undo: list[Callable[[], None]] = []
        versions: list[int | None] = []
        changed: dict[str, None] = {}
        for index, operation in enumerate(operations):
            reason, path = self._problem(operation)
            if reason is not None:
                for step in reversed(undo):
                    step()
                raise conflict(index, path, reason)
            before = self._entries.get(operation.path)
            after = _after(operation, before, session)
            versions.append(after.version if after is not None and isinstance(operation, Create | Put) else None)
            if isinstance(operation, Check):
                continue
            self._set(operation.path, after)
            undo.append(lambda path=operation.path, entry=before: self._set(path, entry))  # type: ignore[misc]
            if before is None or after is None or before.value != after.value:
                changed[operation.path] = None
        return Applied(tuple(versions), tuple(changed))

    def drop_session(self, session: int) -> tuple[str, ...]:
        """Take out the ephemeral entries of a session; returns their paths."""
        gone = tuple(path for path, entry in self._entries.items() if entry.session == session and session)
        for path in gone:
            self._set(path, None)
        return gone

    def _problem(self, operation: Operation) -> tuple[Reason | None, str]:
        path = operation.path
        entry = self._entries.get(path)
        if isinstance(operation, Create):
            parent = self._entries.get(parent_of(path))
            if entry is not None:
                return Reason.EXISTS, path
            if parent is None:
                return Reason.ABSENT, parent_of(path)
            return (Reason.EPHEMERAL, parent.path) if parent.is_ephemeral else (None, path)
        if entry is None:
            return Reason.ABSENT, path
        if operation.version is not None and operation.version != entry.version:
            return Reason.VERSION, path
        if isinstance(operation, Delete) and self._children.get(path):
            return Reason.CHILDREN, path
        return None, path

    def _set(self, path: str, entry: Entry | None) -> None:
        siblings = self._children.setdefault(parent_of(path), set())
        if entry is not None:
            self._entries[path] = entry
            siblings.add(path)
            return
        self._entries.pop(path, None)
        siblings.discard(path)
        if not siblings:
            del self._children[parent_of(path)]


def _after(operation: Operation, before: Entry | None, session: int) -> Entry | None:
    match operation:
        case Create(path, value, ephemeral):
            return Entry(path, value, 0, session if ephemeral else 0)
        case Put(path, value, _):
            assert before is not None
            return Entry(path, value, before.version + 1, before.session)
        case Delete():
            return None
    return before
