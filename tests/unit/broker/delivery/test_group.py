"""Members, their subscriptions, their credit and their turns."""

from __future__ import annotations

import pytest

from dmq.broker.delivery.group import (
    PATIENCE_MS,
    BroadcastCursors,
    Group,
    Joined,
    Member,
    MemberState,
    Pulse,
    Subscription,
)
from dmq.errors import SubscriptionConflict, SubscriptionSuperseded
from dmq.model import broadcast_name

PAID, ALL = Subscription("paid"), Subscription("")


def join(group: Group, name: str, subscription: Subscription = ALL, prefetch: int = 10) -> Joined:
    return group.join(name, subscription, prefetch, 1000)


def subscribe(group: Group, name: str, prefetch: int = 10) -> Member:
    member = join(group, name, prefetch=prefetch).member
    group.subscribed(member, 0, 0)
    return member


def test_members_with_the_same_filter_join_one_after_the_other() -> None:
    group = Group("billing", "orders")
    assert join(group, "a", PAID).superseded == []
    assert join(group, "b", PAID).superseded == []
    assert set(group.members) == {"a", "b"}


def test_another_filter_is_refused_by_name_of_the_conflict() -> None:
    group = Group("billing", "orders")
    join(group, "a", PAID)
    with pytest.raises(SubscriptionConflict, match=r"'b' wants all tags.*'billing'.*'orders'.*'paid'.*member 'a'"):
        join(group, "b", ALL)
    assert set(group.members) == {"a"}


def test_ordered_and_unordered_members_conflict_too() -> None:
    group = Group("billing", "orders")
    join(group, "a")
    with pytest.raises(SubscriptionConflict, match="ordered"):
        join(group, "b", Subscription("", is_ordered=True))


def test_a_higher_version_replaces_the_filter_and_supersedes_the_older_members() -> None:
    group = Group("billing", "orders")
    old = join(group, "a", PAID).member
    group.subscribed(old, 0, 0)
    new = Subscription("paid || refunded", version=1)
    assert join(group, "b", new).superseded == [old]
    assert (old.state, old.credit(0), old.may_pull) == (MemberState.SUPERSEDED, 0, False)
    assert group.next_taker(0) is None
    with pytest.raises(SubscriptionSuperseded, match="which replaced tags 'paid'"):
        join(group, "c", PAID)
    assert group.subscription == new


def test_an_old_deployment_does_not_come_back_while_the_new_one_is_away() -> None:
    group = Group("billing", "orders")
    join(group, "b", Subscription("", version=2))
    group.leave("b")
    with pytest.raises(SubscriptionSuperseded):
        join(group, "a", Subscription("paid", version=1))


def test_a_lone_member_may_change_its_mind() -> None:
    group = Group("billing", "orders")
    join(group, "a", PAID)
    assert join(group, "a", ALL).is_resumed
    group.leave("a")
    assert not join(group, "b", PAID).is_resumed
    assert group.subscription == PAID


def test_a_superseded_member_that_joins_with_the_new_filter_is_served_again() -> None:
    group = Group("billing", "orders")
    join(group, "a", PAID)
    new = Subscription("", version=1)
    join(group, "b", new)
    assert join(group, "a", new).member.state is MemberState.ACTIVE


def test_credit_is_what_was_asked_for_less_what_is_out() -> None:
    """A-03: prefetch, bounded in messages and in bytes."""
    group = Group("billing", "orders")
    member = subscribe(group, "a")
    member.messages_out, member.bytes_out = 7, 999
    assert member.credit(0) == 3
    member.bytes_out = 1000
    assert member.credit(0) == 0
    member.messages_out, member.bytes_out = 12, 0
    assert member.credit(0) == 0


def test_the_backlog_begins_some_time_after_the_subscription_is_acknowledged() -> None:
    """D-12: offline messages are delivered shortly after."""
    group = Group("billing", "orders")
    member = join(group, "a").member
    assert (member.credit(10_000), member.may_pull) == (0, True)
    group.subscribed(member, 1000, 200)
    assert group.next_deadline() == 1200
    assert (group.next_taker(1199), member.credit(1199)) == (None, 0)
    assert group.due(1200).started == [member]
    assert group.next_taker(1200) is member
    assert group.next_deadline() is None


def test_members_with_credit_take_turns_and_the_others_cost_nothing() -> None:
    group = Group("billing", "orders")
    a, b, c = (subscribe(group, name) for name in "abc")
    assert [group.next_taker(0) for _ in range(6)] == [a, b, c, a, b, c]
    b.messages_out = 10
    assert [group.next_taker(0) for _ in range(4)] == [a, c, a, c]
    group.wake(b)
    assert group.next_taker(0) in (a, c)
    b.messages_out = 0
    group.wake(b)
    group.wake(b)
    assert group.next_taker(0) is b, "the one with nothing out comes first, once"
    assert {group.next_taker(0) for _ in range(3)} == {a, b, c}
    group.leave("a")
    assert {group.next_taker(0) for _ in range(4)} == {b, c}


