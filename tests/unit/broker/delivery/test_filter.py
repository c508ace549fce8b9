"""A group with a tag filter: what it gets, what it passes over, and that others have their turn meanwhile. (R-07)"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.delivery.channel import Channel, ChannelParts
from dmq.broker.delivery.cursor import LeaseNumbers
from dmq.broker.delivery.group import Group, Member, Subscription, normalised
from dmq.broker.delivery.lease import Lease
from dmq.broker.delivery.origin import Doomed
from dmq.broker.delivery.waiters import Demand, Handed, Subscriber, WaitingPull
from dmq.errors import DMQError
from dmq.model import Message, TopicConfig
from dmq.offset_runs import bitmap_runs
from dmq.records import RecordView, encode_batch, tag_hash
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.positions import Position
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

LEASE_MS = 60_000
TAGS = ("paid", "open", "lost", None)


class NothingFails:
    """Moves nothing, since nothing fails here."""

    def nack(self, *_: object) -> None: ...

    def reject(self, *_: object) -> None: ...

    def bury_doomed(self, channel: Channel, key: int, lease: Lease, doomed: Doomed, now_ms: int) -> None: ...


class Filtered:
    """A group at a topic of one queue, whose events are kept and written to the store."""

    def __init__(self, expression: str, *, look: int, look_turn: int) -> None:
        self.store = MessageStore(MemoryFiles(), clock=FakeClock())
        self.store.create_topic("orders", TopicConfig(queues=1))
        self.look, self.look_turn, self.expression = look, look_turn, expression
        self.events: list[Settled] = []
        self.asked_again = 0
        self.sequence = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew with what is durable."""
        topic = self.store.queries.topic("orders")
        parts = ChannelParts(
            self.store.queries,
            LeaseNumbers(self.store.queries.epoch, itertools.count(1)),
            self.write,
            failures=NothingFails(),
            pump_soon=self.again,
            look=self.look,
            look_turn=self.look_turn,
        )
        self.channel = Channel(topic, Group("billing", "orders"), parts)
        self.member = self.channel.group.join("m", Subscription(normalised(self.expression)), 0, 0).member

    def write(self, events: list[Settled]) -> None:
        self.events += events
        if events:
            self.store.append(events)
            self.store.flush()

    def again(self, channel: Channel) -> None:
        assert channel is self.channel
        self.asked_again += 1

    def send(self, tags: Sequence[str | None]) -> None:
        messages = [Message(b"%d" % (self.sequence + at), tag=tag) for at, tag in enumerate(tags)]
        encoded = encode_batch("orders", "shop", messages, sent_at_ms=1)
        self.store.append([
            Batch(topic="orders", queue=0, data=encoded.data, lengths=encoded.lengths, producer_id=7,
                  first_sequence=self.sequence)
        ])  # fmt: skip
        self.store.flush()
        self.sequence += len(tags)
        self.channel.selection.mark(0)

    def take(self, limit: int) -> Handed | None:
        """A hand-out, in as many turns as it takes."""
        while True:
            handed = self.channel.hand_out(Demand(self.member, limit, 1 << 20, LEASE_MS), 1)
            if handed is not None or not self.channel.is_looking:
                return handed
            self.channel.begin_turn()

    def ack(self, handed: Handed, ranges: list[tuple[int, int]]) -> None:
        lease = handed.lease
        self.channel.settled(0, self.channel.cursors[0].ack(lease.epoch, lease.number, ranges, 1))


def numbers_of(handed: Handed) -> list[int]:
    """The bodies of a hand-out, which are the offsets, after checking what else it says."""
    buffer = b"".join(handed.pieces)
    starts = list(itertools.accumulate(map(int, handed.lengths), initial=0))
    records = [RecordView(buffer, start) for start in starts[:-1]]
    assert starts[-1] == len(buffer) == handed.size
    offsets = [record.queue_offset for record in records]
    assert [int(record.body) for record in records] == offsets
    sequences = [first + at for count, producer, first in handed.ids for at in range(count) if producer == 7]
    assert sequences == offsets
    return offsets


def settled_by(events: list[Settled], *outcomes: Outcome) -> list[int]:
    return [
        offset
        for event in events
        if event.outcome in outcomes
        for start, stop in bitmap_runs(event.start, event.count, event.bitmap)
        for offset in range(start, stop)
    ]


