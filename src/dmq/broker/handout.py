"""Handing out: which offsets of a queue come next, and what becomes of them until they are leased.

Pure code, the first half of a cursor (see `cursor`, which has its rules). Hand-out has two steps, because only the
store's read tells which offsets of a range pass the filter, and the read may take a while: `propose` reserves offsets,
`grant` turns those that matched into a lease and settles the others silently (see `dequeue`), `release` gives them
back. Other calls may come in between.

What always holds: every unsettled offset below `next` is in exactly one place: reserved by a proposal, out in a lease,
or waiting in the redelivery list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from dmq.broker.bitmap import full, mask_of_offsets, runs
from dmq.broker.dequeue import FILTERED, DequeueLog
from dmq.broker.lease import Held, Holder, Lease, LeaseTable
from dmq.broker.redelivery import Redelivery, RedeliveryList
from dmq.storage.positions import Position

__all__ = ["WINDOW", "HandOut", "Proposal"]

WINDOW: Final = 65_536


class Proposal(Held):
    """Offsets reserved for a hand-out that is being prepared.

    Attributes:
        start, stop: what to read.
        mask: which of them, from `start`; a redelivery may have holes.
        limit: how many may match at most.
        attempt: which attempt their hand-out will be.
        is_fresh: they were never handed out, and all of [start, stop) is reserved.
    """

    __slots__ = ("is_fresh", "limit")

    def __init__(self, start: int, stop: int, mask: int, attempt: int, limit: int, is_fresh: bool) -> None:
        self.start = start
        self.stop = stop
        self.mask = mask
        self.attempt = attempt
        self.limit = limit
        self.is_fresh = is_fresh

    def __repr__(self) -> str:
        return f"Proposal([{self.start}, {self.stop}), at most {self.limit}, attempt {self.attempt})"


class HandOut:
    """See the module; `cursor.Cursor` is the whole."""

    def __init__(
        self,
        group: str,
        topic_id: int,
        queue: int,
        position: Position,
        *,
        epoch: int,
        numbers: Iterator[int],
        ordered: bool = False,
        parallel: int | None = None,
        visible_next: int = 0,
        window: int = WINDOW,
    ) -> None:
        self.epoch = epoch
        self.ordered = ordered
        self.parallel = parallel
        self._numbers = numbers
        self._window = window
        self._visible = visible_next
        self._log = DequeueLog(group, topic_id, queue)
        self.sought = 0  # which seek was the last, as the store counts them; members learn of it with their leases
        self._takes_older_epochs = True  # until a seek: what was acked before it says nothing about what comes after
        self._begin(Position(position.floor, position.ranges))

    def _begin(self, position: Position) -> None:
        self._position = position
        self._next = position.floor
        self._leases = LeaseTable()
        self._redeliveries = RedeliveryList(ordered=self.ordered)
        self._proposals: set[Proposal] = set()
        self._reserved = 0  # messages that the proposals may turn into leases
        self._older_than = next(self._numbers)  # leases with lower numbers are none of this cursor's any more
        # Settled ranges at or above next: from before a restart, or from acks of that time.
        self._ahead: deque[tuple[int, int]] = deque(position.ranges)
        self._ahead_stale = False

    def set_ordered(self, ordered: bool, now_ms: int) -> None:
        """From now on hand out in strict order, or not; what is out stays out."""
        if ordered != self.ordered:
            self.ordered = ordered
            entries = self._redeliveries.touching(0, self._next)
            self._redeliveries = RedeliveryList(ordered=ordered)
            for entry in sorted(entries, key=lambda entry: entry.start):
                self._redeliveries.add(entry, now_ms)

    # --- handing out ------------------------------------------------------------------------------------------------

    def propose(self, limit: int, now_ms: int, visible_next: int, scan: int | None = None) -> Proposal | None:
        """Reserve what is to be handed out next: redeliveries that are ready, then what was never out.

        Parameters:
            limit: how many messages the member can take.
            visible_next: the visible end of the queue.
            scan: how many offsets to look at for them, for a group with a filter; None means `limit`.

        Returns:
            What to read, or None: there is nothing, or nothing may be handed out before something is settled.
        """
        if visible_next > self._visible:
            self._visible = visible_next
        if self.parallel is not None:
            limit = min(limit, self.parallel - self._leases.out - self._reserved)
        if limit <= 0 or (self.ordered and (self._proposals or len(self._leases))):
            return None
        proposal = None
        if self._redeliveries.count:
            held = self._redeliveries.take(limit, now_ms)
            if held is not None:
                proposal = Proposal(held.start, held.stop, held.mask, held.attempt, held.mask.bit_count(), False)
            elif self.ordered:
                return None  # the first one waits for its time, and all wait behind it
        if proposal is None:
            if self._ahead or self._ahead_stale:
                self._pass_ahead()
            start = self._next
            stop = min(start + max(limit, scan or 0), visible_next, self._position.floor + self._window)
            if self._ahead:
                stop = min(stop, self._ahead[0][0])
            if stop <= start:
                return None
            self._next = stop
            proposal = Proposal(start, stop, (1 << (stop - start)) - 1, 1, min(limit, stop - start), True)
        self._proposals.add(proposal)
        self._reserved += proposal.limit
        return proposal

    def grant(
        self,
        proposal: Proposal,
        holder: Holder,
        now_ms: int,
        lease_ms: int,
        *,
        scanned_to: int | None = None,
        matched: Iterable[int] | None = None,
        size: int = 0,
        reason: str = FILTERED,
    ) -> Lease | None:
        """Hand out what matched, settle what did not, and give back what was not looked at.

        Messages that turn out to be expired are granted like others and then settled as EXPIRED.

        Parameters:
            scanned_to: everything below it was looked at; None means all of the proposal.
            matched: the offsets that pass the filter; None means all that was looked at.
            size: bytes of the messages that matched, for the holder's credit.
            reason: why the others are passed over.

        Returns:
            The lease, or None: nothing matched, or all was settled or the position set in the meantime.
        """
        if proposal not in self._proposals:
            return None  # a seek came in between
        start, stop, mask, is_whole = proposal.start, proposal.stop, proposal.mask, proposal.is_fresh
        unseen = 0
        if scanned_to is not None and scanned_to < stop:
            stop = max(scanned_to, start)
            unseen = mask & ~full(stop - start)
            mask ^= unseen
        found = mask if matched is None else mask & mask_of_offsets(matched, start, stop)
        if found.bit_count() > proposal.limit:
            raise ValueError(f"{found.bit_count()} messages matched, {proposal.limit} were proposed")
        self._proposals.remove(proposal)
        self._reserved -= proposal.limit
        if unseen:
            self._give_back(proposal, unseen, now_ms)
        if found != mask:
            start = self._pass_over(start, stop, mask, found, is_whole, reason)
            mask = found >> (start - proposal.start)
        if not mask:
            return None
        number = next(self._numbers)
        lease = Lease(
            number, self.epoch, start, stop, mask, proposal.attempt, holder, now_ms, now_ms + lease_ms, size, is_whole
        )
        self._leases.add(lease)
        return lease

    def release(self, proposal: Proposal, now_ms: int) -> None:
        """Give a proposal back: it was not handed out after all."""
        if proposal in self._proposals:
            self._proposals.remove(proposal)
            self._reserved -= proposal.limit
            self._give_back(proposal, proposal.mask, now_ms)

    def _give_back(self, proposal: Proposal, bits: int, now_ms: int) -> None:
        if not bits:
            return
        first = proposal.start + (bits & -bits).bit_length() - 1
        if proposal.is_fresh and self._next == proposal.stop:
            self._next = first  # the usual case: nobody reserved beyond it, so it is simply not handed out yet
            if bits.bit_count() != proposal.stop - first:
                self._ahead_stale = True  # some of it was settled meanwhile
        else:
            self._redeliveries.add(Redelivery(proposal.start, bits, proposal.attempt, now_ms), now_ms)

    def _pass_over(self, start: int, stop: int, mask: int, found: int, is_whole: bool, reason: str) -> int:
        """Settle what did not match; returns where the lease begins."""
        missed = mask & ~found
        if not is_whole or (not found and missed != full(stop - start)):
            self._log.pass_over(start, missed, reason)
            for first, last in runs(start, missed):
                self._position.settle(first, last)
            return start
        if not found:
            self._position.settle(start, stop)
            self._log.pass_over_range(start, stop, reason)
            return stop
        self._log.pass_over(start, missed, reason)
        # What lies between matches is settled in one step when the lease ends; the floor cannot pass them before.
        first = start + (found & -found).bit_length() - 1
        self._position.settle(start, first)
        return first

    def _pass_ahead(self) -> None:
        """Move next over what is settled already."""
        if self._ahead_stale:
            self._ahead = deque(span for span in self._position.ranges if span[1] > self._next)
            self._ahead_stale = False
            self._next = max(self._next, self._position.floor)
        while self._ahead and self._ahead[0][0] <= self._next:
            self._next = max(self._next, self._ahead.popleft()[1])

    # --- what to show -----------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """What is settled; the caller must not change it."""
        return self._position

    @property
    def floor(self) -> int:
        """Everything below is settled."""
        return self._position.floor

    @property
    def next(self) -> int:
        """The first offset that was never handed out."""
        return self._next

    @property
    def out(self) -> int:
        """Messages that are out."""
        return self._leases.out

    @property
    def redelivering(self) -> int:
        """Messages that wait to be handed out again."""
        return self._redeliveries.count

    @property
    def skipped(self) -> int:
        """Messages passed over whose events wait; see `take_skipped`."""
        return self._log.waiting

    def leases(self) -> list[Lease]:
        """What is out, oldest lease first."""
        return list(self._leases)

    def claim_on(self, offset: int) -> Lease | Redelivery | None:
        """What has a claim on an offset: the lease that has it out, or what waits to hand it out again."""
        claims: list[Lease | Redelivery] = [*self._leases.touching(offset, offset + 1)]
        claims += self._redeliveries.touching(offset, offset + 1)
        for held in claims:
            if held.start <= offset < held.stop and held.mask >> (offset - held.start) & 1:
                return held
        return None

    def lag(self, visible_next: int) -> int:
        """Messages that are visible and not settled; what a filter will pass over is among them until it is seen."""
        if self._ahead or self._ahead_stale:
            self._pass_ahead()
        fresh = max(visible_next - self._next, 0) - sum(end - start for start, end in self._ahead)
        return fresh + self.out + self.redelivering + sum(proposal.mask.bit_count() for proposal in self._proposals)
