"""The files of a plan's rows: one for each queue of the target, in the order they are sent in.

What always holds: rows of a queue are written in the order in which they are added, and described as they are written;
memory is bounded by `_BUFFER_BYTES` and one batch, however many queues there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from dmq.errors import Damaged
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.object_store import store_errors
from dmq.pipeline.tables import MESSAGE, SCHEMAS

__all__ = ["STAGED", "QueueFile", "QueueFiles", "check_bodies", "digest_of"]

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
