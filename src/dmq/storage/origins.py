"""Origins: when the records of a queue were stored, and from which address, as runs.

A record has both only as well as its own bytes can hold them (a time after its sender's clock, an IPv4 address); the
unit it stands in and the row of its batch table have them as they were. Readers that want every message of a queue ask
here, so that they see what readers of the journal itself see.

What always holds: the runs add up to the records asked for, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.records.layout import JOURNAL_OFFSET_AT, U64
from dmq.storage import units
from dmq.storage.state import queue_key

__all__ = ["OriginRun", "origin_runs"]

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
        header = units.read_header(bytes_at(unit, unit + units.HEADER_BYTES))
        assert header is not None, "a unit that holds a record has a header"
        end = unit + header.length
        at = unit + units.HEADER_BYTES + 4 * header.records
        for fields in units.ROW.iter_unpack(bytes_at(at, at + units.ROW_BYTES * header.batches)):
            row = units.Row._make(fields)
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
