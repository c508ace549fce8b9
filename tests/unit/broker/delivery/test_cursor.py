"""What a cursor promises, one scenario each."""

from __future__ import annotations

import itertools

import pytest

from dmq.broker.delivery.cursor import WINDOW, Cursor, HandOutRules, LeaseNumbers, Looked
from dmq.broker.delivery.lease import FILTERED, GONE, CursorKey, Holder, Lease
from dmq.errors import LeaseLost
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.positions import Position

LEASE_MS = 30_000


def make(
    position: Position | None = None, *, epoch: int = 1, ordered: bool = False, parallel: int | None = None
) -> Cursor:
    position = position or Position(0)
    return Cursor(
        CursorKey("g", 16, 3),
        position,
        LeaseNumbers(epoch, itertools.count(1)),
        visible_next=1000,
        rules=HandOutRules(ordered, parallel),
    )


def lease_of(cursor: Cursor, limit: int, now_ms: int = 0, holder: Holder | None = None, visible: int = 1000) -> Lease:
    proposal = cursor.propose(limit, now_ms, visible)
    assert proposal is not None
    lease = cursor.grant(proposal, holder or Holder("m"), now_ms, LEASE_MS, Looked(size=limit * 10))
    assert lease is not None
    return lease


def test_an_acked_lease_gives_one_event_with_everything_a_dequeue_log_needs() -> None:
    cursor = make()
    lease = lease_of(cursor, 10, now_ms=5)
    assert cursor.ack(1, lease.number, [(0, 10)], 9) == [
        Settled("g", 16, 3, 0, 10, Outcome.ACKED, b"", "m", attempt=1, leased_at_ms=5, settled_at_ms=9)
    ]
    assert (cursor.floor, cursor.out, cursor.lag(1000)) == (10, 0, 990)


def test_some_messages_of_a_lease_are_acked_and_the_rest_stays_out() -> None:
    cursor, holder = make(), Holder("m")
    lease = lease_of(cursor, 10, holder=holder)
    (event,) = cursor.ack(1, lease.number, [(2, 4), (7, 8)], 0)
    assert (event.start, event.count, event.bitmap) == (2, 6, bytes([0b100011]))
    assert (cursor.floor, cursor.out, holder.messages_out, holder.bytes_out) == (0, 7, 7, 70)
    assert cursor.ack(1, lease.number, [(2, 4)], 0) == [], "settled once is settled"
    cursor.ack(1, lease.number, None, 0)
    assert (cursor.floor, holder.messages_out, holder.bytes_out) == (10, 0, 0)


def test_what_is_not_acked_in_time_is_handed_out_again_as_one_attempt_more() -> None:
    """D-17: unacked ones are sent again, without end."""
    cursor = make()
    now_ms = 0
    for attempt in range(1, 50):
        lease = lease_of(cursor, 5, now_ms)
        assert (lease.start, lease.attempt) == (0, attempt)
        assert cursor.next_deadline() == now_ms + LEASE_MS
        assert cursor.expire(now_ms + LEASE_MS - 1) == []
        now_ms += LEASE_MS
        (back,) = cursor.expire(now_ms)
        assert (list(back.ranges), back.attempt, back.lease) == ([(0, 5)], attempt + 1, lease.number)
        assert cursor.next_deadline() is None


def test_twenty_parallel_with_batches_of_ten_is_two_leases() -> None:
    """J-13: `parallel` messages of one queue in flight; acks come in any order."""
    cursor = make(parallel=20)
    first, second = lease_of(cursor, 10), lease_of(cursor, 10)
    assert cursor.propose(10, 0, 1000) is None
    cursor.ack(1, second.number, None, 0)
    third = lease_of(cursor, 100)
    assert (third.start, third.count) == (20, 10)
    cursor.ack(1, first.number, [(0, 4)], 0)
    assert lease_of(cursor, 10).count == 4


def test_two_reads_at_a_time_do_not_exceed_parallel() -> None:
    """J-13, while the store is still reading."""
    cursor = make(parallel=20)
    first, second = cursor.propose(15, 0, 1000), cursor.propose(15, 0, 1000)
    assert first is not None
    assert second is not None
    assert (first.limit, second.limit) == (15, 5)
    assert cursor.propose(15, 0, 1000) is None
    cursor.release(first, 0)
    assert lease_of(cursor, 100).start == 0


def test_an_ordered_group_waits_for_its_last_lease() -> None:
    """J-14, R-11: one lease per queue, the next only after the last is settled."""
    cursor = make(ordered=True)
    lease = lease_of(cursor, 10)
    assert cursor.propose(10, 0, 1000) is None
    cursor.ack(1, lease.number, [(0, 9)], 0)
    assert cursor.propose(10, 0, 1000) is None
    cursor.ack(1, lease.number, [(9, 10)], 0)
    assert lease_of(cursor, 10).start == 10


