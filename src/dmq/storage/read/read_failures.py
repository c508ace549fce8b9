"""What the disk refused to read of the journal, and for how long.

A disk may refuse once and give the bytes a moment later: a cable, a controller that is reset, a path to a storage
network. So the first refusal of a range is not damage yet, and nobody passes over its messages. The range is damaged
once it was refused for `PATIENCE_SECONDS`, and three times at least; or when it lies close to one that was. A bad spot
of a disk has many units as a rule, and a queue should not wait for each of them.

Pure. What always holds: memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENCE_SECONDS", "ReadFailures"]

PATIENCE_SECONDS: Final = 30.0
_TRIES_MIN: Final = 3
_ANEW_SECONDS: Final = 300.0  # after which a refusal is the first one again
_SPOT_BYTES: Final = 1 << 20  # so close to a range that cannot be read, another one is taken to be like it
_DOUBTFUL_MAX: Final = 1000  # ranges
_SPOTS_MAX: Final = 1000


class _Doubt:
    """A range that was refused, and may still be read."""

    __slots__ = ("end", "last", "since", "tries")

    def __init__(self, end: int, since: float) -> None:
        self.end = end
        self.since = self.last = since
        self.tries = 0


class ReadFailures:
    """Those of one journal.

    Parameters:
        now: of a monotonic clock, in seconds.

    Attributes:
        is_patient: False where other members have copies: what is refused is fetched from them at once.
        count: how often the disk refused.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._doubts: OrderedDict[int, _Doubt] = OrderedDict()
        self._spots: list[tuple[int, int]] = []
        self.is_patient = True
        self.count = 0

    def __len__(self) -> int:
        """How many ranges are in doubt."""
        return len(self._doubts)

    def failed(self, start: int, end: int) -> bool:
        """The disk refused a range; returns whether it is damaged by that."""
        self.count += 1
        now = self._now()
        doubt = self._doubts.get(start)
        if doubt is None or now - doubt.last > _ANEW_SECONDS:
            self._doubts.pop(start, None)
            doubt = self._doubts[start] = _Doubt(end, now)
            if len(self._doubts) > _DOUBTFUL_MAX:
                self._doubts.popitem(last=False)
        doubt.tries += 1
        doubt.last = now
        is_lasting = doubt.tries >= _TRIES_MIN and now - doubt.since >= PATIENCE_SECONDS
        if self.is_patient and not is_lasting and not self._is_close(start, end):
            return False
        self._doubts.pop(start, None)
        self._spots = [*self._spots[1 - _SPOTS_MAX :], (start, end)]
        return True

    def _is_close(self, start: int, end: int) -> bool:
        return any(first - _SPOT_BYTES <= end and start <= last + _SPOT_BYTES for first, last in self._spots)

    def passed(self, start: int, end: int) -> None:
        """The disk gave a range."""
        for at in [at for at in self._doubts if start <= at < end]:
            del self._doubts[at]
        self._spots = [spot for spot in self._spots if not start <= spot[0] < end]

    def may_pass(self, start: int, end: int) -> bool:
        """Whether any of a range was refused, and may still be read: nobody passes over its messages yet."""
        return any(at < end and start < doubt.end for at, doubt in self._doubts.items())
