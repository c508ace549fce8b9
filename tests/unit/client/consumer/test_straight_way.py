"""The straight way of what is pushed and what is reported: nobody can tell it from the general way.

Two cores hear the same of one broker, one of them without its straight way, and their handlers do the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.message import OpenedMessage, ReceivedMessage, messages_of
from dmq.client.consumer.prefetch import Turn
from dmq.model import Message
from dmq.protocol import Buffer
from dmq.protocol.consume import Lease
from dmq.records.columns import open_records
from dmq.records.layout import BODY_AT
from dmq.testing import FakeClock
from tests.sampling import SEED, sample_size
from tests.unit.client.deliveries import book, core, frame

STEPS = 60
RETRIES = "%RETRY%billing-1"
ENDS = ("done", "done", "done", "done", "nack", "reject", "stop")


class Heard:
    """A core, and what became of all that it was told."""

    def __init__(self, options: dict[str, Any], *, is_straight: bool) -> None:
        self.clock = FakeClock()
        self.core = core(self.clock, **options)
        self.book = book(self.core)
        self.book.is_vouched = True
        self.book.is_straight &= is_straight
        self.urgent: list[bool] = []
        self.core.on_reports = self.urgent.append
        self.taken: list[tuple[Delivery, int]] = []
        self.seen: list[Any] = []

    def pushed(self, leases: Sequence[Lease], body: Buffer) -> None:
        self.seen.append(self.core.received(self.book, leases, body, is_for_handlers=True))

    def told(self, is_urgent: bool) -> None:
        """There is something to report: as the part of a consumer that reports, once in a while."""
        self.urgent.append(is_urgent)
        self.core.is_report_due |= not is_urgent

    def pushed_to_reader(self, leases: Sequence[Lease], body: Buffer, limit: int, *, reads: bool) -> Turn | None:
        """The same to a thread that takes a turn at once.

        Parameters:
            reads: it says before how many messages it takes, as one that reads by itself.
        """
        self.core.reader_limit = limit if reads else 0
        self.core.received(self.book, leases, body, is_for_handlers=True)
        turn, self.core.begun, self.core.reader_limit = self.core.begun, None, 0
        return turn or self.core.begin_turn(limit)

    def handle(self, limit: int, ends: Sequence[str]) -> None:
        """A turn of a handler, which says of each message how it ends."""
        turn = self.core.begin_turn(limit)
        if turn is not None:
            self.work(turn, ends)

    def work(self, turn: Turn, ends: Sequence[str]) -> None:
        for message in messages_of(turn.delivery, turn.indexes, ReceivedMessage, OpenedMessage):
            self.seen.append((message.body, message.key, message.id, message.attempt, message.offset, message.queue))
            match ends[turn.done % len(ends)]:
                case "nack":
                    message.nack()
                case "reject":
                    message.reject("no")
                case "stop":
                    break
            turn.done += 1
        self.core.end_turn(turn)

    def take(self, limit: int) -> None:
        self.taken += self.core.take(limit)

    def ack(self, at: int) -> None:
        if self.taken:
            ReceivedMessage(*self.taken.pop(at % len(self.taken))).ack()

    def report(self) -> None:
        self.seen.append(self.core.reports(self.book))

    @property
    def state(self) -> tuple[Any, ...]:
        made, screening = self.core, self.book.screening
        held = {
            key: (bytes(one.states), one.left, one.waiting, one.deadline, [*one.acks], [*one.others], one.is_dirty)
            for key, one in self.book.held.items()
        }
        windows = [
            {who: (numbers.starts, numbers.stops) for who, numbers in window._sets.items()}
            for window in (screening._done, screening._in_hand)
        ]
        counts = made.prefetched, made.waiting, made.in_hand(), made.suppressed, made._said, self.book.finished
        return self.seen, self.urgent, held, windows, len(screening._done), counts, made.holding(self.book)


class Broker:
    """What a broker may push: mostly the next messages of a producer, and now and then anything else."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lease = self._offset = self._sought = 0
        self._sent = {7: 0, 8: 1000}

    def push(self) -> tuple[list[Lease], Buffer]:
        rng = self._rng
        self._lease += 1
        count = rng.choice((1, 1, 1, 2, 3, 20))
        priority = rng.choice((4, 4, 4, 9))
        messages = [
            Message(rng.randbytes(rng.choice((0, 9, 200, 5000))), rng.choice((None, "k")), priority=priority)
            for _ in range(count)
        ]
        if rng.random() < 0.1:
            messages[-1] = Message(b"x", priority=0)
        producer = rng.choice((7, 7, 8))
        first = self._sent[producer]
        ids = [(count, producer, first)]
        match rng.randrange(12):
            case 0:
                ids = [(count, producer, max(0, first - rng.randrange(5)))]  # some of them came before
            case 1 if count > 1:
                ids = [(1, 7, first), (count - 1, 8, first + 50)]
            case 2:
                ids = []
            case _:
                self._sent[producer] += count
        if rng.random() < 0.03:
            self._sought += 1
        attempt = rng.choice((1, 1, 1, 2))
        (lease,), body = frame(self._lease, messages, first=self._offset, attempt=attempt, ids=ids, sought=self._sought)
        self._offset += count
        if rng.random() < 0.1:
            lease = Lease(
                lease.queue, 1, lease.lease, lease.first_offset, lease.end_offset, count, attempt, 30_000, RETRIES, ids
            )
        if rng.random() < 0.05 and messages[0].body:
            damaged = bytearray(body)
            damaged[4 * count + BODY_AT] ^= 1
            body = bytes(damaged)
        return [lease], body


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"prefetch": 2}], ids=["plain", "ordered", "few"])
def test_both_ways_have_the_same_in_hand_and_report_the_same(options: dict[str, Any]) -> None:
    for seed in range(SEED, SEED + sample_size(share=60, whole=3000)):
        rng = random.Random(seed)
        both = [Heard(options, is_straight=is_straight) for is_straight in (True, False)]
        broker = Broker(rng)
        for step in range(STEPS):
            limit, at, ends = rng.choice((1, 5, 100)), rng.randrange(100), rng.choices(ENDS, k=5)
            match rng.randrange(9):
                case 0 | 1 | 2:
                    leases, body = broker.push()
                    for one in both:
                        one.pushed(leases, body)
                case 3 | 4:
                    for one in both:
                        one.handle(limit, ends)
                case 5:
                    for one in both:
                        one.take(limit)
                case 6:
                    for one in both:
                        one.ack(at)
                case 7:
                    for one in both:
                        one.report()
                case _ if at < 10:
                    for one in both:
                        one.clock.advance(12)
                        one.core.tick()
            assert both[0].state == both[1].state, f"seed {seed}, step {step}"


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"prefetch": 2}], ids=["plain", "ordered", "few"])
def test_a_thread_that_reads_and_handles_leaves_the_same_as_one_that_takes_its_turn(options: dict[str, Any]) -> None:
    for seed in range(SEED, SEED + sample_size(share=30, whole=3000)):
        rng = random.Random(seed)
        both = [Heard(options, is_straight=True) for _ in range(2)]
        for one in both:
            one.core.on_reports = one.told
        broker = Broker(rng)
        for step in range(STEPS):
            limit, at, ends = rng.choice((1, 5, 100)), rng.randrange(100), rng.choices(ENDS, k=5)
            match rng.randrange(8):
                case 0 | 1 | 2 | 3:
                    leases, body = broker.push()
                    reader, other = (
                        one.pushed_to_reader(leases, body, limit, reads=reads)
                        for one, reads in zip(both, (True, False), strict=True)
                    )
                    assert (reader is None) == (other is None)
                    if reader is not None and other is not None:
                        assert [*reader.indexes] == [*other.indexes]
                        both[0].work(reader, ends)
                        both[1].work(other, ends)
                case 4:
                    leases, body = broker.push()
                    for one in both:
                        one.pushed(leases, body)
                case 5:
                    for one in both:
                        one.core.is_paused = at % 3 == 0
                case 6:
                    for one in both:
                        one.core.is_report_due = False
                        one.report()
                case _ if at < 10:
                    for one in both:
                        one.clock.advance(12)
                        one.core.tick()
            assert both[0].state == both[1].state, f"seed {seed}, step {step}"


