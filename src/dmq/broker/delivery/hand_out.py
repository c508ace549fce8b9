"""Fetching: from the cursors of a group at a topic to leases with their messages.

The first half of a consumption (see `consumption`, which has its rules): which queue comes next, what its cursor
proposes, what the store has there, and what of that a member gets.

What always holds: what is leased was read; what is gone or damaged is passed over, and so is what a filter does not let
through; what must not go out is taken out of its lease. A filter looks at a bounded number of index entries in one turn
of the loop, whatever it finds.

Dooming: messages that were read to be handed out, and must not be: they expired, or had all their attempts.

Pure code. A message that kills its consumer is never nacked: only here is noticed that it was handed out often enough.
Expiry is looked at here too, where a message would go out: what nobody asks for need not be looked for.

What always holds: what is doomed is what was read, in order; an attempt that would be the last one allowed is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from dmq.broker.delivery.bitmap import lowest
from dmq.broker.delivery.cursor import GONE, WINDOW, Cursor, Proposal
from dmq.broker.delivery.group import Group, Member, hashes_of
from dmq.broker.delivery.lease import Lease
from dmq.broker.delivery.queue_selection import RETRY_QUEUES, QueueSelection
from dmq.broker.delivery.waiters import Handed, Lengths
from dmq.broker.retry.policy import is_exhausted
from dmq.broker.retry.record_copy import Origin, origins_of
from dmq.errors import Damaged, OffsetGone
from dmq.offset_runs import mask_runs
from dmq.storage.queries import Queries
from dmq.storage.read.reader import Slice, TagFilter
from dmq.storage.read.record_origin import IdRun
from dmq.storage.state.events import Settled
from dmq.storage.state.positions import Position
from dmq.storage.state.state import Topic

__all__ = ["HANDED_MAX", "LOOK", "LOOK_TURN", "PUSH_BYTES", "RETRY", "Doomed", "Fetching", "find_doomed"]

log = logging.getLogger(__name__)


class Doomed(NamedTuple):
    """Messages for the dead letters."""

    expired: list[Origin]
    exhausted: list[Origin]

    @property
    def offsets(self) -> set[int]:
        return {origin.offset for origins in self for origin in origins}


def find_doomed(
    found: Slice,
    offsets: Sequence[int],
    ids: Sequence[IdRun],
    *,
    attempt: int,
    attempts_max: int,
    now_ms: int,
    ttl_ms: int | None,
    is_retry: bool,
) -> Doomed | None:
    """What of the messages that were read must not go out; None if all may.

    Parameters:
        found, offsets, ids: what was read.
        attempt: which hand-out from this queue it would be.
        attempts_max: as of `retry.is_exhausted`.
        ttl_ms: how long messages of this topic live after they were stored; a retry carries its own expiry.
        is_retry: they stand in a retry topic.
    """
    expired: list[Origin] = []
    exhausted: list[Origin] = []
    for origin in origins_of(found, offsets, ids, is_retry=is_retry):
        expires_at_ms = origin.failed.expires_at_ms
        if ttl_ms is not None and not is_retry:
            at_ms = origin.stored_at_ms + ttl_ms
            expires_at_ms = at_ms if expires_at_ms is None else min(at_ms, expires_at_ms)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            expired.append(origin)
        elif is_exhausted(origin.failed.attempts + attempt - 1, attempts_max):
            exhausted.append(origin)
    return Doomed(expired, exhausted) if expired or exhausted else None


# How many index entries a filter looks at for one hand-out, and how many in one turn of the loop.
LOOK: Final = WINDOW
LOOK_TURN: Final = 4 * WINDOW
HANDED_MAX: Final = 32_768  # messages of one hand-out: their ids fit into the head of a frame, whatever they are
PUSH_BYTES: Final = 256 << 10  # of one push; what waits for a slow reader is not much more
DAMAGED: Final = "damaged"
RETRY: Final = RETRY_QUEUES  # a queue of the retry topic is its number and this
# Of messages that must not go out, so many are looked through at a time, so often in one go.
_DOOMED_BATCH: Final = 1024
_DOOMED_ROUNDS: Final = 8


class Fetching:
    """See the module; `consumption.Consumption` is the whole."""

    def __init__(
        self,
        topic: Topic,
        group: Group,
        queries: Queries,
        lease_numbers: Iterator[int],
        write: Callable[[list[Settled]], None],
        look: int,
        look_turn: int,
    ) -> None:
        self.topic = topic
        self.group = group
        self._queries = queries
        self._numbers = lease_numbers
        self._write = write
        self._look, self._look_turn = look, look_turn
        self._looked = 0  # index entries that filters looked at in this turn
        self.cursors: dict[int, Cursor] = {}
        self.selection = QueueSelection(by_priority=topic.config.priority)
        self.parallel: int | None = None
        self.max_attempts = 0  # 0 is for ever
        self.retry_topic: Topic | None = None  # there is none before the first failure
        self.delivered = 0
        self._dooming = 0  # messages that were about to go out and became dead letters instead
        for queue in range(topic.config.queues):
            self.selection.mark(queue)

    def _bury_doomed(self, queue: int, lease: Lease, doomed: Doomed, now_ms: int) -> None:
        """Take messages of a lease to the dead letters."""
        raise NotImplementedError

    def _look_on_soon(self) -> None:
        """Have `begin_turn` called in another turn of the loop, and everybody served who waits."""
        raise NotImplementedError

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
            first, following = self._queries.bounds(topic.name, number)
            position = self._queries.position(self.group.name, topic.name, number) or Position(first)
            subscription = self.group.subscription
            cursor = self.cursors[queue] = Cursor(
                self.group.name,
                topic.id,
                number,
                position,
                epoch=self._queries.epoch,
                numbers=self._numbers,
                ordered=bool(subscription and subscription.is_ordered),
                parallel=self.parallel,
                visible_next=following,
            )
            cursor.sought = self._queries.sought(self.group.name, topic.id, number)
        return cursor

    def set_ordered(self, ordered: bool, now_ms: int) -> None:
        """What the members agreed on holds for cursors, too, that were there before them."""
        for cursor in self.cursors.values():
            cursor.set_ordered(ordered, now_ms)

    def lag(self) -> int:
        """Visible messages the group has not settled."""
        name = self.topic.name
        return sum(self.cursor(q).lag(self._queries.bounds(name, q)[1]) for q in range(self.topic.config.queues))

    # --- handing out ------------------------------------------------------------------------------------------------

    def hand_out(
        self, member: Member, limit: int, max_bytes: int, lease_ms: int, now_ms: int, allowed: int = -1
    ) -> Handed | None:
        """Lease the next messages to a member; None if there are none for it now."""
        if not self.topic.config.can_consume:
            return None  # everybody waits until it is switched on again
        rounds = 0
        limit = min(limit, HANDED_MAX)
        tags = self._tags()
        while not self.is_looking and (queue := self.selection.pick(allowed)) is not None:
            cursor = self.cursor(queue)
            topic, number = (self.topic, queue) if queue < RETRY else self.place(queue)
            following = self._queries.bounds(topic.name, number)[1]
            wanted = limit if not rounds else max(limit, _DOOMED_BATCH)
            proposal = cursor.propose(wanted, now_ms, following, None if tags is None else self._look)
            if proposal is None:
                self.selection.unmark(queue)
                continue
            dead = self._dooming
            handed = self._fetch(cursor, queue, proposal, member, limit, max_bytes, lease_ms, now_ms, tags)
            if tags is not None:
                self._count_look(proposal.stop - proposal.start)
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

    @property
    def is_looking(self) -> bool:
        """A filter has looked at many entries, and goes on when others had their turn: nobody knows what comes."""
        return self._looked >= self._look_turn

    def begin_turn(self) -> None:
        """Others had their turn: filters may look on."""
        self._looked = 0

    def _count_look(self, entries: int) -> None:
        was_looking = self.is_looking
        self._looked += entries
        if self.is_looking and not was_looking:
            self._look_on_soon()

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
            max_bytes = max(max_bytes, PUSH_BYTES)
        try:
            found = self._queries.read(
                topic.name,
                number,
                proposal.start,
                count,
                max_bytes=max_bytes,
                tags=None if filtered is None else TagFilter(filtered, proposal.stop - proposal.start),
            )
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
        scanned_to = found.next_offset
        # Without a filter one follows the other, and a range says so without naming each.
        offsets: Sequence[int] = (
            range(proposal.start, proposal.start + len(found)) if filtered is None else found.offsets.tolist()
        )
        matched = None if filtered is None else offsets
        lengths: Lengths = found.lengths
        size = sum(map(len, found.pieces))
        lease = cursor.grant(proposal, member, now_ms, lease_ms, scanned_to=scanned_to, matched=matched, size=size)
        if lease is None:
            return None
        pieces = found.pieces
        if (
            queue >= RETRY
            or topic.config.ttl_ms is not None
            or topic.id in self._queries.expiring
            or 0 < self.max_attempts < proposal.attempt
        ):
            self._doom(cursor, queue, lease, found, offsets, limit, now_ms)
            if not lease.mask:
                return None
        if lease.count != len(offsets):
            wanted = {offset for first, last in mask_runs(lease.start, lease.mask) for offset in range(first, last)}
            offsets, lengths, pieces = _part(found, offsets, wanted)
            size = sum(lengths)
        ids = self._queries.id_runs(topic, number, offsets, pieces)
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
            self._queries.id_runs(topic, number, offsets, found.pieces),
            attempt=lease.attempt,
            attempts_max=self.max_attempts,
            now_ms=now_ms,
            ttl_ms=topic.config.ttl_ms,
            is_retry=queue >= RETRY,
        )
        if doomed is not None:
            out = {offset for first, last in mask_runs(lease.start, lease.mask) for offset in range(first, last)}
            doomed = Doomed(*([origin for origin in origins if origin.offset in out] for origins in doomed))
            self._dooming += len(doomed.expired) + len(doomed.exhausted)
            self._bury_doomed(queue, lease, doomed, now_ms)
        if lease.count > limit:
            more = list(mask_runs(lease.start, lease.mask ^ lowest(lease.mask, limit)))
            cursor.nack(lease.epoch, lease.number, more, now_ms, was_tried=False)


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
