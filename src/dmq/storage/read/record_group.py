"""Record groups: records by their journal offsets, many at a time, for code that moves them.

What always holds: every offset asked for is in exactly one of the groups, or among those that cannot be read; the
records of a `Gathered` share their producer and, if a client sent them, their topic: they are of one large batch, or of
many small units, which are put together so that what follows is done for many at a time. A body that stands in a block
is found by `RecordView.body`; records that are moved have theirs in them, since what waits is never in a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.errors import Damaged, RecordCorrupt
from dmq.model import MessageId
from dmq.records.layout import BODY_AT, BODY_SIZE_AT, U32
from dmq.records.stand_in import stand_in
from dmq.records.view import RecordView
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import DUE, MOVED, Row, Unit
from dmq.storage.read.reader import Reader

__all__ = ["Gathered", "gather"]


class Gathered(NamedTuple):
    """Records of one producer, in the order of the journal.

    `row` is that of the first one's batch; those of the others have the same producer, epoch, topic and flags. `hashes`
    are those of their keys, 0 where there is none; only for records that were not moved. `dues` is empty unless their
    batch has some.
    """

    buffer: Buffer
    row: Row
    offsets: npt.NDArray[np.int64]  # in the journal
    starts: npt.NDArray[np.int64]  # in the buffer
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]
    dues: npt.NDArray[np.uint64]
    times: npt.NDArray[np.int64]  # when they were stored, in ms since 1970
    corrupt: Mapping[int, str]  # those that cannot be read, by journal offset, and why

    @property
    def is_moved(self) -> bool:
        """Whether the records carry their ids themselves."""
        return bool(self.row.flags & MOVED)

    def without(self, indexes: Sequence[int]) -> Gathered:
        """All but these."""
        kept = np.setdiff1d(np.arange(len(self.offsets)), indexes)
        return self._replace(
            offsets=self.offsets[kept],
            starts=self.starts[kept],
            lengths=self.lengths[kept],
            sequences=self.sequences[kept],
            hashes=self.hashes[kept],
            dues=self.dues[kept] if len(self.dues) else self.dues,
            times=self.times[kept],
        )

    def record(self, index: int) -> RecordView:
        """A record, or the stand-in of one that cannot be read."""
        start = int(self.starts[index])
        if self.corrupt and int(self.offsets[index]) in self.corrupt:
            return RecordView(stand_in(bytes(self.buffer[start : start + int(self.lengths[index])])))
        return RecordView(self.buffer, start)

    def message_id(self, index: int) -> MessageId:
        if not self.is_moved:
            return MessageId(self.row.producer_id, int(self.sequences[index]))
        found = self.record(index).message_id
        if found is None and int(self.offsets[index]) in self.corrupt:
            return MessageId(0, int(self.offsets[index]))
        assert found is not None, "a moved record carries its id"
        return found


# What the batches of small units share whose records are put together: producer, epoch, flags, the topic that they are
# stored in, and the one that they name.
_Key: TypeAlias = tuple[int, int, int, int, bytes]
_UNREADABLE: Final = b"\0"  # in place of a topic


class _Run:
    """Records of small units on their way into one group."""

    __slots__ = ("corrupt", "dues", "hashes", "lengths", "offsets", "pieces", "row", "sequences", "times")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.pieces: list[memoryview] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.sequences: list[int] = []
        self.hashes: list[int] = []
        self.dues: list[int] = []
        self.times: list[int] = []
        self.corrupt: dict[int, str] = {}

    def gathered(self) -> Gathered:
        lengths = np.array(self.lengths, np.int64)
        return Gathered(
            b"".join(self.pieces),
            self.row,
            np.array(self.offsets, np.int64),
            np.cumsum(lengths) - lengths,
            lengths=lengths,
            sequences=np.array(self.sequences, np.uint64),
            hashes=np.array(self.hashes, np.uint64),
            dues=np.array(self.dues, np.uint64),
            times=np.array(self.times, np.int64),
            corrupt=self.corrupt,
        )


def gather(reader: Reader, offsets: Sequence[int]) -> tuple[list[Gathered], list[int]]:
    """The records at these journal offsets, by groups, and the offsets that cannot be read."""
    found: list[Gathered] = []
    runs: dict[_Key, _Run] = {}
    lost: list[int] = []
    wanted = sorted(offsets)
    at = 0
    while at < len(wanted):
        start = reader.derived.lookup.unit_holding(wanted[at])
        try:
            unit = reader.unit_at(start)
        except Damaged:
            lost.append(wanted[at])
            at += 1
            continue
        end = bisect_left(wanted, unit.end, at)
        corrupt = reader.cache.corrupt(unit.start, unit.end)
        if isinstance(unit.offsets, list):
            _of_small_unit(unit, wanted[at:end], lost, corrupt, runs=runs, plain=reader.plain_record)
        else:
            found += _of_unit(unit, np.array(wanted[at:end], np.int64), lost, corrupt)
        at = end
    return found + [run.gathered() for run in runs.values()], lost


def _of_small_unit(
    unit: Unit,
    wanted: list[int],
    lost: list[int],
    corrupt: Mapping[int, str],
    *,
    runs: dict[_Key, _Run],
    plain: Callable[[memoryview], memoryview],
) -> None:
    """As `_of_unit` without arrays, whose set-up would cost more than all the rest."""
    buffer, base = memoryview(unit.buffer), unit.start
    places = dict(zip(wanted, wanted, strict=True))
    index = due_at = 0
    for row in unit.rows:
        has_due = bool(row.flags & DUE)
        for number in range(row.records):
            offset = int(unit.offsets[index])
            if places.pop(offset, None) is not None:
                start, length = offset - base, int(unit.lengths[index])
                topic = _UNREADABLE if offset in corrupt else _topic_bytes(buffer, start)
                key = (row.producer_id, row.producer_epoch, row.flags, row.topic_id, topic)
                run = runs.get(key)
                if run is None:
                    run = runs[key] = _Run(row)
                piece = buffer[start : start + length]
                try:
                    piece = plain(piece)
                except RecordCorrupt as error:
                    run.corrupt[offset] = error.message
                run.pieces.append(piece)
                run.offsets.append(offset)
                run.lengths.append(len(piece))
                run.sequences.append(row.first_sequence + number)
                run.hashes.append(_key_hash(unit, row, index))
                run.times.append(unit.header.stored_at_ms)
                if has_due:
                    run.dues.append(int(unit.dues[due_at + number]))
                if offset in corrupt:
                    run.corrupt[offset] = corrupt[offset]
            index += 1
        due_at += row.records if has_due else 0
    lost += places


def _topic_bytes(buffer: memoryview, start: int) -> bytes:
    """The topic a record names, with its length."""
    at = start + BODY_AT + int(U32.unpack_from(buffer, start + BODY_SIZE_AT)[0])
    return bytes(buffer[at : at + 1 + buffer[at]])


def _key_hash(unit: Unit, row: Row, index: int) -> int:
    if row.flags & MOVED:
        return 0
    for owner, value in zip(unit.hash_index, unit.hashes, strict=True):
        if owner == index:
            return int(value)
    return 0


def _of_unit(
    unit: Unit, wanted: npt.NDArray[np.int64], lost: list[int], corrupt: Mapping[int, str]
) -> Iterator[Gathered]:
    places = np.asarray(unit.offsets, np.int64)
    indexes = np.minimum(np.searchsorted(places, wanted), max(len(places) - 1, 0))
    is_there = places[indexes] == wanted
    if not is_there.all():
        lost += wanted[~is_there].tolist()
        indexes, wanted = indexes[is_there], wanted[is_there]
    lengths = np.asarray(unit.lengths, np.int64)
    dues = np.asarray(unit.dues, np.uint64)
    first = at = due_at = 0
    for row in unit.rows:
        end = at + int(np.searchsorted(indexes[at:], first + row.records))
        if end > at:
            mine = indexes[at:end]
            yield Gathered(
                unit.buffer,
                row,
                wanted[at:end],
                wanted[at:end] - unit.start,
                lengths=lengths[mine],
                sequences=(mine - first).astype(np.uint64) + np.uint64(row.first_sequence),
                hashes=_key_hashes(unit, row, mine),
                dues=dues[mine - first + due_at] if row.flags & DUE else dues[:0],
                times=np.full(len(mine), unit.header.stored_at_ms),
                corrupt=corrupt,
            )
        first += row.records
        due_at += row.records if row.flags & DUE else 0
        at = end


def _key_hashes(unit: Unit, row: Row, indexes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    hashes = np.zeros(len(indexes), np.uint64)
    if row.flags & MOVED or not len(unit.hashes):
        return hashes
    owners = np.asarray(unit.hash_index, np.int64)
    where = np.minimum(np.searchsorted(owners, indexes), len(owners) - 1)
    has_key = owners[where] == indexes
    hashes[has_key] = np.asarray(unit.hashes, np.uint64)[where[has_key]]
    return hashes