def test_what_comes_behind_the_message_that_a_reader_takes_waits_for_its_turn() -> None:
    made = core()
    mine = book(made)
    mine.is_vouched = True
    made.received(mine, *frame(1, [Message(b"a")]), is_for_handlers=True)
    made.release_all()
    made.reports(mine)
    made.reader_limit = 5
    waiting = [
        made.received(mine, *frame(number, [Message(b"b")], first=number - 1), is_for_handlers=True)
        for number in (2, 3, 4)
    ]
    if open_records is None:
        assert (waiting, made.begun) == ([1, 2, 3], None)
        return
    assert waiting == [0, 1, 2]
    assert made.begun is not None
    made.begun.done = 1
    made.end_turn(made.begun)
    made.begun = None
    turns = [made.begin_turn(5) for _ in range(3)]
    assert [turn and turn.delivery.lease.lease for turn in turns] == [3, 4, None]


def test_a_lone_push_is_taken_and_reported_the_straight_way() -> None:
    made = core()
    mine = book(made)
    mine.is_vouched = True

    def push(lease: int, first: int) -> tuple[list[Lease], Buffer]:
        return frame(lease, [Message(b"a", "k"), Message(b"b")], first=first)

    made.received(mine, *push(1, 0), is_for_handlers=True)  # the first of a queue says how often it was sought
    made.release_all()
    made.reports(mine)
    (lease,), body = push(2, 2)
    found = mine.take_plain(made, lease, body, made.now())
    if open_records is None:
        assert found is None
        return
    assert found is not None
    assert (found.bodies, found.keys, found.deadline) == ([b"a", b"b"], ["k", None], made.now() + 30)
    assert mine.plain_report("") is None
    found.states[:] = b"\2\2"
    found.left, found.acks = 0, [0, 1]
    mine.add(found)
    reports = mine.plain_report("me") or []
    assert [(one.member, [said.ranges for said in one.settlements]) for one in reports] == [("me", [[(2, 2)]])]
    assert not mine.held
    assert not mine.has_reports
