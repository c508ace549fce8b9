"""The contract of a registry: a small versioned tree with sessions, shared by all brokers of a cluster.

Cluster logic knows this and nothing else of ZooKeeper, name servers or memory, and one suite of tests
(`tests/integration/registry`) holds for all of them.

What always holds:
- A write happens whole or not at all. Its operations apply in their order, and each sees those before it.
- `RegistryConflict`, `SessionExpired`, `RegistryDown` and errors of the arguments mean that nothing was written.
  `WriteUnknown` means that the write was sent and not answered: it has been carried out, will be, or never will. No
  read settles that. When a later write of the same session is answered, with success or with a conflict, every write
  before it has been carried out or never will be: then reading tells.
- A version counts how often a value was put since the entry was created: 0, 1, 2, … An entry that is deleted and
  created again begins anew, so a caller that must tell the two apart puts something that rises into the value.
- An ephemeral entry is there as long as the session that created it, unless somebody deletes it. It has no children.
- A parent must exist before its child, and goes after it. The root, `/`, is always there and is never written.
- Reads go forwards: a client sees what it has written and what it has seen before, or something newer. What others
  wrote may be seen a moment later.
- A watch begins by saying that anything may have changed. After the last change below its prefix it names the path, or
  says again that anything may have changed; a put of the value that was there already may go unmentioned.
- Until `deadline` our session surely lives: when the last answered write to an ephemeral entry of ours was sent, plus
  half the session, on the clock that counts suspended time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from dmq.errors import (
    InvalidName,
    InvalidRequest,
    RegistryConflict,
    RegistryDown,
    SessionExpired,
    UnknownEntry,
    WriteUnknown,
    WrongFormat,
)
from dmq.registry.watch import Watch

__all__ = [
    "NO_DEADLINE",
    "OPERATIONS_MAX",
    "PATH_BYTES_MAX",
    "ROOT",
    "SESSION_SECONDS",
    "UNAVAILABLE",
    "VALUE_BYTES_MAX",
    "WRITE_BYTES_MAX",
    "Check",
    "Create",
    "Delete",
    "Entry",
    "Operation",
    "Put",
    "Reason",
    "Registry",
    "Trouble",
    "check_path",
    "check_write",
    "conflict",
    "needs_registry",
    "parent_of",
    "unknown_entry",
]

ROOT: Final = "/"
SESSION_SECONDS: Final = 6.0
PATH_BYTES_MAX: Final = 640  # two names of the longest kind, and every database's index takes it
VALUE_BYTES_MAX: Final = 128 << 10
WRITE_BYTES_MAX: Final = 512 << 10  # ZooKeeper takes 1 MiB, with all that is around the values
OPERATIONS_MAX: Final = 128
NO_DEADLINE: Final = float("-inf")
# A registry that cannot be used now; what was asked of it is to be asked again later.
UNAVAILABLE: Final = (RegistryDown, SessionExpired, UnknownEntry, WriteUnknown, WrongFormat)
_NEEDED: Final = "this needs the registry, and "


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry as it was read.

    Attributes:
        session: whose it is if it is ephemeral; 0 if it is not.
    """

    path: str
    value: bytes
    version: int
    session: int = 0

    @property
    def is_ephemeral(self) -> bool:
        return self.session != 0

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


class Check(msgspec.Struct, frozen=True, gc=False):
    """The entry is there, in this version; in any if it is None."""

    path: str
    version: int | None


class Create(msgspec.Struct, frozen=True, gc=False):
    """The entry does not exist, and is made. An ephemeral one goes with our session."""

    path: str
    value: bytes
    ephemeral: bool = False


class Put(msgspec.Struct, frozen=True, gc=False):
    """The entry is there in this version, in any if it is None, and gets another value."""

    path: str
    value: bytes
    version: int | None


class Delete(msgspec.Struct, frozen=True, gc=False):
    """The entry is there in this version, in any if it is None, has no children, and goes."""

    path: str
    version: int | None


Operation: TypeAlias = Check | Create | Put | Delete


class Reason(StrEnum):
    """Why an operation does not apply; stands in the detail of a `RegistryConflict`."""

    ABSENT = "absent"  # the entry, or the parent of one to be created, does not exist
    EXISTS = "exists"
    VERSION = "version"  # the entry is there in another one
    CHILDREN = "children"  # the entry to be deleted has some
    EPHEMERAL = "ephemeral"  # the parent of one to be created is


class Trouble(NamedTuple):
    """Something that is not as it should be, though the registry answers."""

    what: str
    advice: str


