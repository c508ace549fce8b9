"""From the archive's rows to a plan: choosing them, their order, and the queue each of them goes to.

What always holds: the same archive and the same choice give the same plan, digest included. An ordered message goes to
its business id's queue and one of a topic by priority to its priority's, as its producer would send it; any other to
the queue it had, so that messages of one queue stay in one.

The files of a plan's rows: one for each queue of the target, in the order they are sent in.

What always holds: rows of a queue are written in the order in which they are added, and described as they are written;
memory is bounded by `_BUFFER_BYTES` and one batch, however many queues there are.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from dmq.errors import Damaged, UnknownMessage
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.object_store import store_errors
from dmq.pipeline.replay.plan import NAMED_FILES, VERSION, Plan, Plans, Selection, Target
from dmq.pipeline.tables import MESSAGE, SCHEMAS
from dmq.records import business_hash
from dmq.records.layout import ORDERED

__all__ = [
    "ORDER",
    "STAGED",
    "Overview",
    "QueueFile",
    "QueueFiles",
    "check_bodies",
    "keep_plan",
    "make_plan",
    "overview",
    "queues_of",
]

_READ_ROWS: Final = 2048
_MEMORY_BYTES: Final = 1 << 30
_SAMPLE: Final = 5
ORDER: Final = "stored_at, broker, journal_offset"
# Each message once: the row it had first, whatever replays brought in later.
_LATER: Final = (
    "SELECT broker, journal_offset FROM (SELECT broker, journal_offset, row_number() OVER (PARTITION BY message_id "
    f"ORDER BY {ORDER}) AS turn FROM message WHERE {{said}}) WHERE turn > 1"
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
            f"SELECT message_id, topic, queue, queue_offset, key, stored_at, body FROM chosen ORDER BY {ORDER} "
            f"LIMIT {_SAMPLE}"
        )
    return Overview(sum(row["messages"] for row in topics), sum(int(row["bytes"]) for row in topics), topics, sample)


def make_plan(archive: Archive, selection: Selection, target: Target, plans: Plans, now_ms: int) -> Plan:
    """Write down what is to be sent, and keep it as the plan.

    Raises:
        UnknownMessage: nothing is chosen.
        InvalidRequest: the selection's SQL is none.
        Damaged: a file of the archive is.
    """
    version = archive.table(MESSAGE).version()

    def write(folder: Folder) -> dict[int, QueueFile]:
        files = QueueFiles(folder)
        with _Chosen(archive, selection) as chosen:
            asked = ", ".join((*STAGED.names, "queue", "body_crc"))
            for batch in chosen.stream(f"SELECT {asked} FROM chosen ORDER BY {ORDER}"):
                check_bodies(batch)
                files.add(batch, queues_of(batch, target))
        return files.close()

    return keep_plan(plans, selection, target, write, now_ms=now_ms, archive_version=version)


def keep_plan(
    plans: Plans,
    selection: Selection,
    target: Target,
    write: Callable[[Folder], dict[int, QueueFile]],
    *,
    now_ms: int,
    archive_version: int,
) -> Plan:
    """Have the rows written, and keep the plan of them; without a plan no rows stay.

    Raises:
        UnknownMessage: there are none.
    """
    rows = plans.new_rows()
    try:
        files = write(plans.folder.below(rows))
        if not files:
            raise UnknownMessage(f"no archived message matches ({selection.words()}): nothing to replay")
    except BaseException:
        plans.drop(rows)
        raise
    names = {queue: file.name for queue, file in files.items() if file.name != f"{queue}.parquet"}
    return plans.keep(
        Plan(
            version=NAMED_FILES if names else VERSION,
            replay_id=plans.replay_id,
            selection=selection,
            topic=target.topic,
            topic_id=target.topic_id,
            places=target.places,
            counts={queue: file.rows for queue, file in files.items()},
            bytes=sum(file.bytes for file in files.values()),
            digest=digest_of(files),
            folder=rows,
            archive_version=archive_version,
            created_at_ms=now_ms,
            files=names,
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


_ROW_GROUP_ROWS: Final = 4096
_BUFFER_BYTES: Final = 64 << 20
_COLUMNS: Final = (
    "message_id", "key", "business_id", "tag", "app", "priority", "flags", "sent_at", "headers", "body",
)  # fmt: skip
STAGED: Final = pa.schema([SCHEMAS[MESSAGE].field(name) for name in _COLUMNS])


class QueueFile(NamedTuple):
    """One file: its name, how many rows and bytes of bodies it has, and a digest of which messages, in their order."""

    name: str
    rows: int
    bytes: int
    digest: str


def digest_of(files: Mapping[int, QueueFile]) -> str:
    """Of all files together, by queue."""
    whole = hashlib.sha256()
    for queue in sorted(files):
        whole.update(f"{queue} {files[queue].rows} {files[queue].digest}\n".encode())
    return whole.hexdigest()


def check_bodies(batch: pa.RecordBatch) -> None:
    """Compare bodies with the checksums that they were archived with: Parquet has none of its own.

    Parameters:
        batch: with `message_id`, `body` and `body_crc`.

    Raises:
        Damaged: one is another.
    """
    wanted = batch["body_crc"].to_pylist()
    for index, (body, crc) in enumerate(zip(batch["body"], wanted, strict=True)):
        raw = body.as_buffer()
        if crc is not None and crc32c(b"" if raw is None else raw) != crc:
            raise Damaged(
                f"the body of message {batch['message_id'][index]} is not what was archived: a file of table message "
                "is damaged, put it back from a copy, or leave the message out"
            )


class _Queue:
    """The rows of one queue on their way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: list[pa.RecordBatch] = []
        self.waiting_rows = 0
        self.rows = 0
        self.bytes = 0
        self.hash: Any = hashlib.sha256()
        self.writer: pq.ParquetWriter | None = None


