"""The dequeue log: what a cursor settles, as the events that make it durable.

Pure code. Everything a member settles becomes events at once. Messages that the filter passed over are different: no
client waits for them, and finding them again costs one look at the index. So they are settled in the cursor's memory at
once, and their events wait here until something else is settled, or until the caller asks for them (at a checkpoint,
say). A crash before that loses no message: the new cursor looks at those offsets once more, and its filter passes over
them again.

What always holds: an offset that is in an event of this log is settled in its cursor; what waits is bounded, since it
lies within the cursor's window, or is one unbroken range below it.
"""

from __future__ import annotations

from typing import NamedTuple

from dmq.broker.delivery.lease import Lease, pieces
from dmq.storage.state.events import Outcome, Settled

__all__ = ["FILTERED", "GONE", "CursorKey", "DequeueLog"]

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
