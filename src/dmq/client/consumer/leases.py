"""The leases of one broker that a consumer has in hand, and what is still to be told of them. Pure.

What is said of one lease is gathered into one settlement for each outcome, and those into as few frames as they fit: a
consumer that acks message by message sends little more than one that acks by the batch.

What always holds: everything that was said is reported, and again over another link if it may not have arrived; what
waits to be reported is bounded by what is in hand. The lock of the consumer's core guards it.

Duplicates: which messages of a delivery are for the user, so that none is handled twice (R-07, D-10). Pure.

A message may come twice with one id: its producer moved to another address and both had stored it, or an ack got lost
with its connection. The window of what was handled is keyed by message id and attempt, so that a redelivery after a
failure is not a duplicate. Ids of one producer are numbers that follow each other, and are kept as intervals: a
consumer that keeps up with its producers needs a handful of them for millions of messages.

Not for the user are messages whose tag only shares its hash with a wanted one, and duplicates: messages that were acked
before, and twins of messages that are in hand. A twin gets no handler of its own: it shares the outcome of the first.

What always holds: only acked messages count as done; at most `intervals_max` intervals are kept, and the oldest numbers
of the producer heard of least recently go first; a message is in hand from when it was chosen until it is settled,
dropped or forgotten; every twin is settled or chosen in the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.client.connection.link import NamedLink
from dmq.client.consumer.delivery import SETTLED, TAKEN, WAITING, Delivery, Holder, LeaseKey, is_one_run, plain_delivery
from dmq.client.consumer.options import ConsumerOptions
from dmq.errors import DMQError
from dmq.protocol import Buffer, Frame, decode_response, error_from_status
from dmq.protocol.consume import Lease, LeaseRef, Outcome, Settle, Settlement, SettleReply
from dmq.protocol.header import TEXT_MAX
from dmq.protocol.status import ErrorHeader

__all__ = [
    "SETTLEMENTS_MAX",
    "TOLD_MAX",
    "DuplicateWindow",
    "Intervals",
    "LeaseBook",
    "Told",
    "check_extended",
    "extension",
    "partly_moved",
    "refused_of",
    "settlements_of",
]

# In one frame; far below what a header may hold, so that the broker gets to others in between.
SETTLEMENTS_MAX: Final = 1000
TOLD_MAX: Final = 20_000
_SIGN_FRAMES: Final = 64
_ACK: Final = Outcome.ACK


def settlements_of(delivery: Delivery) -> Iterable[Settlement]:
    """What a delivery has to report, one settlement for each outcome; it has nothing more then."""
    lease = delivery.lease
    if delivery.acks:
        acks, delivery.acks = delivery.acks, []
        yield Settlement(
            lease.queue, lease.epoch, lease.lease, Outcome.ACK, ranges=delivery.ranges(acks), topic=lease.topic
        )
    if delivery.others:
        others, delivery.others = delivery.others, []
        alike: dict[tuple[int, int, str], list[int]] = {}
        for index, outcome, delay_ms, reason in others:
            alike.setdefault((outcome, delay_ms, shortened(reason)), []).append(index)
        for (outcome, delay_ms, reason), indexes in alike.items():
            indexes.sort()
            yield Settlement(
                lease.queue,
                lease.epoch,
                lease.lease,
                Outcome(outcome),
                ranges=delivery.ranges(indexes),
                delay_ms=delay_ms,
                reason=reason,
                topic=lease.topic,
            )


def shortened(reason: str) -> str:
    """A reason as long as the protocol takes it, and without what cannot be encoded."""
    text = reason.encode("utf-8", "replace").decode()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


class Told:
    """Settlements that a broker was told, until an answer shows that they arrived: a link that breaks loses what is on
    its way. Told again, they change nothing the second time.

    What always holds: there are at most `TOLD_MAX` settlements; of more, the oldest are held to have arrived.
    """

    __slots__ = ("_count", "_frames", "_link", "_lost", "_unsigned")

    def __init__(self) -> None:
        self._frames: deque[tuple[float, Settle]] = deque()
        self._count = 0  # settlements in them
        self._link: NamedLink | None = None  # over which they were told
        self._lost: list[Settle] = []  # those of the links before
        self._unsigned = 0  # how many were told since the last time that the broker was asked for a sign

    def add(self, link: NamedLink, frames: Sequence[Settle], now: float) -> bool:
        """They were told over a link; returns whether the broker is to be asked for a sign that they arrived."""
        if link is not self._link:
            self._move_to(link)
        self._forget_arrived()
        for frame in frames:
            self._frames.append((now, frame))
            self._count += len(frame.settlements)
        while self._count > TOLD_MAX:
            self._forget_first()
        self._unsigned += len(frames)
        if self._unsigned < _SIGN_FRAMES:
            return False
        self._unsigned = 0
        return True

    def take_lost(self, link: NamedLink) -> list[Settle]:
        """What was told over links before this one, and may not have arrived."""
        if link is not self._link:
            self._move_to(link)
        lost, self._lost = self._lost, []
        return lost

    def _move_to(self, link: NamedLink) -> None:
        self._forget_arrived()
        self._lost += (frame for _, frame in self._frames)
        self._frames.clear()
        self._count, self._link, self._unsigned = 0, link, 0

    def _forget_arrived(self) -> None:
        if self._link is not None:
            since = self._link.answered_since
            while self._frames and self._frames[0][0] < since:
                self._forget_first()

    def _forget_first(self) -> None:
        self._count -= len(self._frames.popleft()[1].settlements)


class LeaseBook:
    """What a consumer has of one broker: deliveries in hand, by lease, and those that have something to report.

    Nearly every push is one lease of new messages that are all for the user, and nearly every report says that they are
    done. Both have a straight way, which chooses and never decides: what is in hand and what is reported is the same.

    Parameters:
        broker: its number within the consumer.

    Attributes:
        is_straight: it may be taken.
    """

    __slots__ = (
        "_options",
        "_sought",
        "_unsent",
        "broker",
        "dirty",
        "finished",
        "held",
        "is_straight",
        "is_vouched",
        "screening",
        "shard",
        "told",
    )

    def __init__(self, options: ConsumerOptions, broker: int) -> None:
        self._options = options
        self.is_straight = not options.ordered and options.type is None and options.tag_set is None
        self.broker = broker
        self.shard = 0  # the number of the broker's shard
        self._sought: dict[tuple[str, int], int] = {}
        self._unsent: list[Settlement] = []
        self.held: dict[LeaseKey, Delivery] = {}
        self.dirty: list[Delivery] = []
        self.is_vouched = False  # frames have a checksum, which stands for those of their records
        self.finished = 0  # how many messages were reported and not yet counted
        self.screening = Screening(options.tag_set)
        self.told = Told()

    def start_anew(self) -> int:
        """Give back what waits, and forget what was done: a thread was stopped in the middle of anything here.

        What was about to be handed out comes again when its lease is over, and is then no duplicate.

        Returns:
            How many messages are handed out.
        """
        taken, self.screening = 0, Screening(self._options.tag_set)
        for delivery in [*self.held.values(), *self.dirty]:
            states, delivery.waiting = delivery.states, 0
            for index in [index for index, state in enumerate(states) if state == WAITING]:
                states[index] = SETTLED
                delivery.others.append((index, Outcome.RELEASE, -1, ""))
            delivery.left = states.count(TAKEN)
            taken += delivery.left
            delivery.is_dirty = delivery in self.dirty
            if delivery.others:
                self.add(delivery)
        return taken

    # --- the straight way -------------------------------------------------------------------------------------------

    def take_plain(self, core: Holder, lease: Lease, body: Buffer, begun: float) -> Delivery | None:
        """Take the only lease of a push in hand, as nearly all are: some new messages of one producer, in order, all
        of them for the user as they came. None, and nothing is done, if it is any other: the general way sees why.

        Parameters:
            begun: from when on the lease runs.

        Raises:
            InvalidRequest: the frame does not add up.
        """
        if (
            not self.is_straight
            or not self.is_vouched
            or lease.topic
            or self._sought.get(("", lease.queue)) != lease.sought
            or not is_one_run(lease)
        ):
            return None
        delivery = plain_delivery(core, self.broker, lease, body)
        if delivery is None or not self.screening.enter(lease.ids[0], lease.attempt):
            return None
        delivery.shard = self.shard
        delivery.deadline = begun + lease.lease_ms / 1000
        self.held[self.broker, "", lease.queue, lease.epoch, lease.lease] = delivery
        return delivery

    def plain_report(self, member: str) -> list[Settle] | None:
        """The report if all there is to say is that the messages of one lease are done, which is then put down. None,
        and nothing is done, if it is anything else."""
        if len(self.dirty) != 1 or self._unsent or not self.is_straight:
            return None
        delivery = self.dirty[0]
        lease, count = delivery.lease, delivery.count
        if (
            delivery.left
            or delivery.others
            or len(delivery.acks) != count
            or not is_one_run(lease)
            or not self.screening.leave(lease.ids[0], lease.attempt)
        ):
            return None
        self.dirty = []
        delivery.is_dirty = False
        delivery.acks = []
        self.held.pop((self.broker, lease.topic, lease.queue, lease.epoch, lease.lease), None)
        self.finished += count
        done = Settlement(
            lease.queue, lease.epoch, lease.lease, _ACK, ranges=[(lease.first_offset, count)], topic=lease.topic
        )
        return [Settle(self._options.topic, self._options.group, [done], member)]

    # --- the general way --------------------------------------------------------------------------------------------

    @property
    def has_reports(self) -> bool:
        """Whether there is something to tell the broker."""
        return bool(self._unsent or self.dirty)

    def add(self, delivery: Delivery) -> None:
        """A delivery has more to report."""
        if not delivery.is_dirty:
            delivery.is_dirty = True
            self.dirty.append(delivery)

    def take_dirty(self) -> list[Delivery]:
        """The deliveries that have something to report; to be turned into settlements."""
        dirty, self.dirty = self.dirty, []
        for delivery in dirty:
            delivery.is_dirty = False
        return dirty

    def take_unsent(self) -> list[Settlement]:
        """What was to be reported before, and found no connection."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def not_sent(self, frames: Iterable[Settle]) -> None:
        """There was no connection for them: they go with the next ones."""
        self._unsent = [settlement for frame in frames for settlement in frame.settlements] + self._unsent

    def frames(self, settlements: list[Settlement], member: str) -> list[Settle]:
        """The headers that report them."""
        options = self._options
        return [
            Settle(options.topic, options.group, settlements[at : at + SETTLEMENTS_MAX], member)
            for at in range(0, len(settlements), SETTLEMENTS_MAX)
        ]

    def is_moved(self, lease: Lease) -> bool:
        """Whether the position of a lease's queue was set by hand since the last lease of it."""
        place = (lease.topic, lease.queue)
        if lease.sought == self._sought.setdefault(place, lease.sought):
            return False
        self._sought[place] = lease.sought
        return True

    def others_of(self, delivery: Delivery) -> Iterable[Delivery]:
        """Deliveries of the same queue that are in hand, the oldest first; itself among them if it is."""
        topic, queue = delivery.lease.topic, delivery.lease.queue
        return (held for held in [*self.held.values()] if (held.lease.topic, held.lease.queue) == (topic, queue))

    def is_first(self, delivery: Delivery) -> bool:
        """Whether no earlier lease of its queue is in hand."""
        return next(iter(self.others_of(delivery)), delivery) is delivery

    def references(self, *, with_pulled: bool = False) -> list[LeaseRef]:
        """The leases we still have something of, or something to say about."""
        topic, held = self._options.topic, self.held.values()
        return [
            LeaseRef(lease.topic or topic, lease.queue, lease.epoch, lease.lease)
            for lease in (delivery.lease for delivery in held if with_pulled or not delivery.is_pulled)
        ]