@given(
    st.lists(st.lists(st.sampled_from(TAGS), min_size=1, max_size=60), min_size=1, max_size=6),
    st.sampled_from(["paid", "paid || open", "nobody", "open || nobody"]),
    st.integers(1, 40),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_a_filter_gives_what_a_plain_list_gives_and_settles_the_rest(
    batches: list[list[str | None]], expression: str, limit: int, look: int, rng: random.Random
) -> None:
    group = Filtered(expression, look=look, look_turn=2 * look)
    wanted = {tag_hash(tag) for tag in expression.split(" || ")}
    got: list[int] = []
    expected: list[int] = []
    for tags in batches:
        expected += [group.sequence + at for at, tag in enumerate(tags) if tag and tag_hash(tag) in wanted]
        group.send(tags)
        out: list[tuple[Handed, list[int]]] = []
        while (handed := group.take(limit)) is not None:
            assert len(handed.lengths) <= limit
            out.append((handed, numbers_of(handed)))
        rng.shuffle(out)
        for handed, offsets in out:
            got += offsets
            parts = [offsets] if rng.random() < 0.5 else [offsets[::2], offsets[1::2]]
            for part in parts:
                group.ack(handed, [(offset, offset + 1) for offset in part])
        if rng.random() < 0.3:
            group.write(group.channel.cursor(0).take_skipped(1))
            group.restart()
    group.write(group.channel.cursor(0).take_skipped(1))
    assert sorted(got) == expected
    assert sorted(settled_by(group.events, Outcome.ACKED)) == expected
    assert sorted(settled_by(group.events, Outcome.ACKED, Outcome.SKIPPED)) == list(range(group.sequence))
    assert group.store.queries.position("billing", "orders", 0) == Position(group.sequence)
    assert group.channel.cursor(0).position == Position(group.sequence)


def test_a_long_way_without_a_match_is_gone_in_several_turns() -> None:
    group = Filtered("paid", look=100, look_turn=400)
    group.send(["open"] * 2500 + ["paid"])
    looked = []
    while group.channel.hand_out(Demand(group.member, 10, 1 << 20, LEASE_MS), 1) is None:
        assert group.channel.is_looking
        looked.append(group.channel.cursor(0).floor)
        assert group.channel.hand_out(Demand(group.member, 10, 1 << 20, LEASE_MS), 1) is None, "others come first"
        group.channel.begin_turn()
    assert looked == [400, 800, 1200, 1600, 2000, 2400]
    assert group.asked_again == len(looked), "each turn asks for the next, once"


def test_a_pull_that_does_not_wait_waits_for_the_end_of_a_look() -> None:
    group = Filtered("paid", look=100, look_turn=400)
    group.send(["open"] * 1000 + ["paid"])
    answers: list[Handed | None] = []
    channel = group.channel
    pull = WaitingPull(object(), Demand(group.member, 10, 1 << 20, LEASE_MS), 1, answers.append)
    assert channel.try_pull(pull.demand, 1) is None
    channel.wait(pull)
    for _ in range(2):
        channel.tick(50)
        assert not answers, "there may be something for it after all"
        channel.pump(50)
    (answer,) = answers
    assert answer is not None
    assert numbers_of(answer) == [1000]


def test_a_look_that_ends_without_a_match_lets_a_pull_go_empty() -> None:
    group = Filtered("paid", look=100, look_turn=400)
    group.send(["open"] * 500)
    answers: list[Handed | None] = []
    channel = group.channel
    pull = WaitingPull(object(), Demand(group.member, 10, 1 << 20, LEASE_MS), 1, answers.append)
    assert channel.try_pull(pull.demand, 1) is None
    channel.wait(pull)
    channel.pump(50)
    assert not answers
    channel.tick(50)
    assert answers == [None]


def test_a_look_counts_for_all_members_together() -> None:
    group = Filtered("paid", look=100, look_turn=400)
    others: list[Member] = []
    for name in "abcdef":
        member = group.channel.group.join(name, Subscription("paid"), 10, 1 << 20).member
        group.channel.subscribers[name] = Subscriber(Owner(), 1, member, Waiting(), batch=10)
        group.channel.group.subscribed(member, 0, 0)
        others.append(member)
    group.send(["open"] * 2000)
    group.channel.pump(1)
    assert group.channel.cursor(0).floor == 400
    assert group.asked_again == 1


class Owner:
    """A client whose subscriptions are its own."""

    def lost(self, number: int) -> None:
        raise AssertionError("nobody takes it over")


class Waiting:
    """A sink that takes everything, and must not get anything."""

    is_ready = True
    address = ""

    def push(self, handed: Handed) -> None:
        raise AssertionError("nothing passes the filter")

    def tell_members(self, queues: int, names: Sequence[str]) -> None: ...

    def end(self, error: DMQError) -> None: ...


def test_what_is_passed_over_is_written_with_few_events() -> None:
    group = Filtered("paid", look=1 << 16, look_turn=1 << 18)
    for _ in range(4):
        group.send((["open"] * 99 + ["paid"]) * 50)
    handed = group.take(1000)
    assert handed is not None
    assert len(handed.lengths) == 200
    offsets = numbers_of(handed)
    group.ack(handed, [(offset, offset + 1) for offset in offsets])
    assert len(group.events) == 2, "one for what was passed over, one for what was acked"
    assert group.store.queries.position("billing", "orders", 0) == Position(20_000)