class QueueFiles:
    """Rows on their way into a file for each queue.

    Parameters:
        suffix: of the files' names, so that nobody else writes the same.
    """

    def __init__(self, folder: Folder, suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix
        self._queues: dict[int, _Queue] = {}
        self._waiting_bytes = 0
        folder.make()

    def add(self, batch: pa.RecordBatch, queues: npt.NDArray[np.int64]) -> None:
        """Rows, and the queue each of them goes to."""
        for number in np.unique(queues).tolist():
            mine = batch.filter(pa.array(queues == number)).select(STAGED.names).cast(STAGED)
            queue = self._queues.get(number)
            if queue is None:
                queue = self._queues[number] = _Queue(f"{number}{self._suffix}.parquet")
            queue.hash.update("".join(mine["message_id"].to_pylist()).encode())
            queue.rows += mine.num_rows
            queue.bytes += pc.sum(pc.binary_length(mine["body"])).as_py() or 0
            queue.waiting.append(mine)
            queue.waiting_rows += mine.num_rows
            self._waiting_bytes += mine.nbytes
            if queue.waiting_rows >= _ROW_GROUP_ROWS:
                self._write(queue)
        if self._waiting_bytes > _BUFFER_BYTES:
            for queue in self._queues.values():
                self._write(queue)

    def _write(self, queue: _Queue) -> None:
        if not queue.waiting:
            return
        with store_errors(self._folder.uri):
            if queue.writer is None:
                path = f"{self._folder.path}/{queue.name}"
                queue.writer = pq.ParquetWriter(path, STAGED, filesystem=self._folder.files, compression="zstd")
            queue.writer.write_table(pa.Table.from_batches(queue.waiting, STAGED), row_group_size=_ROW_GROUP_ROWS)
        self._waiting_bytes -= sum(batch.nbytes for batch in queue.waiting)
        queue.waiting, queue.waiting_rows = [], 0

    def close(self) -> dict[int, QueueFile]:
        """All is written, and stays; the files by queue."""
        for queue in self._queues.values():
            self._write(queue)
            assert queue.writer is not None
            with store_errors(self._folder.uri):
                queue.writer.close()
                self._folder.sync(queue.name)
        return {
            number: QueueFile(queue.name, queue.rows, queue.bytes, queue.hash.hexdigest())
            for number, queue in self._queues.items()
        }
