"""What a task of the archive job does: read a range of a journal and write its rows as files. Runs on executors.

Rows never pass through the JVM: units come from the broker, numpy and Arrow make columns of them, Arrow writes Parquet.
Back goes what was written, for the driver to commit.

What always holds: a task that is run twice, or dies, harms nobody: its files have names of their own and count for
nothing until a commit names them. Memory is bounded by `FLUSH_BYTES` and one answer of the broker.

Settlements: the outcomes in the journal's events, as rows that still have to be joined with their messages.

An event names a queue and a range of offsets. Here it becomes a row for each run of offsets; `settlement_join` joins
them with the messages that stand there.

What always holds: an event is decoded only if it is one of the dequeue log. Left out is what the broker does for itself
under groups of its own, copies to the tail of a queue, and offsets that retention took before a group came to them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dmq.errors import Damaged, InvalidRequest
from dmq.model import SYSTEM_PREFIX
from dmq.offset_runs import bitmap_runs
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.key_index import index_rows
from dmq.pipeline.archive.parquet import Written, write_days
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.pipeline.decode.rows import COPY_COLUMNS, MESSAGE_COLUMNS, copy_batch, message_batch
from dmq.pipeline.decode.units import SystemRecord, UnitRows, decode_fetched
from dmq.pipeline.jobs.frames import BLOOM, GROUP_ROWS, SORT
from dmq.pipeline.object_store import store_errors
from dmq.pipeline.tables import CONSUME_EVENT, COPY, KEY_INDEX, MESSAGE
from dmq.storage.state.events import Outcome, Settled, decode_event

__all__ = ["SETTLEMENT", "Extracted", "Settlements", "Task", "extract"]

FLUSH_BYTES: Final = 128 << 20
_COLUMNS: Final = frozenset(MESSAGE_COLUMNS) | frozenset(COPY_COLUMNS)


class Task(NamedTuple):
    """A range of a journal, and what is wanted of it."""

    servers: str
    journal_id: int
    start: int
    end: int
    archive: str  # address
    tables: frozenset[str]
    staging: str  # folder for settlements, which are not rows of a table yet


@dataclass
class Extracted:
    """What a task did."""

    files: dict[str, list[Written]] = field(default_factory=dict)  # by table
    staged: list[str] = field(default_factory=list)  # files with settlements
    settled: int = 0  # messages that those are about
    bounds: dict[int, tuple[int, int]] = field(default_factory=dict)  # by topic id, which offsets
    damaged: list[tuple[int, int]] = field(default_factory=list)  # ranges of the journal that cannot be read
    messages: int = 0
    events: int = 0  # system records, of any kind

    def add(self, other: Extracted) -> None:
        """Take in what another task did."""
        for name, files in other.files.items():
            self.files.setdefault(name, []).extend(files)
        self.staged += other.staged
        self.settled += other.settled
        for topic_id, (least, greatest) in other.bounds.items():
            mine = self.bounds.get(topic_id, (least, greatest))
            self.bounds[topic_id] = (min(mine[0], least), max(mine[1], greatest))
        self.damaged += other.damaged
        self.messages += other.messages
        self.events += other.events

    @property
    def is_empty(self) -> bool:
        """Nothing that any table would have a row of."""
        return not (self.staged or any(self.files.values()))


def extract(task: Task) -> Extracted:
    """Do it.

    Raises:
        OffsetGone: retention was quicker.
        NotConnected: the broker was away for too long.
    """
    done = Extracted()
    rows = _Rows(task, done)
    with JournalReader(task.servers, app="dmq-archive") as reader:
        for part in _parts(reader, task, done.damaged.append):
            rows.add(part)
    rows.flush()
    return done


def _parts(reader: JournalReader, task: Task, damaged: Callable[[tuple[int, int]], None]) -> Iterator[UnitRows]:
    """The units of a task's range, decoded; around what is damaged."""

    def leave_out(error: Damaged) -> None:
        damaged((int(error.detail["start"]), int(error.detail["end"])))

    at = task.start
    while at < task.end:
        try:
            for fetched in reader.units(at, task.end):
                if fetched.journal_id != task.journal_id:
                    raise InvalidRequest(
                        f"{task.servers} has journal {fetched.journal_id:016x} now, not {task.journal_id:016x}: "
                        "start the run again"
                    )
                yield from decode_fetched(fetched, leave_out, again=reader.fetch_checked, columns=_COLUMNS)
                at = fetched.end
            return
        except Damaged as error:
            if int(error.detail["end"]) <= at:
                raise
            leave_out(error)
            at = int(error.detail["end"])


