"""The table of epochs: which leader began to write where.

Pure code. Two journals of one shard are equal up to the end they share of the newest epoch they share, so the last rows
of the table are all that two members have to compare. An epoch has one leader and one start; a lone broker is its own
leader, with replica id 0.

What always holds: epochs and starts rise from row to row; no more than `ROWS_MAX` rows are kept, the newest ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

__all__ = ["ROWS_MAX", "EpochRow", "EpochTable"]

ROWS_MAX: Final = 64


class EpochRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An epoch, the replica id of its leader, and the journal offset of the unit that began it."""

    epoch: int
    leader: int
    start: int


class EpochTable:
    """The newest epochs of a journal, oldest first."""

    def __init__(self, rows: Iterable[EpochRow] = ()) -> None:
        self._rows = [*rows][-ROWS_MAX:]

    def __iter__(self) -> Iterator[EpochRow]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> EpochRow | None:
        """The newest one."""
        return self._rows[-1] if self._rows else None

    def began(self, row: EpochRow) -> None:
        """A leader began to write. One that is known already, or older than the newest, changes nothing."""
        last = self.last
        if last is None or (row.epoch > last.epoch and row.start > last.start):
            self._rows = [*self._rows[1 - ROWS_MAX :], row]

    def cut(self, end: int) -> None:
        """The journal ends here now."""
        self._rows = [row for row in self._rows if row.start < end]

    def dump(self) -> list[EpochRow]:
        """All rows; the list does not change afterwards."""
        return self._rows
