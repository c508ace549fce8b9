"""From the archive's rows to a plan: choosing them, their order, and the queue each of them goes to.

What always holds: the same archive and the same choice give the same plan, digest included. An ordered message goes to
its business id's queue and one of a topic by priority to its priority's, as its producer would send it; any other to
the queue it had, so that messages of one queue stay in one.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dmq.errors import UnknownMessage
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.replay.plan import VERSION, Plan, Plans, Target
from dmq.pipeline.replay.selection import Selection
from dmq.pipeline.tables import MESSAGE, SCHEMAS
from dmq.records import business_hash
from dmq.records.layout import ORDERED

__all__ = ["STAGED", "Overview", "make_plan", "overview", "queues_of"]

_ROW_GROUP_ROWS: Final = 4096
_BUFFER_BYTES: Final = 64 << 20
_READ_ROWS: Final = 2048
_MEMORY_BYTES: Final = 1 << 30
_SAMPLE: Final = 5
_COLUMNS: Final = (
    "message_id", "key", "business_id", "tag", "app", "priority", "flags", "sent_at", "headers", "body",
)  # fmt: skip
STAGED: Final = pa.schema([SCHEMAS[MESSAGE].field(name) for name in _COLUMNS])
_ORDER: Final = "stored_at, broker, journal_offset"
# Each message once: the row it had first, whatever replays brought in later.
_LATER: Final = (
    "SELECT broker, journal_offset FROM (SELECT broker, journal_offset, row_number() OVER (PARTITION BY message_id "
    f"ORDER BY {_ORDER}) AS turn FROM message WHERE {{said}}) WHERE turn > 1"
)


class Overview(NamedTuple):
    """What a replay would send: messages and bytes by topic, when they were stored, and a few of them."""

    total: int
    bytes: int
    topics: list[dict[str, Any]]
    sample: list[dict[str, Any]]


def overview(archive: Archive, selection: Selection) -> Overview:
    """What a selection chooses.

    Raises:
        InvalidRequest: it chooses everything, or its SQL is none.
    """
    with _Chosen(archive, selection) as chosen:
        topics = chosen.rows(
            "SELECT topic, count(*) AS messages, sum(octet_length(body)) AS bytes, min(stored_at) AS first, "
            "max(stored_at) AS last FROM chosen GROUP BY topic ORDER BY topic"
        )
        sample = chosen.rows(
            f"SELECT message_id, topic, queue, queue_offset, key, stored_at, body FROM chosen ORDER BY {_ORDER} "
            f"LIMIT {_SAMPLE}"
        )
    return Overview(sum(row["messages"] for row in topics), sum(int(row["bytes"]) for row in topics), topics, sample)


def make_plan(archive: Archive, selection: Selection, target: Target, plans: Plans, now_ms: int) -> Plan:
    """Write down what is to be sent, and keep it as the plan.

    Raises:
        UnknownMessage: nothing is chosen.
        InvalidRequest: the selection's SQL is none.
    """
    token = f"rows-{secrets.token_hex(4)}"
    version = archive.table(MESSAGE).version()
    staging = _Staging(plans.folder.below(token), target)
    try:
        with _Chosen(archive, selection) as chosen:
            for batch in chosen.stream(f"SELECT {', '.join((*_COLUMNS, 'queue'))} FROM chosen ORDER BY {_ORDER}"):
                staging.add(batch)
        staging.close()
    except BaseException:
        plans.drop(token)
        raise
    if not staging.rows:
        plans.drop(token)
        raise UnknownMessage(f"no archived message matches ({selection.words()}): nothing to replay")
    return plans.keep(
        Plan(
            version=VERSION,
            replay_id=plans.replay_id,
            selection=selection,
            topic=target.topic,
            topic_id=target.topic_id,
            places=target.places,
            counts=staging.counts,
            bytes=staging.bytes,
            digest=staging.digest(),
            folder=token,
            archive_version=version,
            created_at_ms=now_ms,
        )
    )


def queues_of(batch: pa.RecordBatch, target: Target) -> npt.NDArray[np.int64]:
    """The queue each row goes to."""
    if target.is_priority:
        priorities: npt.NDArray[np.int64] = batch["priority"].to_numpy(zero_copy_only=False).astype(np.int64)
        return np.minimum(priorities, target.queues - 1)
    queues: npt.NDArray[np.int64] = batch["queue"].to_numpy(zero_copy_only=False).astype(np.int64) % target.queues
    ordered = np.flatnonzero(batch["flags"].to_numpy(zero_copy_only=False) & ORDERED)
    if len(ordered):
        for index, business_id in zip(
            ordered.tolist(), batch["business_id"].take(pa.array(ordered)).to_pylist(), strict=True
        ):
            if business_id:
                queues[index] = business_hash(business_id) % target.queues
    return queues


class _Chosen:
    """The view `chosen`: each message that a selection means, once."""

    def __init__(self, archive: Archive, selection: Selection) -> None:
        selection.check()
        self._folder = tempfile.TemporaryDirectory(prefix="dmq-replay-")
        self._engine = Engine(Bounds(memory_bytes=_MEMORY_BYTES), spill=self._folder.name)
        try:
            files = archive.table(MESSAGE).files(where=selection.bounds())
            self._engine.show(MESSAGE, files, SCHEMAS[MESSAGE])
            self._engine.confine(files)
            said = selection.condition()
            later = pa.Table.from_batches(
                self._engine.stream(_LATER.format(said=said), _READ_ROWS),
                pa.schema([SCHEMAS[MESSAGE].field(name) for name in ("broker", "journal_offset")]),
            )
            self._engine.register("later", later)
            self._chosen = (
                f"WITH chosen AS (SELECT * FROM message WHERE {said} AND (broker, journal_offset) NOT IN "
                "(SELECT (broker, journal_offset) FROM later)) "
            )
        except BaseException:
            self.close()
            raise

    def rows(self, query: str) -> list[dict[str, Any]]:
        return [row for batch in self.stream(query) for row in batch.to_pylist()]

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        return self._engine.stream(self._chosen + query, _READ_ROWS)

    def close(self) -> None:
        self._engine.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Staging:
    """Rows on their way into a file for each queue."""

    def __init__(self, folder: Folder, target: Target) -> None:
        self._folder = folder
        self._target = target
        self._writers: dict[int, pq.ParquetWriter] = {}
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._waiting_rows: dict[int, int] = {}
        self._waiting_bytes = 0
        self._hashes: dict[int, Any] = {}
        self.counts: dict[int, int] = {}
        self.rows = 0
        self.bytes = 0
        folder.make()

    def add(self, batch: pa.RecordBatch) -> None:
        queues = queues_of(batch, self._target)
        for queue in np.unique(queues).tolist():
            mine = batch.filter(pa.array(queues == queue)).select(list(_COLUMNS)).cast(STAGED)
            digest = self._hashes.setdefault(queue, hashlib.sha256())
            digest.update("".join(mine["message_id"].to_pylist()).encode())
            self.counts[queue] = self.counts.get(queue, 0) + mine.num_rows
            self.rows += mine.num_rows
            self.bytes += pc.sum(pc.binary_length(mine["body"])).as_py() or 0
            self._waiting.setdefault(queue, []).append(mine)
            self._waiting_rows[queue] = self._waiting_rows.get(queue, 0) + mine.num_rows
            self._waiting_bytes += mine.nbytes
            if self._waiting_rows[queue] >= _ROW_GROUP_ROWS:
                self._write(queue)
        if self._waiting_bytes > _BUFFER_BYTES:
            for queue in [*self._waiting]:
                self._write(queue)

    def _write(self, queue: int) -> None:
        waiting = self._waiting.pop(queue, [])
        if not waiting:
            return
        self._waiting_rows[queue] = 0
        self._waiting_bytes -= sum(batch.nbytes for batch in waiting)
        writer = self._writers.get(queue)
        if writer is None:
            path = f"{self._folder.path}/{queue}.parquet"
            writer = pq.ParquetWriter(path, STAGED, filesystem=self._folder.files, compression="zstd")
            self._writers[queue] = writer
        writer.write_table(pa.Table.from_batches(waiting, STAGED), row_group_size=_ROW_GROUP_ROWS)

    def close(self) -> None:
        """All is written, and stays."""
        for queue in [*self._waiting]:
            self._write(queue)
        for queue, writer in self._writers.items():
            writer.close()
            self._folder.sync(f"{queue}.parquet")

    def digest(self) -> str:
        whole = hashlib.sha256()
        for queue in sorted(self._hashes):
            whole.update(f"{queue} {self.counts[queue]} {self._hashes[queue].hexdigest()}\n".encode())
        return whole.hexdigest()
