"""The identity of a data directory: the file `STORE`, which says which journal it holds and whose member it is.

    {"format": 1, "journal_id": "…", "check": "…",
     "member": {"cluster": "…", "shard": "…", "replica_id": "…", "life": 3, "revision": 17, "doubtful": false}}

A member of a shard has the last entry; `check` is over all the others, as they are told here. The file is replaced as a
whole: after a crash it is the old one or the new one.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from crc32c import crc32c

from dmq.errors import WrongFormat
from dmq.storage.files import Files

__all__ = ["FORMAT", "IDENTITY", "Identity", "Membership", "parse_identity", "read_identity", "write_identity"]

FORMAT: Final = 1
IDENTITY: Final = "STORE"
TEMPORARY: Final = "STORE.tmp"
_SIZE_MAX: Final = 4096


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """As what a data directory belongs to a shard.

    Attributes:
        replica_id: drawn when the directory joined; another directory of the same broker is another replica.
        life: raised at every start, so that an old copy of the directory can be told from it.
        revision: the highest one of the shard's record that this member has seen.
        doubtful: its tail was cut or found damaged, and it has not caught up with a leader since.
    """

    cluster: str
    shard: str
    replica_id: int
    life: int = 0
    revision: int = 0
    doubtful: bool = False


class Identity(msgspec.Struct, frozen=True):
    """What `STORE` says."""

    version: int
    journal_id: int
    member: Membership | None = None


def parse_identity(raw: bytes) -> Identity:
    """What the bytes of `STORE` say.

    Raises:
        ValueError: they cannot be read.
    """
    try:
        said: Any = json.loads(raw)
        member = said.get("member")
        identity = Identity(
            int(said["format"]), int(said["journal_id"], 16), None if member is None else _parse_member(member)
        )
        check = said.get("check", _check_of(identity))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    # A flipped bit must neither make it another store, nor another version's, nor another member's.
    if check != _check_of(identity):
        raise ValueError("it fails its checksum")
    return identity


def _parse_member(said: Any) -> Membership:
    return msgspec.convert({**said, "replica_id": int(said["replica_id"], 16)}, Membership)


def _check_of(identity: Identity) -> str:
    text = f"{identity.version} {identity.journal_id:016x}"
    if identity.member is not None:
        text += f" {json.dumps(_as_json(identity.member), sort_keys=True)}"
    return f"{crc32c(text.encode()):08x}"


def _as_json(member: Membership) -> dict[str, Any]:
    return {**msgspec.structs.asdict(member), "replica_id": f"{member.replica_id:016x}"}


def read_identity(files: Files) -> Identity | None:
    """What the directory's own file says; None where there is none.

    Raises:
        ValueError: it cannot be read.
        WrongFormat: the directory is another version's.
    """
    if not files.exists(IDENTITY):
        return None
    file = files.open(IDENTITY)
    try:
        identity = parse_identity(file.read(0, _SIZE_MAX))
    finally:
        file.close()
    if identity.version != FORMAT:
        raise WrongFormat(
            f"{files.describe('')} has format version {identity.version}, this DMQ reads {FORMAT}: "
            "use the DMQ that wrote it",
            version=identity.version,
        )
    return identity


def write_identity(files: Files, identity: Identity) -> None:
    """Put an identity in the place of the one before; it is durable when this returns."""
    said: dict[str, Any] = {
        "format": identity.version,
        "journal_id": f"{identity.journal_id:016x}",
        "check": _check_of(identity),
    }
    if identity.member is not None:
        said["member"] = _as_json(identity.member)
    file = files.open(TEMPORARY, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (json.dumps(said).encode() + b"\n",))
        file.sync()
    finally:
        file.close()
    files.rename(TEMPORARY, IDENTITY)
    files.sync_dir("")