def test_a_member_stays_for_its_grace_time_and_comes_back_as_itself() -> None:
    group = Group("billing", "orders")
    member = subscribe(group, "a")
    group.disconnect("a", 1000, 500)
    assert (member.state, group.next_taker(1000), group.next_deadline()) == (MemberState.AWAY, None, 1500)
    assert join(group, "a") == Joined(member, True, [])
    assert group.next_deadline() is None
    group.disconnect("a", 2000, 500)
    assert group.due(2499).gone == []
    assert group.due(2500).gone == [member]
    assert group.members == {}
    assert (group.disconnect("a", 0, 0), group.leave("a")) == (None, None)


def test_cursors_of_a_broadcast_member_expire_when_unused() -> None:
    old, new = broadcast_name("g", "old"), broadcast_name("g", "new")
    cursors = BroadcastCursors(1000)
    assert cursors.look([old, new, "plain"], {new}, 0) == []
    assert cursors.next_look_ms == 1000
    assert cursors.look([old, new, "plain"], {new}, 999) == []
    assert cursors.look([old, new, "plain"], {new}, 1000) == [old]
    assert cursors.look([new, "plain"], set(), 2000) == []
    assert cursors.look([new, "plain"], {new}, 2999) == [], "it was back in time"
    assert cursors.look([new, "plain"], set(), 3500) == []
    assert cursors.look([new, "plain"], set(), 4500) == [new]
    assert cursors.look([], set(), 9000) == []


class Whisper:
    """A voice that says something when it is told to."""

    def __init__(self) -> None:
        self.heard = 0
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1


def test_a_client_that_answers_is_no_longer_doubted() -> None:
    voice = Whisper()
    changes: list[bool] = []
    pulse, member = Pulse(voice, changes.append), subscribe(Group("billing", "orders"), "a")
    member.attach(pulse)
    assert pulse.doubt(0) == pulse.doubt(5) == PATIENCE_MS, "one doubt is one question"
    assert (voice.asked, member.is_quiet, member.credit(0), member.state) == (1, True, 0, MemberState.ACTIVE)
    pulse.look(PATIENCE_MS - 1)
    assert changes == []
    voice.heard += 1
    pulse.look(PATIENCE_MS - 1)
    assert (member.is_quiet, member.credit(0), changes) == (False, 10, [False])
    assert pulse.is_fresh(PATIENCE_MS)
    assert not pulse.is_fresh(3 * PATIENCE_MS)


def test_a_client_that_says_nothing_is_silent_until_it_speaks() -> None:
    voice = Whisper()
    changes: list[bool] = []
    pulse, member = Pulse(voice, changes.append), subscribe(Group("billing", "orders"), "a")
    member.attach(pulse)
    pulse.doubt(0)
    pulse.look(PATIENCE_MS)
    pulse.look(9 * PATIENCE_MS)
    assert (member.state, member.may_pull, changes) == (MemberState.SILENT, False, [False])
    voice.heard += 1
    pulse.look(9 * PATIENCE_MS)
    assert (member.state, member.may_pull, changes) == (MemberState.ACTIVE, True, [False, True])


def test_a_member_that_consumes_through_two_clients_is_silent_only_if_both_are() -> None:
    stopped, living = Pulse(Whisper()), Pulse(Whisper())
    member = subscribe(Group("billing", "orders"), "a")
    member.attach(stopped)
    member.attach(living)
    stopped.doubt(0)
    stopped.look(PATIENCE_MS)
    assert (member.is_quiet, member.is_silent) == (False, False)
    member.detach(living)
    assert (member.is_quiet, member.is_silent) == (True, True)
    member.detach(stopped)
    assert member.is_silent, "it went in silence"
    assert stopped.members == living.members == []


def test_a_silent_member_that_joins_again_is_heard() -> None:
    group = Group("billing", "orders")
    pulse, member = Pulse(Whisper()), subscribe(group, "a")
    member.attach(pulse)
    pulse.doubt(0)
    pulse.look(PATIENCE_MS)
    member.detach(pulse)
    group.disconnect("a", 0, 10_000)
    assert subscribe(group, "a") is member
    assert (member.state, member.credit(0)) == (MemberState.ACTIVE, 10)


def test_a_member_for_which_there_was_nothing_keeps_its_turn() -> None:
    """Else, with two members, one of them would get every lone message."""
    group = Group("billing", "orders")
    first, second = subscribe(group, "a"), subscribe(group, "b")
    assert group.next_taker(0) is first
    first.messages_out = 1
    assert group.next_taker(0) is second
    group.keep_turn(second)
    assert group.next_taker(0) is second
    second.messages_out = 1
    assert group.next_taker(0) is first
    group.keep_turn(first)
    assert group.next_taker(0) is first


def test_a_member_with_nothing_out_comes_before_those_that_have_something() -> None:
    group = Group("billing", "orders")
    first, second = subscribe(group, "a"), subscribe(group, "b")
    first.messages_out = second.messages_out = 1
    third = subscribe(group, "c")
    assert [group.next_taker(0), group.next_taker(0)] == [third, first], "it had its turn"
    second.messages_out = 0
    group.wake(second)
    assert group.next_taker(0) is second
