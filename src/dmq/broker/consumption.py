"""Consumption: one group at one topic, with its cursors, its members and whoever waits.

It joins the pure parts (group, cursors, selection) with the store: it decides what is handed to whom, and reads it. It
sends nothing itself: members have sinks, waiting pulls have callbacks.

What always holds: what is leased was read and handed to a sink or a pull in the same step; an event for everything
settled goes to the writer; a queue is marked whenever it may have something to hand out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from dmq.broker.bitmap import runs
from dmq.broker.cursor import Cursor
from dmq.broker.dequeue import GONE
from dmq.broker.group import Group
from dmq.broker.handout import Proposal
from dmq.broker.member import Member
from dmq.broker.outlet import Handed, Sink, WaitingPull
from dmq.broker.selection import QueueSelection
from dmq.broker.tags import hashes_of
from dmq.broker.watching import ConsumedWatch, Watches
from dmq.errors import Busy, Damaged, OffsetGone
from dmq.storage.events import Outcome, Settled
from dmq.storage.positions import Position
from dmq.storage.reading import Slice
from dmq.storage.state import Topic
from dmq.storage.store import MessageStore

__all__ = ["Consumption"]

log = logging.getLogger(__name__)

_SCAN: Final = 16_384
_PUSH_BYTES: Final = 256 << 10  # of one push; what waits for a slow reader is not much more
DAMAGED: Final = "damaged"


class Consumption:
    """See the module.

    Parameters:
        lease_numbers: one counter for all cursors of the broker.
        write: takes events for the journal.
    """

    def __init__(
        self,
        topic: Topic,
        group: Group,
        store: MessageStore,
        lease_numbers: Iterator[int],
        write: Callable[[list[Settled]], None],
        pulls_waiting_max: int,
    ) -> None:
        self.topic = topic
        self.group = group
        self._store = store
        self._numbers = lease_numbers
        self._write = write
        self._pulls_waiting_max = pulls_waiting_max
        self.cursors: dict[int, Cursor] = {}
        self.selection = QueueSelection(by_priority=topic.config.priority)
        self.sinks: dict[str, Sink] = {}
        self._pulls: deque[WaitingPull] = deque()
        self.watches = Watches(pulls_waiting_max)
        self.idle_since_ms: int | None = None
        self.parallel: int | None = None
        self.delivered = 0
        self.acked = 0
        self.dead = 0
        for queue in range(topic.config.queues):
            self.selection.mark(queue)

    # --- cursors ----------------------------------------------------------------------------------------------------

    def cursor(self, queue: int) -> Cursor:
        """The cursor of a queue, made from what is durable when it is first needed."""
        cursor = self.cursors.get(queue)
        if cursor is None:
            name = self.topic.name
            first, following = self._store.bounds(name, queue)
            position = self._store.position(self.group.name, name, queue) or Position(first)
            subscription = self.group.subscription
            cursor = self.cursors[queue] = Cursor(
                self.group.name,
                self.topic.id,
                queue,
                position,
                epoch=self._store.epoch,
                numbers=self._numbers,
                ordered=bool(subscription and subscription.is_ordered),
                parallel=self.parallel,
                visible_next=following,
            )
        return cursor

    def set_ordered(self, ordered: bool, now_ms: int) -> None:
        """What the members agreed on holds for cursors, too, that were there before them."""
        for cursor in self.cursors.values():
            cursor.set_ordered(ordered, now_ms)

    def lag(self) -> int:
        """Visible messages the group has not settled."""
        name = self.topic.name
        return sum(self.cursor(q).lag(self._store.bounds(name, q)[1]) for q in range(self.topic.config.queues))

    # --- handing out ------------------------------------------------------------------------------------------------

    def hand_out(
        self, member: Member, limit: int, max_bytes: int, lease_ms: int, now_ms: int, allowed: int = -1
    ) -> Handed | None:
        """Lease the next messages to a member; None if there are none for it now."""
        while (queue := self.selection.pick(allowed)) is not None:
            cursor = self.cursor(queue)
            following = self._store.bounds(self.topic.name, queue)[1]
            tags = self._tags()
            proposal = cursor.propose(limit, now_ms, following, None if tags is None else _SCAN)
            if proposal is None:
                self.selection.unmark(queue)
                continue
            handed = self._fetch(cursor, queue, proposal, member, max_bytes, lease_ms, now_ms, tags)
            if handed is not None:
                self.delivered += len(handed.lengths)
                return handed
        return None

    def _tags(self) -> list[int] | None:
        subscription = self.group.subscription
        return None if subscription is None else hashes_of(subscription.filter)

    def _fetch(
        self,
        cursor: Cursor,
        queue: int,
        proposal: Proposal,
        member: Member,
        max_bytes: int,
        lease_ms: int,
        now_ms: int,
        tags: list[int] | None,
    ) -> Handed | None:
        """Read what was proposed and lease what is there; what is gone or damaged is passed over."""
        count = proposal.limit if proposal.is_fresh else proposal.stop - proposal.start
        filtered = tags if proposal.is_fresh else None
        try:
            found = self._store.read(self.topic.name, queue, proposal.start, count, max_bytes, filtered)
        except (OffsetGone, Damaged) as error:
            is_gone = isinstance(error, OffsetGone)
            resume = int(error.detail["first"] if is_gone else error.detail["next"])
            log.warning(
                "messages passed over",
                extra={"topic": self.topic.name, "group": self.group.name, "queue": queue, "error": str(error)},
            )
            cursor.grant(
                proposal,
                member,
                now_ms,
                lease_ms,
                scanned_to=max(proposal.start, min(proposal.stop, resume)),
                matched=(),
                reason=GONE if is_gone else DAMAGED,
            )
            self._write(cursor.take_skipped(now_ms))
            return None
        except BaseException:
            cursor.release(proposal, now_ms)
            raise
        scanned_to = min(found.next_offset, proposal.stop)
        offsets = found.offsets.tolist()
        matched = None if filtered is None else [offset for offset in offsets if offset < proposal.stop]
        sizes = found.lengths.tolist()
        lease = cursor.grant(
            proposal, member, now_ms, lease_ms, scanned_to=scanned_to, matched=matched, size=sum(sizes)
        )
        if lease is None:
            return None
        pieces = found.pieces
        if lease.count != len(offsets):
            wanted = {offset for first, last in runs(lease.start, lease.mask) for offset in range(first, last)}
            offsets, sizes, pieces = _part(found, offsets, sizes, wanted)
        ids = self._store.id_runs(self.topic, queue, offsets, pieces)
        return Handed(queue, lease, sizes, pieces, sum(sizes), ids, cursor.sought)

    # --- pumping ----------------------------------------------------------------------------------------------------

    def pump(self, now_ms: int) -> None:
        """Serve everybody who waits as long as there is something for them."""
        self._serve_pulls(now_ms)
        misses = 0
        while misses <= len(self.group.members) and (member := self.group.next_taker(now_ms)) is not None:
            sink = self.sinks.get(member.name)
            if sink is None or not sink.is_ready:
                misses += 1
                continue
            limit = min(sink.batch, member.credit(now_ms))
            room = min(max(1, member.prefetch_bytes - member.bytes_out), _PUSH_BYTES)
            handed = self.hand_out(member, limit, room, sink.lease_ms, now_ms, sink.allowed)
            if handed is None:
                misses += 1
            else:
                misses = 0
                sink.push(handed)

    def _serve_pulls(self, now_ms: int) -> None:
        for _ in range(len(self._pulls)):
            pull = self._pulls.popleft()
            if pull.is_done:
                continue
            try:
                is_served = self.try_pull(pull, now_ms)
            except BaseException:
                self._pulls.append(pull)
                raise
            if not is_served:
                self._pulls.append(pull)

    def try_pull(self, pull: WaitingPull, now_ms: int) -> bool:
        """Answer a pull if there is something for it."""
        if not pull.member.may_pull:
            pull.is_done = True
            pull.answer(None)
            return True
        allowed = -1 if pull.queue is None else 1 << pull.queue
        handed = self.hand_out(pull.member, pull.limit, pull.max_bytes, pull.lease_ms, now_ms, allowed)
        if handed is None:
            return False
        pull.is_done = True
        pull.answer(handed)
        return True

    def wait(self, pull: WaitingPull) -> None:
        """Let a pull wait for messages.

        Raises:
            Busy: too many wait already.
        """
        if len(self._pulls) >= self._pulls_waiting_max:
            raise Busy(
                f"{len(self._pulls)} pulls of group {self.group.name!r} wait already: try again shortly",
                retry_after_ms=100,
            )
        self._pulls.append(pull)

    def cancel_pulls(self, owner: object) -> None:
        """Whoever waited is gone."""
        self._pulls = deque(pull for pull in self._pulls if pull.owner is not owner)

    # --- settling ---------------------------------------------------------------------------------------------------

    def settled(self, queue: int, events: list[Settled]) -> None:
        """Something was settled: write it, tell who waited for it, and let the next be handed out."""
        self._write(events)
        for event in events:
            count = int.from_bytes(event.bitmap, "little").bit_count() if event.bitmap else event.count
            if event.outcome == Outcome.ACKED:
                self.acked += count
            elif event.outcome == Outcome.DEAD:
                self.dead += count
        self.selection.mark(queue)
        if self.watches:
            self.watches.settled(queue, events)

    def watch(self, watch: ConsumedWatch) -> None:
        """Tell a producer when the group has acked its messages, which may have been long ago if it sent them again."""
        position = self.cursor(watch.queue).position
        if all(position.is_settled(offset) for offset in range(watch.first, watch.first + watch.count)):
            watch.answer(True)
        else:
            self.watches.add(watch)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> bool:
        """What time did: leases and delays that are over, members that are gone, pulls that waited long enough.

        Returns whether anything may be handed out now that could not before.
        """
        woken = False
        for queue, cursor in self.cursors.items():
            deadline = cursor.next_deadline()
            if deadline is not None and deadline <= now_ms:
                cursor.expire(now_ms)
                self.selection.mark(queue)
                woken = True
        deadline = self.group.next_deadline()
        if deadline is not None and deadline <= now_ms:
            due = self.group.due(now_ms)
            for member in due.gone:
                self.forget(member, now_ms, is_clean=False)
            woken = True
        for pull in self._pulls:
            if not pull.is_done and pull.deadline_ms <= now_ms:
                pull.is_done = True
                pull.answer(None)
        while self._pulls and self._pulls[0].is_done:
            self._pulls.popleft()
        if self.watches:
            self.watches.expire(now_ms)
        return woken

    def forget(self, member: Member, now_ms: int, *, is_clean: bool) -> None:
        """A member will not come back: what it had goes to others."""
        self.sinks.pop(member.name, None)
        for queue, cursor in self.cursors.items():
            if cursor.member_gone(member, now_ms, is_clean=is_clean):
                self.selection.mark(queue)

    @property
    def counts(self) -> dict[str, int]:
        """What happened to messages so far."""
        return {"delivered": self.delivered, "acked": self.acked, "dead": self.dead}

    @property
    def is_idle(self) -> bool:
        """Nobody is there, nothing is out, nobody waits."""
        return not (
            self.group.members
            or self._pulls
            or self.watches
            or any(cursor.out or cursor.redelivering for cursor in self.cursors.values())
        )

    @property
    def may_be_forgotten(self) -> bool:
        """It is idle, and everything it knows is durable: a filter's version and a seek are not."""
        subscription = self.group.subscription
        return (
            self.is_idle
            and (subscription is None or not (subscription.version or subscription.filter))
            and not any(cursor.sought for cursor in self.cursors.values())
        )

    def close(self) -> None:
        """The group or the topic is no more: nobody waits for it any longer."""
        pulls, self._pulls = self._pulls, deque()
        for pull in pulls:
            if not pull.is_done:
                pull.is_done = True
                pull.answer(None)
        self.watches.expire()


def _part(
    found: Slice, offsets: list[int], sizes: list[int], wanted: set[int]
) -> tuple[list[int], list[int], list[memoryview]]:
    """Only some of what was read: offsets, lengths and records, each record a piece of its own."""
    kept: list[int] = []
    lengths: list[int] = []
    pieces: list[memoryview] = []
    at = 0
    rest = iter(found.pieces)
    piece = next(rest)
    for offset, size in zip(offsets, sizes, strict=True):
        if at >= len(piece):
            piece, at = next(rest), 0
        if offset in wanted:
            kept.append(offset)
            lengths.append(size)
            pieces.append(piece[at : at + size])
        at += size
    return kept, lengths, pieces
