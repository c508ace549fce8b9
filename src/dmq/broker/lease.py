"""Leases: what is out, with whom, until when.

Pure code. A lease is a range of one queue's offsets handed to one holder; its mask says which of them are still out.
The table of a cursor's leases finds one by number, by holder, by offset, and those whose time is over.

What always holds: a lease is in its table exactly while its mask is not empty; a holder's counts are the sums over its
leases in all tables; no offset is in two masks of one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

__all__ = ["Held", "Holder", "Lease", "LeaseTable", "Pages"]

_PAGE_BITS: Final = 8
_SPARE_DEADLINES: Final = 64


class Holder:
    """Who holds leases, and how much is out with it. A holder is itself, whatever its name."""

    __slots__ = ("bytes_out", "messages_out", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages_out = 0
        self.bytes_out = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.messages_out} out)"


class Held:
    """Offsets of [start, stop) that somebody has a claim on: those in the mask."""

    __slots__ = ("attempt", "mask", "start", "stop")

    def __init__(self, start: int, stop: int, mask: int, attempt: int) -> None:
        self.start = start
        self.stop = stop
        self.mask = mask
        self.attempt = attempt


class Lease(Held):
    """One hand-out.

    Attributes:
        mask: what is still out.
        moved: what was given back for another hand-out, and is neither out nor settled by this lease.
        is_whole: the lease has all of [start, stop) to itself; what is in no mask was passed over by the filter.
        size: bytes out, for the holder's credit.
        deadline_ms: when its time is over; never earlier through a disconnect.
        due_ms: when it ends: the deadline, or the end of the grace time of a holder that is away.
    """

    __slots__ = ("deadline_ms", "due_ms", "epoch", "holder", "is_whole", "leased_at_ms", "moved", "number", "size")

    def __init__(
        self,
        number: int,
        epoch: int,
        start: int,
        stop: int,
        mask: int,
        attempt: int,
        holder: Holder,
        leased_at_ms: int,
        deadline_ms: int,
        size: int,
        is_whole: bool,
    ) -> None:
        self.start = start
        self.stop = stop
        self.mask = mask
        self.attempt = attempt
        self.number = number
        self.epoch = epoch
        self.holder = holder
        self.leased_at_ms = leased_at_ms
        self.deadline_ms = deadline_ms
        self.due_ms = deadline_ms
        self.size = size
        self.is_whole = is_whole
        self.moved = 0

    @property
    def count(self) -> int:
        """Messages still out."""
        return self.mask.bit_count()

    def __repr__(self) -> str:
        return (
            f"Lease({self.number}, [{self.start}, {self.stop}), {self.count} out with {self.holder.name!r}, "
            f"attempt {self.attempt}, due {self.due_ms})"
        )


H = TypeVar("H", bound=Held)


class Pages(Generic[H]):
    """Finds what lies around an offset: claims by the pages of offsets their range touches."""

    def __init__(self) -> None:
        self._pages: dict[int, set[H]] = {}

    def add(self, held: H) -> None:
        for page in range(held.start >> _PAGE_BITS, (held.stop - 1 >> _PAGE_BITS) + 1):
            found = self._pages.get(page)
            if found is None:
                self._pages[page] = {held}
            else:
                found.add(held)

    def remove(self, held: H) -> None:
        for page in range(held.start >> _PAGE_BITS, (held.stop - 1 >> _PAGE_BITS) + 1):
            found = self._pages[page]
            if len(found) == 1:
                del self._pages[page]
            else:
                found.remove(held)

    def touching(self, start: int, stop: int) -> set[H]:
        """Claims whose range may overlap [start, stop)."""
        first, last = start >> _PAGE_BITS, (stop - 1) >> _PAGE_BITS
        if last - first < len(self._pages):
            pages = [self._pages[page] for page in range(first, last + 1) if page in self._pages]
        else:
            pages = [found for page, found in self._pages.items() if first <= page <= last]
        return set().union(*pages)


class LeaseTable:
    """The leases of one cursor."""

    def __init__(self) -> None:
        self.out = 0
        self._leases: dict[int, Lease] = {}
        self._by_holder: dict[Holder, dict[int, Lease]] = {}
        self._pages: Pages[Lease] = Pages()
        # (due, number); an entry whose lease is gone or due at another time is passed over.
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, number: int) -> Lease | None:
        return self._leases.get(number)

    def of(self, holder: Holder) -> list[Lease]:
        """The holder's leases, oldest first."""
        return list(self._by_holder.get(holder, {}).values())

    def touching(self, start: int, stop: int) -> set[Lease]:
        """Leases whose range may overlap [start, stop)."""
        return self._pages.touching(start, stop)

    def add(self, lease: Lease) -> None:
        number, holder = lease.number, lease.holder
        self._leases[number] = lease
        held = self._by_holder.get(holder)
        if held is None:
            self._by_holder[holder] = {number: lease}
        else:
            held[number] = lease
        count = lease.mask.bit_count()
        self.out += count
        holder.messages_out += count
        holder.bytes_out += lease.size
        self._pages.add(lease)
        self._watch(lease)

    def take(self, lease: Lease, bits: int) -> None:
        """Take bits out of the lease's mask; with the last of them it leaves the table."""
        count, before = bits.bit_count(), lease.mask.bit_count()
        lease.mask ^= bits
        # Sizes of single messages are not kept: a part gives back its share, the last one the rest.
        share = lease.size * count // before
        lease.size -= share
        holder = lease.holder
        holder.messages_out -= count
        holder.bytes_out -= share
        self.out -= count
        if count == before:
            del self._leases[lease.number]
            held = self._by_holder[holder]
            if len(held) == 1:
                del self._by_holder[holder]
            else:
                del held[lease.number]
            self._pages.remove(lease)

    # --- time -------------------------------------------------------------------------------------------------------

    def set_due(self, lease: Lease, due_ms: int) -> None:
        """Let the lease end at another time."""
        if due_ms != lease.due_ms:
            lease.due_ms = due_ms
            self._watch(lease)

    def next_due(self) -> int | None:
        """When the next lease ends, if nothing happens before."""
        deadlines = self._deadlines
        while deadlines:
            due_ms, number = deadlines[0]
            lease = self._leases.get(number)
            if lease is not None and lease.due_ms == due_ms:
                return due_ms
            heappop(deadlines)
        return None

    def over(self, now_ms: int) -> list[Lease]:
        """Leases whose time is over, the longest over first. They stay in the table."""
        found: dict[int, Lease] = {}  # a lease may be watched twice for the same time
        while (due_ms := self.next_due()) is not None and due_ms <= now_ms:
            number = heappop(self._deadlines)[1]
            found[number] = self._leases[number]
        return list(found.values())

    def _watch(self, lease: Lease) -> None:
        # Most leases are acked long before their deadline. Their entries would pile up, so they are swept out whenever
        # they have become the larger part: constant work per lease in the long run.
        if len(self._deadlines) > 2 * len(self._leases) + _SPARE_DEADLINES:
            self._deadlines = [(lease.due_ms, number) for number, lease in self._leases.items()]
            heapify(self._deadlines)
        else:
            heappush(self._deadlines, (lease.due_ms, lease.number))