def extension(lease: Lease, seconds: float) -> Settlement:
    """The wish to keep a lease for so long from now."""
    delay_ms = max(1, round(seconds * 1000))
    return Settlement(lease.queue, lease.epoch, lease.lease, Outcome.EXTEND, delay_ms=delay_ms, topic=lease.topic)


def refused_of(answer: Frame | DMQError) -> set[int] | None:
    """The settlements that a broker refused, by their index; None if it did not answer."""
    if isinstance(answer, DMQError):
        return None
    try:
        reply: SettleReply = decode_response(answer)
    except DMQError:
        return None
    return {refusal.index for refusal in reply.refused}


def partly_moved(failed: Sequence[DMQError], brokers: int) -> DMQError:
    """What a seek raises that some of the brokers did not carry out."""
    error = failed[0]
    if brokers == 1:
        return error
    moved = f"the group was moved in {brokers - len(failed)} of {brokers} shards: seek again to move it in all"
    return type(error)(f"{error.message}; {moved}", **error.detail)


def check_extended(reply: SettleReply, delivery: Delivery, deadline: float) -> None:
    """Take note of an extension.

    Raises:
        LeaseLost: it came too late.
    """
    for refusal in reply.refused:
        raise error_from_status(refusal.status, ErrorHeader(refusal.message))
    delivery.deadline = max(delivery.deadline, deadline)


