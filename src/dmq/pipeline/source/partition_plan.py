"""How a read is divided into Spark's partitions. Pure: offsets and places in the journal in, pieces out.

Messages of all queues stand mixed in one journal. Going through the journal is the cheapest way to many of them, and
a dear way to a few: so if the wanted queues fill a part of its bytes, pieces are ranges of the journal, of which the
broker sends what concerns their topics; if not, pieces are ranges of offsets of one queue, which the broker gathers.

What always holds: the pieces cover every wanted offset once; equal arguments give equal pieces.
"""

from __future__ import annotations

import itertools
import math
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.model import place_of
from dmq.pipeline.source.offsets import PartitionOffsets, TopicPartition

__all__ = ["JournalPiece", "Piece", "QueuePiece", "QueueRange", "Wanted", "plan", "plan_shard", "share_out"]

PIECE_BYTES: Final = 32 << 20
PIECES_MAX: Final = 10_000
# Where the wanted records fill less than this of the journal's bytes, gathering them is the cheaper way.
SHARE_MIN: Final = 0.05
SPARSE_MAX: Final = 8  # times as many bytes of the journal as a piece has bytes are looked at for it


class QueueRange(NamedTuple):
    """Offsets `start` up to, not including, `end` of one queue of one incarnation of a topic."""

    topic: str
    topic_id: int
    queue: int
    start: int
    end: int
    shard: int = 0

    @property
    def key(self) -> int:
        """Topic and queue as one number."""
        return self.topic_id << 8 | self.queue

    @property
    def place(self) -> TopicPartition:
        """The queue under the number that Spark has for it."""
        return TopicPartition(self.topic, place_of(self.queue, self.shard))


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
    """Records that stand in this range of a shard's journal, and which of them are wanted.

    A read of very many queues has very many pieces, and nearly all of them want all that stands in their range of the
    same queues: so those are named as one text, which all these pieces share.
    """

    start: int
    end: int
    shard: int
    whole: bytes  # packed keys of the queues of which everything here is wanted
    ranges: tuple[QueueRange, ...] = ()  # of the queues that begin or end here

    def whole_keys(self) -> npt.NDArray[np.int64]:
        """The keys of the queues of which everything here is wanted."""
        keys: npt.NDArray[np.int64] = np.cumsum(np.frombuffer(zlib.decompress(self.whole), np.int64))
        return keys


def _packed(keys: Iterable[int]) -> bytes:
    """Keys as a text: of most topics it is a few bytes for all queues."""
    return zlib.compress(np.diff(np.array(sorted(keys), np.int64), prepend=0).tobytes(), 1)


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
    # The sizes of a few messages may say little about the others: that is why the journal's bytes count, too.
    size = min(end - start, max(total, (end - start) / SPARSE_MAX))
    count = min(max(partitions_min, math.ceil(size / piece_bytes)), PIECES_MAX, end - start)
    bounds = [start + (end - start) * number // count for number in range(count + 1)]
    return _journal_pieces(wanted, bounds)


def _journal_pieces(wanted: Sequence[Wanted], bounds: Sequence[int]) -> list[Piece]:
    """The journal in ranges with these bounds."""
    begins: dict[int, list[int]] = defaultdict(list)  # keys of queues, by the first piece that wants all of them
    ends: dict[int, list[int]] = defaultdict(list)  # and by the first that does not any more
    parts: dict[int, list[QueueRange]] = defaultdict(list)
    for part in wanted:
        first, last = bisect_right(bounds, part.journal_start) - 1, bisect_left(bounds, part.journal_end) - 1
        whole = first if bounds[first] == part.journal_start else first + 1
        after = last + 1 if bounds[last + 1] == part.journal_end else last
        if whole < after:
            begins[whole].append(part.range.key)
            ends[after].append(part.range.key)
        for number in {first, last}:
            if not whole <= number < after:
                parts[number].append(part.range)
    pieces: list[Piece] = []
    keys: set[int] = set()
    text, shard = _packed(keys), wanted[0].range.shard
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        if number in begins or number in ends:
            keys = (keys - set(ends[number])) | set(begins[number])
            text = _packed(keys)
        if keys or number in parts:
            pieces.append(JournalPiece(first, last, shard, text, ranges=tuple(parts.get(number, ()))))
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
        start: where each queue is; one that does not exist is at 0.
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
