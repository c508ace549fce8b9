"""When the machine under the memory file system goes wrong.

What always holds: the operations that change something are numbered from 1 on, in the order they were called; after a
crash every operation raises `CrashNow`; a fault is raised as the same error the real files raise.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from dmq.storage.files import storage_error
from dmq.testing.disk.nodes import Node

__all__ = ["CrashNow", "Fault", "Kind", "Machine", "Operation", "Which", "check_name", "describe", "refuse"]

Kind = Literal[
    "read",
    "write",
    "sync",
    "truncate",
    "open",
    "create",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "sync_dir",
    "listdir",
    "size",
]
Which = int | Callable[[str, int], bool]

_NAME_MAX_BYTES = 255

# The verbs of the real files, so that messages read the same.
_VERBS: dict[Kind, str] = {
    "sync": "flush",
    "sync_dir": "flush",
    "unlink": "remove",
    "rmdir": "remove",
    "mkdir": "create",
    "create": "open",
    "listdir": "list",
    "size": "look at",
}


class CrashNow(BaseException):
    """The power is gone. Not an `Exception`, so that no handler under test survives it."""


class Operation(NamedTuple):
    """A line of the trace."""

    number: int
    kind: Kind
    path: str
    position: int
    size: int


class Fault:
    """One thing that goes wrong: the `which`th operation of a kind, or every one the predicate picks.

    Operations of the kind are counted from when the fault was set, starting at 1; the predicate gets the path and that
    number. `hits` tells how often it struck.
    """

    def __init__(self, kind: Kind, which: Which, error: int, written: float) -> None:
        self.kind = kind
        self.error = error
        self.written = written
        self.hits = 0
        self._which = which
        self._seen = 0

    def strikes(self, path: str) -> bool:
        self._seen += 1
        which = self._which
        struck = self._seen == which if isinstance(which, int) else which(path, self._seen)
        self.hits += struck
        return struck


def describe(path: str) -> str:
    """A path as it stands in messages."""
    return f"memory:/{path}"


def refuse(error: int, kind: Kind, path: str) -> Exception:
    """The error the real files raise when the operating system answers `error`."""
    cause = OSError(error, os.strerror(error), describe(path))
    if isinstance(cause, FileNotFoundError):
        return cause
    mapped = storage_error(cause, _VERBS.get(kind, kind), describe(path))
    mapped.__cause__ = cause
    return mapped


def check_name(name: str, kind: Kind, path: str) -> None:
    """Refuse a name that Linux file systems refuse."""
    if len(name.encode()) > _NAME_MAX_BYTES:
        raise refuse(errno.ENAMETOOLONG, kind, path)


class Machine:
    """Counts operations, and knows which of them fails or is the last."""

    def __init__(self, rng: random.Random, trace: int) -> None:
        self.mutex = threading.RLock()
        self.rng = rng
        self.operations = 0
        self.crash_at: int | None = None
        self.dead = False
        self.handles = 0
        self.faults: list[Fault] = []
        self.trace: deque[Operation] = deque(maxlen=trace)

    def alive(self) -> None:
        if self.dead:
            raise CrashNow

    def look(self, kind: Kind, path: str, position: int = 0, size: int = 0) -> None:
        """Before an operation that changes nothing."""
        self.alive()
        if self.trace.maxlen:
            self.trace.append(Operation(self.operations, kind, path, position, size=size))
        if self.faults and (fault := self.struck(kind, path)):
            raise refuse(fault.error, kind, path)

    def count(self, kind: Kind, path: str, position: int = 0, size: int = 0) -> bool:
        """Number an operation that is about to change something; whether the crash is to happen in it."""
        self.alive()
        self.operations += 1
        if self.trace.maxlen:
            self.trace.append(Operation(self.operations, kind, path, position, size=size))
        return self.crash_at is not None and self.operations >= self.crash_at

    def change(self, kind: Kind, path: str, effect: Callable[[], None]) -> None:
        """Do something that changes something, unless it fails; a crash comes before or after it."""
        if self.count(kind, path):
            if self.rng.random() < 0.5:
                effect()
            self.die()
        if self.faults and (fault := self.struck(kind, path)):
            raise refuse(fault.error, kind, path)
        effect()

    def sync(self, kind: Kind, path: str, node: Node) -> None:
        """Make a file or folder durable; a failure dooms what it should have saved."""
        try:
            self.change(kind, path, node.sync)
        except Exception:
            node.doom()
            raise

    def struck(self, kind: Kind, path: str) -> Fault | None:
        """The fault that hits this operation; all of the kind count it."""
        hits = [fault for fault in self.faults if fault.kind == kind and fault.strikes(path)]
        return hits[0] if hits else None

    def die(self) -> None:
        self.dead = True
        raise CrashNow