INTERVALS_MAX: Final = 10_000
_EMPTY_MAX: Final = 64  # producers that are remembered though nothing of theirs is in


class Intervals:
    """A set of numbers, as sorted intervals that do not touch.

    Attributes:
        starts, stops: where each begins and ends.
    """

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def __len__(self) -> int:
        """How many intervals there are."""
        return len(self.starts)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop)."""
        starts, stops = self.starts, self.stops
        if not stops or stops[-1] < start:  # the usual case: later ones
            starts.append(start)
            stops.append(stop)
            return
        low = bisect_left(stops, start)
        high = bisect_right(starts, stop)
        if low < high:
            start, stop = min(start, starts[low]), max(stop, stops[high - 1])
        starts[low:high] = [start]
        stops[low:high] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out, as far as it is in."""
        starts, stops = self.starts, self.stops
        if starts and starts[0] == start and stops[0] >= stop:  # the usual case: the oldest ones
            if stops[0] == stop:
                del starts[0], stops[0]
            else:
                starts[0] = stop
            return
        low = bisect_right(stops, start)
        high = bisect_left(starts, stop)
        if low >= high:
            return
        left, right = starts[low], stops[high - 1]
        kept = [(left, start)] if left < start else []
        if right > stop:
            kept.append((stop, right))
        starts[low:high] = [first for first, _ in kept]
        stops[low:high] = [last for _, last in kept]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any number of [start, stop) is in."""
        at = bisect_right(self.stops, start)
        return at < len(self.starts) and self.starts[at] < stop

    def drop_first(self) -> None:
        """Forget the lowest interval."""
        del self.starts[0], self.stops[0]


class DuplicateWindow:
    """The messages that were handled, or are in hand."""

    def __init__(self, intervals_max: int = INTERVALS_MAX) -> None:
        self._intervals_max = intervals_max
        self._sets: OrderedDict[tuple[int, int], Intervals] = OrderedDict()  # by producer and attempt
        self._count = 0

    def __len__(self) -> int:
        """How many intervals are kept."""
        return self._count

    def add(self, producer: int, attempt: int, start: int, stop: int) -> None:
        """The messages [start, stop) of a producer are done."""
        key = (producer, attempt)
        known = self._sets.get(key)
        if known is None:
            known = self._sets[key] = Intervals()
        else:
            self._sets.move_to_end(key)
            if known.stops and known.stops[-1] == start:  # the usual case: the next ones
                known.stops[-1] = stop
                return
        before = len(known.starts)
        known.add(start, stop)
        self._count += len(known.starts) - before
        while self._count > self._intervals_max:
            oldest, numbers = next(iter(self._sets.items()))
            if numbers:
                numbers.drop_first()
                self._count -= 1
            if not numbers:
                del self._sets[oldest]

    def remove(self, producer: int, attempt: int, start: int, stop: int) -> None:
        """They are not, after all."""
        key = (producer, attempt)
        known = self._sets.get(key)
        if known is not None:
            before = len(known.starts)
            known.remove(start, stop)
            self._count += len(known.starts) - before
            if not known.starts and len(self._sets) > _EMPTY_MAX:  # the next ones of this producer come soon
                del self._sets[key]

    def overlaps(self, producer: int, attempt: int, start: int, stop: int) -> bool:
        """Whether any of them is done."""
        known = self._sets.get((producer, attempt))
        if known is None or not known.stops or known.stops[-1] <= start:  # the usual case: later ones
            return False
        return known.overlaps(start, stop)

    def clear(self) -> None:
        """Forget everything."""
        self._sets.clear()
        self._count = 0


_NO_LIMIT: Final = 1 << 62

_Run: TypeAlias = tuple[int, int, int, int]  # producer, attempt, first sequence, one past the last
_Place: TypeAlias = tuple[Delivery, int]


class Screened(NamedTuple):
    """What came out: messages for the user, those to ack in silence, and those that wait for their twins."""

    chosen: Sequence[int]
    unwanted: Sequence[int] = ()
    twins: Sequence[int] = ()


class Screening:
    """Which messages of one broker are for the user.

    Parameters:
        tags: the tags that are wanted; None for all.
    """

    def __init__(self, tags: frozenset[str | None] | None) -> None:
        self._tags = tags
        self._done = DuplicateWindow()
        self._in_hand = DuplicateWindow(_NO_LIMIT)  # bounded by what is out
        self._twins: dict[tuple[int, int, int], list[_Place]] = {}

    def screen(self, delivery: Delivery) -> Screened:
        """Look through a delivery that came, but for what cannot be read. What is chosen is in hand then."""
        chosen: Sequence[int] = range(delivery.count)
        strangers: list[int] = []
        if delivery.corrupt:
            chosen = [index for index in chosen if index not in delivery.corrupt]
        if self._tags is not None:
            tags, readable = self._tags, chosen
            chosen = [index for index in readable if delivery.record(index).tag in tags]
            if len(chosen) != len(readable):
                wanted = set(chosen)
                strangers = [index for index in readable if index not in wanted]
        added: list[_Run] = []
        for run in delivery.id_runs(chosen):
            if self._done.overlaps(*run) or self._in_hand.overlaps(*run):
                for earlier in added:
                    self._in_hand.remove(*earlier)
                return self._one_by_one(delivery, chosen, strangers)
            self._in_hand.add(*run)
            added.append(run)
        return Screened(chosen, strangers)

    def enter(self, ids: tuple[int, int, int], attempt: int) -> bool:
        """Take a run of ids in hand as `screen` does, if nothing of it was done or is in hand; else nothing is done."""
        count, producer, first = ids
        run = producer, attempt, first, first + count
        if self._done.overlaps(*run) or self._in_hand.overlaps(*run):
            return False
        self._in_hand.add(*run)
        return True

    def leave(self, ids: tuple[int, int, int], attempt: int) -> bool:
        """A run of ids is done, as `conclude` says it; False, and nothing is done, if any message has a twin."""
        if self._twins:
            return False
        count, producer, first = ids
        run = producer, attempt, first, first + count
        self._in_hand.remove(*run)
        self._done.add(*run)
        return True

    def _one_by_one(self, delivery: Delivery, indexes: Sequence[int], unwanted: list[int]) -> Screened:
        chosen: list[int] = []
        twins: list[int] = []
        for index in indexes:
            place = chosen
            for run in delivery.id_runs((index,)):
                if self._done.overlaps(*run):
                    place = unwanted
                elif self._in_hand.overlaps(*run):
                    self._twins.setdefault(run[:3], []).append((delivery, index))
                    place = twins
                else:
                    self._in_hand.add(*run)
            place.append(index)
        return Screened(chosen, unwanted, twins)

    def conclude(self, delivery: Delivery) -> Iterable[tuple[Delivery, int, Outcome, int, str]]:
        """Messages of a delivery are settled: done, or they may come again. Yields what to say of their twins."""
        delivery.acks.sort()
        for run in delivery.id_runs(delivery.acks):
            self._in_hand.remove(*run)
            self._done.add(*run)
            for twin in self._twins_of(run):
                yield *twin, Outcome.ACK, -1, ""
        for index, outcome, delay_ms, reason in [*delivery.others]:
            for run in delivery.id_runs((index,)):
                self._in_hand.remove(*run)
                for twin in self._twins_of(run):
                    # Also a reject: the first one's lease may be lost, and then the word about the twin is what counts.
                    # Should both count, they are one dead letter, of one id, group and attempt.
                    yield *twin, Outcome(outcome), delay_ms, reason

    def _twins_of(self, run: _Run) -> Iterable[_Place]:
        if self._twins:
            producer, attempt, start, stop = run
            for sequence in range(start, stop):
                yield from self._twins.pop((producer, attempt, sequence), ())

    def drop(self, delivery: Delivery, indexes: Sequence[int]) -> list[_Place]:
        """Messages are not in hand any more; twins that take their place."""
        heirs: list[_Place] = []
        for run in delivery.id_runs(indexes):
            self._in_hand.remove(*run)
            if not self._twins:
                continue
            for sequence in range(run[2], run[3]):
                waiting = self._twins.pop((run[0], run[1], sequence), [])
                while waiting:
                    twin, index = waiting.pop(0)
                    if twin.states[index] == TAKEN:
                        heirs.append((twin, index))
                        self._in_hand.add(run[0], run[1], sequence, sequence + 1)
                        if waiting:
                            self._twins[run[0], run[1], sequence] = waiting
                        break
        return heirs

    def begin_anew(self) -> None:
        """What was done or is in hand may be wanted again."""
        self._done.clear()
        self._in_hand.clear()
        self._twins.clear()
