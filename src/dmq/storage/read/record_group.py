"""Record groups: records by their journal offsets, many at a time, for code that moves them.

What always holds: every offset asked for is in exactly one of the groups, or among those that cannot be read; a
`Gathered` holds records of one batch of one unit, so that they share their producer and, if a client sent them, their
topic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dmq.errors import Damaged
from dmq.model import MessageId
from dmq.records.check import stand_in
from dmq.records.view import RecordView
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import DUE, MOVED, Row, Unit
from dmq.storage.read.reader import Reader

__all__ = ["Gathered", "gather"]


class Gathered(NamedTuple):
    """Records of one batch.

    `hashes` are those of their keys, 0 where there is none; only for records that were not moved. `dues` is empty
    unless their batch has some.
    """

    buffer: Buffer
    row: Row
    offsets: npt.NDArray[np.int64]  # in the journal
    starts: npt.NDArray[np.int64]  # in the buffer
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]
    dues: npt.NDArray[np.uint64]
    stored_at_ms: int
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


def gather(reader: Reader, offsets: Sequence[int]) -> tuple[list[Gathered], list[int]]:
    """The records at these journal offsets, in the order of the journal, and the offsets that cannot be read."""
    found: list[Gathered] = []
    lost: list[int] = []
    wanted = np.array(sorted(offsets), np.int64)
    at = 0
    while at < len(wanted):
        start = reader.derived.lookup.unit_holding(int(wanted[at]))
        try:
            unit = reader.unit_at(start)
        except Damaged:
            lost.append(int(wanted[at]))
            at += 1
            continue
        end = int(np.searchsorted(wanted, unit.end))
        found += _of_unit(unit, wanted[at:end], lost, reader.cache.corrupt(unit.start, unit.end))
        at = end
    return found, lost


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
                stored_at_ms=unit.header.stored_at_ms,
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
