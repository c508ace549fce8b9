"""The cursor: one group in one queue, from "what is next" to "all of it is settled".

Pure code: events in, decisions out. Time comes in as `now_ms`, the broker's own time, which must not run backwards. The
caller reads the store, sends, and writes the events.

Hand-out has two steps, because only the store's read tells which offsets of a range pass the filter, and the read may
take a while: `propose` reserves offsets, `grant` turns those that matched into a lease and settles the others silently
(see `DequeueLog`), `release` gives them back. Other calls may come in between.

What always holds:

- every unsettled offset below `next` is in exactly one place: reserved by a proposal, out in a lease, or waiting in the
  redelivery list;
- nothing settled is handed out again, except after `seek`; nothing unsettled is lost;
- nothing is handed out at or above `floor + window`, or at or above the visible end of the queue;
- with `parallel`, no more than that many messages are out at once;
- an ordered group has one lease or proposal at a time, always of the lowest offsets that are not settled.

Attempts: the first hand-out is attempt 1; a lease that timed out, a member that died and a nack add one. A lease whose
holder fell silent adds none, since nobody knows whether a handler began; but only `SILENCES_MAX` times for a message,
or one that hangs every process which gets it would go round for ever. Attempts live in memory, since only the position
is durable: after a restart of the broker everything unsettled is handed out as attempt 1 again, so a restart never adds
to the count. A message that was moved to a retry topic carries the attempts it had in its own record, and the cursor of
that topic counts on top of them.

Stale calls: an ack names (epoch, lease number). For an unordered group an ack of a lease that is no longer there still
settles what is not settled yet, wherever it is now, also after a restart; other calls raise `LeaseLost`. Lease numbers
come from one counter for all cursors of a broker, so a cursor knows which leases are older than itself (its topic was
dropped and created again) or than its last `seek`; their acks say nothing about the offsets as they are now, and raise
`LeaseLost` too. (A restart forgets that there was a seek, so an ack may settle what was replayed if it is older than
both; only a client that held a lease over both can send one.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from dmq.broker.delivery.lease import (
    FILTERED,
    CursorKey,
    DequeueLog,
    Held,
    Holder,
    Lease,
    LeaseTable,
    Ranges,
    Redelivery,
    RedeliveryList,
    Tally,
    full,
    mask_of_offsets,
    mask_of_ranges,
    redelivery,
)
from dmq.errors import LeaseLost
from dmq.offset_runs import mask_runs
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.positions import Position

__all__ = ["SILENCES_MAX", "WINDOW", "Cursor", "HandOutRules", "LeaseEnd", "LeaseNumbers", "Looked", "Proposal"]

WINDOW: Final = 65_536
SILENCES_MAX: Final = 8


class Proposal(Held, kw_only=True):
    """Offsets reserved for a hand-out that is being prepared.

    Attributes:
        start, stop: what to read.
        mask: which of them, from `start`; a redelivery may have holes.
        attempt: which attempt their hand-out will be.
        limit: how many may match at most.
        is_fresh: they were never handed out, and all of [start, stop) is reserved.
    """

    limit: int
    is_fresh: bool

    def __repr__(self) -> str:
        return f"Proposal([{self.start}, {self.stop}), at most {self.limit}, attempt {self.attempt})"


class Looked(NamedTuple):
    """What the store's read found of a proposal.

    Attributes:
        scanned_to: everything below it was looked at; None means all of the proposal.
        matched: the offsets that pass the filter; None means all that was looked at.
        size: bytes of the messages that matched, for the holder's credit.
        reason: why the others are passed over.
    """

    scanned_to: int | None = None
    matched: Iterable[int] | None = None
    size: int = 0
    reason: str = FILTERED


class LeaseEnd(NamedTuple):
    """How a lease ends whose time is over.

    Attributes:
        is_tried: it counts as an attempt; not so if its holder fell silent.
        others_until_ms: before this time its messages are not handed to the same member again.
        not_before_ms: it does not end before this time after all; 0 if it does now.
    """

    is_tried: bool = True
    others_until_ms: int = 0
    not_before_ms: int = 0


class LeaseNumbers(NamedTuple):
    """Where the leases of a broker get their names from.

    Attributes:
        epoch: the broker's; leases of older epochs are those of before a restart.
        numbers: one counter for all cursors of the broker.
        tally: counts what is leased in all of them.
    """

    epoch: int
    numbers: Iterator[int]
    tally: Tally | None = None


class HandOutRules(NamedTuple):
    """How a cursor hands out.

    Attributes:
        ordered: one lease at a time, in strict order.
        parallel: how many messages may be out at once; None: as many as the window takes.
        window: how far hand-out may run ahead of the floor.
    """

    ordered: bool = False
    parallel: int | None = None
    window: int = WINDOW


_ALL: Final = Looked()
_TRIED: Final = LeaseEnd()
_UNTRIED: Final = LeaseEnd(is_tried=False)
_RULES: Final = HandOutRules()
NEVER_MS: Final = 1 << 62


class Cursor:
    """One group in one queue.

    Parameters:
        key: whose cursor it is, for the events.
        position: what is durable; it is copied, and the store goes on by the events.
        visible_next: the visible end of the queue as it is now; without it, acks of older epochs wait for a propose.
    """

    def __init__(
        self,
        key: CursorKey,
        position: Position,
        leases: LeaseNumbers,
        *,
        visible_next: int = 0,
        rules: HandOutRules = _RULES,
    ) -> None:
        self.epoch, self._numbers, self._tally = leases
        self.ordered, self.parallel, self._window = rules
        self._visible = visible_next
        self._log = DequeueLog(key)
        self.sought = 0  # which seek was the last, as the store counts them; members learn of it with their leases
        self._takes_older_epochs = True  # until a seek: what was acked before it says nothing about what comes after
        self._begin(Position(position.floor, position.ranges))

    def _begin(self, position: Position) -> None:
        self._position = position
        self._next = position.floor
        self._leases = LeaseTable(self._tally)
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

    def propose(
        self, limit: int, now_ms: int, visible_next: int, scan: int | None = None, *, member: str = ""
    ) -> Proposal | None:
        """Reserve what is to be handed out next: redeliveries that are ready, then what was never out.

        Parameters:
            limit: how many messages the member can take.
            visible_next: the visible end of the queue.
            scan: how many offsets to look at for them, for a group with a filter; None means `limit`.
            member: who gets them; it does not get what is kept for others.

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
            held = self._redeliveries.take(limit, now_ms, member)
            if held is not None:
                proposal = Proposal(
                    held.start,
                    held.stop,
                    held.mask,
                    held.attempt,
                    silences=held.silences,
                    limit=held.mask.bit_count(),
                    is_fresh=False,
                )
            elif self.ordered:
                return None  # the first one waits for its time, or for another member, and all wait behind it
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
            count = stop - start
            proposal = Proposal(start, stop, (1 << count) - 1, 1, limit=min(limit, count), is_fresh=True)
        self._proposals.add(proposal)
        self._reserved += proposal.limit
        return proposal

    def grant(
        self, proposal: Proposal, holder: Holder, now_ms: int, lease_ms: int, looked: Looked = _ALL
    ) -> Lease | None:
        """Hand out what matched, settle what did not, and give back what was not looked at.

        Messages that turn out to be expired are granted like others and then settled as EXPIRED.

        Returns:
            The lease, or None: nothing matched, or all was settled or the position set in the meantime.
        """
        scanned_to, matched, size, reason = looked
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
            start = self._pass_over(start, stop, mask, found, is_whole=is_whole, reason=reason)
            mask = found >> (start - proposal.start)
        if not mask:
            return None
        deadline_ms = now_ms + lease_ms
        lease = Lease(
            start,
            stop,
            mask,
            proposal.attempt,
            silences=proposal.silences,
            number=next(self._numbers),
            epoch=self.epoch,
            holder=holder,
            leased_at_ms=now_ms,
            deadline_ms=deadline_ms,
            due_ms=deadline_ms,
            size=size,
            is_whole=is_whole,
        )
        self._leases.add(lease)
        return lease

    def rest(self, limit: int, visible_next: int) -> int | None:
        """Where what was never out begins, if `propose` would take all of that and nothing else; None if not."""
        start = self._next
        if visible_next > self._visible:
            self._visible = visible_next
        if self.parallel is not None:
            limit = min(limit, self.parallel - self._leases.out)
        if (
            not start < visible_next <= start + limit
            or visible_next > self._position.floor + self._window
            or self._redeliveries.count
            or self._proposals
            or self._ahead
            or self._ahead_stale
            or (self.ordered and len(self._leases))
        ):
            return None
        return start

    def lease_rest(self, stop: int, holder: Holder, now_ms: int, lease_ms: int, *, size: int) -> Lease:
        """Hand out what `rest` found, at once: as `propose` and `grant` do when everything of it matches."""
        start = self._next
        self._next = stop
        deadline_ms = now_ms + lease_ms
        lease = Lease(
            start,
            stop,
            (1 << stop - start) - 1,
            1,
            number=next(self._numbers),
            epoch=self.epoch,
            holder=holder,
            leased_at_ms=now_ms,
            deadline_ms=deadline_ms,
            due_ms=deadline_ms,
            size=size,
            is_whole=True,
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
            self._redeliveries.add(redelivery(proposal, bits, now_ms), now_ms)

    def _pass_over(self, start: int, stop: int, mask: int, found: int, is_whole: bool, reason: str) -> int:
        """Settle what did not match; returns where the lease begins."""
        missed = mask & ~found
        if not is_whole or (not found and missed != full(stop - start)):
            self._log.pass_over(start, missed, reason)
            for first, last in mask_runs(start, missed):
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
    def has_more(self) -> bool:
        """Whether there is anything to hand out, now or later, as far as was seen."""
        return self._next < self._visible or self._redeliveries.count > 0

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

    # --- settling ---------------------------------------------------------------------------------------------------

    def ack(self, epoch: int, number: int, ranges: Ranges | None, now_ms: int) -> list[Settled]:
        """Settle messages as consumed.

        Parameters:
            epoch, number: the lease.
            ranges: which of its messages; None means all that are still out. What is settled already, or was never in
                the lease, is passed over.

        Returns:
            The events to write: exactly what became settled now, maybe nothing.

        Raises:
            LeaseLost: the lease is gone, and the ack does not count (see the module).
        """
        lease = self._leases.get(number) if epoch == self.epoch else None
        if lease is not None:
            return self._settle(lease, ranges, Outcome.ACKED, now_ms, error="")
        if epoch == self.epoch:
            is_known = number > self._older_than
        else:
            is_known = epoch < self.epoch and self._takes_older_epochs
        if self.ordered or not is_known or ranges is None:
            raise self._lost(epoch, number)  # what a lost lease had, only its holder knows
        return self._settle_stale(epoch, ranges, now_ms)

    def settle(
        self, epoch: int, number: int, ranges: Ranges | None, outcome: Outcome, now_ms: int, error: str = ""
    ) -> list[Settled]:
        """Settle messages of a lease that is still there with any outcome, as when they are moved elsewhere.

        Raises:
            LeaseLost: the lease is gone; nothing may be moved.
        """
        return self._settle(self._find(epoch, number), ranges, outcome, now_ms, error=error)

    def reject(self, epoch: int, number: int, ranges: Ranges | None, now_ms: int, error: str = "") -> list[Settled]:
        """Settle messages that no attempt will help: the caller moves them to the dead letters.

        Raises:
            LeaseLost: the lease is gone.
        """
        return self.settle(epoch, number, ranges, Outcome.DEAD, now_ms=now_ms, error=error)

    def set_aside(
        self, epoch: int, number: int, ranges: Ranges | None, outcome: Outcome, now_ms: int, error: str = ""
    ) -> tuple[Redelivery, list[Settled]] | None:
        """Take messages out of their lease while what settles them is written; `conclude` ends that.

        Returns:
            What is set aside, and the events to write; None if nothing of it is out.

        Raises:
            LeaseLost: the lease is gone; nothing may be moved.
        """
        lease = self._find(epoch, number)
        bits = lease.mask if ranges is None else lease.mask & mask_of_ranges(ranges, lease.start, lease.stop)
        if not bits:
            return None
        entry = self._move(lease, bits, lease.attempt, NEVER_MS, now_ms=now_ms)
        events = self._log.settled(entry.start, entry.mask, outcome, now_ms, lease=lease, error=error)
        return entry, events

    def conclude(self, entry: Redelivery, now_ms: int, again_at_ms: int | None = None) -> None:
        """What was set aside is settled durably; or, with a time, it could not be, and comes again from then on."""
        if entry not in self._redeliveries.touching(entry.start, entry.stop):
            return  # the position was set, or an ack that came late has settled it
        start, bits = entry.start, entry.mask
        self._redeliveries.drop(entry, bits)
        if again_at_ms is not None:
            self._redeliveries.add(redelivery(entry, bits, again_at_ms, entry.attempt + 1), now_ms)
            return
        for first, last in mask_runs(start, bits):
            self._position.settle(first, last)

    def nack(
        self,
        epoch: int,
        number: int,
        ranges: Ranges | None,
        now_ms: int,
        delay_ms: int = 0,
        *,
        was_tried: bool = True,
    ) -> list[Redelivery]:
        """Give messages back, to be handed out again after a delay.

        In an ordered group everything of the lease behind the first of them goes back too, without counting as tried.

        Parameters:
            was_tried: it counts as an attempt; not so for what was fetched but never given to a handler.

        Returns:
            What will be handed out again, and when.

        Raises:
            LeaseLost: the lease is gone.
        """
        lease = self._find(epoch, number)
        tried = lease.mask if ranges is None else lease.mask & mask_of_ranges(ranges, lease.start, lease.stop)
        moved = lease.mask & -(tried & -tried) if self.ordered else tried  # from the lowest tried one up
        entries = []
        while moved:
            is_tried = bool(moved & -moved & tried)
            others = moved & ~tried if is_tried else moved & tried
            # Up to the next one of the other kind, so that entries lie one behind the other.
            part = moved & ((others & -others) - 1) if others else moved
            attempt = lease.attempt + (1 if is_tried and was_tried else 0)
            entries.append(self._move(lease, part, attempt, now_ms + delay_ms if is_tried else now_ms, now_ms=now_ms))
            moved ^= part
        return entries

    def extend(self, epoch: int, number: int, now_ms: int, lease_ms: int) -> int:
        """Let a lease, as a whole, last at least until `lease_ms` from now; returns its deadline.

        Raises:
            LeaseLost: the lease is gone.
        """
        lease = self._find(epoch, number)
        if now_ms + lease_ms > lease.deadline_ms:
            is_present = lease.due_ms >= lease.deadline_ms
            lease.deadline_ms = now_ms + lease_ms
            if is_present:
                self._leases.set_due(lease, lease.deadline_ms)
        return lease.deadline_ms

    def take_skipped(self, now_ms: int) -> list[Settled]:
        """The events of what the filter passed over, which else wait for the next thing that is settled."""
        return self._log.take(now_ms)

    def find(self, epoch: int, number: int) -> Lease:
        """A lease that is out.

        Raises:
            LeaseLost: it is gone.
        """
        return self._find(epoch, number)

    def _find(self, epoch: int, number: int) -> Lease:
        lease = self._leases.get(number) if epoch == self.epoch else None
        if lease is None:
            raise self._lost(epoch, number)
        return lease

    def _lost(self, epoch: int, number: int) -> LeaseLost:
        return LeaseLost(
            f"lease {epoch}/{number} is gone: it ended, timed out, or the position was set; "
            "its messages are handed out again unless they are settled",
            epoch=epoch,
            lease=number,
        )

    def _settle(self, lease: Lease, ranges: Ranges | None, outcome: Outcome, now_ms: int, error: str) -> list[Settled]:
        start, bits = lease.start, lease.mask
        if ranges is not None and ranges != [(start, lease.stop)]:  # the usual case: all of it
            bits &= mask_of_ranges(ranges, start, lease.stop)
            if not bits:
                return []
        self._leases.take(lease, bits)
        if lease.mask:
            for first, last in mask_runs(start, bits):
                self._position.settle(first, last)
        elif lease.is_whole and not lease.moved:  # as `_close`
            self._position.settle(start, lease.stop)
        else:
            self._close(lease, bits)
        return self._log.settled(start, bits, outcome, now_ms, lease=lease, error=error)

    def _close(self, lease: Lease, bits: int) -> None:
        """Settle what is left to settle of a lease that ended: its last bits, and what its filter passed over."""
        if not lease.is_whole:
            for first, last in mask_runs(lease.start, bits):
                self._position.settle(first, last)
        elif not lease.moved:
            self._position.settle(lease.start, lease.stop)
        else:
            for first, last in mask_runs(lease.start, full(lease.stop - lease.start) & ~lease.moved):
                self._position.settle(first, last)

    def _settle_stale(self, epoch: int, ranges: Ranges, now_ms: int) -> list[Settled]:
        """Settle what a lost lease had, wherever it is now."""
        events: list[Settled] = []
        end = min(self._visible, self._position.floor + self._window) if epoch < self.epoch else self._next
        for first, last in ranges:
            first, last = max(first, self._position.floor), min(last, end)
            if first >= last:
                continue
            found = 0
            for lease in self._leases.touching(first, last):
                if bits := lease.mask & mask_of_ranges([(first, last)], lease.start, lease.stop):
                    self._leases.take(lease, bits)
                    if not lease.mask:
                        self._close(lease, bits)
                    found |= _shift(bits, lease.start - first)
            for entry in self._redeliveries.touching(first, last):
                if bits := entry.mask & mask_of_ranges([(first, last)], entry.start, entry.stop):
                    self._redeliveries.drop(entry, bits)
                    found |= _shift(bits, entry.start - first)
            for proposal in self._proposals:
                if bits := proposal.mask & mask_of_ranges([(first, last)], proposal.start, proposal.stop):
                    proposal.mask ^= bits
                    found |= _shift(bits, proposal.start - first)
            if last > self._next:
                fresh = full(last - first) & ~full(max(self._next - first, 0))
                found |= fresh & ~mask_of_ranges(self._position.ranges, first, last)
                self._ahead_stale = True
            if found:
                for settled_from, settled_to in mask_runs(first, found):
                    self._position.settle(settled_from, settled_to)
                events += self._log.settled(first, found, Outcome.ACKED, now_ms)
        return events

    # --- leases that end otherwise ----------------------------------------------------------------------------------

    def expire(self, now_ms: int, judge: Callable[[Lease], LeaseEnd] = lambda _: _TRIED) -> list[Redelivery]:
        """Time has passed: leases that are over go back; delays that are over are ready.

        Parameters:
            judge: says how a lease ends; as one attempt more if left out.
        """
        self._redeliveries.wake(now_ms)
        returned = []
        for lease in self._leases.over(now_ms):
            ending = judge(lease)
            if ending.not_before_ms > now_ms:
                self._leases.set_due(lease, ending.not_before_ms)
            else:
                returned.append(self._return(lease, ending, now_ms))
        return returned

    def withholds(self, member: str, now_ms: int) -> bool:
        """Whether there is something for other members that this one does not get for now."""
        return self._redeliveries.count > 0 and self._redeliveries.withholds(member, now_ms)

    def next_deadline(self) -> int | None:
        """When to call `expire` next, and to try to hand out again afterwards."""
        due_ms, ready_ms = self._leases.next_due(), self._redeliveries.next_ready()
        if due_ms is None or ready_ms is None:
            return ready_ms if due_ms is None else due_ms
        return min(due_ms, ready_ms)

    def disconnect(self, holder: Holder, now_ms: int, grace_ms: int) -> int:
        """The holder's connection broke: its leases last for the grace time at most. Returns how many there are."""
        leases = self._leases.of(holder)
        for lease in leases:
            self._leases.set_due(lease, min(lease.due_ms, now_ms + grace_ms))
        return len(leases)

    def resume(self, holder: Holder) -> list[Lease]:
        """The holder is back: what it has still got, each until its own deadline."""
        leases = self._leases.of(holder)
        for lease in leases:
            self._leases.set_due(lease, lease.deadline_ms)
        return leases

    def member_gone(self, holder: Holder, now_ms: int, *, is_clean: bool = False) -> list[Redelivery]:
        """The holder will not come back; if it left cleanly, what it had does not count as tried.

        Nor does it if the holder had fallen silent before it went.
        """
        leases = self._leases.of(holder)
        if is_clean:
            return [self._move(lease, lease.mask, lease.attempt, now_ms, now_ms=now_ms) for lease in leases]
        ending = _UNTRIED if holder.is_silent else _TRIED
        return [self._return(lease, ending, now_ms) for lease in leases]

    def close(self) -> None:
        """The group or the topic is gone: what is out does not count any more."""
        self._leases.leave()
        self._tally = None

    def seek(self, offset: int) -> None:
        """Begin anew at an offset, with nothing out and nothing settled above it; the caller writes `PositionSet`."""
        for lease in list(self._leases):
            self._leases.take(lease, lease.mask)  # gives the holders their credit back
        self._log.forget()
        self._takes_older_epochs = False
        self._begin(Position(offset))

    def _return(self, lease: Lease, ending: LeaseEnd, now_ms: int) -> Redelivery:
        """Give back what nobody settled in time."""
        attempt = lease.attempt
        if ending.is_tried or lease.silences >= SILENCES_MAX:
            attempt += 1
        else:
            lease.silences += 1
        return self._move(lease, lease.mask, attempt, now_ms, now_ms=now_ms, others_until_ms=ending.others_until_ms)

    def _move(
        self, lease: Lease, bits: int, attempt: int, ready_at_ms: int, *, now_ms: int, others_until_ms: int = 0
    ) -> Redelivery:
        """Take bits out of a lease and into the redelivery list."""
        self._leases.take(lease, bits)
        lease.moved |= bits
        if not lease.mask:
            self._close(lease, 0)
        entry = redelivery(lease, bits, ready_at_ms, attempt)
        entry.lease, entry.member, entry.others_until_ms = lease.number, lease.holder.name, others_until_ms
        self._redeliveries.add(entry, now_ms)
        return entry


def _shift(bits: int, by: int) -> int:
    return bits << by if by >= 0 else bits >> -by
