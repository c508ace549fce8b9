"""The health of shards as a client meets it: which of them messages that may go anywhere avoid for a while. Pure.

A shard that fails is avoided, twice as long each time it fails again. One that answers well above what the others take
is slow, and avoided, too; then it is tried anew.

What always holds: an answer in good time ends what failures began; nothing is avoided for longer than `FAILED_MAX`;
what is kept is a few numbers for each shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final

__all__ = ["ShardHealth"]

FAILED_MIN: Final = 0.5
FAILED_MAX: Final = 15.0
SLOW_SECONDS: Final = 5.0  # for which a slow one is avoided
SLOW_MIN: Final = 0.2  # an answer sooner than this is never slow
SLOW_FACTOR: Final = 4.0  # above what the others take
SAMPLES_MIN: Final = 5
_WEIGHT: Final = 0.2  # of the newest answer in the mean


class _Record:
    __slots__ = ("count", "failures", "mean", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0  # on the monotonic clock
        self.mean = 0.0  # seconds that an answer takes
        self.count = 0


class ShardHealth:
    """What a client's senders have met. To be called under one lock, or by one thread; a lost update does no harm."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self.changes = 0
        """Rises when another shard is to be avoided."""

    def _of(self, shard: int) -> _Record:
        record = self._records.get(shard)
        if record is None:
            record = self._records[shard] = _Record()
        return record

    def failed(self, shard: int, now: float, seconds: float | None = None) -> None:
        """A shard refused a message for the moment, or its connection broke.

        Parameters:
            seconds: after which it wants to be asked again, if it said so.
        """
        record = self._of(shard)
        if now < record.until and seconds is None:
            return  # of the same trouble
        pause = min(FAILED_MAX, FAILED_MIN * 2**record.failures)
        record.failures = min(record.failures + 1, 10)
        record.until = now + (pause if seconds is None else min(seconds, FAILED_MAX))
        self.changes += 1

    def answered(self, shard: int, seconds: float, now: float) -> None:
        """A shard has stored a message, after so long."""
        record = self._of(shard)
        record.failures = 0
        record.count += 1
        record.mean = seconds if record.count == 1 else record.mean + _WEIGHT * (seconds - record.mean)
        if record.mean < SLOW_MIN or record.count < SAMPLES_MIN:
            return
        others = [other.mean for other in self._records.values() if other is not record and other.count >= SAMPLES_MIN]
        if others and record.mean > SLOW_FACTOR * median(others):
            record.until = now + SLOW_SECONDS
            self.changes += 1
            record.count = 0  # it gets another chance then

    def avoided(self, shards: Iterable[int], now: float) -> list[int]:
        """Which of these are to be avoided now."""
        records = self._records
        return [shard for shard in shards if (record := records.get(shard)) is not None and record.until > now]
