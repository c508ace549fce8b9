"""Headers of a registry behind name servers: REGISTRY_SESSION to REGISTRY_CHANGED.

What always holds: an answer fits into a header: a write is small, and a listing comes in pages.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U32, Amount, Header, Name, OptionalName

__all__ = [
    "PAGE_BYTES_MAX",
    "PAGE_MAX",
    "PATHS_MAX",
    "RegistryBeat",
    "RegistryChanged",
    "RegistryChildren",
    "RegistryChildrenReply",
    "RegistryClose",
    "RegistryEntry",
    "RegistryOperation",
    "RegistryRead",
    "RegistryReadReply",
    "RegistrySession",
    "RegistrySessionReply",
    "RegistryWatch",
    "RegistryWrite",
    "RegistryWriteReply",
    "Step",
]

PAGE_MAX: Final = 1000
PAGE_BYTES_MAX: Final = 512 << 10
PATHS_MAX: Final = 1000

Path = Annotated[str, Meta(min_length=1, max_length=640)]
Value = Annotated[bytes, Meta(max_length=128 << 10)]
Paths = Annotated[list[Path], Meta(max_length=PATHS_MAX)]


class RegistrySession(Header, frozen=True):
    """Begin a session, or go on with one; must come before a write."""

    owner: Name  # for people
    session: Amount = 0  # the one to go on with; 0 begins another


class RegistrySessionReply(Header, frozen=True):
    """The session; another one if that which was asked for is over."""

    session: Amount
    session_ms: U32  # how long it lives without a sign of the client
    registry: OptionalName = ""  # name servers of one registry say the same; one of an earlier version says nothing


class RegistryBeat(Header, frozen=True):
    """Let the session live on; SESSION_EXPIRED if it is over."""

    session: Amount


class RegistryClose(Header, frozen=True):
    """End the session, and take its ephemeral entries out."""

    session: Amount


class RegistryEntry(Header, frozen=True):
    """One entry."""

    path: Path
    value: Value
    version: Amount
    session: Amount = 0  # whose it is if it is ephemeral


class RegistryRead(Header, frozen=True):
    """Ask for an entry."""

    path: Path


class RegistryReadReply(Header, frozen=True):
    """The entry, if it exists."""

    found: RegistryEntry | None = None


class RegistryChildren(Header, frozen=True):
    """Ask for the entries right below a path, in the order of their paths, after one of them."""

    path: Path
    after: Annotated[str, Meta(max_length=640)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class RegistryChildrenReply(Header, frozen=True):
    """One page. `more` says that another follows after the last one here."""

    entries: Annotated[list[RegistryEntry], Meta(max_length=PAGE_MAX)]
    more: bool = False


class Step(IntEnum):
    """What an operation does."""

    CHECK = 1
    CREATE = 2
    CREATE_EPHEMERAL = 3
    PUT = 4
    DELETE = 5


class RegistryOperation(Header, frozen=True):
    """One operation of a write."""

    step: Step
    path: Path
    value: Value = b""
    version: Amount | None = None  # none: any


class RegistryWrite(Header, frozen=True):
    """Carry out all operations or none. One whose number is not above those before it is not carried out."""

    session: Amount
    number: Amount  # rises with each write of the session
    operations: Annotated[list[RegistryOperation], Meta(min_length=1, max_length=128)]


class RegistryWriteReply(Header, frozen=True):
    """The version that each create and put has made."""

    versions: Annotated[list[Amount | None], Meta(max_length=128)]


class RegistryWatch(Header, frozen=True):
    """Tell this connection of changes at and below these paths, and of no others."""

    prefixes: Paths = []


class RegistryChanged(Header, frozen=True):
    """Name server to client, one-way: these have changed, or anything may have."""

    paths: Paths = []
    is_all: bool = False
