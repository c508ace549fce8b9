"""The plan of a replay: which messages, and the rows themselves, in their order, kept beside the archive until sent.

A `Selection` is what `dmq archive replay` is given, and the question it becomes. A replay that is killed and run again
must send the same messages in the same batches, whatever became of the archive in between: new commits, compaction,
retention. So the first run that executes writes the chosen rows down, queue by queue, and every run sends from there.
It lies in `replay/<replay id>` below the archive's address:

    plan.json                  what is to be sent; once this is there, the rows are
    claim/                     in an object store: the same, as the first entry of a log, which only one run can write
    rows-<token>/<queue>.parquet   the rows for one queue of the target, in order; made by Spark, the plan has the names
    done.json                  it was sent, all of it; the rows are gone then

What always holds: a plan is never changed; each message stands in it once, even if the archive has rows of it from
earlier replays; messages that shared a queue keep their order. Texts of a user get into a question as values, but for
the one that is SQL; and that one only ever stands in a SELECT over the archive's own tables
(`dmq.pipeline.lookup.engine`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec
from pyarrow import fs

from dmq.errors import InvalidRequest, WrongFormat
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.lookup.engine import quoted
from dmq.pipeline.object_store import store_errors

__all__ = ["Done", "Plan", "Plans", "Selection", "Target", "check_replay_id"]


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that is given must hold; of several ids, keys or business ids one of them."""

    topic: str = ""
    ids: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    business_ids: tuple[str, ...] = ()
    since: datetime | None = None  # by the time they were stored, this moment included
    until: datetime | None = None  # this one not
    where: str = ""  # SQL over the columns of `message`

    def check(self) -> None:
        """Refuse to choose everything there is without being told so.

        Raises:
            InvalidRequest: nothing is said, or the times are the wrong way round.
        """
        if not any((self.topic, self.ids, self.keys, self.business_ids, self.since, self.until, self.where)):
            raise InvalidRequest("say which messages: --topic, --id, --key, --business-id, --since, --until or --where")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidRequest("--since must be before --until")
        if ";" in self.where or self.where.count("(") != self.where.count(")"):
            raise InvalidRequest("--where is one condition as in \"tag = 'paid' AND priority > 4\"")

    def condition(self) -> str:
        """As SQL."""
        said = []
        if self.topic:
            said.append(f"topic = {quoted(self.topic)}")
        for column, values in (("message_id", self.ids), ("key", self.keys), ("business_id", self.business_ids)):
            if values:
                said.append(f"{column} IN ({', '.join(map(quoted, values))})")
        if self.since is not None:
            said.append(f"stored_at >= {_moment(self.since)}")
        if self.until is not None:
            said.append(f"stored_at < {_moment(self.until)}")
        if self.where:
            said.append(f"({self.where})")
        return " AND ".join(said)

    def bounds(self) -> dict[str, tuple[Any, Any]]:
        """What a file's statistics may be compared with."""
        found: dict[str, tuple[Any, Any]] = {}
        if self.topic:
            found["topic"] = (self.topic, self.topic)
        if self.since is not None or self.until is not None:
            found["stored_at"] = (self.since, self.until)
        return found

    def words(self) -> str:
        """For people."""
        parts = [f"topic {self.topic}"] if self.topic else []
        for name, values in (("id", self.ids), ("key", self.keys), ("business id", self.business_ids)):
            if values:
                parts.append(f"{name} {', '.join(values[:3])}{'…' if len(values) > 3 else ''}")
        parts += [f"from {self.since.isoformat()}"] if self.since else []
        parts += [f"before {self.until.isoformat()}"] if self.until else []
        parts += [f"where {self.where}"] if self.where else []
        return ", ".join(parts)


def _moment(at: datetime) -> str:
    return f"TIMESTAMPTZ {quoted(at.astimezone(UTC).isoformat())}"


