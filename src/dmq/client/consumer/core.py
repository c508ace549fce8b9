"""The core of a consumer: messages in hand, what was said of each, and what brokers are told. Pure but for a lock.

Both consumers, the blocking one and the asyncio one, hand it what they receive and send what it gives. What came from
one broker stands in a book of its own (`dmq.client.consumer.leases`); the prefetch is one for all.

What always holds:
- A message is handed out at most once for each time it was delivered; one that was acked before is acked again, in
  silence, and one that is in hand already shares the fate of the first.
- What is said of a message counts once, and is reported once, to the broker it came from, in the order of the leases;
  nothing is reported of what a broker took back.
- Of an ordered group, nothing of a queue is handed out while an earlier lease of the queue is not done with, or while
  a handler of the queue runs: after a broker's restart, or once a lease is over, the next one comes although a handler
  still runs.
- Nothing is handed out whose lease is over, by a clock that runs on while the machine is suspended. A lease is counted
  from a moment at which the broker cannot have given it yet, and is longer only once the broker has said so: a process
  that stood still knows less than the broker, never more.
- No user gets a record that fails its checksums: the broker looks at it again, and delivers it anew or makes it a dead
  letter. Over frames with checksums the bodies of what is pushed are checked; what is pulled in bulk is not looked at.
- Untouched messages of a consumer that makes no progress go back before their lease is over, so that others get them
  and no attempt is counted.
- A message whose body is not of the consumer's `type` is rejected at once, and the user gets the next one.
- All state is guarded by `lock`; `on_reports` and `on_free` are called without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

import numpy as np

from dmq.client.connection.link import NamedLink
from dmq.client.consumer.delivery import SETTLED, TAKEN, WAITING, Delivery, is_all, packed_flags
from dmq.client.consumer.leases import LeaseBook, settlements_of
from dmq.client.consumer.message import ReceivedMessage, facts_of
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Part, Prefetch, Turn
from dmq.clock import Clock
from dmq.errors import DMQError, RecordCorrupt
from dmq.event_log import EventLog
from dmq.protocol import Buffer, place_records
from dmq.protocol.consume import Lease, LeaseRef, Outcome, Settle, SubscribeReply
from dmq.records.block import BodyBlocks
from dmq.records.check import find_corrupt
from dmq.records.layout import BLOCK, COMPRESSED

__all__ = ["ConsumerCore"]

# What a pool that is full gives back comes again after this long.
REFUSED_MS: Final = 1000
# A message that comes damaged so often is rejected. A broker that stores it damaged notices that when it comes back; an
# earlier one would hand it out for ever. A good one that a bad link damages some times must not go.
CORRUPT_ATTEMPTS: Final = 8

log = EventLog(__name__)


class ConsumerCore:
    """What one consumer has in hand.

    Parameters:
        extend: keeps a delivery's lease for so many seconds, and waits for the answer.
    """

    def __init__(self, options: ConsumerOptions, clock: Clock, extend: Callable[[Delivery, float], object]) -> None:
        self.options: Final = options
        self.extend: Final = extend
        self.lock: Final = threading.Lock()
        self.now: Final = clock.boottime
        """The time that leases run by."""
        self._prefetch = Prefetch(is_ordered=options.ordered, is_free=self._is_free, is_over=self._drop)
        self._is_typed = options.type is not None
        self._turns: list[Turn] = []  # that handlers work on
        self._queues: set[tuple[int, str, int]] = set()  # of an ordered group, those of the turns
        self._books: list[LeaseBook] = []
        self._said = 0  # of how many messages since the last report, about
        self.urgent_count = max(1, options.prefetch // 4)
        self.handlers = 1  # how many work on messages at a time
        self.pace = 1  # messages that a handler gets done in a millisecond
        self.reader_limit = 0  # so many messages the thread that reads takes itself, if nothing else waits
        self.begun: Turn | None = None  # what it took
        self._has_progress = False
        self._taken = 0  # handed out, and not settled
        self.member = ""  # its name in the group
        self.is_running = False  # handlers run: what they have is kept for them, however long they take
        self.room: Callable[[], int] | None = None  # how many more may wait; the rest goes back
        self.is_paused = False
        self.suppressed = 0  # messages that came and were not for the user
        self.ended: DMQError | None = None
        self.is_report_due = False  # somebody is about to ask for reports
        self.has_company = False  # a request is about to leave that reports can travel with
        self.on_reports: Callable[[bool], None] = lambda is_urgent: None
        self._unreadable: list[tuple[ReceivedMessage, str]] = []  # rejected, and nobody was told yet
        self._is_freed = False  # the same
        self.on_free: Callable[[], None] = lambda: None  # what waited for an earlier lease may be taken now

    def add_book(self) -> LeaseBook:
        """The book of one more broker."""
        with self.lock:
            book = LeaseBook(self.options, len(self._books))
            self._books.append(book)
        return book

    def _book(self, delivery: Delivery) -> LeaseBook:
        """The book of the broker that a delivery came from."""
        return self._books[delivery.broker]

    # --- what comes -------------------------------------------------------------------------------------------------

    def received(
        self,
        book: LeaseBook,
        leases: Sequence[Lease],
        body: Buffer,
        since: float | None = None,
        without: Container[int] = (),
        *,
        is_for_handlers: bool = False,
    ) -> int:
        """A broker pushed messages, or they were pulled ahead; returns how many wait now.

        Parameters:
            since: from when on their leases run at the latest; now if left out.
            without: leases that are lost, by their index.
            is_for_handlers: they are handled one by one, and each body is checked, also behind a frame's checksum.

        Raises:
            InvalidRequest: the frame does not add up.
        """
        begun = self.now() if since is None else since
        with self.lock:
            may_be_plain = is_for_handlers and len(leases) == 1 and without == () and self.room is None
            plain = book.take_plain(self, leases[0], body, begun) if may_be_plain else None
            if plain is None:
                for one in self._deliveries(
                    book, leases, body, begun=begun, without=without, is_for_handlers=is_for_handlers
                ):
                    chosen = self._chosen(one)
                    if self.room is not None:
                        chosen = self._refuse(one, chosen, self.room() - self._prefetch.count)
                    self._prefetch.put(one, chosen)
            elif plain.count > self.reader_limit or self.begun or self._prefetch.count or self.is_paused:
                self._prefetch.put(plain, range(plain.count))
            else:  # the thread that reads handles it: as `put` and `begin_turn`
                self._taken += plain.count
                self._has_progress = True
                self.begun = Turn.of_all(plain)
                self._turns.append(self.begun)
            waiting = self._prefetch.count
            is_long = self.begun is not None and self.begun.stop > 1 and not self.is_report_due  # as in `begin_turn`
            must_report = bool(book.dirty) or is_long
        if must_report:
            self.on_reports(False)
        return waiting

    def pulled(self, book: LeaseBook, leases: Sequence[Lease], body: Buffer, since: float | None = None) -> list[Part]:
        """Messages were pulled: the deliveries, and which of their messages are for the user."""
        parts: list[Part] = []
        begun = self.now() if since is None else since
        with self.lock:
            for delivery in self._deliveries(book, leases, body, begun=begun):
                delivery.is_pulled = True
                chosen = self._chosen(delivery)
                delivery.waiting -= len(chosen)
                self._taken += len(chosen)
                if len(chosen) == delivery.count:
                    delivery.states[:] = bytes((TAKEN,)) * delivery.count
                else:
                    for index in chosen:
                        delivery.states[index] = TAKEN
                if chosen:
                    parts.append((delivery, chosen))
            parts = self._readable_parts(parts)
            must_report = bool(book.dirty)
        self._tell_unreadable()
        if must_report:
            self.on_reports(False)
        return parts

    def _deliveries(
        self,
        book: LeaseBook,
        leases: Sequence[Lease],
        body: Buffer,
        *,
        begun: float,
        without: Container[int] = (),
        is_for_handlers: bool = False,
    ) -> Iterable[Delivery]:
        bounds, data = place_records(body, sum(lease.count for lease in leases))
        # Slices of bytes cost half of slices of a view, and a body is looked at more often than not.
        buffer = bytes(data)
        packed = packed_flags(buffer, bounds)  # for all of them at once
        is_packed = bool(packed & COMPRESSED)
        blocks = BodyBlocks(buffer) if packed & BLOCK else None
        at = 0
        for number, lease in enumerate(leases):
            mine = bounds if len(leases) == 1 else bounds[at : at + lease.count + 1]
            at += lease.count
            if number in without:
                continue
            delivery = Delivery(self, book.broker, lease, buffer, bounds=mine)
            delivery.shard = book.shard
            delivery.deadline = begun + lease.lease_ms / 1000
            delivery.is_packed = is_packed
            delivery.blocks = blocks
            book.held[delivery.key] = delivery
            if book.is_moved(lease):
                self._begin_anew(delivery)
            if is_for_handlers:
                is_right = book.is_vouched and delivery.check_bodies()
            else:
                is_right = book.is_vouched and (blocks is None or delivery.open_blocks())
            if not is_right:
                edges = np.asarray(mine, np.int64)
                delivery.corrupt = find_corrupt(buffer, edges[:-1], np.diff(edges))
            yield delivery

    def _begin_anew(self, delivery: Delivery) -> None:
        """The position was set before this delivery: old messages are new again."""
        book = self._book(delivery)
        for old in book.others_of(delivery):
            if old.lease.sought != delivery.lease.sought and not old.is_pulled:
                self._lose(old)  # it comes again, in its place
        book.screening.begin_anew()

    def _chosen(self, delivery: Delivery) -> Sequence[int]:
        """Which messages of a delivery are for the user; the others are settled here, or follow their twins."""
        chosen, unwanted, twins = self._book(delivery).screening.screen(delivery)
        if delivery.corrupt:
            chosen = self._refuse_corrupt(delivery, chosen)
        for index in unwanted:
            self._settle(delivery, index, Outcome.ACK, -1, reason="")
        for index in twins:
            delivery.states[index] = TAKEN
        delivery.waiting -= len(twins)
        self._taken += len(twins)
        self.suppressed += delivery.count - len(chosen)
        return chosen

    def _refuse_corrupt(self, delivery: Delivery, chosen: Sequence[int]) -> Sequence[int]:
        """Give back what cannot be read; which of those that were chosen stay.

        The broker looks at it: a record that is right there was damaged on the way, and comes again; any other becomes
        a dead letter. One of an older version that does not look gives up when it is told that no attempt will help.
        """
        if self.options.ordered:
            # What lies before it must be done with first; then it comes again, as the first of its lease.
            first = min(delivery.corrupt)
            for index in range(max(first, 1), delivery.count):
                self._settle(delivery, index, Outcome.RELEASE, -1, reason="")
            chosen = [index for index in chosen if index < first]
        for index, why in delivery.corrupt.items():
            if delivery.states[index] == SETTLED:
                continue
            log.error(
                "a damaged message goes back",
                once_for=(self.options.topic, delivery.lease.queue),
                topic=self.options.topic,
                queue=delivery.lease.queue,
                offset=delivery.offset(index),
                reason=why,
            )
            outcome = Outcome.NACK if self._attempt_of(delivery, index) < CORRUPT_ATTEMPTS else Outcome.REJECT
            self._settle(delivery, index, outcome, -1, reason=f"{RecordCorrupt.code}: {why}")
        return chosen

    def _attempt_of(self, delivery: Delivery, index: int) -> int:
        try:
            return delivery.attempt_of(index)
        except RecordCorrupt:
            return delivery.attempt

    def _refuse(self, delivery: Delivery, chosen: Sequence[int], room: int) -> Sequence[int]:
        """Give back what a full pool does not take; of an ordered group all or nothing."""
        room = max(0, room)
        if len(chosen) <= room or (self.options.ordered and room):
            return chosen
        for index in chosen[room:]:
            self._settle(delivery, index, Outcome.RELEASE, REFUSED_MS, reason="")
        return chosen[:room]

    # --- what goes to handlers --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that may be taken now."""
        prefetch = self._prefetch
        count = prefetch.count
        return count if count and not self.is_paused and (not self.options.ordered or prefetch.has_free) else 0

    @property
    def prefetched(self) -> tuple[int, int]:
        """Messages and bytes that wait."""
        return self._prefetch.count, self._prefetch.bytes

    @property
    def is_quick(self) -> bool:
        """Whether a handler takes so little time that nothing has to go on beside it."""
        return self.pace > 1

    def hands_for(self, count: int) -> int:
        """How many handlers are to begin with so many messages: one for each millisecond of work."""
        return 1 + count // self.pace if self.pace > 1 else count

    def take(self, limit: int) -> list[tuple[Delivery, int]]:
        """The next messages for a user, the highest priority first; none while paused."""
        with self.lock:
            if self.is_paused or not self._prefetch.count:
                return []
            self._has_progress = True
            taken: list[tuple[Delivery, int]] = []
            while not taken and (taken := self._prefetch.take(limit, self.now())):
                self._taken += len(taken)
                taken = [one for one in taken if self._readable_of(one[0], one[1:])]
                if not self._unreadable:
                    return taken
        self._tell_unreadable()
        return taken

    def begin_turn(self, limit: int) -> Turn | None:
        """The next messages for a handler, of one delivery; None while there are none.

        Of an ordered group, the queue that they are of is the handler's until `end_turn`.
        """
        with self.lock:
            if self.is_paused or not self._prefetch.count:
                return None
            self._has_progress = True
            turn = self._next_turn(limit)
            if turn is not None:
                self._turns.append(turn)
                if self.options.ordered:
                    self._queues.add(turn.delivery.place)
            # A handler may take long, and what others were done with before it is reported meanwhile.
            must_report = turn is not None and len(turn.indexes) > 1 and not self.is_report_due
        if self._unreadable:
            self._tell_unreadable()
        if must_report:
            self.on_reports(False)
        return turn

    def _next_turn(self, limit: int) -> Turn | None:
        while (part := self._prefetch.take_part(limit, self.now())) is not None:
            delivery, indexes = part
            self._taken += len(indexes)
            if delivery.is_packed or self._is_typed:
                indexes = self._readable_of(delivery, indexes)
            if indexes:
                return Turn(delivery, indexes)
        return None

    def _readable_of(self, delivery: Delivery, indexes: Sequence[int]) -> Sequence[int]:
        """Those whose bodies expand, and are of the consumer's type. No attempt helps the others: they are rejected."""
        if not (delivery.is_packed or self._is_typed):
            return indexes  # nothing has to be made of what came
        readable = []
        for index in indexes:
            if why := delivery.why_unreadable(index):
                self._settle(delivery, index, Outcome.REJECT, -1, reason=why)
                self._unreadable.append((ReceivedMessage(delivery, index), why))
            else:
                readable.append(index)
        return readable

    def _readable_parts(self, parts: list[Part]) -> list[Part]:
        return [(delivery, found) for delivery, some in parts if (found := self._readable_of(delivery, some))]

    def _tell_unreadable(self) -> None:
        """Say what was rejected, in the log and to the broker."""
        if self._unreadable:
            unreadable, self._unreadable = self._unreadable, []
            for message, why in unreadable:
                facts = facts_of(message)
                log.warning("a body was rejected", once_for=self.options.group, exc_info=None, **facts, reason=why)
            self.on_reports(False)

    def end_turn(self, turn: Turn) -> None:
        """Handlers are done with a turn: of an ordered group, its queue may be worked on again."""
        is_awaited = False
        with self.lock:
            self._turns.remove(turn)
            self._count(turn)
            if turn.done < len(turn.indexes):
                self._put_back(turn.delivery, turn.indexes[turn.done :])
            if self.options.ordered:
                self._queues.discard(turn.delivery.place)
                is_awaited = self._prefetch.count > 0
            is_urgent = self._said >= self.urgent_count or not self._is_busy
            must_report = bool(self._said) and (is_urgent or not self.is_report_due)
        if is_awaited:
            self.on_free()
        if must_report:
            self.on_reports(is_urgent)

    def shorten(self, turn: Turn) -> None:
        """Let what is behind the message that a handler is at wait for another one. Not of an ordered group."""
        with self.lock:
            self._put_back(turn.delivery, turn.cut())

    def look(self) -> None:
        """To be called some milliseconds after the last report: help a handler that does not get on.

        It may be at one message for long. Those before it are reported, and those behind it wait for others.
        """
        with self.lock:
            if not self.options.ordered:
                for turn in self._turns:
                    if turn.is_stuck():
                        self._put_back(turn.delivery, turn.cut())
                        self._is_freed = True
            is_awaited = not self.is_report_due and any(turn.done + 1 < turn.stop for turn in self._turns)
        self._tell_free()
        if is_awaited:
            self.on_reports(False)

    def _put_back(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        behind = [index for index in indexes if delivery.states[index] == TAKEN]
        if behind:
            self._taken -= len(behind)
            self._prefetch.put_back(delivery, behind)

    def _catch_up(self) -> None:
        """Ack what handlers are done with by now."""
        for turn in self._turns:
            self._count(turn)

    def _count(self, turn: Turn) -> None:
        done = turn.done
        indexes, turn.acked = turn.indexes[turn.acked : done], done
        if indexes:
            self._ack_many(turn.delivery, indexes)

    def _ack_many(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        states = delivery.states
        if not is_all(states, TAKEN, indexes):
            indexes = [index for index in indexes if states[index] == TAKEN]
            for index in indexes:
                states[index] = SETTLED
        elif isinstance(indexes, range):
            states[indexes.start : indexes.stop] = bytes((SETTLED,)) * len(indexes)
        count = len(indexes)
        if not count:
            return
        delivery.acks.extend(indexes)
        delivery.left -= count
        self._taken -= count
        self._has_progress = True
        self._said += count
        if not delivery.is_dirty:
            self._books[delivery.broker].add(delivery)

    def _is_free(self, delivery: Delivery) -> bool:
        """Of an ordered group, whether messages of a delivery may be taken now."""
        return delivery.place not in self._queues and self._book(delivery).is_first(delivery)

    def without_expired(self, taken: Sequence[tuple[Delivery, int]]) -> Sequence[tuple[Delivery, int]]:
        """Of what was taken and not touched, what is still ours. Nothing is said of the rest: its leases are over."""
        now = self.now()
        expired = [(delivery, index) for delivery, index in taken if delivery.deadline <= now]
        if not expired:
            return taken
        self.forget(expired)
        return [(delivery, index) for delivery, index in taken if delivery.deadline > now]

    def take_parts(self, limit: int) -> list[Part]:
        """The next messages for a pull, by deliveries; those that were pulled ahead."""
        with self.lock:
            parts = self._prefetch.take_parts(limit, self.now())
            for delivery, chosen in parts:
                self._taken += len(chosen)
                delivery.is_pulled = not delivery.waiting
            parts = self._readable_parts(parts)
        self._tell_unreadable()
        return parts

    def in_hand(self, book: LeaseBook | None = None) -> int:
        """Messages of a broker, or of all, that are here and not settled."""
        with self.lock:
            self._catch_up()
            return sum(delivery.left for delivery in self._held(book))

    def in_hand_of(self, book: LeaseBook) -> tuple[int, int]:
        """Messages of a broker that are here and not settled, and how many of them wait."""
        with self.lock:
            self._catch_up()
            held = book.held.values()
            return sum(delivery.left for delivery in held), sum(delivery.waiting for delivery in held)

    def has_room_for(self, count: int, in_hand: int) -> bool:
        """Whether so many more may be asked for while the last pull's messages, and nothing else, are in hand."""
        options = self.options
        is_alone = self._taken == in_hand and not self._prefetch.count and not self.is_paused
        # Where leases are counted, what is read ahead would be in the way of others, or of ourselves.
        return is_alone and not options.ordered and not options.parallel and in_hand + count <= options.prefetch

    def untake(self, taken: Iterable[tuple[Delivery, int]]) -> None:
        """Give back what was taken and not touched."""
        with self.lock:
            for delivery, index in taken:
                self._settle(delivery, index, Outcome.RELEASE, -1, reason="")
        self.on_reports(True)

    def forget(self, taken: Iterable[tuple[Delivery, int]]) -> None:
        """What was taken went back to the broker by itself."""
        with self.lock:
            self._forget_taken(taken)
        self._tell_free()

    def _forget_taken(self, taken: Iterable[tuple[Delivery, int]]) -> None:
        for delivery, index in taken:
            if delivery.states[index] == TAKEN:
                delivery.states[index] = SETTLED
                delivery.left -= 1
                self._taken -= 1
                self._let_go(delivery, (index,))
                if not delivery.left and not delivery.is_dirty:
                    self._put_down(delivery)

    # --- what is said of them ---------------------------------------------------------------------------------------

    def is_settled(self, delivery: Delivery, index: int) -> bool:
        with self.lock:
            self._catch_up()
            return delivery.states[index] == SETTLED

    def ack(self, delivery: Delivery, index: int) -> None:
        """A message is done: `settle` for what is said most."""
        with self.lock:
            states = delivery.states
            if states[index] != TAKEN:
                return
            states[index] = SETTLED
            delivery.left -= 1
            delivery.acks.append(index)
            self._taken -= 1
            self._has_progress = True
            said = self._said = self._said + 1
            if not delivery.is_dirty:
                self._books[delivery.broker].add(delivery)
            # As `_is_busy`, in place: this is said of every message.
            is_urgent = said >= self.urgent_count or not (self._taken or self._prefetch.count or self.has_company)
            if self.is_report_due and not is_urgent:
                return
        self.on_reports(is_urgent)

    def settle(self, delivery: Delivery, index: int, outcome: Outcome, delay_ms: int = -1, reason: str = "") -> None:
        """Say what became of a message; the first word counts."""
        with self.lock:
            self._catch_up()
            if not self._settle(delivery, index, outcome, delay_ms, reason=reason):
                return
            # With nothing else to do it leaves at once; else it waits for company, but not for long.
            is_urgent = self._said >= self.urgent_count or not self._is_busy
        self.on_reports(is_urgent)

    def settle_many(
        self, delivery: Delivery, indexes: Sequence[int], outcome: Outcome, delay_ms: int = -1, reason: str = ""
    ) -> None:
        """The same of many messages of a delivery, at once."""
        with self.lock:
            if outcome is Outcome.ACK:
                self._ack_many(delivery, indexes)
            else:
                self._catch_up()
                for index in indexes:
                    self._settle(delivery, index, outcome, delay_ms, reason=reason)
            is_urgent = not self.has_company
        if is_urgent or not self.is_report_due:
            self.on_reports(is_urgent)

    @property
    def _is_busy(self) -> bool:
        """Whether more will be said soon."""
        return bool(self._taken or self._prefetch.count or self.has_company)

    def _settle(self, delivery: Delivery, index: int, outcome: Outcome, delay_ms: int, reason: str) -> bool:
        states = delivery.states
        if states[index] == SETTLED:
            return False
        if states[index] == WAITING:
            delivery.waiting -= 1
        else:
            self._taken -= 1
        states[index] = SETTLED
        delivery.left -= 1
        self._has_progress = True
        self._said += 1
        self._book(delivery).add(delivery)  # before a drop: what has something to report is still in hand
        if outcome is Outcome.ACK:
            delivery.acks.append(index)
        else:
            delivery.others.append((index, outcome, delay_ms, reason))
            if self.options.ordered and outcome is Outcome.NACK:
                delivery.failed.add(index)
                self._drop(delivery)  # the broker takes back what lies behind it, in order
                if delivery.is_pulled:
                    self._forget_taken((delivery, behind) for behind in range(index + 1, delivery.count))
        return True

    def _drop(self, delivery: Delivery) -> None:
        """Forget what waits of a delivery: the broker hands it out again. A twin takes its place."""
        self._let_go(delivery, self._prefetch.drop(delivery))
        if not delivery.left and not delivery.is_dirty:
            self._put_down(delivery)

    def _lose(self, delivery: Delivery) -> None:
        """A lease is somebody else's, or will be: nothing of it is handled any more that was not begun."""
        delivery.deadline = min(delivery.deadline, self.now())
        self._drop(delivery)

    def _put_down(self, delivery: Delivery) -> None:
        """A lease is not in hand any more; another one of its queue may have waited for that."""
        book = self._book(delivery)
        book.held.pop(delivery.key, None)
        if self.options.ordered:
            self._is_freed |= any(True for _ in book.others_of(delivery))

    def _let_go(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        """Messages are not in hand any more, and nothing was said of them."""
        for twin, index in self._book(delivery).screening.drop(delivery, indexes):
            twin.states[index] = WAITING
            twin.waiting += 1
            self._taken -= 1
            self._prefetch.put(twin, [index])

    # --- reports ----------------------------------------------------------------------------------------------------

    @property
    def has_reports(self) -> bool:
        """Whether there is something to tell a broker."""
        return any(book.has_reports for book in self._books)

    def reports(self, book: LeaseBook) -> list[Settle]:
        """What to tell a broker now."""
        with self.lock:
            if self._turns:
                self._catch_up()
            self._said = 0
            frames = book.plain_report(self.member)
            if frames is None:
                frames = self._gathered(book)
        if self._is_freed:
            self._tell_free()
        return frames

    def _gathered(self, book: LeaseBook) -> list[Settle]:
        settlements = book.take_unsent()
        while dirty := book.take_dirty():
            for delivery in dirty:
                book.finished += len(delivery.acks) + sum(said[1] != Outcome.RELEASE for said in delivery.others)
                for twin, index, outcome, delay_ms, reason in book.screening.conclude(delivery):
                    self._settle(twin, index, outcome, delay_ms, reason=reason)
                settlements += settlements_of(delivery)
                if not delivery.left:
                    self._put_down(delivery)
        return book.frames(settlements, self.member) if settlements else []

    def _tell_free(self) -> None:
        """Call those who wait for what had to wait for an earlier lease."""
        if self._is_freed:
            self._is_freed = False
            self.on_free()

    def not_sent(self, book: LeaseBook, frames: Sequence[Settle]) -> None:
        """There was no connection for them: they go with the next ones."""
        with self.lock:
            book.not_sent(frames)

    # --- the subscription -------------------------------------------------------------------------------------------

    def told(self, book: LeaseBook, link: NamedLink, frames: Sequence[Settle]) -> bool:
        """A broker was told over a link; returns whether it is to be asked for a sign that this arrived."""
        with self.lock:
            return book.told.add(link, frames, self.now())

    def take_lost(self, book: LeaseBook, link: NamedLink) -> list[Settle]:
        """What a broker was told over links before this one, and may not have heard."""
        with self.lock:
            return book.told.take_lost(link)

    def holding(self, book: LeaseBook, *, with_pulled: bool = False) -> list[LeaseRef]:
        """The leases of a broker that we still have something of, or something to say about."""
        with self.lock:
            self._catch_up()
            return book.references(with_pulled=with_pulled)

    def subscribed(self, book: LeaseBook, reply: SubscribeReply) -> None:
        """We are subscribed, again: what was lost meanwhile is not handed to anybody here any more."""
        topic = self.options.topic
        lost = {(ref.topic, ref.queue, ref.epoch, ref.lease) for ref in reply.lost}
        with self.lock:
            for delivery in [*book.held.values()]:
                lease = delivery.lease
                if (lease.topic or topic, lease.queue, lease.epoch, lease.lease) in lost:
                    self._lose(delivery)
        self._tell_free()

    def sought(self, book: LeaseBook) -> None:
        """The position was set: what is here is not what comes next."""
        with self.lock:
            for delivery in [*book.held.values()]:
                if not delivery.is_pulled:
                    self._lose(delivery)
            book.screening.begin_anew()

    def release_waiting(self, book: LeaseBook | None = None, queues: Container[int] | None = None) -> None:
        """Give all back that nobody has touched, to one broker or to all; of some queues, or of all."""
        with self.lock:
            for delivery in self._held(book):
                if not delivery.is_pulled and (queues is None or delivery.lease.queue in queues):
                    self._release(delivery)
        self.on_reports(True)

    def release_last(self, count: int) -> None:
        """Give so many back of those that would be handed out last: others may have more time for them."""
        with self.lock:
            for delivery, indexes in self._prefetch.give_back(count):
                self._give_back(delivery, indexes)
        self.on_reports(True)

    def release_all(self) -> None:
        """Give everything back that is not settled."""
        with self.lock:
            self._catch_up()
            for delivery in self._held():
                self._release(delivery)
                for index, state in enumerate(delivery.states):
                    if state == TAKEN:
                        self._settle(delivery, index, Outcome.RELEASE, -1, reason="")

    def start_anew(self) -> None:
        """A thread was stopped in the middle of anything here: see `LeaseBook.start_anew`."""
        with self.lock:
            self._prefetch, self._taken = self._prefetch.emptied(), sum([book.start_anew() for book in self._books])

    def _held(self, book: LeaseBook | None = None) -> list[Delivery]:
        """What is in hand, of one broker or of all."""
        return [delivery for one in ([book] if book else self._books) for delivery in one.held.values()]

    def _release(self, delivery: Delivery) -> None:
        self._give_back(delivery, self._prefetch.drop(delivery))

    def _give_back(self, delivery: Delivery, gone: Sequence[int]) -> None:
        if gone:
            delivery.others.extend((index, Outcome.RELEASE, -1, "") for index in gone)
            self._book(delivery).add(delivery)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[LeaseBook, list[Delivery]]]:
        """To be called four times per lease: give back what is not worked on; which leases to extend, by brokers."""
        with self.lock:
            self._catch_up()
            now = self.now()
            has_progress, self._has_progress = self._has_progress and not self.is_paused, False
            kept = [
                (book, [one for one in [*book.held.values()] if self._is_extended(one, now, has_progress)])
                for book in self._books
            ]
            must_report = any(book.dirty for book in self._books)
        self._tell_free()
        if must_report:
            self.on_reports(True)
        return kept

    def _is_extended(self, delivery: Delivery, now: float, has_progress: bool) -> bool:
        """Whether a lease is to be extended now. One that is not needed is given back, one that is over is dropped."""
        left, lease = delivery.deadline - now, self.options.lease
        if left <= 0:
            self._drop(delivery)
            if left < -lease:
                self._forget(delivery)
        elif left <= lease / 2 and delivery.left and not delivery.is_pulled:
            is_handled = self.is_running and delivery.left > delivery.waiting
            if is_handled or (delivery.waiting and has_progress):
                return True
            self._release(delivery)
        return False

    def extended(self, deliveries: Iterable[Delivery], lost: Container[int], since: float) -> None:
        """A broker has extended leases, but for those that are lost, by their index.

        Parameters:
            since: when it was asked to.
        """
        with self.lock:
            for at, delivery in enumerate(deliveries):
                if at in lost:
                    self._lose(delivery)
                else:
                    delivery.deadline = max(delivery.deadline, since + self.options.lease)
        self._tell_free()

    def _forget(self, delivery: Delivery) -> None:
        """A lease that was over long ago is nothing to remember, whatever its messages' user still says of them."""
        taken = [index for index, state in enumerate(delivery.states) if state == TAKEN]
        self._let_go(delivery, taken)
        self._put_down(delivery)
