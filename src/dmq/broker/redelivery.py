"""Redelivery: what was out, is not settled, and waits to be handed out again.

Pure code. Each entry is a claim on some offsets, with the attempt its next hand-out will be and the time before which
that must not happen.

What always holds: `count` is the number of set bits over all entries; in the order of an ordered group nothing is taken
before everything below it was taken, whatever its time.
"""

from __future__ import annotations

from heapq import heappop, heappush

from dmq.broker.bitmap import Ranges, lowest, runs
from dmq.broker.lease import Held, Pages

__all__ = ["Redelivery", "RedeliveryList"]


class Redelivery(Held):
    """Offsets that wait for another hand-out."""

    __slots__ = ("lease", "member", "ready_at_ms")

    def __init__(
        self, start: int, stop: int, mask: int, attempt: int, ready_at_ms: int, lease: int = 0, member: str = ""
    ) -> None:
        super().__init__(start, stop, mask, attempt)
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
        self._waiting: list[tuple[int, int, Redelivery]] = []  # by time; not used by ordered groups
        self._ready: list[tuple[int, int, Redelivery]] = []  # by offset
        self._pages: Pages[Redelivery] = Pages()

    def add(self, entry: Redelivery, now_ms: int) -> None:
        self.count += entry.mask.bit_count()
        self._pages.add(entry)
        self._made += 1
        if self._ordered or entry.ready_at_ms <= now_ms:
            heappush(self._ready, (entry.start, self._made, entry))
        else:
            heappush(self._waiting, (entry.ready_at_ms, self._made, entry))

    def touching(self, start: int, stop: int) -> set[Redelivery]:
        """Entries whose range may overlap [start, stop)."""
        return self._pages.touching(start, stop)

    def drop(self, entry: Redelivery, bits: int) -> None:
        """Take bits out of an entry: they are settled, or about to be handed out."""
        entry.mask ^= bits
        self.count -= bits.bit_count()
        if not entry.mask:
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
            self.drop(entry, bits)
            if limit == 0:
                break
            entry = self._first_ready(now_ms)
        return Held(start, stop, mask, attempt)

    def next_ready(self, now_ms: int) -> int | None:
        """When something can be taken: now or earlier if something can be already."""
        first = self._first_ready(now_ms)
        if first is not None:
            return first.ready_at_ms
        heap = self._ready if self._ordered else self._waiting
        self._sweep(heap)
        return heap[0][2].ready_at_ms if heap else None

    def _first_ready(self, now_ms: int) -> Redelivery | None:
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, made, entry = heappop(self._waiting)
            if entry.mask:
                heappush(self._ready, (entry.start, made, entry))
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
