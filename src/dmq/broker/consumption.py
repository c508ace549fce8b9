"""Consumption: one group at one topic, with its cursors, its members and whoever waits.

It joins the pure parts (group, cursors, selection) with the store: it decides what is handed to whom, and reads it. It
sends nothing itself: members have sinks, waiting pulls have callbacks.

The group's retry topic belongs to it as well: its queues stand beside those of the topic, `RETRY` numbers higher, and
queue `n` of it has what failed in queue `n`. What holds for a queue (turns, credit, filter, priority) holds for both.

What always holds: what is leased was read and handed to a sink or a pull in the same step, but for what must not go
out, which goes to the dead letters; an event for everything settled goes to the writer; a queue is marked whenever it
may have something to hand out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dmq.broker.bitmap import full, lowest, runs
from dmq.broker.cursor import Cursor
from dmq.broker.dequeue import GONE
from dmq.broker.dooming import Doomed, find_doomed
from dmq.broker.group import Group
from dmq.broker.handout import Proposal
from dmq.broker.lease import Lease
from dmq.broker.member import Member
from dmq.broker.moving import read_origins
from dmq.broker.outlet import Handed, Lengths, Sink, WaitingPull
from dmq.broker.selection import RETRY_QUEUES, QueueSelection, with_retries
from dmq.broker.tags import hashes_of
from dmq.broker.watching import ConsumedWatch, Watches
from dmq.errors import Busy, Damaged, OffsetGone
from dmq.storage.events import Outcome, Settled
from dmq.storage.positions import Position
from dmq.storage.reading import Slice
from dmq.storage.state import Topic
from dmq.storage.store import MessageStore

__all__ = ["RETRY", "Consumption", "Doomed"]

log = logging.getLogger(__name__)

_SCAN: Final = 16_384
_PUSH_BYTES: Final = 256 << 10  # of one push; what waits for a slow reader is not much more
DAMAGED: Final = "damaged"
RETRY: Final = RETRY_QUEUES  # a queue of the retry topic is its number and this
# Of messages that must not go out, so many are looked through at a time, so often in one go.
_DOOMED_BATCH: Final = 1024
_DOOMED_ROUNDS: Final = 8

Bury = Callable[["Consumption", int, Lease, Doomed, int], None]


class Consumption:
    """See the module.

    Parameters:
        lease_numbers: one counter for all cursors of the broker.
        write: takes events for the journal.
        bury: takes messages of a lease for the dead letters.
    """

    def __init__(
        self,
        topic: Topic,
        group: Group,
        store: MessageStore,
        lease_numbers: Iterator[int],
        write: Callable[[list[Settled]], None],
        pulls_waiting_max: int,
        bury: Bury,
    ) -> None:
        self.topic = topic
        self.group = group
        self._store = store
        self._numbers = lease_numbers
        self._write = write
        self._bury = bury
        self._pulls_waiting_max = pulls_waiting_max
        self.cursors: dict[int, Cursor] = {}
        self.selection = QueueSelection(by_priority=topic.config.priority)
        self.sinks: dict[str, Sink] = {}
        self._pulls: deque[WaitingPull] = deque()
        self.watches = Watches(pulls_waiting_max)
        self.idle_since_ms: int | None = None
        self.parallel: int | None = None
        self.max_attempts = 0  # 0 is for ever
        self.retry_topic: Topic | None = None  # there is none before the first failure
        self.delivered = 0
        self.acked = 0
        self.retried = 0
        self.dead = 0
        self._dooming = 0  # messages that were about to go out and became dead letters instead
        for queue in range(topic.config.queues):
            self.selection.mark(queue)

    # --- cursors ----------------------------------------------------------------------------------------------------

    def is_retry(self, queue: int) -> bool:
        """Whether a queue is one of the retry topic."""
        return queue >= RETRY

    def place(self, queue: int) -> tuple[Topic, int]:
        """The topic a queue is of, and its number there."""
        if queue < RETRY:
            return self.topic, queue
        assert self.retry_topic is not None, "nobody knows of its queues before it is there"
        return self.retry_topic, queue - RETRY

    def queue_of(self, topic: str, queue: int) -> int | None:
        """What a queue is called here that a member knows by its topic ("" is the group's) and number."""
        if topic in ("", self.topic.name):
            return queue if queue < self.topic.config.queues else None
        if self.retry_topic is None or topic != self.retry_topic.name or queue >= self.retry_topic.config.queues:
            return None
        return queue + RETRY

    def set_retry_topic(self, topic: Topic) -> None:
        """The retry topic is there, or has more queues than before."""
        self.retry_topic = topic
        for queue in range(topic.config.queues):
            self.selection.mark(queue + RETRY)

    @property
    def keeps_in_place(self) -> bool:
        """Whether what fails stays in its queue: it does in order, and where the cursor is one member's own."""
        subscription = self.group.subscription
        return subscription is not None and (subscription.is_ordered or subscription.is_broadcast)

    def cursor(self, queue: int) -> Cursor:
        """The cursor of a queue, made from what is durable when it is first needed."""
        cursor = self.cursors.get(queue)
        if cursor is None:
            topic, number = self.place(queue)
            first, following = self._store.bounds(topic.name, number)
            position = self._store.position(self.group.name, topic.name, number) or Position(first)
            subscription = self.group.subscription
            cursor = self.cursors[queue] = Cursor(
                self.group.name,
                topic.id,
                number,
                position,
                epoch=self._store.epoch,
                numbers=self._numbers,
                ordered=bool(subscription and subscription.is_ordered),
                parallel=self.parallel,
                visible_next=following,
            )
            cursor.sought = self._store.sought(self.group.name, topic.id, number)
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
        if not self.topic.config.can_consume:
            return None  # everybody waits until it is switched on again
        rounds = 0
        while (queue := self.selection.pick(allowed)) is not None:
            cursor = self.cursor(queue)
            topic, number = (self.topic, queue) if queue < RETRY else self.place(queue)
            following = self._store.bounds(topic.name, number)[1]
            tags = self._tags()
            proposal = cursor.propose(
                limit if not rounds else max(limit, _DOOMED_BATCH), now_ms, following, None if tags is None else _SCAN
            )
            if proposal is None:
                self.selection.unmark(queue)
                continue
            dead = self._dooming
            handed = self._fetch(cursor, queue, proposal, member, limit, max_bytes, lease_ms, now_ms, tags)
            if handed is not None:
                self.delivered += len(handed.lengths)
                return handed
            if self._dooming != dead:
                rounds += 1
                if rounds >= _DOOMED_ROUNDS:
                    # The rest when these are written, which marks the queue: others want to be served, too.
                    self.selection.unmark(queue)
                    return None
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
        limit: int,
        max_bytes: int,
        lease_ms: int,
        now_ms: int,
        tags: list[int] | None,
    ) -> Handed | None:
        """Read what was proposed and lease what is there; what is gone or damaged is passed over."""
        count = proposal.limit if proposal.is_fresh else proposal.stop - proposal.start
        filtered = tags if proposal.is_fresh else None
        topic, number = (self.topic, queue) if queue < RETRY else self.place(queue)
        if proposal.limit > limit:
            max_bytes = max(max_bytes, _PUSH_BYTES)
        try:
            found = self._store.read(topic.name, number, proposal.start, count, max_bytes, filtered)
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
        # Without a filter one follows the other, and a range says so without naming each.
        offsets: Sequence[int] = (
            range(proposal.start, proposal.start + len(found)) if filtered is None else found.offsets.tolist()
        )
        matched = None if filtered is None else [offset for offset in offsets if offset < proposal.stop]
        lengths: Lengths = found.lengths
        size = sum(map(len, found.pieces))
        lease = cursor.grant(proposal, member, now_ms, lease_ms, scanned_to=scanned_to, matched=matched, size=size)
        if lease is None:
            return None
        pieces = found.pieces
        if (
            queue >= RETRY
            or topic.config.ttl_ms is not None
            or topic.id in self._store.expiring
            or 0 < self.max_attempts < proposal.attempt
        ):
            self._doom(cursor, queue, lease, found, offsets, limit, now_ms)
            if not lease.mask:
                return None
        if lease.count != len(offsets):
            wanted = {offset for first, last in runs(lease.start, lease.mask) for offset in range(first, last)}
            offsets, lengths, pieces = _part(found, offsets, wanted)
            size = sum(lengths)
        ids = self._store.id_runs(topic, number, offsets, pieces)
        name = "" if queue < RETRY else topic.name
        return Handed(number, lease, lengths, pieces, size, ids, cursor.sought, name)

    def _doom(
        self, cursor: Cursor, queue: int, lease: Lease, found: Slice, offsets: Sequence[int], limit: int, now_ms: int
    ) -> None:
        """Take out of a lease what must not go out, and what is more than was asked for."""
        topic, number = self.place(queue)
        doomed = find_doomed(
            found,
            offsets,
            self._store.id_runs(topic, number, offsets, found.pieces),
            attempt=lease.attempt,
            attempts_max=self.max_attempts,
            now_ms=now_ms,
            ttl_ms=topic.config.ttl_ms,
            is_retry=queue >= RETRY,
        )
        if doomed is not None:
            out = {offset for first, last in runs(lease.start, lease.mask) for offset in range(first, last)}
            doomed = Doomed(*([origin for origin in origins if origin.offset in out] for origins in doomed))
            self._dooming += len(doomed.expired) + len(doomed.exhausted)
            self._bury(self, queue, lease, doomed, now_ms)
        if lease.count > limit:
            more = list(runs(lease.start, lease.mask ^ lowest(lease.mask, limit)))
            cursor.nack(lease.epoch, lease.number, more, now_ms, was_tried=False)

    # --- pumping ----------------------------------------------------------------------------------------------------

    def pump(self, now_ms: int) -> None:
        """Serve everybody who waits as long as there is something for them."""
        self._serve_pulls(now_ms)
        misses = 0
        while (
            self.selection.has_any
            and misses <= len(self.group.members)
            and (member := self.group.next_taker(now_ms)) is not None
        ):
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
        allowed = -1 if pull.queue is None else with_retries(1 << pull.queue)
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
            self._tell_watches(queue, events)

    def _tell_watches(self, queue: int, events: list[Settled]) -> None:
        if queue < RETRY:
            self.watches.settled(queue, events)
            return
        # Whoever waits knows the message by the place it had before it failed.
        topic, number = self.place(queue)
        for event in events:
            bits = int.from_bytes(event.bitmap, "little") if event.bitmap else full(event.count)
            if event.outcome == Outcome.ACKED:
                origins, _ = read_origins(self._store, topic, number, list(runs(event.start, bits)), is_retry=True)
                for origin in origins:
                    self.watches.acked(number, origin.first_offset)

    def watch(self, watch: ConsumedWatch, was_moved: Callable[[int], bool]) -> None:
        """Tell a producer when the group has acked its messages, which may have been long ago if it sent them again.

        Parameters:
            was_moved: whether the message at an offset was settled by being moved, which is not being consumed.
        """
        position = self.cursor(watch.queue).position
        offsets = range(watch.first, watch.first + watch.count)
        if all(position.is_settled(offset) for offset in offsets) and not any(map(was_moved, offsets)):
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
                for entry in cursor.expire(now_ms):
                    if (holder := self.group.members.get(entry.member)) is not None:
                        self.group.wake(holder)  # what was out with it is so no more
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
        return {"delivered": self.delivered, "acked": self.acked, "retried": self.retried, "dead": self.dead}

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
        """It is idle, and everything it knows is durable: a filter's version is not."""
        subscription = self.group.subscription
        return self.is_idle and (subscription is None or not (subscription.version or subscription.filter))

    def close(self) -> None:
        """The group or the topic is no more: nobody waits for it any longer."""
        pulls, self._pulls = self._pulls, deque()
        for pull in pulls:
            if not pull.is_done:
                pull.is_done = True
                pull.answer(None)
        self.watches.expire()


def _part(found: Slice, offsets: Sequence[int], wanted: set[int]) -> tuple[list[int], list[int], list[memoryview]]:
    """Only some of what was read: offsets, lengths and records, each record a piece of its own."""
    kept: list[int] = []
    lengths: list[int] = []
    pieces: list[memoryview] = []
    at = 0
    rest = iter(found.pieces)
    piece = next(rest)
    for offset, size in zip(offsets, found.lengths.tolist(), strict=True):
        if at >= len(piece):
            piece, at = next(rest), 0
        if offset in wanted:
            kept.append(offset)
            lengths.append(size)
            pieces.append(piece[at : at + size])
        at += size
    return kept, lengths, pieces
