"""Reads of what a follower knows to be committed, for those who read journals: Spark and the archive.

What always holds: only whole units below the follower's own committed mark are given, as they are on its disk; who
decodes them checks them. At most `_READS_MAX` reads are on the disk at once, so that they do not hold up its flushes.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from dmq.errors import Damaged, OffsetGone, StorageError
from dmq.shard.place import OnDisk
from dmq.storage.files import Buffer, is_refusal
from dmq.storage.journal.unit import HEADER_BYTES, read_header, whole_units
from dmq.storage.replica import Replica

__all__ = ["CommittedReader", "CommittedUnits"]

_READS_MAX: Final = 2
_UNITS_MAX: Final = 65_536


class CommittedUnits(NamedTuple):
    """Units from journal offset `start` to `end`; the follower has `first` up to `committed`."""

    start: int
    end: int
    first: int
    committed: int
    journal_id: int
    raw: Buffer


class CommittedReader:
    """Reads of one member's journal, while it follows.

    Parameters:
        on_disk: calls a function in a thread that may wait for the disk.
    """

    def __init__(self, on_disk: OnDisk) -> None:
        self._on_disk = on_disk
        self._turn = asyncio.Semaphore(_READS_MAX)

    async def read(self, replica: Replica, offset: int, max_bytes: int) -> CommittedUnits:
        """Whole units from the one on that holds an offset; none at the end.

        Raises:
            OffsetGone: the follower does not have the offset, or does not know that it is committed.
            Damaged: what stands there cannot be read.
        """
        async with self._turn:
            first, committed = replica.start, replica.applied
            if not first <= offset <= committed:
                raise OffsetGone(
                    f"this follower has offsets {first} to {committed}, not {offset}: ask the leader",
                    first=first,
                    next=committed,
                )
            start = replica.derived.lookup.unit_holding(offset) if offset < committed else offset
            raw: Buffer = b""
            if start < committed:
                raw = await self._whole(replica, start, min(max_bytes, committed - start), committed)
            return CommittedUnits(start, start + len(raw), first, committed, journal_id=replica.journal_id, raw=raw)

    async def _whole(self, replica: Replica, start: int, size: int, committed: int) -> Buffer:
        """At least one unit."""
        raw = await self._bytes(replica, start, max(size, HEADER_BYTES))
        header = read_header(raw)
        if header is not None and header.start == start and len(raw) < header.length <= committed - start:
            raw = await self._bytes(replica, start, header.length)
        end = whole_units(raw, start, _UNITS_MAX)
        if not end:
            raise Damaged(
                f"no unit can be read at journal offset {start} of this follower: ask the leader",
                start=start,
                end=committed,
            )
        return raw if end == len(raw) else memoryview(raw)[:end]

    async def _bytes(self, replica: Replica, start: int, size: int) -> bytes:
        read = replica.plan_read(start, size)
        try:
            return b"" if read is None else await self._on_disk(read.run)
        except StorageError as error:
            if not is_refusal(error):
                raise
            return b""  # as damage