class Registry(Protocol):
    """One client of a registry, with its session. All methods belong to the event loop it was opened on.

    A client whose session is over opens another one by itself, and reconnects by itself.
    """

    @property
    def session_seconds(self) -> float:
        """How long a session lives without a sign of its client."""
        ...

    @property
    def session(self) -> int:
        """The number of our session, never 0 and never used twice; 0 while there is none."""
        ...

    @property
    def deadline(self) -> float:
        """Until when, on `Clock.boottime`, our session surely lives; long past if that is not known."""
        ...

    async def read(self, path: str) -> Entry | None:
        """The entry; None if there is none.

        Raises:
            RegistryDown: no server answers.
        """
        ...

    async def children(self, path: str) -> list[Entry]:
        """The entries right below a path, in the order of their names.

        Each is as it was at some moment of the call; they need not have been so all at once.

        Raises:
            UnknownEntry: there is no such path, which is not the same as one without children.
            RegistryDown: no server answers.
        """
        ...

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """Carry out all operations or none; returns the version that each `Create` and `Put` made.

        Raises:
            RegistryConflict: one does not apply; `detail` has its `index`, `path` and `reason`.
            SessionExpired: our session was over, and with it our ephemeral entries; another one is being opened.
            RegistryDown: no server was reached.
            WriteUnknown: it was sent and not answered within half a session. See the module.
        """
        ...

    def watch(self, prefix: str) -> Watch:
        """Hear of changes to an entry and to everything below it."""
        ...

    async def close(self) -> None:
        """End the session, and with it our ephemeral entries, if a server can still be told."""
        ...


def check_path(path: str) -> str:
    """Return the path if it can be one.

    Raises:
        InvalidName: with a sentence that says what is allowed.
    """
    if path == ROOT:
        return path
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") or not part.isprintable() for part in parts[1:]):
        raise InvalidName(
            f"{path!r} is not a path of a registry: write /part/part, with parts that are printable and none of them "
            "empty, '.' or '..'",
            path=path,
        )
    if len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        raise InvalidName(
            f"a path of a registry has at most {PATH_BYTES_MAX} bytes of UTF-8: choose shorter names", path=path
        )
    return path


def check_write(operations: Sequence[Operation]) -> None:
    """Check what can be known of a write without a registry.

    Raises:
        InvalidName: a path is none.
        InvalidRequest: it is too much at once, or writes the root.
    """
    if not 0 < len(operations) <= OPERATIONS_MAX:
        raise InvalidRequest(
            f"a registry takes 1 to {OPERATIONS_MAX} operations at a time, and here are {len(operations)}: divide them"
        )
    size = 0
    for operation in operations:
        if check_path(operation.path) == ROOT and not isinstance(operation, Check):
            raise InvalidRequest("the root of a registry cannot be written: write below it")
        value = operation.value if isinstance(operation, Create | Put) else b""
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidRequest(
                f"the value for {operation.path} has {len(value)} bytes, and a registry takes {VALUE_BYTES_MAX}: "
                "keep large things elsewhere"
            )
        size += len(value)
    if size > WRITE_BYTES_MAX:
        raise InvalidRequest(f"{size} bytes at a time are over the registry's limit of {WRITE_BYTES_MAX}: divide them")


def parent_of(path: str) -> str:
    """The path above; the root's is the root."""
    return path.rpartition("/")[0] or ROOT


_SENTENCES: Final = {
    Reason.ABSENT: "does not exist: read again, and decide with what is found",
    Reason.EXISTS: "exists already: read it, and decide again",
    Reason.VERSION: "has another version, since another client wrote it: read it, and decide again",
    Reason.CHILDREN: "has entries below it: delete those first",
    Reason.EPHEMERAL: "is ephemeral and takes no entries below it: choose another place",
}


def conflict(index: int, path: str, reason: Reason) -> RegistryConflict:
    """The error of an operation that does not apply."""
    return RegistryConflict(
        f"nothing was written: {path} {_SENTENCES[reason]}", index=index, path=path, reason=str(reason)
    )


def unknown_entry(path: str) -> UnknownEntry:
    """The error of a path whose children cannot be listed."""
    return UnknownEntry(
        f"{path} is not in the registry: check that it is the registry of this cluster, and that nobody deleted it",
        path=path,
    )


@contextlib.contextmanager
def needs_registry() -> Iterator[None]:
    """What is done here needs the registry: if that is down, the error says so, and that messages go on."""
    try:
        yield
    except RegistryDown as error:
        if error.message.startswith(_NEEDED):
            raise
        raise RegistryDown(
            f"{_NEEDED}{error.message}; messages of existing topics go on meanwhile", **error.detail
        ) from error