def test_a_failing_message_of_an_ordered_group_is_retried_in_place() -> None:
    """J-14, A-06: what lies behind it waits with it, and does not count as tried."""
    cursor = make(ordered=True)
    lease = lease_of(cursor, 10)
    cursor.ack(1, lease.number, [(0, 3)], 0)
    failed, behind = cursor.nack(1, lease.number, [(3, 4)], 0, delay_ms=1000)
    assert (list(failed.ranges), failed.attempt, failed.ready_at_ms) == ([(3, 4)], 2, 1000)
    assert (list(behind.ranges), behind.attempt) == ([(4, 10)], 1)
    assert cursor.propose(10, 999, 1000) is None
    assert cursor.next_deadline() == 1000
    again = lease_of(cursor, 10, now_ms=1000)
    assert (again.start, again.count, again.attempt) == (3, 1, 2)
    assert cursor.propose(10, 1000, 1000) is None
    cursor.ack(1, again.number, None, 1000)
    rest = lease_of(cursor, 10, now_ms=1000)
    assert (rest.start, rest.count, rest.attempt) == (4, 6, 1)


def test_a_stale_ack_counts_for_an_unordered_group_wherever_the_messages_are() -> None:
    cursor, other = make(), Holder("other")
    lost = lease_of(cursor, 10)
    cursor.expire(LEASE_MS)
    again = lease_of(cursor, 5, now_ms=LEASE_MS, holder=other)
    assert (again.start, again.attempt) == (0, 2)
    (event,) = cursor.ack(1, lost.number, [(0, 10)], LEASE_MS)
    assert (event.start, event.count) == (0, 10)
    assert (cursor.floor, cursor.out, cursor.redelivering, other.messages_out) == (10, 0, 0, 0)
    assert cursor.ack(1, again.number, [(0, 5)], LEASE_MS) == []


def test_a_stale_ack_of_an_ordered_group_is_told_that_its_lease_is_lost() -> None:
    cursor = make(ordered=True)
    lost = lease_of(cursor, 10)
    cursor.expire(LEASE_MS)
    with pytest.raises(LeaseLost, match="handed out again"):
        cursor.ack(1, lost.number, [(0, 10)], LEASE_MS)


def test_a_stale_nack_extend_or_reject_is_told_that_its_lease_is_lost() -> None:
    cursor = make()
    lost = lease_of(cursor, 10)
    cursor.expire(LEASE_MS)
    with pytest.raises(LeaseLost):
        cursor.nack(1, lost.number, [(0, 1)], LEASE_MS)
    with pytest.raises(LeaseLost):
        cursor.extend(1, lost.number, LEASE_MS, LEASE_MS)
    with pytest.raises(LeaseLost):
        cursor.reject(1, lost.number, None, LEASE_MS)


def test_a_rejected_message_is_settled_as_dead_with_its_reason() -> None:
    cursor = make()
    lease = lease_of(cursor, 2)
    (event,) = cursor.reject(1, lease.number, [(1, 2)], 0, "bad input")
    assert (event.start, event.outcome, event.error) == (1, Outcome.DEAD, "bad input")
    assert cursor.out == 1


def test_a_nacked_message_comes_again_after_its_delay_and_holds_nobody_up() -> None:
    """A-06: rolled back, redelivered."""
    cursor = make()
    lease = lease_of(cursor, 10)
    (back,) = cursor.nack(1, lease.number, [(4, 5), (6, 7)], 0, delay_ms=500)
    assert (list(back.ranges), back.attempt) == ([(4, 5), (6, 7)], 2)
    assert lease_of(cursor, 10).start == 10
    assert cursor.next_deadline() == 500
    again = lease_of(cursor, 10, now_ms=500)
    assert (again.start, again.count, again.attempt) == (4, 2, 2)


def test_what_was_fetched_but_never_tried_goes_back_without_counting() -> None:
    cursor, holder = make(), Holder("m")
    lease = lease_of(cursor, 10)
    assert [e.attempt for e in cursor.nack(1, lease.number, None, 0, was_tried=False)] == [1]
    lease_of(cursor, 10, holder=holder)
    assert [e.attempt for e in cursor.member_gone(holder, 0, is_clean=True)] == [1]


