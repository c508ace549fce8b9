"""Records that are about to be moved: read where they stand, and gathered as batches for where they go.

What always holds: what is read is read once, in as few pieces as it stands in; a batch has a hash for the id of every
copy and for every key, so that a message is found wherever it went.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from dmq.broker.delivery.bitmap import Ranges
from dmq.errors import Damaged, OffsetGone
from dmq.records import RecordView, layout
from dmq.records.copy import CopyPlan, Failed, copy_record, read_failed
from dmq.records.hashes import id_hashes
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.queries import Queries
from dmq.storage.read.reader import Slice
from dmq.storage.read.record_origin import IdRun
from dmq.storage.state.state import Topic

__all__ = ["Origin", "Parcel", "origins_of", "read_origins"]

_ID: Final = struct.Struct(">QQ")
_EVERYTHING: Final = 1 << 40


class Origin(NamedTuple):
    """A record where it stands now."""

    offset: int
    failed: Failed
    message_id: bytes

    @property
    def first_offset(self) -> int:
        """Where it stood in its topic before it came into the retry topic; its own offset if it was never moved."""
        found = RecordView(self.failed.raw).attributes.original_queue_offset
        return self.offset if found is None else found

    @property
    def stored_at_ms(self) -> int:
        raw = self.failed.raw
        sent = int.from_bytes(raw[layout.SEND_TIME_AT : layout.SEND_TIME_AT + 8], "big")
        return sent + int.from_bytes(raw[layout.STORE_TIME_AT : layout.STORE_TIME_AT + 4], "big")


def read_origins(
    queries: Queries, topic: Topic, queue: int, ranges: Ranges, *, is_retry: bool
) -> tuple[list[Origin], list[tuple[int, int]]]:
    """The records of some ranges, and the ranges of those that cannot be read."""
    origins: list[Origin] = []
    missing: list[tuple[int, int]] = []
    for start, stop in ranges:
        at = start
        while at < stop:
            try:
                found = queries.read(topic.name, queue, at, stop - at, _EVERYTHING, None)
            except OffsetGone as error:
                resume = min(stop, max(at + 1, int(error.detail["first"])))
            except Damaged as error:
                resume = min(stop, max(at + 1, int(error.detail["next"])))
            else:
                offsets = found.offsets.tolist()
                ids = queries.id_runs(topic, queue, offsets, found.pieces)
                origins += origins_of(found, offsets, ids, is_retry=is_retry)
                if found.next_offset > at:
                    at = found.next_offset
                    continue
                resume = at + 1
            missing.append((at, resume))
            at = resume
    return origins, missing


def origins_of(found: Slice, offsets: Sequence[int], ids: Sequence[IdRun], *, is_retry: bool) -> list[Origin]:
    """Records that were read, with their ids."""
    named: list[bytes] = []
    pack = _ID.pack
    for count, producer, first in ids:
        named += [pack(producer, first + at) for at in range(count)] if producer else [b""] * count
    origins: list[Origin] = []
    lengths = iter(found.lengths.tolist())
    index = 0
    for piece in found.pieces:
        data = bytes(piece)
        at, end = 0, len(data)
        while at < end:
            stop = at + next(lengths)
            failed = read_failed(data[at:stop], is_retry=is_retry)
            origins.append(Origin(offsets[index], failed, failed.message_id or named[index]))
            index += 1
            at = stop
    return origins


class Parcel:
    """Copies for one queue, on their way into a unit."""

    def __init__(self, topic: str, queue: int) -> None:
        self._topic = topic
        self._queue = queue
        self._records: list[bytes] = []
        self._ids: list[bytes] = []
        self._keys: list[tuple[int, bytes]] = []
        self._dues: list[int] = []
        self._is_expiring = False

    def add(self, origin: Origin, plan: CopyPlan, attempt: int, due_ms: int | None, expires_at_ms: int | None) -> int:
        """Add a copy; returns its size."""
        copied = copy_record(origin.failed, plan, origin.message_id, attempt, expires_at_ms)
        if copied.key is not None:
            self._keys.append((len(self._records), copied.key))
        self._records.append(copied.record)
        self._ids.append(copied.message_id)
        if due_ms is not None:
            self._dues.append(due_ms)
        if expires_at_ms is not None or origin.failed.expires_at_ms is not None:
            self._is_expiring = True
        return len(copied.record)

    def batch(self) -> Batch:
        """All of them as one batch of moved records."""
        pairs = np.frombuffer(b"".join(self._ids), ">u8").reshape(-1, 2).astype(np.uint64)
        hashes = np.empty(len(pairs) + len(self._keys), np.uint64)
        producers = pairs[:, 0]
        for producer in np.unique(producers).tolist():
            mine = np.flatnonzero(producers == np.uint64(producer))
            hashes[mine] = id_hashes(producer, pairs[mine, 1])
        hashes[len(pairs) :] = [crc32c(key) << 32 | zlib.crc32(key) or 1 for _, key in self._keys]
        index = np.empty(len(hashes), np.uint32)
        index[: len(pairs)] = np.arange(len(pairs), dtype=np.uint32)
        index[len(pairs) :] = [at for at, _ in self._keys]
        order = np.argsort(index, kind="stable")
        return Batch(
            topic=self._topic,
            queue=self._queue,
            data=b"".join(self._records),
            lengths=np.fromiter(map(len, self._records), np.uint32, len(self._records)),
            hash_index=index[order],
            hashes=hashes[order],
            dues=self._dues,
            moved=True,
            expiring=self._is_expiring,
        )
