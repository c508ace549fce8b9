"""The cursor against a simple model that keeps one word per offset, driven by random events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dmq.broker.delivery.cursor import Cursor, HandOutRules, LeaseNumbers, Looked, Proposal
from dmq.broker.delivery.lease import CursorKey, Holder, Lease
from dmq.errors import LeaseLost
from dmq.offset_runs import bitmap_runs
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.positions import Position
from tests.sampling import sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

WINDOW = 24
LEASE_MS = 100
GRACE_MS = 30
FRESH, SETTLED, PASSED = ("fresh",), ("settled",), ("passed",)  # passed: settled, but maybe not durably
State = tuple[object, ...]  # or ("reserved", proposal), ("out", number), ("waits", attempt, ready at)


def offsets_of(events: Iterable[Settled], *, skipped: bool = False) -> list[int]:
    return [
        offset
        for event in events
        if (event.outcome == Outcome.SKIPPED) is skipped
        for start, stop in bitmap_runs(event.start, event.count, event.bitmap)
        for offset in range(start, stop)
    ]


def singles(offsets: Iterable[int]) -> list[tuple[int, int]]:
    return [(offset, offset + 1) for offset in offsets]


class CursorMachine(RuleBasedStateMachine):
    """An unordered group. After every step each offset is where the model says."""

    # Covers D-17, J-13 and, in the ordered machine, J-14 and R-11.
    ordered: ClassVar[bool] = False

    @initialize(parallel=st.sampled_from([None, 3, 10]))
    def begin(self, parallel: int | None) -> None:
        self.now_ms, self.visible, self.epoch, self.parallel = 1_000, 0, 1, parallel
        self.durable = Position(0)
        self.offsets: dict[int, State] = {}
        self.held: dict[tuple[int, int], list[int]] = {}  # every lease there ever was: what it had at first
        self.live: dict[int, Lease] = {}
        self.attempts: dict[int, int] = {}
        self.proposals: list[Proposal] = []
        self.sought_at = (0, 0)  # leases up to this one are from before a seek
        self.away: set[str] = set()
        self.make_cursor()

    def make_cursor(self) -> None:
        self.holders = {name: Holder(name) for name in "abc"}
        self.live, self.proposals, self.away = {}, [], set()
        self.numbers = itertools.count(1)
        self.cursor = Cursor(
            CursorKey("g", 16, 0),
            self.durable,
            LeaseNumbers(self.epoch, self.numbers),
            visible_next=self.visible,
            rules=HandOutRules(self.ordered, self.parallel, WINDOW),
        )

    def state(self, offset: int) -> State:
        return self.offsets.get(offset, FRESH)

    def unsettled(self) -> list[int]:
        begin = self.durable.floor
        return [offset for offset in range(begin, self.visible) if self.state(offset) not in (SETTLED, PASSED)]

    def out_of(self, number: int) -> list[int]:
        return [offset for offset, state in self.offsets.items() if state == ("out", number)]

    def apply(self, events: list[Settled]) -> None:
        for event in events:
            assert (event.group, event.topic_id, event.queue) == ("g", 16, 0)
            for start, stop in bitmap_runs(event.start, event.count, event.bitmap):
                self.durable.settle(start, stop)
        for offset in offsets_of(events, skipped=True):
            assert self.offsets[offset] == PASSED
            self.offsets[offset] = SETTLED

    def leave(self, number: int) -> None:
        if number in self.live and not self.out_of(number):
            del self.live[number]

    # --- handing out ------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12))
    def append(self, count: int) -> None:
        self.visible += count

    @rule(limit=st.integers(1, 10), scan=st.sampled_from([None, 16]))
    def propose(self, limit: int, scan: int | None) -> None:
        proposal = self.cursor.propose(limit, self.now_ms, self.visible, scan)
        unsettled = self.unsettled()
        ready = [o for o in unsettled if self.state(o)[0] == "waits" and int(str(self.state(o)[2])) <= self.now_ms]
        fresh = [o for o in unsettled if self.state(o) == FRESH]
        if proposal is None:
            room = self.parallel is None or self.reserved_and_out() < self.parallel
            if self.ordered:
                room = not self.live and not self.proposals
                waits = [o for o in unsettled if self.state(o)[0] == "waits"]
                assert not (room and (waits[0] in ready if waits else self.in_window(fresh)))
            else:
                assert not (room and (ready or self.in_window(fresh))), "something could have been handed out"
            return
        taken = [proposal.start + bit for bit in range(proposal.stop - proposal.start) if proposal.mask >> bit & 1]
        assert taken
        for offset in taken:
            state = self.state(offset)
            if proposal.is_fresh:
                assert state == FRESH
            else:
                assert state[:2] == ("waits", proposal.attempt)
                assert offset in ready
            self.offsets[offset] = ("reserved", proposal)
        if self.ordered:
            assert taken == unsettled[: len(taken)], "an ordered group goes on with the lowest"
        else:
            assert not (ready and proposal.is_fresh), "redeliveries come first"
        self.proposals.append(proposal)

    def in_window(self, fresh: list[int]) -> bool:
        return bool(fresh) and fresh[0] < self.cursor.floor + WINDOW

    def reserved_and_out(self) -> int:
        return self.cursor.out + sum(proposal.limit for proposal in self.proposals)

    @rule(data=st.data(), name=st.sampled_from("abc"), limit=st.integers(2, 10), count=st.integers(4, 12))
    def hand_out(self, data: st.DataObject, name: str, limit: int, count: int) -> None:
        """The whole of it without anything in between, which is what mostly happens."""
        if self.visible < self.cursor.next + limit:
            self.append(count)
        before = len(self.proposals)
        self.propose(limit, None)
        if len(self.proposals) > before:
            self.grant_proposal(self.proposals.pop(), name, None, data.draw(st.sampled_from([255, 255, 0b10110101])))

    @rule(data=st.data(), name=st.sampled_from("abc"), limit=st.integers(2, 10), count=st.integers(4, 12))
    def hand_out_more(self, data: st.DataObject, name: str, limit: int, count: int) -> None:
        """Once more, so that it happens more often."""
        self.hand_out(data, name, limit, count)

    @rule(name=st.sampled_from("abc"), limit=st.integers(1, 12), count=st.integers(0, 4))
    def hand_out_rest(self, name: str, limit: int, count: int) -> None:
        """What was just stored, without a proposal."""
        self.append(count)
        start = self.cursor.rest(limit, self.visible)
        assert self.cursor.has_more == any(self.state(o) == FRESH or self.state(o)[0] == "waits" for o in self.open())
        if start is None:
            return
        rest = range(start, self.visible)
        assert [o for o in self.unsettled() if self.state(o) == FRESH] == [*rest]
        assert not any(self.state(offset)[0] == "waits" for offset in self.unsettled()), "redeliveries come first"
        assert len(rest) <= limit
        assert self.parallel is None or self.cursor.out + len(rest) <= self.parallel
        assert rest[-1] < self.cursor.floor + WINDOW
        assert not (self.ordered and self.live)
        lease = self.cursor.lease_rest(self.visible, self.holders[name], self.now_ms, LEASE_MS, size=10 * len(rest))
        assert (lease.start, lease.stop, lease.count, lease.attempt) == (start, self.visible, len(rest), 1)
        self.lease_out(lease, name, [*rest])

    def open(self) -> range:
        """What is neither settled nor passed over, and may be handed out now or later."""
        return range(self.durable.floor, self.visible)

    def lease_out(self, lease: Lease, name: str, wanted: list[int]) -> None:
        self.held[self.epoch, lease.number] = wanted
        self.live[lease.number] = lease
        self.attempts[lease.number] = lease.attempt
        self.offsets.update(dict.fromkeys(wanted, ("out", lease.number)))
        if name in self.away:
            self.resume(name)

    @precondition(lambda self: self.proposals)
    @rule(data=st.data(), name=st.sampled_from("abc"), pattern=st.integers(0, 255))
    def grant(self, data: st.DataObject, name: str, pattern: int) -> None:
        proposal = self.proposals.pop(data.draw(st.integers(0, len(self.proposals) - 1)))
        scanned_to = data.draw(st.integers(proposal.start, proposal.stop))
        self.grant_proposal(proposal, name, scanned_to, pattern)

    def grant_proposal(self, proposal: Proposal, name: str, scanned_to: int | None, pattern: int) -> None:
        reserved = [o for o, state in self.offsets.items() if state == ("reserved", proposal)]
        is_filtered = pattern != 255
        if scanned_to is None:
            scanned_to = proposal.stop
        matched = [o for o in range(proposal.start, scanned_to) if pattern >> (o % 8) & 1]
        wanted = [offset for offset in matched if offset in reserved]
        if len(wanted) > proposal.limit:
            scanned_to = wanted[proposal.limit]
            wanted, matched = wanted[: proposal.limit], [o for o in matched if o < scanned_to]
        lease = self.cursor.grant(
            proposal,
            self.holders[name],
            self.now_ms,
            LEASE_MS,
            Looked(scanned_to, matched if is_filtered else None, size=10 * len(wanted)),
        )
        self.give_back([offset for offset in reserved if offset >= scanned_to], proposal)
        for offset in reserved:
            if offset < scanned_to and offset not in wanted:
                self.offsets[offset] = PASSED
        assert (lease is None) == (not wanted)
        if lease is not None:
            assert lease.attempt == proposal.attempt
            assert lease.count == len(wanted)
            self.lease_out(lease, name, wanted)

    @precondition(lambda self: self.proposals)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        proposal = self.proposals.pop(data.draw(st.integers(0, len(self.proposals) - 1)))
        self.cursor.release(proposal, self.now_ms)
        self.give_back([o for o, state in self.offsets.items() if state == ("reserved", proposal)], proposal)

    def give_back(self, offsets: list[int], proposal: Proposal) -> None:
        for offset in offsets:
            fresh = offset >= self.cursor.next
            assert proposal.is_fresh or not fresh
            self.offsets[offset] = FRESH if fresh else ("waits", proposal.attempt, self.now_ms)

    # --- settling ---------------------------------------------------------------------------------------------------

    def draw_lease(self, data: st.DataObject) -> tuple[int, int, list[int]]:
        if len(self.live) > 0 and data.draw(st.integers(0, 3)) > 0:
            epoch, number = self.epoch, data.draw(st.sampled_from(sorted(self.live)))
        else:
            epoch, number = data.draw(st.sampled_from(sorted(self.held)[-20:]))
        had = self.held[epoch, number]
        return epoch, number, data.draw(st.lists(st.sampled_from(had), unique=True, min_size=1))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_whole=st.booleans())
    def ack(self, data: st.DataObject, is_whole: bool) -> None:
        epoch, number, some = self.draw_lease(data)
        if epoch == self.epoch and number in self.live:
            expected = self.out_of(number) if is_whole else [o for o in some if self.state(o) == ("out", number)]
            events = self.cursor.ack(epoch, number, None if is_whole else singles(some), self.now_ms)
            assert all(
                event.member == self.live[number].holder.name and event.attempt == self.attempts[number]
                for event in events
                if event.outcome == Outcome.ACKED
            )
        elif self.ordered or (epoch, number) <= self.sought_at:
            with pytest.raises(LeaseLost):
                self.cursor.ack(epoch, number, singles(some), self.now_ms)
            return
        else:
            expected = [o for o in some if o < self.visible and self.state(o) not in (SETTLED, PASSED)]
            if epoch < self.epoch:
                expected = [o for o in expected if o < self.cursor.floor + WINDOW]
            events = self.cursor.ack(epoch, number, singles(some), self.now_ms)
        assert sorted(offsets_of(events)) == sorted(expected), "exactly what became settled"
        self.settle(events, expected)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DEAD, Outcome.EXPIRED, Outcome.RETRIED]))
    def settle_otherwise(self, data: st.DataObject, outcome: Outcome) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        out = self.out_of(number)
        some = data.draw(st.lists(st.sampled_from(out), unique=True, min_size=1))
        events = self.cursor.settle(self.epoch, number, singles(some), outcome, self.now_ms, "why")
        assert {(e.outcome, e.error) for e in events if e.outcome != Outcome.SKIPPED} == {(outcome, "why")}
        assert sorted(offsets_of(events)) == sorted(some)
        self.settle(events, some)

    def settle(self, events: list[Settled], offsets: list[int]) -> None:
        self.apply(events)
        self.offsets.update(dict.fromkeys(offsets, SETTLED))
        for number in list(self.live):
            self.leave(number)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay_ms=st.sampled_from([0, 50, 500]), was_tried=st.booleans())
    def nack(self, data: st.DataObject, delay_ms: int, was_tried: bool) -> None:
        epoch, number, some = self.draw_lease(data)
        if epoch != self.epoch or number not in self.live:
            with pytest.raises(LeaseLost):
                self.cursor.nack(epoch, number, singles(some), self.now_ms, delay_ms)
            with pytest.raises(LeaseLost):
                self.cursor.extend(epoch, number, self.now_ms, LEASE_MS)
            return
        tried = [offset for offset in some if self.state(offset) == ("out", number)]
        behind = [o for o in self.out_of(number) if self.ordered and tried and o > min(tried) and o not in tried]
        entries = self.cursor.nack(epoch, number, singles(some), self.now_ms, delay_ms, was_tried=was_tried)
        assert sorted(o for e in entries for a, b in e.ranges for o in range(a, b)) == sorted(tried + behind)
        attempt = self.attempts[number]
        state: State = ("waits", attempt + was_tried, self.now_ms + delay_ms)
        self.offsets.update(dict.fromkeys(tried, state))
        self.offsets.update(dict.fromkeys(behind, ("waits", attempt, self.now_ms)))
        self.leave(number)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), lease_ms=st.integers(1, 300))
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        lease = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        before = lease.deadline_ms
        assert self.cursor.extend(self.epoch, lease.number, self.now_ms, lease_ms) == max(
            before, self.now_ms + lease_ms
        )

    @rule()
    def take_skipped(self) -> None:
        self.apply(self.cursor.take_skipped(self.now_ms))
        assert PASSED not in self.offsets.values()

    # --- leases that end otherwise ----------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([0, 1, 20, 40, 101, 600]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        over = {n: lease for n, lease in self.live.items() if lease.due_ms <= self.now_ms}
        entries = self.cursor.expire(self.now_ms)
        assert sorted(entry.lease for entry in entries) == sorted(over)
        self.go_back(over.values(), 1)
        deadline = self.cursor.next_deadline()
        assert deadline is None or deadline > self.now_ms

    def go_back(self, leases: Iterable[Lease], added: int) -> None:
        for lease in list(leases):
            state: State = ("waits", self.attempts[lease.number] + added, self.now_ms)
            self.offsets.update(dict.fromkeys(self.out_of(lease.number), state))
            self.leave(lease.number)

    @rule(name=st.sampled_from("abc"))
    def disconnect(self, name: str) -> None:
        self.cursor.disconnect(self.holders[name], self.now_ms, GRACE_MS)
        self.away.add(name)
        mine = [lease for lease in self.live.values() if lease.holder.name == name]
        assert all(lease.due_ms <= self.now_ms + GRACE_MS for lease in mine)

    @rule(name=st.sampled_from("abc"))
    def resume(self, name: str) -> None:
        mine = {n: lease for n, lease in self.live.items() if lease.holder.name == name}
        leases = self.cursor.resume(self.holders[name])
        assert {lease.number for lease in leases} == set(mine)
        assert all(lease.due_ms == lease.deadline_ms for lease in leases)
        self.away.discard(name)

    @rule(name=st.sampled_from("abc"), is_clean=st.booleans())
    def member_gone(self, name: str, is_clean: bool) -> None:
        mine = [lease for lease in self.live.values() if lease.holder.name == name]
        entries = self.cursor.member_gone(self.holders[name], self.now_ms, is_clean=is_clean)
        assert len(entries) == len(mine)
        self.go_back(mine, 0 if is_clean else 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), chance=st.integers(0, 4))
    def seek(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        offset = data.draw(st.integers(0, self.visible))
        proposals, self.proposals = self.proposals, []
        self.cursor.seek(offset)
        for proposal in proposals:
            assert self.cursor.grant(proposal, self.holders["a"], self.now_ms, LEASE_MS) is None
        self.durable = Position(offset)
        self.offsets = dict.fromkeys(range(offset), SETTLED)
        self.live = {}
        self.sought_at = max(self.held, default=(0, 0))

    @precondition(lambda self: self.held)
    @rule(chance=st.integers(0, 4))
    def restart(self, chance: int) -> None:
        """Only what was written comes back; nothing counts as tried."""
        if chance:
            return
        self.epoch += 1
        self.offsets = {o: SETTLED for o in range(self.visible) if self.durable.is_settled(o)}
        self.make_cursor()
        # An ack from before a seek and a restart cannot be told from others; the broker's clients are told of a seek.
        self.held = {key: had for key, had in self.held.items() if key > self.sought_at}
        self.sought_at = (0, 0)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def every_offset_is_where_the_model_says(self) -> None:
        for lease in self.cursor.leases():
            out = [lease.start + bit for bit in range(lease.stop - lease.start) if lease.mask >> bit & 1]
            assert sorted(self.out_of(lease.number)) == out
        assert set(self.live) == {lease.number for lease in self.cursor.leases()}
        states = [state[0] for state in self.offsets.values()]
        assert self.cursor.out == states.count("out")
        assert self.cursor.redelivering == states.count("waits")
        assert self.cursor.skipped == states.count("passed")
        assert self.cursor.lag(self.visible) == len(self.unsettled())
        for offset in range(self.visible):
            if self.cursor.position.is_settled(offset):
                assert self.state(offset) in (SETTLED, PASSED)
            assert self.durable.is_settled(offset) == (self.state(offset) == SETTLED)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.cursor.next <= max(self.cursor.floor + WINDOW, self.cursor.floor)
        assert self.parallel is None or self.cursor.out <= self.parallel
        assert not self.ordered or len(self.live) + len(self.proposals) <= 1

    @invariant()
    def credit_is_what_is_out(self) -> None:
        for name, holder in self.holders.items():
            mine = [lease for lease in self.live.values() if lease.holder.name == name]
            assert holder.messages_out == sum(lease.count for lease in mine)
            assert holder.bytes_out == sum(lease.size for lease in mine)

    def teardown(self) -> None:
        """Nothing is lost: one member that acks everything gets everything that is not settled."""
        if not hasattr(self, "cursor"):
            return
        for proposal in self.proposals:
            self.cursor.release(proposal, self.now_ms)
        self.now_ms += 10_000
        self.cursor.expire(self.now_ms)
        missing = set(self.unsettled())
        while (following := self.cursor.propose(7, self.now_ms, self.visible)) is not None:
            lease = self.cursor.grant(following, self.holders["a"], self.now_ms, LEASE_MS)
            assert lease is not None
            settled = offsets_of(self.cursor.ack(self.epoch, lease.number, None, self.now_ms))
            assert set(settled) <= missing
            missing -= set(settled)
        assert not missing
        assert self.cursor.position == Position(max(self.visible, self.cursor.floor))


class OrderedMachine(CursorMachine):
    """An ordered group."""

    ordered = True


LENGTH = settings(max_examples=sample_size(share=150, whole=1000), stateful_step_count=sample_size(share=50, whole=80))
TestUnordered = pytest.mark.sampled(CursorMachine.TestCase)
TestUnordered.settings = LENGTH
TestOrdered = pytest.mark.sampled(OrderedMachine.TestCase)
TestOrdered.settings = LENGTH
