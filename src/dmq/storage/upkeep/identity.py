"""The identity of a data directory: the file `STORE`, which says which journal it holds and whose member it is.

    {"format": 1, "journal_id": "…", "check": "…",
     "member": {"cluster": "…", "shard": "…", "replica_id": "…", "life": 3, "revision": 17, "doubtful": false},
     "place": {"id": "1a2b-77", "closed": false, "check": "…"}}

A member of a shard has the last two entries; `check` is over all the others but `place`, as they are told here, so that
earlier versions read the file. The file is replaced as a whole: after a crash it is the old one or the new one.

Beside it a member has `RECORD`: the newest record of its shard that it has seen, with a checksum on its first line. A
registry that was lost is built anew from it.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from crc32c import crc32c

from dmq.errors import StorageError, WrongFormat
from dmq.storage.files import Files

__all__ = [
    "FORMAT",
    "IDENTITY",
    "RECORD",
    "Identity",
    "Membership",
    "Residence",
    "parse_identity",
    "read_identity",
    "read_record",
    "was_alone",
    "write_identity",
    "write_record",
]

FORMAT: Final = 1
IDENTITY: Final = "STORE"
TEMPORARY: Final = "STORE.tmp"
RECORD: Final = "RECORD"
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


class Residence(msgspec.Struct, frozen=True):
    """Where a member's directory was when it was started last.

    Attributes:
        id: as of `Files.place`; "" if that is not known.
        closed: that life ended well: the directory has not changed since, wherever it was moved to.
    """

    id: str = ""
    closed: bool = False

    @property
    def check(self) -> str:
        return f"{crc32c(f'{self.id} {self.closed}'.encode()):08x}"


class Identity(msgspec.Struct, frozen=True):
    """What `STORE` says."""

    version: int
    journal_id: int
    member: Membership | None = None
    place: Residence = Residence()


def parse_identity(raw: bytes) -> Identity:
    """What the bytes of `STORE` say.

    Raises:
        ValueError: they cannot be read.
    """
    try:
        said: Any = json.loads(raw)
        member = said.get("member")
        identity = Identity(
            int(said["format"]),
            int(said["journal_id"], 16),
            None if member is None else _parse_member(member),
            _parse_place(said.get("place")),
        )
        check = said.get("check", _check_of(identity))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it cannot be read") from error
    # A flipped bit must neither make it another store, nor another version's, nor another member's.
    if check != _check_of(identity):
        raise ValueError("it fails its checksum")
    return identity


def _parse_member(said: Any) -> Membership:
    return msgspec.convert({**said, "replica_id": int(said["replica_id"], 16)}, Membership)


def _parse_place(said: Any) -> Residence:
    """Where it was; not known if that cannot be read, since nothing else depends on it."""
    try:
        place = Residence(str(said["id"]), said["closed"] is True)
        return place if said["check"] == place.check else Residence()
    except (LookupError, TypeError):
        return Residence()


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
        said["place"] = {"id": identity.place.id, "closed": identity.place.closed, "check": identity.place.check}
    _replace(files, IDENTITY, json.dumps(said).encode() + b"\n")


def read_record(files: Files) -> bytes:
    """The newest record of the shard that the member has seen; nothing if there is none that can be read."""
    if not files.exists(RECORD):
        return b""
    file = files.open(RECORD)
    try:
        check, _, record = file.read(0, file.size()).partition(b"\n")
    finally:
        file.close()
    return record if check == b"%08x" % crc32c(record) else b""


def was_alone(files: Files, member: Membership) -> bool:
    """Whether the record that the member saw last has nobody else in the in-sync set: nobody else can have led since.

    Of the record, which is the registry's, nothing but `in_sync` is looked at here.
    """
    try:
        in_sync = json.loads(read_record(files) or b"{}").get("in_sync")
    except (ValueError, AttributeError):
        return False
    return bool(in_sync == [f"{member.replica_id:016x}"])


def write_record(files: Files, record: bytes) -> None:
    """Keep a record of the shard; durable when this returns."""
    _replace(files, RECORD, b"%08x\n%b" % (crc32c(record), record))


def _replace(files: Files, path: str, content: bytes) -> None:
    temporary = f"{path}.tmp"
    try:
        file = files.open(temporary, create=True, write=True)
    except FileNotFoundError:
        raise StorageError(
            f"{files.describe(path)} cannot be written: its folder was removed or moved; put the directory back where "
            "it was, or restore it from a replica or a backup, then start again"
        ) from None
    try:
        file.truncate(0)
        file.write(0, (content,))
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_dir("")
