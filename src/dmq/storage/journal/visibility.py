"""Visibility: up to where the journal may be seen.

Pure code. A unit becomes visible once everything before it is and the durability it asked for is reached. Reads,
leases, the wheel, Spark and checkpoints stop at `visible`, so nobody ever sees what a crash may take back.

What always holds: visible <= end; units become visible in order; `flushed` and `replicated` never go back.
"""

from __future__ import annotations

from collections import deque

from dmq.model import Durability
from dmq.storage.journal.unit import Unit

__all__ = ["Visibility"]


class Visibility:
    """Units that were written and wait to be seen."""

    def __init__(self, start: int) -> None:
        self.visible = start
        self.flushed = start
        self.replicated = start
        self._pending: deque[tuple[Unit, Durability]] = deque()

    @property
    def pending(self) -> list[Unit]:
        return [unit for unit, _ in self._pending]

    def wrote(self, unit: Unit, durability: Durability) -> None:
        """A unit is in the page cache."""
        self._pending.append((unit, durability))

    def show(self, unit: Unit, durability: Durability) -> bool:
        """Whether a unit that is in the page cache is visible at once, since neither it nor any before it waits.

        If so, it is; if not, `wrote` is to be told.
        """
        if durability is not Durability.STORED or self._pending:
            return False
        self.visible = unit.end
        return True

    def advance(self) -> list[Unit]:
        """The units that have become visible, in order."""
        seen: list[Unit] = []
        while self._pending:
            unit, durability = self._pending[0]
            if durability >= Durability.FLUSHED and self.flushed < unit.end:
                break
            if durability >= Durability.REPLICATED and self.replicated < unit.end:
                break
            self._pending.popleft()
            self.visible = unit.end
            seen.append(unit)
        return seen
