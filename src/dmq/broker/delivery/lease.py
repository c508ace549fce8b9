"""Leases, redeliveries and the dequeue log: messages that are out with a member, that go out again, that are settled.

Pure code. A lease is a range of one queue's offsets handed to one holder; its mask says which of them are still out.
The table of a cursor's leases finds one by number, by holder, by offset, and those whose time is over. A redelivery is
a claim on offsets that were out and are not settled, with the attempt that their next hand-out will be and the time
before which that must not happen.

What always holds: a lease is in its table exactly while its mask is not empty; a holder's counts are the sums over its
leases in all tables; no offset is in two masks of one table. The count of a redelivery list is the number of set bits
over all entries; in an ordered group nothing is taken before everything below it was taken, whatever its time. What a
member let run out is kept for the others for a moment, if there are any.

The dequeue log: what a cursor settles, as the events that make it durable. Everything a member settles becomes events
at once. Messages that the filter passed over are different: no client waits for them, and finding them again costs one
look at the index. So they are settled in the cursor's memory at once, and their events wait here until something else
is settled, or until the caller asks for them (at a checkpoint, say). A crash before that loses no message: the new
cursor looks at those offsets once more, and its filter passes over them again.

What always holds: an offset that is in an event of this log is settled in its cursor; what waits is bounded, since it
lies within the cursor's window, or is one unbroken range below it.

Bitmaps: which offsets of a range are meant, as one whole number.

Bit i of a mask stands for the offset `start + i`. A whole number is the fastest set of neighbouring offsets that Python
has: a lease of a hundred messages is one machine object, and taking offsets out of it is one operation.
`dmq.offset_runs` turns a mask into ranges.

What always holds: masks are never negative; bits are never set beyond the range they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from dmq.offset_runs import mask_runs
from dmq.storage.state.events import Outcome, Settled

__all__ = [
    "FILTERED",
    "GONE",
    "CursorKey",
    "DequeueLog",
    "Held",
    "Holder",
    "Lease",
    "LeaseTable",
    "Pages",
    "Ranges",
    "Redelivery",
    "RedeliveryList",
    "Tally",
    "full",
    "lowest",
    "mask_of_offsets",
    "mask_of_ranges",
    "pieces",
    "redelivery",
]

Ranges = Iterable[tuple[int, int]]  # (start, stop), stop excluded

# The longest bitmap in one event.
PIECE_MAX: Final = 65_536
_FEW: Final = 8  # ranges; so many are joined one by one


def full(count: int) -> int:
    """A mask with the lowest `count` bits set."""
    return (1 << count) - 1


def mask_of_ranges(ranges: Ranges, start: int, stop: int) -> int:
    """The mask, from `start`, of those offsets of the ranges that lie in [start, stop)."""
    rest = iter(ranges)
    mask = 0
    for first, last in islice(rest, _FEW):
        first, last = max(first, start), min(last, stop)
        if first < last:
            mask |= ((1 << (last - first)) - 1) << (first - start)
    if many := list(rest):
        mask |= _mask_of_many(many, start, stop)
    return mask


def _mask_of_many(ranges: list[tuple[int, int]], start: int, stop: int) -> int:
    """The same with a byte for each offset: joining whole numbers costs time by their length for each range."""
    marked = bytearray(max(stop - start, 0))
    for first, last in ranges:
        first, last = max(first, start), min(last, stop)
        if first < last:
            marked[first - start : last - start] = b"\1" * (last - first)
    return int.from_bytes(np.packbits(np.frombuffer(marked, np.uint8), bitorder="little").tobytes(), "little")


def mask_of_offsets(offsets: Iterable[int], start: int, stop: int) -> int:
    """The mask, from `start`, of those offsets that lie in [start, stop)."""
    bits = bytearray((max(stop - start, 0) + 7) // 8)
    for offset in offsets:
        if start <= offset < stop:
            bits[(offset - start) >> 3] |= 1 << ((offset - start) & 7)
    return int.from_bytes(bits, "little")


def lowest(mask: int, count: int) -> int:
    """The lowest `count` set bits of a mask; all of them if there are no more."""
    if mask.bit_count() <= count:
        return mask
    low, high = count, mask.bit_length()  # so many bits of the mask hold enough set ones
    while low < high:
        middle = (low + high) // 2
        if (mask & full(middle)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & full(low)


def pieces(start: int, mask: int) -> Iterator[tuple[int, int, bytes]]:
    """A mask as (start, count, bitmap) for events; an empty bitmap means the whole of the range.

    Long runs become ranges of their own; what is between them is cut so that no bitmap is longer than `PIECE_MAX`.
    """
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        start += skip
        count = (~mask & (mask + 1)).bit_length() - 1
        bitmap = b""
        if count < PIECE_MAX and mask.bit_length() > count:
            chunk = mask & full(PIECE_MAX)
            count = chunk.bit_length()
            if chunk != full(count):
                bitmap = chunk.to_bytes((count + 7) // 8, "little")
        yield start, count, bitmap
        mask >>= count
        start += count


_PAGE_BITS: Final = 8
_SPARE_DEADLINES: Final = 64


class Holder:
    """Who holds leases, and how much is out with it. A holder is itself, whatever its name.

    Attributes:
        is_silent: it let a lease run out, and did not answer when it was asked for a sign of life.
    """

    __slots__ = ("bytes_out", "is_silent", "messages_out", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages_out = 0
        self.bytes_out = 0
        self.is_silent = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.messages_out} out)"


class Held(msgspec.Struct, eq=False):
    """Offsets of [start, stop) that somebody has a claim on: those in the mask.

    Attributes:
        silences: how many hand-outs before were not counted as attempts, because their holder fell silent.
    """

    start: int
    stop: int
    mask: int
    attempt: int
    silences: int = 0


class Lease(Held, kw_only=True):
    """One hand-out.

    Attributes:
        mask: what is still out.
        is_whole: the lease has all of [start, stop) to itself; what is in no mask was passed over by the filter.
        size: bytes out, for the holder's credit.
        deadline_ms: when its time is over; never earlier through a disconnect.
        due_ms: when it ends: the deadline, or the end of the grace time of a holder that is away.
        moved: what was given back for another hand-out, and is neither out nor settled by this lease.
    """

    number: int
    epoch: int
    holder: Holder
    leased_at_ms: int
    deadline_ms: int
    due_ms: int
    size: int
    is_whole: bool
    moved: int = 0

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
        page, last = held.start >> _PAGE_BITS, held.stop - 1 >> _PAGE_BITS
        while page <= last:
            try:
                self._pages[page].add(held)
            except KeyError:
                self._pages[page] = {held}
            page += 1

    def remove(self, held: H) -> None:
        page, last = held.start >> _PAGE_BITS, held.stop - 1 >> _PAGE_BITS
        while page <= last:
            found = self._pages[page]
            if len(found) == 1:
                del self._pages[page]
            else:
                found.remove(held)
            page += 1

    def touching(self, start: int, stop: int) -> set[H]:
        """Claims whose range may overlap [start, stop)."""
        first, last = start >> _PAGE_BITS, (stop - 1) >> _PAGE_BITS
        if last - first < len(self._pages):
            pages = [self._pages[page] for page in range(first, last + 1) if page in self._pages]
        else:
            pages = [found for page, found in self._pages.items() if first <= page <= last]
        return set().union(*pages)


class Tally:
    """How many messages are leased in all tables that share it."""

    __slots__ = ("out",)

    def __init__(self) -> None:
        self.out = 0


class LeaseTable:
    """The leases of one cursor.

    Parameters:
        tally: of all cursors together.
    """

    def __init__(self, tally: Tally | None = None) -> None:
        self.out = 0
        self._tally = tally or Tally()
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
        self._tally.out += count
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
        self._tally.out -= count
        if count == before:
            del self._leases[lease.number]
            held = self._by_holder[holder]
            if len(held) == 1:
                del self._by_holder[holder]
            else:
                del held[lease.number]
            self._pages.remove(lease)

    def leave(self) -> None:
        """Count no longer with the others: the cursor is given up."""
        self._tally.out -= self.out
        self._tally = Tally()

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


_SPARE_ENTRIES: Final = 64


class Redelivery(Held, kw_only=True):
    """Offsets that wait for another hand-out; made by `redelivery`.

    Attributes:
        lease: the number of the lease they were in, for logs.
        member: who held it.
        others_until_ms: before this time they are not handed to that member again.
    """

    ready_at_ms: int
    lease: int = 0
    member: str = ""
    others_until_ms: int = 0

    @property
    def ranges(self) -> Ranges:
        return list(mask_runs(self.start, self.mask))

    def __repr__(self) -> str:
        return f"Redelivery({self.ranges}, attempt {self.attempt}, from {self.ready_at_ms})"


def redelivery(held: Held, mask: int, ready_at_ms: int, attempt: int | None = None) -> Redelivery:
    """An entry for some of what is held, a bit each from its start.

    It is tight around its offsets, so that those of an ordered group sort by what they really hold.

    Parameters:
        attempt: what their hand-out will be; that of the claim before, if left out.
    """
    shift = (mask & -mask).bit_length() - 1
    mask >>= shift
    start = held.start + shift
    if attempt is None:
        attempt = held.attempt
    return Redelivery(start, start + mask.bit_length(), mask, attempt, silences=held.silences, ready_at_ms=ready_at_ms)


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
        self._withheld: list[tuple[int, int, Redelivery]] = []  # by the time until which others come first
        self._pages: Pages[Redelivery] = Pages()

    def add(self, entry: Redelivery, now_ms: int) -> None:
        self.count += entry.mask.bit_count()
        self._live += 1
        self._pages.add(entry)
        self._made += 1
        if entry.others_until_ms > now_ms:
            heappush(self._withheld, (entry.others_until_ms, self._made, entry))
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

    def take(self, limit: int, now_ms: int, member: str = "") -> Held | None:
        """Take out up to `limit` offsets that are ready and of one attempt, lowest first.

        Parameters:
            member: who gets them.
        """
        aside: list[tuple[int, int, Redelivery]] = []  # kept for others
        try:
            first = self._first_ready(now_ms, member, aside)
            if first is None:
                return None
            start, mask = first.start, 0
            stop, attempt, silences = first.stop, first.attempt, first.silences
            entry: Redelivery | None = first
            # Scattered failures of the same attempt travel together again.
            while entry is not None and entry.attempt == attempt and entry.silences == silences:
                bits = lowest(entry.mask, limit)
                limit -= bits.bit_count()
                mask |= bits << (entry.start - start)
                stop = max(stop, entry.stop)
                rest = entry.mask ^ bits
                self.drop(entry, entry.mask)
                if rest:
                    again = redelivery(entry, rest, entry.ready_at_ms)
                    again.lease, again.member = entry.lease, entry.member
                    again.others_until_ms = entry.others_until_ms
                    self.add(again, now_ms)
                if limit == 0:
                    break
                entry = self._first_ready(now_ms, member, aside)
        finally:
            for item in aside:
                heappush(self._ready, item)
        return Held(start, stop, mask, attempt, silences=silences)

    def withholds(self, member: str, now_ms: int) -> bool:
        """Whether something is kept for other members than this one for now."""
        return any(entry.mask and _is_withheld(entry, member, now_ms) for _, _, entry in self._withheld)

    def wake(self, now_ms: int) -> None:
        """Time has passed: what waited until now is ready, and no longer of interest to a timer."""
        self._woken_ms = max(self._woken_ms, now_ms)
        while self._withheld and self._withheld[0][0] <= now_ms:
            heappop(self._withheld)
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, made, entry = heappop(self._waiting)
            if entry.mask:
                heappush(self._ready, (entry.start, made, entry))

    def next_ready(self) -> int | None:
        """When something that cannot be taken yet can be; None if nothing waits for a time to come."""
        heap = self._ready if self._ordered else self._waiting
        self._sweep(heap)
        ready_ms = heap[0][2].ready_at_ms if heap and heap[0][2].ready_at_ms > self._woken_ms else None
        self._sweep(self._withheld)
        if not self._withheld or (ready_ms is not None and ready_ms <= self._withheld[0][0]):
            return ready_ms
        return self._withheld[0][0]

    def _first_ready(self, now_ms: int, member: str, aside: list[tuple[int, int, Redelivery]]) -> Redelivery | None:
        self.wake(now_ms)
        while True:
            self._sweep(self._ready)
            if not self._ready:
                return None
            entry = self._ready[0][2]
            # Only in an ordered group can the first one have to wait, and then everything behind it waits too.
            if entry.ready_at_ms > now_ms:
                return None
            if not _is_withheld(entry, member, now_ms):
                return entry
            if self._ordered:
                return None
            aside.append(heappop(self._ready))

    @staticmethod
    def _sweep(heap: list[tuple[int, int, Redelivery]]) -> None:
        while heap and not heap[0][2].mask:
            heappop(heap)


def _is_withheld(entry: Redelivery, member: str, now_ms: int) -> bool:
    return entry.others_until_ms > now_ms and entry.member == member


# Why messages were passed over without being handed out, in the event's `error`.
FILTERED = "filtered"
GONE = "gone"  # retention took them before the group came to them


class CursorKey(NamedTuple):
    """Whose cursor it is."""

    group: str
    topic_id: int
    queue: int


class DequeueLog:
    """Makes the `Settled` events of one cursor."""

    def __init__(self, key: CursorKey) -> None:
        self._key = key
        self._masks: list[tuple[int, int, str]] = []  # start, mask, reason
        self._ranges: list[tuple[int, int, str]] = []  # start, stop, reason
        self.waiting = 0  # messages passed over whose events wait

    def settled(
        self,
        start: int,
        mask: int,
        outcome: Outcome,
        now_ms: int,
        lease: Lease | None = None,
        error: str = "",
    ) -> list[Settled]:
        """The events for the offsets of a mask, after those that waited.

        Parameters:
            lease: what they were out with, if they were.
        """
        group, topic_id, queue = self._key
        value, member, attempt, leased_at_ms = int(outcome), "", 1, 0
        if lease is not None:
            member, attempt, leased_at_ms = lease.holder.name, lease.attempt, lease.leased_at_ms
        events = self.take(now_ms) if self.waiting else []
        if mask & (mask + 1) == 0:  # unbroken: the usual case, a whole lease
            count = mask.bit_length()
            events.append(
                Settled(
                    group,
                    topic_id,
                    queue,
                    start,
                    count=count,
                    outcome=value,
                    bitmap=b"",
                    member=member,
                    attempt=attempt,
                    leased_at_ms=leased_at_ms,
                    settled_at_ms=now_ms,
                    error=error,
                )
            )
            return events
        events.extend(
            Settled(
                group,
                topic_id,
                queue,
                at,
                count=count,
                outcome=value,
                bitmap=bitmap,
                member=member,
                attempt=attempt,
                leased_at_ms=leased_at_ms,
                settled_at_ms=now_ms,
                error=error,
            )
            for at, count, bitmap in pieces(start, mask)
        )
        return events

    def pass_over(self, start: int, mask: int, reason: str) -> None:
        """Note that nobody will get the offsets of a mask."""
        if mask:
            self.waiting += mask.bit_count()
            self._masks.append((start, mask, reason))

    def pass_over_range(self, start: int, stop: int, reason: str) -> None:
        """Note that nobody will get [start, stop). Ranges that follow each other become one."""
        self.waiting += stop - start
        if self._ranges and self._ranges[-1][1:] == (start, reason):
            start = self._ranges.pop()[0]
        self._ranges.append((start, stop, reason))

    def take(self, now_ms: int) -> list[Settled]:
        """The events that waited; they no longer do."""
        masks, ranges = self._masks, self._ranges
        self.forget()
        events = [
            Settled(*self._key, start, stop - start, int(Outcome.SKIPPED), settled_at_ms=now_ms, error=reason)
            for start, stop, reason in ranges
        ]
        for start, mask, reason in masks:
            events += self.settled(start, mask, Outcome.SKIPPED, now_ms, error=reason)
        return events

    def forget(self) -> None:
        """Drop what waited: the position was set by hand, and what lay around it means nothing any more."""
        self._masks, self._ranges, self.waiting = [], [], 0
