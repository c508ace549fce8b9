"""Copy batches: copies of records that are moved, gathered as a batch for the queue they go to.

What always holds: a batch has a hash for the id of every copy and for every key, so that a message is found wherever it
went.
"""

from __future__ import annotations

import zlib

import numpy as np
from crc32c import crc32c

from dmq.broker.delivery.origin import Origin
from dmq.records.copy import CopyPlan, copy_record
from dmq.records.hashes import id_hashes
from dmq.storage.journal.unit_draft import Batch

__all__ = ["CopyBatch"]


class CopyBatch:
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
        copied = copy_record(origin.failed, plan, origin.message_id, attempt, expires_at_ms=expires_at_ms)
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
