"""What a cursor does with leases whose holder fell silent, and with those that others should get first."""

from __future__ import annotations

import itertools

from dmq.broker.delivery.cursor import SILENCES_MAX, Cursor, HandOutRules, LeaseEnd, LeaseNumbers
from dmq.broker.delivery.lease import CursorKey, Holder, Lease
from dmq.storage.state.positions import Position

LEASE_MS = 30_000
SILENT = LeaseEnd(is_tried=False)


def make(*, ordered: bool = False) -> Cursor:
    return Cursor(
        CursorKey("g", 16, 3),
        Position(0),
        LeaseNumbers(1, itertools.count(1)),
        visible_next=20,
        rules=HandOutRules(ordered),
    )


def lease_of(cursor: Cursor, holder: Holder, limit: int = 5, now_ms: int = 0, visible: int = 20) -> Lease | None:
    proposal = cursor.propose(limit, now_ms, visible, member=holder.name)
    return None if proposal is None else cursor.grant(proposal, holder, now_ms, LEASE_MS)


def test_a_lease_that_ends_in_silence_is_no_attempt_a_few_times_for_each_message() -> None:
    """Else a message that hangs every process would go round for ever."""
    cursor, attempts = make(), []
    for turn in range(SILENCES_MAX + 3):
        now_ms = turn * LEASE_MS
        lease = lease_of(cursor, Holder("m"), now_ms=now_ms, visible=5)
        assert lease is not None
        attempts.append(lease.attempt)
        cursor.expire(now_ms + LEASE_MS, lambda _: SILENT)
    assert attempts == [1] * (SILENCES_MAX + 1) + [2, 3]


def test_a_silent_holder_that_dies_adds_no_attempt_and_any_other_that_dies_does() -> None:
    for is_silent in (True, False):
        cursor, holder = make(), Holder("m")
        lease_of(cursor, holder)
        holder.is_silent = is_silent
        (entry,) = cursor.member_gone(holder, 1)
        assert entry.attempt == (1 if is_silent else 2)


def test_a_lease_in_doubt_ends_later_and_may_still_be_extended_and_acked() -> None:
    cursor = make()
    lease = lease_of(cursor, Holder("m"))
    assert lease is not None
    assert cursor.expire(LEASE_MS, lambda _: LeaseEnd(not_before_ms=LEASE_MS + 1000)) == []
    assert cursor.next_deadline() == LEASE_MS + 1000
    cursor.extend(1, lease.number, LEASE_MS + 10, LEASE_MS)
    assert cursor.next_deadline() == 2 * LEASE_MS + 10
    cursor.ack(1, lease.number, None, LEASE_MS + 20)
    assert cursor.floor == 5


def test_what_a_member_let_run_out_goes_to_others_first() -> None:
    cursor, slow, other = make(), Holder("slow"), Holder("other")
    lease_of(cursor, slow)
    cursor.expire(LEASE_MS, lambda _: LeaseEnd(others_until_ms=LEASE_MS + 1000))
    fresh = lease_of(cursor, slow, now_ms=LEASE_MS)
    assert fresh is not None
    assert fresh.start == 5, "it gets what is new"
    assert cursor.withholds("slow", LEASE_MS)
    assert not cursor.withholds("other", LEASE_MS)
    assert cursor.next_deadline() == LEASE_MS + 1000, "then it may have the rest"
    again = lease_of(cursor, other, limit=3, now_ms=LEASE_MS)
    assert again is not None
    assert (again.start, again.count, again.attempt) == (0, 3, 2)
    cursor.expire(LEASE_MS + 1000)
    assert not cursor.withholds("slow", LEASE_MS + 1000)
    rest = lease_of(cursor, slow, now_ms=LEASE_MS + 1000)
    assert rest is not None
    assert (rest.start, rest.count, rest.attempt) == (3, 2, 2)


def test_in_order_a_member_waits_behind_what_others_get_first() -> None:
    cursor, slow = make(ordered=True), Holder("slow")
    lease_of(cursor, slow)
    cursor.expire(LEASE_MS, lambda _: LeaseEnd(others_until_ms=LEASE_MS + 1000))
    assert lease_of(cursor, slow, now_ms=LEASE_MS) is None
    again = lease_of(cursor, Holder("other"), now_ms=LEASE_MS)
    assert again is not None
    assert (again.start, again.attempt) == (0, 2)
