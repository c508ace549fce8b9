"""Redelivery: what was out, is not settled, and waits to be handed out again.

Pure code. Each entry is a claim on some offsets, with the attempt its next hand-out will be and the time before which
that must not happen.

What always holds: `count` is the number of set bits over all entries; in the order of an ordered group nothing is taken
before everything below it was taken, whatever its time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from dmq.broker.bitmap import Ranges, lowest, runs
from dmq.broker.lease import Held, Pages

__all__ = ["Redelivery", "RedeliveryList"]

_SPARE_ENTRIES: Final = 64


class Redelivery(Held):
    """Offsets that wait for another hand-out."""

    __slots__ = ("lease", "member", "ready_at_ms")

    def __init__(self, start: int, mask: int, attempt: int, ready_at_ms: int, lease: int = 0, member: str = "") -> None:
        # Tight around its offsets, so that entries of an ordered group sort by what they really hold.
        shift = (mask & -mask).bit_length() - 1
        mask >>= shift
        super().__init__(start + shift, start + shift + mask.bit_length(), mask, attempt)
        self.ready_at_ms = ready_at_ms
        self.lease = lease  # the number of the lease they were in, for logs
        self.member = member

    @property
    def ranges(self) -> Ranges:
        return list(runs(self.start, self.mask))

    def __repr__(self) -> str:
        return f"Redelivery({self.ranges}, attempt {self.attempt}, from {self.ready_at_ms})"


class RedeliveryList:
    """The redeliveries of one cursor."""

    def __init__(self, *, ordered: bool) -> None:
        self.count = 0
        self._ordered = ordered
        self._made = 0  # breaks ties in the heaps
        self._live = 0  # entries that are not empty
        self._woken_ms = -1
        self._waiting: list[tuple[int, int, Redelivery]] = []  # by time; not used by ordered groups
        self._ready: list[tuple[int, int, Redelivery]] = []  # by offset
        self._pages: Pages[Redelivery] = Pages()

    def add(self, entry: Redelivery, now_ms: int) -> None:
        self.count += entry.mask.bit_count()
        self._live += 1
        self._pages.add(entry)
        self._made += 1
        if self._ordered or entry.ready_at_ms <= now_ms:
            heappush(self._ready, (entry.start, self._made, entry))
        else:
            heappush(self._waiting, (entry.ready_at_ms, self._made, entry))
            if len(self._waiting) > 2 * self._live + _SPARE_ENTRIES:
                # Settled while they waited: swept out before they pile up over hours of delay.
                self._waiting = [item for item in self._waiting if item[2].mask]
                heapify(self._waiting)

    def touching(self, start: int, stop: int) -> set[Redelivery]:
        """Entries whose range may overlap [start, stop)."""
        return self._pages.touching(start, stop)

    def drop(self, entry: Redelivery, bits: int) -> None:
        """Take bits out of an entry: they are settled, or about to be handed out."""
        entry.mask ^= bits
        self.count -= bits.bit_count()
        if not entry.mask:
            self._live -= 1
            self._pages.remove(entry)  # the heaps pass over what is empty

    def take(self, limit: int, now_ms: int) -> Held | None:
        """Take out up to `limit` offsets that are ready and of one attempt, lowest first."""
        first = self._first_ready(now_ms)
        if first is None:
            return None
        start, mask = first.start, 0
        stop, attempt = first.stop, first.attempt
        entry: Redelivery | None = first
        # Scattered failures of the same attempt travel together again.
        while entry is not None and entry.attempt == attempt:
            bits = lowest(entry.mask, limit)
            limit -= bits.bit_count()
            mask |= bits << (entry.start - start)
            stop = max(stop, entry.stop)
            rest = entry.mask ^ bits
            self.drop(entry, entry.mask)
            if rest:
                self.add(Redelivery(entry.start, rest, attempt, entry.ready_at_ms, entry.lease, entry.member), now_ms)
            if limit == 0:
                break
            entry = self._first_ready(now_ms)
        return Held(start, stop, mask, attempt)

    def wake(self, now_ms: int) -> None:
        """Time has passed: what waited until now is ready, and no longer of interest to a timer."""
        self._woken_ms = max(self._woken_ms, now_ms)
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, made, entry = heappop(self._waiting)
            if entry.mask:
                heappush(self._ready, (entry.start, made, entry))

    def next_ready(self) -> int | None:
        """When something that cannot be taken yet can be; None if nothing waits for a time to come."""
        heap = self._ready if self._ordered else self._waiting
        self._sweep(heap)
        if not heap or heap[0][2].ready_at_ms <= self._woken_ms:
            return None
        return heap[0][2].ready_at_ms

    def _first_ready(self, now_ms: int) -> Redelivery | None:
        self.wake(now_ms)
        self._sweep(self._ready)
        if not self._ready:
            return None
        entry = self._ready[0][2]
        # Only in an ordered group can the first one have to wait, and then everything behind it waits too.
        return entry if entry.ready_at_ms <= now_ms else None

    @staticmethod
    def _sweep(heap: list[tuple[int, int, Redelivery]]) -> None:
        while heap and not heap[0][2].mask:
            heappop(heap)
