"""The cursor: one group in one queue, from "what is next" to "all of it is settled".

Pure code: events in, decisions out. Time comes in as `now_ms`, the broker's own time, which must not run backwards (the
wall clock at the start plus the monotonic clock since). The caller reads the store, sends, and writes the events.

Handing out is in `handout`; here is everything that happens to a lease once it is out. What always holds:

- nothing settled is handed out again, except after `seek`; nothing unsettled is lost;
- nothing is handed out at or above `floor + window`, or at or above the visible end of the queue;
- with `parallel`, no more than that many messages are out at once;
- an ordered group has one lease or proposal at a time, always of the lowest offsets that are not settled.

Attempts: the first hand-out is attempt 1; a lease that timed out, a member that died and a nack add one. They live in
memory, since only the position is durable: after a restart of the broker everything unsettled is handed out as attempt
1 again, so a restart never adds to the count. A message that was moved to a retry topic carries the attempts it had in
its own record, and the cursor of that topic counts on top of them.

Stale calls: an ack names (epoch, lease number). For an unordered group an ack of a lease that is no longer there still
settles what is not settled yet, wherever it is now, also after a restart; other calls raise `LeaseLost`. Lease numbers
come from one counter for all cursors of a broker, so a cursor knows which leases are older than itself (its topic was
dropped and created again) or than its last `seek`; their acks say nothing about the offsets as they are now, and raise
`LeaseLost` too. (A restart forgets that there was a seek, so an ack may settle what was replayed if it is older than
both; only a client that held a lease over both can send one.)
"""

from __future__ import annotations

from typing import Final

from dmq.broker.bitmap import Ranges, full, mask_of_ranges, runs
from dmq.broker.handout import WINDOW, HandOut, Proposal
from dmq.broker.lease import Holder, Lease
from dmq.broker.redelivery import Redelivery
from dmq.errors import LeaseLost
from dmq.storage.events import Outcome, Settled
from dmq.storage.positions import Position

__all__ = ["WINDOW", "Cursor", "Proposal"]

NEVER_MS: Final = 1 << 62


class Cursor(HandOut):
    """See the module.

    Parameters:
        group, topic_id, queue: whose cursor it is, for the events.
        position: what is durable; it is copied, and the store goes on by the events.
        epoch: the broker's; leases of older epochs are those of before a restart.
        numbers: where lease numbers come from, one for all cursors of a broker.
        ordered: one lease at a time, in strict order.
        parallel: how many messages may be out at once; None: as many as the window takes.
        visible_next: the visible end of the queue as it is now; without it, acks of older epochs wait for a propose.
        window: how far hand-out may run ahead of the floor.
    """

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
            return self._settle(lease, ranges, Outcome.ACKED, now_ms, "")
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
        return self._settle(self._find(epoch, number), ranges, outcome, now_ms, error)

    def reject(self, epoch: int, number: int, ranges: Ranges | None, now_ms: int, error: str = "") -> list[Settled]:
        """Settle messages that no attempt will help: the caller moves them to the dead letters.

        Raises:
            LeaseLost: the lease is gone.
        """
        return self.settle(epoch, number, ranges, Outcome.DEAD, now_ms, error)

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
        entry = self._move(lease, bits, lease.attempt, NEVER_MS, now_ms)
        events = self._log.settled(
            entry.start,
            entry.mask,
            outcome,
            now_ms,
            member=lease.holder.name,
            attempt=lease.attempt,
            leased_at_ms=lease.leased_at_ms,
            error=error,
        )
        return entry, events

    def conclude(self, entry: Redelivery, now_ms: int, again_at_ms: int | None = None) -> None:
        """What was set aside is settled durably; or, with a time, it could not be, and comes again from then on."""
        if entry not in self._redeliveries.touching(entry.start, entry.stop):
            return  # the position was set, or an ack that came late has settled it
        start, bits = entry.start, entry.mask
        self._redeliveries.drop(entry, bits)
        if again_at_ms is not None:
            self._redeliveries.add(Redelivery(start, bits, entry.attempt + 1, again_at_ms), now_ms)
            return
        for first, last in runs(start, bits):
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
            entries.append(self._move(lease, part, attempt, now_ms + delay_ms if is_tried else now_ms, now_ms))
            moved ^= part
        return entries

    def extend(self, epoch: int, number: int, now_ms: int, lease_ms: int) -> int:
        """Let a lease, as a whole, last at least until `lease_ms` from now; returns its deadline.

        Raises:
            LeaseLost: the lease is gone.
        """
        lease = self._find(epoch, number)
        if now_ms + lease_ms > lease.deadline_ms:
            is_present = lease.due_ms == lease.deadline_ms
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
        if ranges is not None:
            bits &= mask_of_ranges(ranges, start, lease.stop)
            if not bits:
                return []
        self._leases.take(lease, bits)
        if lease.mask:
            for first, last in runs(start, bits):
                self._position.settle(first, last)
        else:
            self._close(lease, bits)
        return self._log.settled(
            start,
            bits,
            outcome,
            now_ms,
            member=lease.holder.name,
            attempt=lease.attempt,
            leased_at_ms=lease.leased_at_ms,
            error=error,
        )

    def _close(self, lease: Lease, bits: int) -> None:
        """Settle what is left to settle of a lease that ended: its last bits, and what its filter passed over."""
        if not lease.is_whole:
            for first, last in runs(lease.start, bits):
                self._position.settle(first, last)
        elif not lease.moved:
            self._position.settle(lease.start, lease.stop)
        else:
            for first, last in runs(lease.start, full(lease.stop - lease.start) & ~lease.moved):
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
                for settled_from, settled_to in runs(first, found):
                    self._position.settle(settled_from, settled_to)
                events += self._log.settled(first, found, Outcome.ACKED, now_ms)
        return events

    # --- leases that end otherwise ----------------------------------------------------------------------------------

    def expire(self, now_ms: int) -> list[Redelivery]:
        """Time has passed: leases that are over go back, as one attempt more; delays that are over are ready."""
        self._redeliveries.wake(now_ms)
        return [self._return(lease, lease.attempt + 1, now_ms) for lease in self._leases.over(now_ms)]

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
        """The holder will not come back; if it left cleanly, what it had does not count as tried."""
        added = 0 if is_clean else 1
        return [self._return(lease, lease.attempt + added, now_ms) for lease in self._leases.of(holder)]

    def seek(self, offset: int) -> None:
        """Begin anew at an offset, with nothing out and nothing settled above it; the caller writes `PositionSet`."""
        for lease in list(self._leases):
            self._leases.take(lease, lease.mask)  # gives the holders their credit back
        self._log.forget()
        self._takes_older_epochs = False
        self._begin(Position(offset))

    def _return(self, lease: Lease, attempt: int, now_ms: int) -> Redelivery:
        return self._move(lease, lease.mask, attempt, now_ms, now_ms)

    def _move(self, lease: Lease, bits: int, attempt: int, ready_at_ms: int, now_ms: int) -> Redelivery:
        """Take bits out of a lease and into the redelivery list."""
        self._leases.take(lease, bits)
        lease.moved |= bits
        if not lease.mask:
            self._close(lease, 0)
        entry = Redelivery(lease.start, bits, attempt, ready_at_ms, lease.number, lease.holder.name)
        self._redeliveries.add(entry, now_ms)
        return entry


def _shift(bits: int, by: int) -> int:
    return bits << by if by >= 0 else bits >> -by
