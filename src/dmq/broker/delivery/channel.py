"""The channel: one consumer group at one topic, with its cursors, its members and what waits for messages.

It joins the pure parts (group, cursors, queue selection) with the store: it decides what is handed to whom, and reads
it. It sends nothing itself: subscribers have sinks, pulls have callbacks.

The group's retry topic belongs to it as well: its queues stand beside those of the topic, `RETRY` numbers higher, and
queue `n` of it has what failed in queue `n`. What holds for a queue (turns, credit, filter, priority) holds for both.

What always holds: leased messages were read and handed to a sink or a pull in the same step, except for doomed ones,
which go to the dead letters; messages that are gone or damaged are passed over, and so are those that a filter does not
let through, but nothing damaged while another member may have a copy; an event for everything settled goes to the
writer; a queue is marked whenever it may have something to hand out. A filter looks at a bounded number of index
entries in one turn of the loop, whatever it finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from dmq.broker.delivery.cursor import WINDOW, Cursor, HandOutRules, LeaseEnd, LeaseNumbers, Looked, Proposal
from dmq.broker.delivery.group import RETRY_QUEUES, Group, Inheritance, Member, Pulse, QueueSelection, hashes_of
from dmq.broker.delivery.lease import GONE, CursorKey, Holder, Lease, Ranges, full, lowest
from dmq.broker.delivery.origin import Doomed, Terms, find_doomed, origins_of, read_origins
from dmq.broker.delivery.waiters import ConsumedWatch, Demand, Handed, Lengths, Subscriber, WaitingPull, Watches
from dmq.broker.runtime.runtime import Histogram
from dmq.errors import Busy, Damaged, DMQError, LeaseLost, OffsetGone
from dmq.event_log import EventLog
from dmq.offset_runs import mask_runs
from dmq.protocol.consume import Outcome as Verdict
from dmq.protocol.consume import Settlement
from dmq.records.layout import SEND_TIME_AT, STORE_TIME_AT
from dmq.storage.queries import Queries
from dmq.storage.read.reader import Slice, TagFilter
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.positions import Position
from dmq.storage.state.state import Topic

__all__ = ["RETRY", "Channel", "ChannelParts", "Failure", "FailureMover"]

log = EventLog(__name__)

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
# As plain numbers: to name a member of an enum costs as much as a call.
_ACK: Final = int(Verdict.ACK)
_ACKED: Final = int(Outcome.ACKED)
_NOBODY: Final = Holder("")
_HELD_MS: Final = 250
_REFUSED_MS: Final = 2000  # what a disk refuses may take it seconds to refuse
_OTHERS_MS: Final = 1000  # so long a member that let a lease run out does not get its messages again if others may
# Of a record: when it was sent, and how much later it was stored.
_TIMES: Final = Struct(f">q{STORE_TIME_AT - SEND_TIME_AT - 8}xI")


class Failure(NamedTuple):
    """Messages of a lease that a consumer failed at.

    Attributes:
        ranges: which of them; None is all that are out.
        delay_ms: until their next attempt; below 0 the policy says.
    """

    epoch: int
    lease: int
    ranges: Ranges | None
    error: str = ""
    delay_ms: int = -1


class FailureMover(Protocol):
    """Takes messages that failed to their retry or to the dead letters."""

    def nack(self, channel: Channel, key: int, failure: Failure) -> None:
        """Messages are to be tried again, if they have attempts left."""
        ...

    def reject(self, channel: Channel, key: int, failure: Failure) -> None:
        """No attempt will help these messages."""
        ...

    def bury_doomed(self, channel: Channel, key: int, lease: Lease, doomed: Doomed, now_ms: int) -> None:
        """These messages were about to be handed out, and must not be."""
        ...


class Traffic:
    """What was handed out and what became of it, of one channel or of all."""

    __slots__ = ("acked", "dead", "delivered", "delivered_bytes", "redelivered", "retried")

    def __init__(self) -> None:
        self.delivered = self.delivered_bytes = self.redelivered = 0
        self.acked = self.retried = self.dead = 0


class ChannelParts(NamedTuple):
    """What all channels of a broker share.

    Attributes:
        leases: numbers for the leases of all cursors.
        write: takes events for the journal.
        pump_soon: has `pump` called in another turn of the loop.
        lease_ms: how long a lease is extended if the consumer does not say.
        doubt: has a client asked for a sign of life; returns by when that must have come.
        look: how many index entries a filter looks at for one hand-out.
        look_turn: so many in one turn of the loop; then other channels have theirs.
        traffic: of all channels.
        waits: how long messages lay in the journal before they were handed out for the first time.
        inherited_until_ms: until when ordered queues wait for members that another leader of the shard had served; 0 in
            a broker by itself.
        inherited: the next offsets of all queues when this broker became leader, by their keys: nothing from there on
            was handed out before.
    """

    queries: Queries
    leases: LeaseNumbers
    write: Callable[[list[Settled]], None]
    failures: FailureMover
    pump_soon: Callable[[Channel], None]
    pulls_waiting_max: int = 1000
    lease_ms: int = 30_000
    doubt: Callable[[Pulse, int], int] = lambda pulse, now_ms: 0
    look: int = LOOK
    look_turn: int = LOOK_TURN
    traffic: Traffic = Traffic()
    waits: Histogram = Histogram()
    inherited_until_ms: int = 0
    inherited: Mapping[int, int] = MappingProxyType({})


class Channel:
    """One group at one topic.

    Attributes:
        subscribers: members that get messages pushed, by name.
        max_attempts: how many attempts a message gets; 0 is any number.
        retry_topic: None before the first failure.
    """

    def __init__(self, topic: Topic, group: Group, parts: ChannelParts, traffic: Traffic | None = None) -> None:
        self.topic = topic
        self.group = group
        self._parts = parts
        self._queries = parts.queries
        self._looked = 0  # index entries that filters looked at in this turn
        self.cursors: dict[int, Cursor] = {}
        self._timed: set[int] = set()  # queues in which something was handed out: time means nothing to the others
        self.selection = QueueSelection(by_priority=topic.config.priority)
        self.parallel: int | None = None
        self.max_attempts = 0
        self.retry_topic: Topic | None = None
        self.subscribers: dict[str, Subscriber] = {}
        self._pulls: deque[WaitingPull] = deque()
        self.watches = Watches(parts.pulls_waiting_max)
        self.idle_since_ms: int | None = None
        self.traffic = traffic or Traffic()
        self._held: dict[int, int] = {}  # queues whose next messages are being mended, and when to look again
        self._dooming = 0  # messages that were about to go out and became dead letters instead
        self._inheritance = Inheritance(parts.inherited_until_ms) if parts.inherited_until_ms else None
        for queue in range(topic.config.queues):
            self.selection.mark(queue)

    # --- queues and cursors -----------------------------------------------------------------------------------------

    def is_retry(self, queue: int) -> bool:
        """Whether a queue is one of the retry topic."""
        return queue >= RETRY

    def place(self, queue: int) -> tuple[Topic, int]:
        """The topic a queue is of, and its number there."""
        if queue < RETRY:
            return self.topic, queue
        assert self.retry_topic is not None, "its queues are not known before it exists"
        return self.retry_topic, queue - RETRY

    def queue_of(self, topic: str, queue: int) -> int | None:
        """What a queue is called here that a member knows by its topic ("" is the group's) and number."""
        if topic in ("", self.topic.name):
            return queue if queue < self.topic.config.queues else None
        if self.retry_topic is None or topic != self.retry_topic.name or queue >= self.retry_topic.config.queues:
            return None
        return queue + RETRY

    def set_topic(self, topic: Topic) -> None:
        """The topic has other settings: new queues may have something."""
        for queue in range(self.topic.config.queues, topic.config.queues):
            self.selection.mark(queue)
        self.topic = topic

    def set_retry_topic(self, topic: Topic) -> None:
        """The retry topic exists, or has more queues than before."""
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
                CursorKey(self.group.name, topic.id, number),
                position,
                self._parts.leases,
                visible_next=following,
                rules=HandOutRules(bool(subscription and subscription.is_ordered), self.parallel),
            )
            cursor.sought = self._queries.sought(self.group.name, topic.id, number)
            if self._inheritance is not None and position.floor >= self._parts.inherited.get(topic.id << 8 | number, 0):
                self._inheritance.release(queue)
        return cursor

    def inherit(self, queue: int, member: Member) -> None:
        """A member says that it has messages of a queue from another leader of the shard."""
        if self._inheritance is not None:
            self._inheritance.claim(queue, member.name)
            self.selection.mark(queue)

    def begin_anew(self) -> None:
        """The group is new to the topic: nobody has anything from another leader of the shard."""
        self._inheritance = None

    def set_ordered(self, ordered: bool, now_ms: int) -> None:
        """What the members agreed on holds for cursors, too, that were there before them."""
        for cursor in self.cursors.values():
            cursor.set_ordered(ordered, now_ms)

    def set_parallel(self, parallel: int) -> None:
        """No more messages than this are out at once in each queue."""
        self.parallel = parallel
        for cursor in self.cursors.values():
            cursor.parallel = parallel

    def lag(self) -> int:
        """Visible messages the group has not settled."""
        name = self.topic.name
        return sum(self.cursor(q).lag(self._queries.bounds(name, q)[1]) for q in range(self.topic.config.queues))

    @property
    def out(self) -> int:
        """How many messages are leased."""
        return sum(cursor.out for cursor in self.cursors.values())

    # --- handing out ------------------------------------------------------------------------------------------------

    def hand_out(self, demand: Demand, now_ms: int) -> Handed | None:
        """Lease the next messages to a member; None if there are none for it now."""
        if not self.topic.config.can_consume:
            return None  # everybody waits until it is switched on again
        rounds = 0
        allowed = demand.allowed
        limit = demand.limit if demand.limit < HANDED_MAX else HANDED_MAX
        tags = None if (held := self.group.subscription) is None or not held.filter else hashes_of(held.filter)
        look, look_turn = None if tags is None else self._parts.look, self._parts.look_turn
        while self._looked < look_turn and (queue := self.selection.pick(allowed)) is not None:
            cursor = self.cursors.get(queue) or self.cursor(queue)
            topic, number = (self.topic, queue) if queue < RETRY else self.place(queue)
            if (
                self._inheritance is not None
                and cursor.ordered
                and not self._inheritance.lets(queue, demand.member.name)
            ):
                allowed &= ~(1 << queue)  # until its heir is back, or the time for that is over
                continue
            following = self._queries.next_offset(topic.id << 8 | number)
            if (
                tags is None
                and (handed := self._hand_newest(queue, cursor, demand, following, now_ms=now_ms)) is not None
            ):
                self.selection.drained(queue)
                self._count_delivered(handed, now_ms)
                return handed
            wanted = limit if not rounds else max(limit, _DOOMED_BATCH)
            proposal = cursor.propose(wanted, now_ms, following, look, member=demand.member.name)
            if proposal is None:
                if cursor.withholds(demand.member.name, now_ms):
                    allowed &= ~(1 << queue)  # there is something for others
                else:
                    self.selection.unmark(queue)
                continue
            dead = self._dooming
            handed = self._fetch(queue, cursor, proposal, demand, tags=tags, now_ms=now_ms)
            if tags is not None:
                self._count_look(proposal.stop - proposal.start)
            if handed is not None:
                if cursor.ordered or not cursor.has_more:
                    self.selection.drained(queue)  # an ordered queue has no more before this is settled
                self._count_delivered(handed, now_ms)
                return handed
            if self._dooming != dead:
                rounds += 1
                if rounds >= _DOOMED_ROUNDS:
                    # The rest when these are written, which marks the queue: others want to be served, too.
                    self.selection.unmark(queue)
                    return None
        return None

    def _hand_newest(self, queue: int, cursor: Cursor, demand: Demand, following: int, now_ms: int) -> Handed | None:
        """What was just stored, to a group that keeps up: what the long way would give; None where it has to look."""
        limit = demand.limit
        start = cursor.rest(limit if limit < HANDED_MAX else HANDED_MAX, following)
        if start is None or queue >= RETRY:
            return None
        topic = self.topic
        if topic.config.ttl_ms is not None or topic.id in self._queries.expiring:
            return None
        found = self._queries.newest(topic.id << 8 | queue, start, following, demand.max_bytes)
        if found is None:
            return None
        lengths, piece, size, ids = found
        self._timed.add(queue)
        lease = cursor.lease_rest(following, demand.member, now_ms, demand.lease_ms, size=size)
        return Handed(queue, lease, lengths, [piece], size=size, ids=ids, sought=cursor.sought)

    def _count_delivered(self, handed: Handed, now_ms: int) -> None:
        mine, all_ = self.traffic, self._parts.traffic
        count, size = len(handed.lengths), handed.size
        mine.delivered += count
        mine.delivered_bytes += size
        all_.delivered += count
        all_.delivered_bytes += size
        if handed.lease.attempt > 1:
            mine.redelivered += count
            all_.redelivered += count
        else:
            # All of them are taken to have waited as long as the first.
            sent_at_ms, stored_after_ms = _TIMES.unpack_from(handed.pieces[0], SEND_TIME_AT)
            waited_ms = now_ms - sent_at_ms - stored_after_ms
            self._parts.waits.observe(waited_ms / 1000 if waited_ms > 0 else 0.0, count)

    def count_moved(self, count: int, *, is_dead: bool) -> None:
        """Messages that failed were moved, to their retry or to the dead letters."""
        for traffic in (self.traffic, self._parts.traffic):
            if is_dead:
                traffic.dead += count
            else:
                traffic.retried += count

    @property
    def is_looking(self) -> bool:
        """A filter has looked at many entries, and goes on when others had their turn: what comes is not known yet."""
        return self._looked >= self._parts.look_turn

    def begin_turn(self) -> None:
        """Others had their turn: filters may look on."""
        self._looked = 0

    def _count_look(self, entries: int) -> None:
        was_looking = self.is_looking
        self._looked += entries
        if self.is_looking and not was_looking:
            self.pump_soon()

    def _fetch(
        self, queue: int, cursor: Cursor, proposal: Proposal, demand: Demand, *, tags: list[int] | None, now_ms: int
    ) -> Handed | None:
        """Read what was proposed and lease what is there; what is gone is passed over, and what is damaged for good."""
        is_fresh = proposal.is_fresh
        count = proposal.limit if is_fresh else proposal.stop - proposal.start
        filtered = tags if is_fresh else None
        topic, number = (self.topic, queue) if queue < RETRY else self.place(queue)
        limit, max_bytes = demand.limit if demand.limit < HANDED_MAX else HANDED_MAX, demand.max_bytes
        if proposal.limit > limit:
            max_bytes = max(max_bytes, PUSH_BYTES)
        try:
            found = self._queries.read_of(
                topic,
                number,
                proposal.start,
                count,
                max_bytes=max_bytes,
                tags=None if filtered is None else TagFilter(filtered, proposal.stop - proposal.start),
            )
        except (OffsetGone, Damaged) as error:
            self._skip(queue, cursor, proposal, error, now_ms=now_ms)
            return None
        except BaseException:
            cursor.release(proposal, now_ms)
            raise
        must_look = (
            queue >= RETRY
            or topic.config.ttl_ms is not None
            or topic.id in self._queries.expiring
            or 0 < self.max_attempts < proposal.attempt
            or found.corrupt
        )
        if found.blocks is not None and (must_look or not demand.takes_blocks):
            found = self._queries.plain(found)
        # Without a filter one follows the other, and a range says so without naming each.
        offsets: Sequence[int] = (
            range(proposal.start, proposal.start + len(found)) if filtered is None else found.offsets.tolist()
        )
        lengths: Lengths = found.lengths
        pieces: Sequence[Any] = found.pieces
        size = found.size or sum(map(len, pieces))
        looked = Looked(found.next_offset, None if filtered is None else offsets, size)
        lease = cursor.grant(proposal, demand.member, now_ms, demand.lease_ms, looked=looked)
        if lease is None:
            return None
        self._timed.add(queue)
        if must_look or found.corrupt:
            self._doom(queue, lease, found, offsets, now_ms=now_ms)
            if lease.count > limit:
                more = list(mask_runs(lease.start, lease.mask ^ lowest(lease.mask, limit)))
                cursor.nack(lease.epoch, lease.number, more, now_ms, was_tried=False)
            if not lease.mask:
                return None
        if lease.count != len(offsets):
            wanted = {offset for first, last in mask_runs(lease.start, lease.mask) for offset in range(first, last)}
            offsets, lengths, pieces = found.part(offsets, wanted)
            size = sum(lengths)
        ids = self._queries.id_runs(topic, number, offsets, pieces)
        if found.blocks is not None:
            lengths, pieces = self._queries.hand_out(lengths, pieces, found.blocks)
            size = sum(map(len, pieces))
        name = "" if queue < RETRY else topic.name
        return Handed(number, lease, lengths, pieces, size=size, ids=ids, sought=cursor.sought, topic=name)

    def _skip(self, queue: int, cursor: Cursor, proposal: Proposal, error: DMQError, now_ms: int) -> None:
        """The messages of a proposal cannot be read: they wait for a copy from another member or for a disk that
        refuses them, or are passed over."""
        is_gone, detail = isinstance(error, OffsetGone), error.detail
        waits = not is_gone and self._queries.may_be_mended(detail["start"], detail["end"])
        refused = waits and detail.get("may_pass", False)
        what = "messages wait for a copy from another member" if waits else "messages passed over"
        log.warning(
            "messages wait for a disk that refuses them" if refused else what,
            once_for=(self.topic.name, self.group.name, queue, waits),
            topic=self.topic.name,
            group=self.group.name,
            queue=queue,
            error=error,
        )
        if waits:
            cursor.release(proposal, now_ms)
            self.selection.unmark(queue)
            self._held[queue] = now_ms + (_REFUSED_MS if refused else _HELD_MS)
            return
        resume = int(detail["first"] if is_gone else detail["next"])
        looked = Looked(min(resume, proposal.stop), (), reason=GONE if is_gone else DAMAGED)
        cursor.grant(proposal, _NOBODY, now_ms, 0, looked=looked)
        self._parts.write(cursor.take_skipped(now_ms))

    def _doom(self, queue: int, lease: Lease, found: Slice, offsets: Sequence[int], now_ms: int) -> None:
        """Take out of a lease what must not go out."""
        topic, number = self.place(queue)
        is_retry = queue >= RETRY
        ids = self._queries.id_runs(topic, number, offsets, found.pieces)
        doomed = find_doomed(
            origins_of(found, offsets, ids, is_retry=is_retry),
            Terms(lease.attempt, self.max_attempts, now_ms, None if is_retry else topic.config.ttl_ms),
        )
        if doomed is not None:
            out = {offset for first, last in mask_runs(lease.start, lease.mask) for offset in range(first, last)}
            doomed = Doomed(*([origin for origin in origins if origin.offset in out] for origins in doomed))
            self._dooming += sum(map(len, doomed))
            self._parts.failures.bury_doomed(self, queue, lease, doomed, now_ms=now_ms)

    # --- pumping ----------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Have `pump` called at the end of this turn of the loop."""
        self._parts.pump_soon(self)

    def pump(self, now_ms: int) -> None:
        """Serve everybody who waits as long as there is something for them."""
        self._looked = 0
        if self._pulls:
            self._serve_pulls(now_ms)
        misses, group, selection = 0, self.group, self.selection
        while (
            selection.has_any
            and self._looked < self._parts.look_turn
            and misses <= len(group.members)
            and (member := group.next_taker(now_ms)) is not None
        ):
            subscriber = self.subscribers.get(member.name)
            if subscriber is None or not subscriber.sink.is_ready:
                misses += 1
                continue
            credit, room = member.prefetch - member.messages_out, member.prefetch_bytes - member.bytes_out
            limit = credit if credit < subscriber.batch else subscriber.batch
            if limit > 1 and not member.messages_out and group.idle:
                limit = self._share(limit, group.idle + 1)
            size = room if room < PUSH_BYTES else PUSH_BYTES
            demand = Demand(
                member,
                limit,
                size,
                subscriber.lease_ms,
                allowed=subscriber.allowed,
                takes_blocks=subscriber.takes_blocks,
            )
            handed = self.hand_out(demand, now_ms)
            if handed is None:
                misses += 1
                if not len(selection):
                    group.keep_turn(member)
            else:
                misses = 0
                subscriber.sink.push(handed)

    def _share(self, limit: int, members: int) -> int:
        """What one of some idle members gets of what is there: a part for each, but no more than it wants."""
        waiting = 0
        for queue in self.selection.marked():
            topic, number = self.place(queue)
            cursor = self.cursor(queue)
            waiting += max(0, self._queries.bounds(topic.name, number)[1] - cursor.next) + cursor.redelivering
            if waiting >= limit * members:
                return limit
        return max(1, min(limit, -(-waiting // members)))

    def _serve_pulls(self, now_ms: int) -> None:
        for _ in range(len(self._pulls)):
            pull = self._pulls.popleft()
            if pull.is_done:
                continue
            try:
                found = self.try_pull(pull.demand, now_ms)
                if found is not None:
                    pull.is_done = True
                    pull.answer(*found)
            except BaseException:
                self._pulls.append(pull)
                raise
            if found is None:
                self._pulls.append(pull)

    def try_pull(self, demand: Demand, now_ms: int) -> tuple[Handed | None] | None:
        """What a pull is answered with now, as a tuple of one; None if it has to wait."""
        if demand.member.may_pull:
            handed = self.hand_out(demand, now_ms)
            return None if handed is None else (handed,)
        # It waits until its client speaks, or its time is over; a member that is gone gets nothing.
        return None if demand.member.is_quiet else (None,)

    def wait(self, pull: WaitingPull) -> None:
        """Let a pull wait for messages.

        Raises:
            Busy: too many wait already.
        """
        if len(self._pulls) >= self._parts.pulls_waiting_max:
            raise Busy(
                f"{len(self._pulls)} pulls of group {self.group.name!r} wait already: try again shortly",
                retry_after_ms=100,
            )
        self._pulls.append(pull)

    def cancel_pulls(self, owner: object) -> None:
        """The client that waited is gone."""
        self._pulls = deque(pull for pull in self._pulls if pull.owner is not owner)

    def end_pulls(self, owner: object, member: Member) -> None:
        """A member pulls no more: its pulls that still wait are answered."""
        for pull in self._pulls:
            if pull.owner is owner and pull.demand.member is member and not pull.is_done:
                pull.is_done = True
                pull.answer(None)

    @property
    def awaits(self) -> bool:
        """Whether a queue may have something, and somebody may want it."""
        return self.selection.has_any and bool(self._pulls or self.subscribers)

    def end_subscriptions(self, error: DMQError) -> None:
        """Tell all subscribers that nothing more comes, and why."""
        for subscriber in self.subscribers.values():
            subscriber.sink.end(error)

    # --- settling ---------------------------------------------------------------------------------------------------

    def settle(self, said: Settlement, now_ms: int) -> None:
        """What a consumer says of messages it has: ack, nack, reject, extend or release.

        Raises:
            LeaseLost: the lease is gone.
        """
        queue = self.queue_of(said.topic, said.queue)
        if queue is None:
            raise LeaseLost(f"{said.topic or self.topic.name!r} has no queue {said.queue} of this group")
        cursor = self.cursors.get(queue) or self.cursor(queue)
        ranges: Ranges | None = [(first, first + count) for first, count in said.ranges] or None
        if said.outcome == _ACK:  # as a rule
            self.settled(queue, cursor.ack(said.epoch, said.lease, ranges, now_ms))
            return
        match said.outcome:
            case Verdict.NACK:
                failure = Failure(said.epoch, said.lease, ranges, said.reason, delay_ms=said.delay_ms)
                self._parts.failures.nack(self, queue, failure)
            case Verdict.RELEASE:
                delay_ms = max(0, said.delay_ms)
                cursor.nack(said.epoch, said.lease, ranges, now_ms, delay_ms=delay_ms, was_tried=False)
                self.selection.mark(queue)
            case Verdict.EXTEND:
                cursor.extend(
                    said.epoch, said.lease, now_ms, said.delay_ms if said.delay_ms >= 0 else self._parts.lease_ms
                )
            case Verdict.REJECT:
                self._parts.failures.reject(self, queue, Failure(said.epoch, said.lease, ranges, said.reason))

    def settled(self, queue: int, events: list[Settled]) -> None:
        """Something was settled: write it, tell who waited for it, and let the next be handed out."""
        if not events:
            return
        self._parts.write(events)
        for event in events:
            count = int.from_bytes(event.bitmap, "little").bit_count() if event.bitmap else event.count
            if event.outcome == _ACKED:
                self.traffic.acked += count
                self._parts.traffic.acked += count
            elif event.outcome == Outcome.DEAD:
                self.count_moved(count, is_dead=True)
        if self.cursors[queue].has_more:
            self.selection.mark(queue)
        if self.watches.count:
            self._tell_watches(queue, events)

    def _tell_watches(self, queue: int, events: list[Settled]) -> None:
        if queue < RETRY:
            self.watches.settled(queue, events)
            return
        # A producer that waits knows the message by the place it had before it failed.
        topic, number = self.place(queue)
        for event in events:
            bits = int.from_bytes(event.bitmap, "little") if event.bitmap else full(event.count)
            if event.outcome == Outcome.ACKED:
                origins, _ = read_origins(
                    self._queries, topic, number, list(mask_runs(event.start, bits)), is_retry=True
                )
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

    def seek(self, queue: int, offset: int) -> None:
        """The position of a queue was set: begin anew there."""
        cursor = self.cursor(queue)
        cursor.seek(offset)
        cursor.sought = self._queries.sought(self.group.name, self.topic.id, queue)
        self.selection.mark(queue)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> bool:
        """What time did: leases and delays that are over, members that are gone, pulls that waited long enough.

        Returns whether anything may be handed out now that could not before.
        """
        woken = False
        if self._inheritance is not None and self._inheritance.until_ms <= now_ms:
            self._inheritance = None
            woken = self.selection.has_any
        for queue in [queue for queue, until_ms in self._held.items() if until_ms <= now_ms]:
            del self._held[queue]
            self.selection.mark(queue)
            woken = True
        for queue in [*self._timed]:
            cursor = self.cursors[queue]
            deadline = cursor.next_deadline()
            if deadline is None:
                self._timed.remove(queue)
            elif deadline <= now_ms:
                for entry in cursor.expire(now_ms, lambda lease: self._ending(lease, now_ms)):
                    if (holder := self.group.members.get(entry.member)) is not None:
                        self.group.wake(holder)  # the lease that ended gave its credit back
                self.selection.mark(queue)
                woken = True
        deadline = self.group.next_deadline()
        if deadline is not None and deadline <= now_ms:
            due = self.group.due(now_ms)
            for member in due.gone:
                self.forget(member, now_ms, is_clean=False)
            woken = True
        if not self.is_looking:  # else there may be something for them after all
            self._expire_pulls(now_ms)
        while self._pulls and self._pulls[0].is_done:
            self._pulls.popleft()
        if self.watches.count:
            self.watches.expire(now_ms)
        return woken

    def _ending(self, lease: Lease, now_ms: int) -> LeaseEnd:
        """How a lease ends whose time is over: its holder may be at work, be gone, or have fallen silent."""
        member = lease.holder
        if not isinstance(member, Member) or member.away_until_ms is not None or not member.pulses or member.is_silent:
            return LeaseEnd(is_tried=not member.is_silent, others_until_ms=self._others_until(member, now_ms))
        if not any(pulse.is_fresh(now_ms) for pulse in member.pulses):
            by_ms = max(self._parts.doubt(pulse, now_ms) for pulse in member.pulses)
            if by_ms > now_ms:
                return LeaseEnd(not_before_ms=by_ms)
        return LeaseEnd(others_until_ms=self._others_until(member, now_ms))

    def _others_until(self, member: Holder, now_ms: int) -> int:
        """Until when others come first for what a member let run out; 0 if there are none."""
        subscription = self.group.subscription
        if subscription is not None and subscription.strategy:
            return 0  # none of them takes what is not of its own queues
        return now_ms + _OTHERS_MS if any(m is not member and m.may_pull for m in self.group.members.values()) else 0

    def pulse_changed(self, member: Member) -> None:
        """A client of the member is silent or has spoken: leases that waited for that end with the next tick."""
        self.group.wake(member)
        if member.away_until_ms is None:
            for cursor in self.cursors.values():
                cursor.resume(member)

    def _expire_pulls(self, now_ms: int) -> None:
        for pull in self._pulls:
            if not pull.is_done and pull.deadline_ms <= now_ms:
                pull.is_done = True
                pull.answer(None)

    def away(self, name: str, now_ms: int, grace_ms: int) -> None:
        """The connection of a member broke: its leases stay its own for the grace time."""
        member = self.group.disconnect(name, now_ms, grace_ms)
        if member is not None:
            for cursor in self.cursors.values():
                cursor.disconnect(member, now_ms, grace_ms)

    def forget(self, member: Member, now_ms: int, *, is_clean: bool) -> None:
        """A member will not come back: what it had goes to others."""
        self.subscribers.pop(member.name, None)
        for queue, cursor in self.cursors.items():
            if cursor.member_gone(member, now_ms, is_clean=is_clean):
                self.selection.mark(queue)

    def take_skipped(self, now_ms: int) -> list[Settled]:
        """The events of what filters passed over, which else wait for the next thing that is settled."""
        return [event for cursor in self.cursors.values() for event in cursor.take_skipped(now_ms)]

    @property
    def is_idle(self) -> bool:
        """It has no members, nothing is out, nothing waits."""
        return not (
            self.group.members
            or self._pulls
            or self.watches.count
            or any(cursor.out or cursor.redelivering for cursor in self.cursors.values())
        )

    @property
    def may_be_forgotten(self) -> bool:
        """It is idle, and everything it knows is durable: a filter's version is not."""
        subscription = self.group.subscription
        return self.is_idle and (subscription is None or not (subscription.version or subscription.filter))

    def close(self) -> None:
        """The group or the topic is gone: whatever waits is answered."""
        for cursor in self.cursors.values():
            cursor.close()
        pulls, self._pulls = self._pulls, deque()
        for pull in pulls:
            if not pull.is_done:
                pull.is_done = True
                pull.answer(None)
        self.watches.expire()
