"""From the archive's rows to a plan: choosing them, their order, and the queue each of them goes to.

What always holds: the same archive and the same choice give the same plan, digest included. An ordered message goes to
its business id's queue and one of a topic by priority to its priority's, as its producer would send it; any other to
the queue it had, so that messages of one queue stay in one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dmq.errors import UnknownMessage
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.replay.plan import NAMED_FILES, VERSION, Plan, Plans, Target
from dmq.pipeline.replay.queue_files import STAGED, QueueFile, QueueFiles, check_bodies, digest_of
from dmq.pipeline.replay.selection import Selection
from dmq.pipeline.tables import MESSAGE, SCHEMAS
from dmq.records import business_hash
from dmq.records.layout import ORDERED

__all__ = ["ORDER", "Overview", "keep_plan", "make_plan", "overview", "queues_of"]

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