def test_scattered_failures_travel_together_again() -> None:
    cursor = make()
    lease = lease_of(cursor, 10)
    for offset in (1, 5, 9):
        cursor.nack(1, lease.number, [(offset, offset + 1)], 0)
    again = lease_of(cursor, 10)
    assert (again.start, again.count) == (1, 3)
    cursor.ack(1, again.number, None, 0)
    cursor.ack(1, lease.number, None, 0)
    assert cursor.position == Position(10)


def test_after_a_disconnect_the_member_takes_its_leases_back_within_the_grace_time() -> None:
    cursor, holder = make(), Holder("m")
    lease = lease_of(cursor, 10, holder=holder)
    cursor.disconnect(holder, 1000, 5000)
    assert cursor.next_deadline() == 6000
    assert cursor.resume(holder) == [lease]
    assert cursor.expire(6000) == []
    assert cursor.next_deadline() == LEASE_MS
    assert cursor.ack(1, lease.number, None, 7000)


def test_after_the_grace_time_its_leases_are_handed_out_again() -> None:
    cursor, holder = make(), Holder("m")
    lease_of(cursor, 10, holder=holder)
    cursor.disconnect(holder, 1000, 5000)
    assert [entry.attempt for entry in cursor.expire(6000)] == [2]
    assert cursor.resume(holder) == []
    assert holder.messages_out == 0


def test_extending_moves_the_deadline_and_never_shortens_it() -> None:
    cursor = make()
    lease = lease_of(cursor, 10)
    assert cursor.extend(1, lease.number, 10, 1000) == LEASE_MS
    assert cursor.extend(1, lease.number, 20_000, LEASE_MS) == 50_000
    assert cursor.expire(49_999) == []
    assert len(cursor.expire(50_000)) == 1


def test_a_restart_adds_no_attempt_and_hands_out_only_what_is_not_settled() -> None:
    """Only the position is durable, so everything unsettled is attempt 1 again."""
    cursor = make(Position(2, [(4, 6), (8, 9)]), epoch=2)
    found = [lease_of(cursor, 10, visible=12) for _ in range(3)]
    assert [(lease.start, lease.stop, lease.attempt) for lease in found] == [(2, 4, 1), (6, 8, 1), (9, 12, 1)]
    assert cursor.lag(12) == 7
    cursor.ack(2, found[1].number, None, 0)
    assert cursor.position == Position(2, [(4, 9)])


def test_an_ack_from_before_a_restart_still_counts() -> None:
    cursor = make(epoch=2)
    (event,) = cursor.ack(1, 77, [(3, 6), (990, 2000)], 0)[:1]
    assert (event.start, event.count) == (3, 3)
    assert cursor.position.ranges[0] == (3, 6)
    assert max(end for _, end in cursor.position.ranges) == 1000, "what does not exist cannot be settled"
    assert (lease_of(cursor, 10).stop, lease_of(cursor, 10).start) == (3, 6)


def test_leases_from_before_a_seek_say_nothing_any_more() -> None:
    cursor, holder = make(), Holder("m")
    old = lease_of(cursor, 10, holder=holder)
    cursor.ack(1, old.number, [(0, 5)], 0)
    cursor.seek(0)
    assert holder.messages_out == 0
    with pytest.raises(LeaseLost):
        cursor.ack(1, old.number, [(5, 10)], 0)
    assert lease_of(cursor, 10).start == 0


def test_leases_from_before_a_restart_and_a_seek_say_nothing_any_more() -> None:
    cursor = make(epoch=2)
    cursor.seek(0)
    with pytest.raises(LeaseLost):
        cursor.ack(1, 77, [(0, 10)], 0)


def test_what_is_acked_while_it_is_being_read_again_is_not_handed_out() -> None:
    cursor = make(epoch=2)
    first, second = cursor.propose(10, 0, 1000), cursor.propose(10, 0, 1000)
    assert first is not None
    assert second is not None
    cursor.ack(1, 77, [(4, 6), (15, 20)], 0)
    cursor.release(second, 0)
    lease = cursor.grant(first, Holder("m"), 0, LEASE_MS)
    assert lease is not None
    assert lease.count == 8
    found = [lease_of(cursor, 10), lease_of(cursor, 10)]
    assert [(lease.start, lease.stop) for lease in found] == [(10, 15), (20, 30)]
    assert cursor.propose(10, 0, 30) is None


def test_what_was_given_back_behind_another_read_is_handed_out_first() -> None:
    cursor = make()
    first, second = cursor.propose(10, 0, 1000), cursor.propose(10, 0, 1000)
    assert first is not None
    assert second is not None
    assert cursor.grant(first, Holder("m"), 0, LEASE_MS, Looked(scanned_to=4)) is not None
    again = lease_of(cursor, 10)
    assert (again.start, again.count, again.attempt) == (4, 6, 1)
    assert lease_of(cursor, 10).start == 20


