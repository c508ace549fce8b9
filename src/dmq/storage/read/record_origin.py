"""Where the records of a queue come from: their message ids, store times and addresses, as runs.

A record does not carry its id: producer and sequence stand once per batch, in the unit's batch table (ADR 1). Code that
hands records out asks `Identities`, and gets a run for each batch instead of an id for each record. A record has its
store time and its sender's address only as well as its own bytes can hold them (a time after its sender's clock, an
IPv4 address); the unit and the row of its batch table have them as they were. Readers that want every message of a
queue ask `origin_runs`, so that they see what readers of the journal itself see.

What always holds: the runs add up to the records asked for, in their order; a run of ids with producer 0 means that
those records were moved and carry their ids themselves. At most `ROWS_MAX` rows of batch tables are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.records.layout import JOURNAL_OFFSET_AT, U64
from dmq.storage.journal.unit import HEADER_BYTES, MOVED, ROW, ROW_BYTES, Row, read_header
from dmq.storage.state.state import queue_key

__all__ = ["IdRun", "Identities", "OriginRun", "origin_runs"]


ROWS_MAX: Final = 16_384  # a row alone in its unit takes some 700 bytes here

IdRun: TypeAlias = tuple[int, int, int]  # count, producer id, first sequence
_Span: TypeAlias = tuple[int, int, int, int]  # first queue offset, one past the last, producer id, first sequence

_Table: TypeAlias = tuple[int, dict[int, list[_Span]]]  # where the unit ends, and the spans of each queue


class Identities:
    """The batch tables of the units read last.

    Parameters:
        bytes_at: verified bytes of the journal.
        unit_holding: where the unit starts that a journal offset lies in.
    """

    def __init__(
        self, bytes_at: Callable[[int, int], memoryview], unit_holding: Callable[[int], int], rows_max: int = ROWS_MAX
    ) -> None:
        self._bytes_at = bytes_at
        self._unit_holding = unit_holding
        self._rows_max = rows_max
        self._tables: OrderedDict[int, _Table] = OrderedDict()
        self._rows: dict[int, int] = {}
        self._row_count = 0

    def runs(self, topic_id: int, queue: int, offsets: Sequence[int], pieces: Sequence[memoryview]) -> list[IdRun]:
        """The ids of records that were read.

        Parameters:
            offsets: their queue offsets, rising.
            pieces: their bytes, in pieces each of which lies within one unit.

        Raises:
            Damaged: a batch table cannot be read.
        """
        key = queue_key(topic_id, queue)
        spans: list[_Span] = []
        unit = end = 0  # where the unit of the piece before lies
        for piece in pieces:
            at = U64.unpack_from(piece, JOURNAL_OFFSET_AT)[0]
            if not unit <= at < end:
                unit = self._unit_holding(at)
                end, table = self._table(unit)
                spans += table.get(key, ())
        return _cut(spans, offsets)

    def _table(self, unit: int) -> _Table:
        found = self._tables.get(unit)
        if found is not None:
            self._tables.move_to_end(unit)
            return found
        header = read_header(self._bytes_at(unit, unit + HEADER_BYTES))
        assert header is not None, "a unit that holds a record has a header"
        at = unit + HEADER_BYTES + 4 * header.records
        table: dict[int, list[_Span]] = {}
        for fields in ROW.iter_unpack(self._bytes_at(at, at + ROW_BYTES * header.batches)):
            row = Row._make(fields)
            first = row.first_queue_offset
            producer = 0 if row.flags & MOVED else row.producer_id
            table.setdefault(queue_key(row.topic_id, row.queue), []).append(
                (first, first + row.records, producer, row.first_sequence)
            )
        found = unit + header.length, table
        self._keep(unit, found, header.batches)
        return found

    def _keep(self, unit: int, table: _Table, rows: int) -> None:
        self._tables[unit] = table
        self._rows[unit] = rows
        self._row_count += rows
        while self._row_count > self._rows_max and len(self._tables) > 1:
            gone, _ = self._tables.popitem(last=False)
            self._row_count -= self._rows.pop(gone)


def _cut(spans: list[_Span], offsets: Sequence[int]) -> list[IdRun]:
    """The part of the spans that the offsets name."""
    runs: list[IdRun] = []
    count = len(offsets)
    firsts = [span[0] for span in spans]
    at = start = stop = producer = begun = 0
    while at < count:
        first = offsets[at]
        if not start <= first < stop:
            start, stop, producer, begun = spans[bisect_right(firsts, first) - 1]
            assert start <= first < stop, "every record is of a batch of its unit"
        # Up to the end of the batch, or to the first offset that is left out.
        end = min(count, at + stop - first)
        if offsets[end - 1] - first != end - 1 - at:
            end = at + 1
            while offsets[end] == offsets[end - 1] + 1:
                end += 1
        sequence = begun + first - start if producer else 0
        if runs and runs[-1][1] == producer and (not producer or runs[-1][2] + runs[-1][0] == sequence):
            runs[-1] = (runs[-1][0] + end - at, producer, runs[-1][2])
        else:
            runs.append((end - at, producer, sequence))
        at = end
    return runs


OriginRun: TypeAlias = tuple[int, int, bytes]  # count, store time in ms, address (16 bytes) and port
_PORT_BYTES: Final = 2


def origin_runs(
    bytes_at: Callable[[int, int], memoryview],
    unit_holding: Callable[[int], int],
    topic_id: int,
    queue: int,
    offsets: npt.NDArray[np.uint64],
    pieces: Sequence[memoryview],
) -> list[OriginRun]:
    """The origins of records that were read.

    Parameters:
        bytes_at: verified bytes of the journal.
        unit_holding: where the unit starts that a journal offset lies in.
        offsets: the records' queue offsets, rising.
        pieces: their bytes, in pieces each of which lies within one unit.

    Raises:
        Damaged: a batch table cannot be read.
    """
    key = queue_key(topic_id, queue)
    firsts: list[int] = []
    origins: list[tuple[int, bytes]] = []
    unit = end = 0  # where the unit of the piece before lies
    for piece in pieces:
        offset = U64.unpack_from(piece, JOURNAL_OFFSET_AT)[0]
        if unit <= offset < end:
            continue
        unit = unit_holding(offset)
        header = read_header(bytes_at(unit, unit + HEADER_BYTES))
        assert header is not None, "a unit that holds a record has a header"
        end = unit + header.length
        at = unit + HEADER_BYTES + 4 * header.records
        for fields in ROW.iter_unpack(bytes_at(at, at + ROW_BYTES * header.batches)):
            row = Row._make(fields)
            if queue_key(row.topic_id, row.queue) == key:
                firsts.append(row.first_queue_offset)
                origins.append((header.stored_at_ms, row.address + row.port.to_bytes(_PORT_BYTES, "big")))
    if not firsts:
        return []
    index = np.searchsorted(np.array(firsts, np.uint64), offsets, side="right") - 1
    numbers, counts = _runs(index)
    named = ((origins[number], count) for number, count in zip(numbers, counts, strict=True))
    return [(sum(count for _, count in group), *origin) for origin, group in groupby(named, key=lambda pair: pair[0])]


def _runs(index: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Values that follow each other, and how often each does."""
    cuts = np.flatnonzero(np.diff(index)) + 1
    starts = np.concatenate(([0], cuts))
    return index[starts].tolist(), np.diff(np.append(starts, len(index))).tolist()
