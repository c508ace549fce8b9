"""How a read is divided into Spark's partitions. Pure: offsets and places in the journal in, pieces out.

Messages of all queues stand mixed in one journal. Reading the journal's bytes is the cheapest way to most of them, and
a dear way to a few: so if the wanted queues fill a good part of the bytes, pieces are ranges of the journal, of which
each reader takes what is wanted; if not, pieces are ranges of offsets of one queue, which the broker gathers.

What always holds: the pieces cover every wanted offset once; equal arguments give equal pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.pipeline.source.offsets import PartitionOffsets, TopicPartition

__all__ = ["JournalPiece", "Piece", "QueuePiece", "QueueRange", "Wanted", "plan", "plan_shard", "share_out"]

PIECE_BYTES: Final = 32 << 20
PIECES_MAX: Final = 10_000
# Where the wanted records fill less than this of the journal's bytes, gathering them is the cheaper way.
SHARE_MIN: Final = 0.2


class QueueRange(NamedTuple):
    """Offsets `start` up to, not including, `end` of one queue of one incarnation of a topic."""

    topic: str
    topic_id: int
    queue: int
    start: int
    end: int
    shard: int = 0


class Wanted(NamedTuple):
    """A range, and where it lies in the journal: from its first record to the end of its last, and their sizes."""

    range: QueueRange
    journal_start: int
    journal_end: int
    record_bytes: float  # of the first and the last, on average

    @property
    def bytes(self) -> float:
        return (self.range.end - self.range.start) * self.record_bytes


class JournalPiece(NamedTuple):
    """Records that stand in this range of a shard's journal, and which of them are wanted."""

    start: int
    end: int
    ranges: tuple[QueueRange, ...]

    @property
    def shard(self) -> int:
        return self.ranges[0].shard


class QueuePiece(NamedTuple):
    """Offsets of one queue."""

    range: QueueRange

    @property
    def shard(self) -> int:
        return self.range.shard


Piece: TypeAlias = JournalPiece | QueuePiece


def plan(wanted: Sequence[Wanted], partitions_min: int = 1, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a read, shard by shard; each has its part of the pieces that there shall be at least."""
    total = sum(part.bytes for part in wanted)
    pieces: list[Piece] = []
    for _, of_shard in itertools.groupby(sorted(wanted, key=_shard), key=_shard):
        parts = [*of_shard]
        share = sum(part.bytes for part in parts) / total
        pieces += plan_shard(parts, math.ceil(partitions_min * share), piece_bytes=piece_bytes)
    return pieces


def _shard(wanted: Wanted) -> int:
    return wanted.range.shard


def plan_shard(wanted: Sequence[Wanted], partitions_min: int = 1, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a read of one shard.

    Parameters:
        wanted: what is to be read; none of it empty.
        partitions_min: how many pieces there shall be at least, if there is enough to divide.
        piece_bytes: how much of the journal one piece has, more or less.
    """
    if not wanted:
        return []
    wanted = sorted(wanted)
    start, end = min(part.journal_start for part in wanted), max(part.journal_end for part in wanted)
    total = sum(part.bytes for part in wanted)
    if total < SHARE_MIN * (end - start):
        return _queue_pieces(wanted, total, partitions_min, piece_bytes)
    count = max(partitions_min, math.ceil((end - start) / piece_bytes))
    count = min(count, PIECES_MAX, end - start)
    bounds = [start + (end - start) * number // count for number in range(count + 1)]
    pieces: list[Piece] = []
    for first, last in itertools.pairwise(bounds):
        ranges = tuple(part.range for part in wanted if part.journal_start < last and first < part.journal_end)
        if ranges:
            pieces.append(JournalPiece(first, last, ranges))
    return pieces


def _queue_pieces(wanted: Sequence[Wanted], total: float, partitions_min: int, piece_bytes: int) -> list[Piece]:
    """Each queue by itself, the long ones in several pieces."""
    size = min(float(piece_bytes), total / partitions_min)
    size = max(size, total / PIECES_MAX)
    pieces: list[Piece] = []
    for part in wanted:
        start, end = part.range.start, part.range.end
        count = min(end - start, max(1, math.ceil(part.bytes / size)))
        bounds = [start + (end - start) * number // count for number in range(count + 1)]
        pieces += [QueuePiece(part.range._replace(start=first, end=last)) for first, last in itertools.pairwise(bounds)]
    return pieces


def share_out(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], rows_max: int
) -> PartitionOffsets:
    """How far to read so that it is no more than `rows_max` rows: each queue in proportion to what waits in it.

    Parameters:
        start: where each queue is; one that is not there is at 0.
        end: how far each may be read; one that is behind its start is left where it is.
        rows_max: how many rows all of them give together at most.
    """
    waiting = {place: max(0, last - start.get(place, 0)) for place, last in end.items()}
    total = sum(waiting.values())
    if total <= rows_max:
        return dict(end)
    shares = {place: rows_max * count // total for place, count in waiting.items()}
    # What the divisions left over goes to those who lost most by them; names decide between equals.
    left = rows_max - sum(shares.values())
    by_loss = sorted(waiting, key=lambda place: (-(rows_max * waiting[place] % total), place))
    for place in by_loss[:left]:
        shares[place] += 1
    return {place: start.get(place, 0) + shares[place] if waiting[place] else end[place] for place in end}
