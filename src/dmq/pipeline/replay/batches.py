"""The rows of a plan as batches for a broker: the same bounds in every run.

What always holds: how rows are divided into batches depends on nothing but the rows from there on and the plan, so a
run that goes on behind a batch makes the same batches as the one before it would have. The n-th row of a queue, counted
from 0, has sequence `queue << 48 | n`, so no number is given twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from dmq.errors import MessageTooLarge
from dmq.model import Message
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.replay.plan import Plan
from dmq.protocol.batch import pack_batch
from dmq.protocol.frame import Buffer
from dmq.records import Compressor, EncodedBatch
from dmq.records.layout import ORDERED
from dmq.records.replay import ReplayTarget

__all__ = ["Parcel", "first_sequence", "parcels"]

_QUEUE_SHIFT: Final = 48
_ROW_BYTES: Final = 64  # what a row counts beside its body


class Parcel(NamedTuple):
    """One batch, ready to be sent."""

    queue: int
    first: int  # row of its queue
    rows: int
    keys: int
    body: list[Buffer]

    @property
    def first_sequence(self) -> int:
        return first_sequence(self.queue, self.first)


def first_sequence(queue: int, row: int) -> int:
    """The sequence of a row of a queue."""
    return queue << _QUEUE_SHIFT | row


class _Row(NamedTuple):
    """One message, as the columns of a plan's files have it."""

    message_id: str
    key: str | None
    business_id: str | None
    tag: str | None
    app: str
    priority: int
    flags: int
    sent_at_us: int
    headers: list[dict[str, Any]] | None
    body: bytes


def parcels(rows: Folder, plan: Plan, queue: int, start: int, sent_at_ms: int, body_bytes_max: int) -> Iterator[Parcel]:
    """The batches of a queue from a row on.

    Parameters:
        rows: the plan's folder of rows.
        start: 0, or behind a batch of an earlier run.
        sent_at_ms: the records' send time.
        body_bytes_max: the largest body that the broker takes.

    Raises:
        InvalidMessage, MessageTooLarge: a message does not fit the topic or the broker.
    """
    making = _Making(plan, queue, sent_at_ms, body_bytes_max)
    first = start
    waiting: list[_Row] = []
    size = 0
    for row in _rows(rows, plan.file(queue), start):
        row_size = len(row.body) + _ROW_BYTES
        if waiting and (len(waiting) == plan.batch_rows or size + row_size > plan.batch_bytes):
            yield making.parcel(first, waiting)
            first, waiting, size = first + len(waiting), [], 0
        waiting.append(row)
        size += row_size
    if waiting:
        yield making.parcel(first, waiting)


def _rows(folder: Folder, name: str, start: int) -> Iterator[_Row]:
    with pq.ParquetFile(f"{folder.path}/{name}", filesystem=folder.files) as file:
        at = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if at + count > start:
                table: pa.Table = file.read_row_group(group).slice(max(0, start - at))
                sent_at = table.schema.get_field_index("sent_at")
                table = table.set_column(sent_at, "sent_at", table["sent_at"].cast(pa.int64()))
                yield from map(_Row._make, zip(*(column.to_pylist() for column in table.columns), strict=True))
            at += count


class _Making:
    """Rows into batches, for one queue."""

    def __init__(self, plan: Plan, queue: int, sent_at_ms: int, body_bytes_max: int) -> None:
        self._topic = plan.topic
        self._queue = queue
        self._body_bytes_max = body_bytes_max
        self._target = ReplayTarget(plan.topic, plan.replay_id, sent_at_ms)
        self._compressor = Compressor("auto")

    def parcel(self, first: int, rows: list[_Row]) -> Parcel:
        bodies = [row.body for row in rows]
        packed = self._compressor.compress_many(self._topic, bodies, body_bytes_max=self._body_bytes_max)
        records: list[bytes] = []
        hash_index: list[int] = []
        hashes: list[int] = []
        for index, row in enumerate(rows):
            codec, body = (0, row.body) if packed is None else packed[index]
            if len(body) > self._body_bytes_max:
                raise MessageTooLarge(
                    f"message {row.message_id} has {len(body)} bytes; the broker takes {self._body_bytes_max}: raise "
                    "store.body_bytes_max there, or leave the message out",
                    size=len(body),
                    limit=self._body_bytes_max,
                )
            if row.key is not None:
                raw = row.key.encode()
                hash_index.append(index)
                hashes.append(crc32c(raw) << 32 | zlib.crc32(raw) or 1)
            records.append(self._record(row, codec, body))
        batch = EncodedBatch(
            bytearray().join(records),
            np.fromiter(map(len, records), np.uint32, len(records)),
            np.array(hash_index, np.uint32),
            np.array(hashes, np.uint64),
            count=len(records),
        )
        return Parcel(self._queue, first, len(rows), len(hashes), body=pack_batch(batch))

    def _record(self, row: _Row, codec: int, body: bytes) -> bytes:
        return self._target.record(
            (int(row.message_id, 32) >> 2).to_bytes(16, "big"),  # base 32, with two bits to spare at the end
            Message(
                body,
                key=row.key,
                tag=row.tag,
                business_id=row.business_id,
                ordered=bool(row.flags & ORDERED),
                priority=row.priority,
                properties={one["key"]: one["value"].decode() for one in row.headers} if row.headers else None,
            ),
            app=row.app,
            first_sent_at_ms=row.sent_at_us // 1000,
            codec=codec,
            raw_size=len(row.body) if codec else 0,
        )