class _Rows:
    """Rows on their way into files."""

    def __init__(self, task: Task, done: Extracted) -> None:
        self._task = task
        self._done = done
        self._messages: list[pa.RecordBatch] = []
        self._copies: list[pa.RecordBatch] = []
        self._settlements = Settlements()
        self._bytes = 0

    def add(self, rows: UnitRows) -> None:
        tables = self._task.tables
        self._done.events += len(rows.events)
        if CONSUME_EVENT in tables:
            self._settlements.add(rows.events)
        if tables & {MESSAGE, KEY_INDEX} and len(rows):
            # The index alone, after a run was killed, needs no bodies.
            columns = MESSAGE_COLUMNS if MESSAGE in tables else tuple(c for c in MESSAGE_COLUMNS if c in _INDEXED)
            self._messages.append(message_batch(rows, columns))
            self._bytes += self._messages[-1].nbytes
        if COPY in tables and len(rows):
            self._copies.append(copy_batch(rows))
            self._bytes += self._copies[-1].nbytes
        if self._bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        tables = self._task.tables
        messages = pa.Table.from_batches(self._messages) if self._messages else None
        copies = pa.Table.from_batches(self._copies) if self._copies else None
        self._messages, self._copies, self._bytes = [], [], 0
        if messages is not None and messages.num_rows:
            self._done.messages += messages.num_rows
            if MESSAGE in tables:
                self._write(MESSAGE, messages, sort_by=SORT[MESSAGE], bloom=BLOOM.get(MESSAGE, ()))
            if KEY_INDEX in tables:
                self._write(KEY_INDEX, _by_hash(index_rows(messages)), row_group_rows=GROUP_ROWS[KEY_INDEX])
        if copies is not None and copies.num_rows:
            self._write(COPY, copies, sort_by=SORT[COPY])
        if len(self._settlements):
            self._stage()

    def _write(self, name: str, table: pa.Table, **how: object) -> None:
        folder = Folder.at(self._task.archive).below(name)
        self._done.files.setdefault(name, []).extend(write_days(table, folder, **how))

    def _stage(self) -> None:
        folder = Folder.at(self._task.staging)
        folder.make()
        name = f"{uuid.uuid4().hex}.parquet"
        with store_errors(folder.uri):
            pq.write_table(
                self._settlements.table(), f"{folder.path}/{name}", filesystem=folder.files, coerce_timestamps="us"
            )
        mine = Extracted(
            staged=[f"{folder.uri}/{name}"], settled=self._settlements.count, bounds=self._settlements.bounds
        )
        self._done.add(mine)
        self._settlements = Settlements()


_INDEXED: Final = frozenset(
    {"message_id", "broker", "journal_offset", "topic", "queue", "queue_offset", "key", "business_id", "dt"}
)


def _by_hash(index: pa.Table) -> pa.Table:
    """In the order of bucket and hash, which is that of the hash as an unsigned number."""
    hashes = index["hash"].combine_chunks().to_numpy(zero_copy_only=False).view(np.uint64)
    return index.combine_chunks().take(pa.array(np.argsort(hashes, kind="stable")))


OUTCOMES: Final[dict[int, str]] = {
    Outcome.ACKED: "acked",
    Outcome.RETRIED: "failed",
    Outcome.DEAD: "dead",
    Outcome.EXPIRED: "expired",
    Outcome.SKIPPED: "skipped",
}
_TIME: Final = pa.timestamp("us", tz="UTC")
SETTLEMENT: Final = pa.schema(
    [
        pa.field("topic_id", pa.int64()),
        pa.field("queue", pa.int32()),
        pa.field("first_offset", pa.int64()),
        pa.field("last_offset", pa.int64()),
        pa.field("group", pa.string()),
        pa.field("member", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("outcome", pa.string()),
        pa.field("leased_at", _TIME),
        pa.field("settled_at", _TIME),
        pa.field("error", pa.string()),
        pa.field("journal_offset", pa.int64()),
        pa.field("dt", pa.date32()),
    ]
)
_SETTLED_TAG: Final = 3
_GONE: Final = "gone"  # as `dmq.broker.delivery.cursor` says it; such ranges may be of any length, and have no messages
_DAY_MS: Final = 86_400_000
_TIME_MAX_MS: Final = 253_402_300_799_999


class Settlements:
    """The settlements of some units.

    Attributes:
        count: how many messages they are about.
        bounds: by topic id, the least and the greatest offset among them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.bounds: dict[int, tuple[int, int]] = {}
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, records: Iterable[SystemRecord]) -> None:
        """Take in what system records say."""
        for record in records:
            # An array's head, then its event's number: most other events are told apart without decoding them.
            if not record.is_snapshot and len(record.body) > 1 and record.body[1] == _SETTLED_TAG:
                event = decode_event(record.body)
                if isinstance(event, Settled):
                    self._add(event, record.journal_offset, record.stored_at_ms)

    def _add(self, event: Settled, journal_offset: int, stored_at_ms: int) -> None:
        outcome = OUTCOMES.get(event.outcome)
        if outcome is None or event.group.startswith(SYSTEM_PREFIX) or (event.error == _GONE and outcome == "skipped"):
            return
        for first, end in bitmap_runs(event.start, event.count, event.bitmap):
            self._rows.append(
                (
                    event.topic_id,
                    event.queue,
                    first,
                    end - 1,
                    event.group,
                    event.member or None,
                    event.attempt,
                    outcome,
                    _micros(event.leased_at_ms),
                    _micros(event.settled_at_ms or stored_at_ms),
                    event.error or None,
                    journal_offset,
                    stored_at_ms // _DAY_MS,
                )
            )
            self.count += end - first
            least, greatest = self.bounds.get(event.topic_id, (first, first))
            self.bounds[event.topic_id] = (min(least, first), max(greatest, end - 1))

    def table(self) -> pa.Table:
        """As rows."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(SETTLEMENT)
        arrays = []
        for column, kind in zip(columns, SETTLEMENT, strict=True):
            if pa.types.is_timestamp(kind.type):
                arrays.append(pa.array(column, pa.int64()).cast(kind.type))
            elif pa.types.is_date32(kind.type):
                arrays.append(pa.array(column, pa.int32()).cast(kind.type))
            else:
                arrays.append(pa.array(column, kind.type))
        return pa.Table.from_arrays(arrays, schema=SETTLEMENT)


def _micros(at_ms: int) -> int | None:
    return min(at_ms, _TIME_MAX_MS) * 1000 if at_ms > 0 else None
