"""Finding archived messages: by id, key, business id or time, and what became of one.

The index table says where a message stands by the hash of what it is looked up by; it and the messages are sorted, so
that of each file one row group is read, and of most files none. Files are chosen by the statistics in the tables' logs.

What always holds: whatever is found has the very id, key or business id that was asked for, whatever its hash is; what
was in the tables `fresh_seconds` before a question is found; a body that is given out matches its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import pyarrow as pa
from crc32c import crc32c

from dmq.errors import Damaged, InvalidRequest
from dmq.pipeline.archive.key_index import BUSINESS_ID, KEY, MESSAGE_ID
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Bounds as EngineBounds
from dmq.pipeline.lookup.engine import Engine, Result
from dmq.pipeline.lookup.file_list import Listing
from dmq.pipeline.lookup.key_lookup import KeyIndex
from dmq.pipeline.tables import CONSUME_EVENT, COPY, MESSAGE, SCHEMAS

__all__ = ["Life", "Lookup", "Row", "run_sql"]

Row: TypeAlias = dict[str, Any]

LIMIT: Final = 100
_FRESH_SECONDS: Final = 1.0
_COLUMNS: Final = [name for name in SCHEMAS[MESSAGE].names if name != "body"]
_TIMES: Final = frozenset(field.name for field in SCHEMAS[MESSAGE] if pa.types.is_timestamp(field.type))
_ASKED: Final = {name: f"epoch_us({name})" if name in _TIMES else name for name in SCHEMAS[MESSAGE].names} | {
    "body_bytes": "octet_length(body)"
}
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Life(NamedTuple):
    """What the archive knows of one message: its rows, the copies made of it, and the words said of it."""

    messages: list[Row]
    copies: list[Row]
    events: list[Row]


class Lookup:
    """The archive, opened once for many questions. A context manager; used by one thread at a time.

    Parameters:
        uri: where the tables lie.
        fresh_seconds: for how long the list of a table's files is taken for true.

    Raises:
        StorageError: there is no archive, or its store does not answer; see `Archive.open`.
    """

    def __init__(self, uri: str, *, fresh_seconds: float = _FRESH_SECONDS) -> None:
        self.archive: Final = Archive.open(uri)
        self._engine = Engine()
        self._engine.reach(self.archive.uri)
        self._listings = {
            name: Listing(self.archive.table(name), fresh_seconds) for name in (MESSAGE, COPY, CONSUME_EVENT)
        }
        self._index = KeyIndex(self.archive, fresh_seconds)

    # --- messages ---------------------------------------------------------------------------------------------------

    def by_id(self, message_id: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT) -> list[Row]:
        """The message with an id, and what was replayed under it, oldest first."""
        return self._by(MESSAGE_ID, message_id, topic, bodies, limit=limit)

    def by_key(self, key: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT) -> list[Row]:
        """Messages with a key, oldest first."""
        return self._by(KEY, key, topic, bodies, limit=limit)

    def by_business_id(
        self, business_id: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT
    ) -> list[Row]:
        """Messages with a business id, oldest first."""
        return self._by(BUSINESS_ID, business_id, topic, bodies, limit=limit)

    def by_time(
        self, topic: str, since: datetime | None, until: datetime | None, *, bodies: bool = True, limit: int = LIMIT
    ) -> list[Row]:
        """Messages of a topic that were stored from a moment on and before another, oldest first."""
        bounds: dict[str, tuple[Any, Any]] = {"topic": (topic, topic)}
        if since is not None or until is not None:
            bounds["stored_at"] = (since, until)
        files = self._listings[MESSAGE].files(where=bounds, days=_days(since, until))
        said = (
            ["topic = $topic"]
            + ["stored_at >= $since"] * (since is not None)
            + ["stored_at < $until"] * (until is not None)
        )
        values = {"topic": topic} | ({"since": since} if since else {}) | ({"until": until} if until else {})
        return self._messages(files, " AND ".join(said), values, bodies, limit=limit)

    def _by(self, kind: str, text: str, topic: str, bodies: bool, limit: int) -> list[Row]:
        if limit < 1:
            raise InvalidRequest(f"at least one message is asked for, not {limit}")
        if not self._index.is_there():
            # Made by an older job, or not made yet: slower, and true all the same.
            files = self._listings[MESSAGE].files(where={"topic": (topic, topic)} if topic else None)
            said = f"{kind} = $text" + (" AND topic = $topic" if topic else "")
            return self._messages(
                files, said, {"text": text} | ({"topic": topic} if topic else {}), bodies, limit=limit
            )
        places = self._index.places(kind, text, topic, limit)
        listing = self._listings[MESSAGE]
        chosen: set[str] = set()
        for place in places:
            here = (place.queue_offset, place.queue_offset)
            at = (place.journal_offset, place.journal_offset)
            bounds = {"journal_offset": at, "queue_offset": here, "topic": (place.topic, place.topic)}
            chosen.update(listing.files(where=bounds, days=(place.day, place.day)))
        if not chosen:
            return []
        # Written out: of a list that is a parameter DuckDB does not know which row groups it leaves out.
        offsets = ", ".join(map(str, sorted({place.queue_offset for place in places})))
        journal_offsets = ", ".join(map(str, sorted({place.journal_offset for place in places})))
        said = f"queue_offset IN ({offsets}) AND journal_offset IN ({journal_offsets}) AND {kind} = $text"
        values = {"text": text}
        if topic:
            said, values = f"{said} AND topic = $topic", values | {"topic": topic}
        return sorted(self._messages(sorted(chosen), said, values, bodies, limit=None), key=_by_time)[:limit]

    def _messages(
        self, files: Sequence[str], said: str, values: Mapping[str, Any], bodies: bool, limit: int | None
    ) -> list[Row]:
        """The oldest messages of some files; without a limit all, in no order, which is cheaper."""
        if not files:
            return []
        names = [*_COLUMNS, "body_bytes", *(["body"] if bodies else [])]
        query = f"SELECT {', '.join(_ASKED[name] for name in names)} FROM read_parquet($files) WHERE {said}"
        asked = dict(values) | {"files": files}
        if limit is not None:
            query, asked = f"{query} ORDER BY stored_at, journal_offset LIMIT $limit", asked | {"limit": limit}
        rows = self._engine.tuples(query, asked)
        return [_row(names, row) for row in rows]

    # --- what became of one -----------------------------------------------------------------------------------------

    def life(self, message_id: str, *, bodies: bool = False) -> Life:
        """Everything the archive knows of a message."""
        messages = self.by_id(message_id, bodies=bodies)
        # Copies are made before, too, as of a delayed message: from when it was sent on, by a clock that may be wrong.
        since = min(messages[0]["sent_at"] or _EPOCH, messages[0]["stored_at"]) - _DAY if messages else None
        found: list[list[Row]] = []
        for name, order in ((COPY, "stored_at"), (CONSUME_EVENT, '"at"')):
            files = self._listings[name].files(where={"message_id": (message_id, message_id)}, days=_days(since, None))
            query = (
                f"SELECT * FROM read_parquet($files) WHERE message_id = $id ORDER BY {order}, journal_offset LIMIT 1000"
            )
            found.append(self._engine.rows(query, {"files": files, "id": message_id}).to_pylist() if files else [])
        return Life(messages, *found)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_sql(uri: str, query: str, bounds: EngineBounds | None = None) -> Result:
    """What a SELECT over the archive's tables, under their names, gives.

    Raises:
        InvalidRequest: it is no SELECT, or cannot be understood.
        LimitReached, TimedOut: it takes more than the bounds allow.
        StorageError: there is no archive, or its store does not answer; see `Archive.open`.
    """
    archive = Archive.open(uri)
    archive.check_logs(SCHEMAS)
    with Engine(bounds) as engine:
        every: list[str] = []
        for name, schema in SCHEMAS.items():
            files = archive.table(name).files()
            engine.show(name, files, schema)
            every += files
        engine.confine(every)
        return engine.ask(query)


def _row(names: Sequence[str], values: Sequence[Any]) -> Row:
    """A message as a dictionary: moments as such, headers as properties.

    Raises:
        Damaged: its body is not what was archived; Parquet has no checksum of its own.
    """
    row = dict(zip(names, values, strict=True))
    if "body" in row and row["body_crc"] not in (None, crc32c(row["body"] or b"")):
        raise Damaged(
            f"the body of message {row['message_id']} is not what was archived: a file of table message is damaged, "
            "put it back from a copy; without bodies the message can be looked up"
        )
    for name in _TIMES:
        row[name] = None if row[name] is None else _EPOCH + timedelta(microseconds=row[name])
    row["properties"] = {one["key"]: bytes(one["value"]).decode() for one in row.pop("headers") or ()}
    return row


def _by_time(row: Row) -> tuple[datetime, int]:
    return row["stored_at"], row["journal_offset"]


def _days(since: datetime | None, until: datetime | None) -> tuple[date | None, date | None]:
    """The days that hold a stretch of time."""
    return (
        None if since is None else since.astimezone(UTC).date(),
        None if until is None else until.astimezone(UTC).date(),
    )