VERSION: Final = 1
NAMED_FILES: Final = 2  # the version of a plan that names its files, which those who made version 1 would not find
_ROWS: Final = "rows-"
_CLAIM: Final = "claim"
BATCH_ROWS: Final = 2000
BATCH_BYTES: Final = 512 << 10
_ID: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class Target(NamedTuple):
    """Where it goes."""

    topic: str
    topic_id: int  # in a cluster, the incarnation
    queues: int
    is_priority: bool
    places: tuple[int, ...] = ()  # in a cluster, the place that each queue stands for


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent. Stored: fields may be added at the end."""

    version: int
    replay_id: str
    selection: Selection
    topic: str
    topic_id: int
    counts: dict[int, int]  # messages by queue
    bytes: int  # of bodies
    digest: str  # of what is sent where, in which order
    folder: str  # of the rows
    archive_version: int  # of the table `message`
    created_at_ms: int
    batch_rows: int = BATCH_ROWS
    batch_bytes: int = BATCH_BYTES
    places: tuple[int, ...] = ()  # in a cluster: of which shard and queue each queue of the plan is
    files: dict[int, str] = {}  # by queue, the name of its file, where that is not the queue's number

    def file(self, queue: int) -> str:
        """The name of the file with the rows of a queue."""
        return self.files.get(queue, f"{queue}.parquet")

    def place(self, queue: int) -> int:
        """The place that a queue of the plan stands for."""
        return self.places[queue] if self.places else queue

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def producer_id(self) -> int:
        """Under which it is sent: the same for the same messages under the same replay id, and no other."""
        said = f"dmq replay {self.replay_id} {self.topic} {self.digest}".encode()
        return int.from_bytes(hashlib.sha256(said).digest()[:8], "big") | 1


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """That it was sent."""

    sent: int
    at_ms: int


def check_replay_id(replay_id: str) -> str:
    """The id if it may be one.

    Raises:
        InvalidRequest: it may not.
    """
    if not 1 <= len(replay_id) <= 64 or not _ID.issuperset(replay_id) or replay_id.startswith("."):
        raise InvalidRequest("a replay id has 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', and does not begin with '.'")
    return replay_id


class Plans:
    """The plan of one replay, where it is kept.

    Parameters:
        archive: the archive's folder.

    Raises:
        InvalidRequest: the replay id cannot be one.
    """

    def __init__(self, archive: Folder, replay_id: str) -> None:
        self.replay_id: Final = check_replay_id(replay_id)
        self.folder: Final = archive.below("replay").below(replay_id)

    def new_rows(self) -> str:
        """A folder for rows that nobody else writes to."""
        return f"{_ROWS}{secrets.token_hex(4)}"

    def load(self) -> Plan | None:
        """The plan; None if there is none yet.

        Raises:
            WrongFormat: another version made it.
        """
        raw = self._read("plan.json")
        if raw is None and not self.folder.is_local:
            claimed = self.folder.claimed(_CLAIM)  # by a run that was killed before it wrote the file
            raw = None if claimed is None else claimed.encode()
        if raw is None:
            return None
        try:
            plan = msgspec.json.decode(raw, type=Plan)
        except msgspec.MsgspecError as error:
            raise WrongFormat(f"the plan of replay {self.replay_id} cannot be read: {error}") from error
        if plan.version not in (VERSION, NAMED_FILES):
            raise WrongFormat(f"the plan of replay {self.replay_id} is of version {plan.version}: let that one send it")
        return plan

    def done(self) -> Done | None:
        """That it was sent; None if it was not, or not all of it."""
        raw = self._read("done.json")
        return None if raw is None else msgspec.json.decode(raw, type=Done)

    def keep(self, plan: Plan) -> Plan:
        """Make it the plan, unless somebody else was quicker: then theirs is it."""
        raw = msgspec.json.format(msgspec.json.encode(plan), indent=2)
        is_ours = self.load() is None
        if is_ours and not self.folder.is_local:
            is_ours = self.folder.claim(_CLAIM, raw.decode()) == raw.decode()
        if not is_ours or not self._create("plan.json", raw):
            theirs = self.load()
            assert theirs is not None
            self.drop(plan.folder)
            return theirs
        return plan

    def finish(self, plan: Plan, done: Done) -> None:
        """It was sent: say so, and let the rows go, with those that killed runs have left."""
        self._create("done.json", msgspec.json.encode(done))
        for info in self.folder.files.get_file_info(fs.FileSelector(self.folder.path, allow_not_found=True)):
            if info.base_name.startswith(_ROWS):
                self.drop(info.base_name)

    def drop(self, folder: str) -> None:
        """Delete rows that are not needed."""
        self.folder.delete(folder)

    def _read(self, name: str) -> bytes | None:
        path = f"{self.folder.path}/{name}"
        with store_errors(self.folder.uri):
            if self.folder.files.get_file_info(path).type != fs.FileType.File:
                return None
            with self.folder.files.open_input_stream(path) as stream:
                return bytes(stream.read())

    def _create(self, name: str, raw: bytes) -> bool:
        """Write a file that is there whole or not at all; False if it was there already.

        In an object store, of two at once the last one counts: what must be written once is claimed before.
        """
        path = f"{self.folder.path}/{name}"
        self.folder.make()
        if not self.folder.is_local:
            if self._read(name) is not None:
                return False
            with store_errors(self.folder.uri), self.folder.files.open_output_stream(path) as stream:
                stream.write(raw)
            return True
        draft = f"{path}.{os.getpid()}"
        with store_errors(self.folder.uri), open(draft, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails where a rename would write over
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        self.folder.sync(name)
        return True