def test_a_cursor_of_a_topic_created_again_takes_no_acks_of_the_old_one() -> None:
    numbers = itertools.count(1)
    old = Cursor(CursorKey("g", 16, 0), Position(0), LeaseNumbers(1, numbers), visible_next=100)
    lease = lease_of(old, 10)
    new = Cursor(CursorKey("g", 17, 0), Position(0), LeaseNumbers(1, numbers), visible_next=100)
    lease_of(new, 10)
    with pytest.raises(LeaseLost):
        new.ack(1, lease.number, [(0, 10)], 0)


def test_hand_out_stops_at_the_window_and_goes_on_when_the_floor_moves() -> None:
    cursor, far = make(), 1 << 40
    blocking = lease_of(cursor, 1)
    done = 1
    while (proposal := cursor.propose(10_000, 0, far)) is not None:
        lease = cursor.grant(proposal, Holder("m"), 0, LEASE_MS)
        assert lease is not None
        cursor.ack(1, lease.number, None, 0)
        done = lease.stop
    assert done == WINDOW
    cursor.ack(1, blocking.number, None, 0)
    assert cursor.floor == WINDOW
    assert lease_of(cursor, 10, visible=far).start == WINDOW


def test_nothing_beyond_the_visible_end_is_handed_out() -> None:
    cursor = make()
    assert lease_of(cursor, 100, visible=7).stop == 7
    assert cursor.propose(100, 0, 7) is None


def test_what_the_filter_passes_over_is_settled_silently_and_persists_with_the_next_ack() -> None:
    cursor = make()
    proposal = cursor.propose(2, 0, 1000, scan=100)
    assert proposal is not None
    assert (proposal.start, proposal.stop, proposal.limit) == (0, 100, 2)
    lease = cursor.grant(proposal, Holder("m"), 0, LEASE_MS, Looked(matched=[3, 6], scanned_to=7))
    assert lease is not None
    assert (lease.start, lease.stop, lease.count, cursor.next, cursor.floor, cursor.skipped) == (3, 7, 2, 7, 3, 5)
    skipped, acked = cursor.ack(1, lease.number, None, 9)
    assert (skipped.start, skipped.count, skipped.bitmap) == (0, 6, bytes([0b110111]))
    assert (skipped.outcome, skipped.error, skipped.member, skipped.settled_at_ms) == (Outcome.SKIPPED, FILTERED, "", 9)
    assert (acked.start, acked.count, acked.bitmap, acked.outcome) == (3, 4, bytes([0b1001]), Outcome.ACKED)
    assert (cursor.floor, cursor.skipped) == (7, 0)


def test_a_filter_that_matches_nothing_never_blocks_and_costs_one_event() -> None:
    cursor, far = make(), 10 * WINDOW
    for _ in range(10):
        proposal = cursor.propose(10, 0, far, scan=WINDOW)
        assert proposal is not None
        assert cursor.grant(proposal, Holder("m"), 0, LEASE_MS, Looked(matched=[])) is None
    assert cursor.floor == far
    assert [(e.start, e.count, e.bitmap) for e in cursor.take_skipped(0)] == [(0, far, b"")]
    assert cursor.take_skipped(0) == []


def test_what_retention_took_is_passed_over_by_that_name() -> None:
    cursor = make()
    proposal = cursor.propose(10, 0, 1000, scan=50)
    assert proposal is not None
    assert cursor.grant(proposal, Holder("m"), 0, LEASE_MS, Looked(matched=[], reason=GONE)) is None
    assert [(e.count, e.error) for e in cursor.take_skipped(0)] == [(50, GONE)]


def test_more_matches_than_proposed_are_a_bug_of_the_caller_and_change_nothing() -> None:
    cursor = make()
    proposal = cursor.propose(2, 0, 1000, scan=10)
    assert proposal is not None
    with pytest.raises(ValueError, match="10 messages matched, 2 were proposed"):
        cursor.grant(proposal, Holder("m"), 0, LEASE_MS)
    cursor.release(proposal, 0)
    assert lease_of(cursor, 10).start == 0


def test_deadlines_of_acked_leases_do_not_pile_up() -> None:
    cursor = make()
    for now_ms in range(10_000):
        proposal = cursor.propose(1, now_ms, 1 << 40)
        assert proposal is not None
        lease = cursor.grant(proposal, Holder("m"), now_ms, LEASE_MS)
        assert lease is not None
        cursor.ack(1, lease.number, None, now_ms)
    assert len(cursor._leases._deadlines) < 100
