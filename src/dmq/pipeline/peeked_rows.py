"""Records of one queue that the broker gathered, as the same rows that units decode to.

What always holds: every column is what the units would give.
"""

from __future__ import annotations

import numpy as np

from dmq.pipeline.decoding import Batches, Positions, UnitRows
from dmq.pipeline.journal_reading import Peeked
from dmq.records import layout
from dmq.records.layout import gather

__all__ = ["decode_peeked"]


class PeekedRows(UnitRows):
    """Rows whose places stand in the records."""

    def journal_offset(self) -> Positions:
        offset: Positions = gather(self.buffer, self.starts, layout.JOURNAL_OFFSET_AT, ">u8").astype(np.int64)
        return offset


def decode_peeked(peeked: Peeked, topic_id: int, queue: int, columns: frozenset[str]) -> UnitRows:
    """The rows of an answer; each record is a batch of its own."""
    lengths = np.array(peeked.lengths, np.int64)
    ends = np.cumsum(lengths)
    count = len(lengths)
    ids = [*zip(*peeked.ids, strict=True)] or [(), (), ()]
    origins = [*zip(*peeked.origins, strict=True)] or [(), (), ()]
    id_counts, stored_counts = np.array(ids[0], np.int64), np.array(origins[0], np.int64)
    producer_id = np.repeat(np.array(ids[1], np.uint64), id_counts)
    # The number of each record within its run, on top of the run's first sequence.
    within_run = np.arange(count) - np.repeat(np.cumsum(id_counts) - id_counts, id_counts)
    every = np.arange(count)
    batches = Batches(
        np.full(count, topic_id, np.uint32),
        np.full(count, queue, np.uint8),
        peeked.first_offset + every,
        producer_id,
        np.repeat(np.array(ids[2], np.uint64), id_counts) + within_run.astype(np.uint64),
        np.repeat(np.frombuffer(b"".join(origins[2]), "V18"), stored_counts),
        np.repeat(np.array(origins[1], np.int64), stored_counts),
        np.zeros(count, np.int64),
        producer_id == 0,
    )
    return PeekedRows(peeked.body, ends - lengths, ends, every, np.zeros(count, np.int64), batches, columns)
