"""Which broker to try next, and when."""

from __future__ import annotations

import pytest

from dmq.client.connection.failover import Backoff, Failover, nobody_answers
from dmq.client.connection.router import Listeners
from dmq.client.connection.url import Address
from dmq.errors import DMQError, NotConnected, NotLeader, VersionMismatch
from dmq.protocol.session import ShardInfo

A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)


def tried(failover: Failover, count: int) -> list[Address]:
    return [failover.next_attempt().address for _ in range(count)]


def test_a_round_tries_each_address_once_and_rounds_are_apart() -> None:
    failover = Failover([A, B, C], Backoff(seed=1))
    attempts = [failover.next_attempt() for _ in range(7)]
    assert [attempt.address for attempt in attempts] == [A, B, C, A, B, C, A]
    assert [attempt.pause > 0 for attempt in attempts] == [False, False, False, True, False, False, True]
    assert attempts[6].pause > attempts[3].pause


def test_pauses_double_up_to_a_maximum_and_begin_anew() -> None:
    backoff = Backoff(0.1, 1.0, seed=3)
    pauses = [backoff.take() for _ in range(8)]
    for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert 0.75 * full <= pause <= full
    backoff.reset()
    assert backoff.take() <= 0.1


def test_a_broker_that_is_back_for_two_seconds_is_met() -> None:
    backoff = Backoff(seed=1)
    assert max(backoff.take() for _ in range(100)) < 2.0


def test_after_a_loss_the_next_one_comes_first_and_at_once() -> None:
    failover = Failover([A, B, C])
    tried(failover, 5)
    failover.connected(B, "bob")
    failover.lost(B)
    assert failover.next_attempt()[:2] == (C, 0.0)
    assert tried(failover, 2) == [A, B]


def test_a_rebooting_broker_is_left_out_of_the_first_round_and_comes_last_after_it() -> None:
    failover = Failover([A, B, C])
    failover.connected(A, "alice")
    assert failover.rebooting(A)
    assert tried(failover, 2) == [B, C]
    assert tried(failover, 3) == [B, C, A]
    assert failover.others(B) == [C]


def test_the_only_broker_is_tried_even_while_it_reboots() -> None:
    failover = Failover([A])
    failover.connected(A, "alice")
    assert not failover.rebooting(A)
    assert failover.next_attempt()[:2] == (A, 0.0)


@pytest.mark.parametrize(("broker", "address"), [("alice", ""), ("someone", "a:1")])
def test_a_healthy_broker_is_in_use_again(broker: str, address: str) -> None:
    failover = Failover([A, B])
    failover.connected(A, "alice")
    failover.rebooting(A)
    assert not failover.is_in_use(A)
    assert failover.healthy(broker, address) == A
    assert failover.is_in_use(A)


def test_health_of_a_stranger_changes_nothing() -> None:
    failover = Failover([A])
    assert failover.healthy("x", "far:99") is None
    assert failover.healthy("x", "::not an address::") is None


def test_a_connection_that_succeeds_puts_a_broker_back() -> None:
    failover = Failover([A, B])
    failover.rebooting(A)
    failover.connected(A, "alice")
    assert failover.is_in_use(A)


def test_one_sentence_tells_why_nobody_answers() -> None:
    error = nobody_answers({A: NotConnected("no broker answers at a:1 (Connection refused)")})
    assert error.message.endswith("start a broker there, or check the URL")
    both = nobody_answers({A: NotConnected("first"), B: NotConnected("second")})
    assert "first" in both.message
    assert "second" in both.message
    refused = VersionMismatch("too old")
    assert nobody_answers({A: refused}) is refused


def test_the_last_listener_set_wins() -> None:
    heard: list[str] = []
    listeners = Listeners(on_exception=lambda _: heard.append("first"))
    listeners.on_exception = lambda _: heard.append("second")
    listeners.exception(DMQError("x"))
    listeners.interrupted()
    listeners.resumed()
    assert heard == ["second"]


# --- a shard ----------------------------------------------------------------------------------------------------------


def follower(epoch: int, leader: Address | str = "", *members: Address) -> ShardInfo:
    return ShardInfo("s1", epoch, False, str(leader), [str(member) for member in members])


def leader(epoch: int) -> ShardInfo:
    return ShardInfo("s1", epoch, True)


def test_the_leader_that_a_member_names_is_tried_next_and_once_in_a_round() -> None:
    failover = Failover([A, B, C])
    assert tried(failover, 1) == [A]
    assert isinstance(failover.check_leader(A, follower(3, C)), NotLeader)
    assert tried(failover, 1) == [C]
    failover.check_leader(C, follower(3, A))
    assert tried(failover, 1) == [B]
    assert failover.is_round_over


def test_a_member_that_the_url_does_not_name_is_tried_too() -> None:
    far, other = Address("far", 9), Address("other", 8)
    failover = Failover([A])
    tried(failover, 1)
    failover.check_leader(A, follower(3, far, A, far, other))
    assert tried(failover, 1) == [far]
    assert failover.check_leader(far, leader(3)) is None
    failover.connected(far, "far")
    failover.lost(far)
    assert tried(failover, 3) == [other, A, far]


@pytest.mark.parametrize("nonsense", ["", "::", "a:99999", "a b:1", "a:1:2"])
def test_a_leader_that_is_no_address_changes_nothing(nonsense: str) -> None:
    failover = Failover([A, B])
    tried(failover, 1)
    assert isinstance(failover.check_leader(A, follower(3, nonsense)), NotLeader)
    assert tried(failover, 1) == [B]


def test_a_lower_epoch_never_replaces_a_higher_one() -> None:
    failover = Failover([A, B, C])
    tried(failover, 1)
    assert failover.check_leader(A, leader(8)) is None
    failover.connected(A, "a")
    failover.lost(A)
    tried(failover, 1)
    assert isinstance(failover.check_leader(B, leader(7)), NotLeader)
    failover.check_leader(B, follower(7, A))
    assert failover.leader != A or failover.epoch == 8
    assert tried(failover, 1) == [C], "what it says of an old epoch is not listened to"
    assert failover.check_leader(C, leader(9)) is None


def test_a_shard_that_was_made_anew_is_found_in_the_end() -> None:
    failover = Failover([A])
    tried(failover, 1)
    failover.check_leader(A, leader(8))
    failover.connected(A, "a")
    failover.lost(A)
    refusals = 0
    failover.next_attempt()
    while failover.check_leader(A, leader(1)) is not None:
        refusals += 1
        failover.next_attempt()
    assert 10 < refusals < 30
    failover.connected(A, "a")
    assert failover.epoch == 1


def test_a_leader_that_was_lost_is_tried_last_though_others_still_name_it() -> None:
    failover = Failover([A, B, C])
    tried(failover, 1)
    failover.check_leader(A, leader(1))
    failover.connected(A, "a")
    failover.lost(A)
    assert tried(failover, 1) == [B]
    failover.check_leader(B, follower(1, A))
    assert tried(failover, 2) == [C, A]
    assert tried(failover, 1) == [B]
    failover.check_leader(B, follower(1, A))
    assert tried(failover, 1) == [A], "it may be back"


def test_a_leader_that_is_elected_again_is_tried_at_once_though_it_was_lost() -> None:
    failover = Failover([A, B, C])
    failover.check_leader(A, leader(1))
    failover.connected(A, "a")
    failover.lost(A)
    assert tried(failover, 1) == [B]
    failover.check_leader(B, follower(2, A))
    assert tried(failover, 1) == [A]


def test_a_deposed_leader_is_left_at_once_and_tried_again_after_a_pause() -> None:
    failover = Failover([A, B], Backoff(seed=1))
    failover.check_leader(A, leader(1))
    failover.connected(A, "a")
    failover.settled()
    failover.deposed(A, "", 1)
    assert failover.next_attempt()[:2] == (B, 0.0)
    failover.check_leader(B, follower(1, A))
    again = [failover.next_attempt() for _ in range(2)]
    assert again[0].pause > 0
    assert {attempt.address for attempt in again} == {A, B}


def test_members_that_say_they_lead_and_cannot_are_tried_less_and_less_often() -> None:
    failover = Failover([A, B], Backoff(seed=1))
    pauses = []
    for _ in range(8):
        address, pause, _ = failover.next_attempt()
        assert failover.check_leader(address, leader(1)) is None
        pauses.append(pause)
        failover.connected(address, "x")
        failover.deposed(address, str(A if address == B else B), 1)
    assert pauses[0] == 0
    assert pauses[1] < pauses[3] < pauses[4]
    assert pauses[-1] > 1


def test_a_member_of_another_shard_is_not_used() -> None:
    failover = Failover([A, B])
    failover.check_leader(A, follower(1))
    error = failover.check_leader(B, ShardInfo("s2", 1, True))
    assert error is not None
    assert "'s2'" in error.message
    assert failover.check_leader(B, None) is None, "a lone broker has always been used"


def test_what_cannot_answer_gets_little_time_while_there_are_others() -> None:
    failover = Failover([A, B])
    seconds = [failover.next_attempt().seconds for _ in range(12)]
    assert seconds[0] < 2
    assert seconds == sorted(seconds)
    assert seconds[-1] == Failover([A]).next_attempt().seconds == 5.0


def test_the_sentence_names_a_leader_that_cannot_be_reached() -> None:
    gone = {A: NotLeader("a does not lead"), B: NotConnected("no broker answers at b:2")}
    error = nobody_answers(gone, "s1", B)
    assert isinstance(error, NotConnected)
    assert "advertised at b:2" in error.message
    assert error.detail["leader"] == "b:2"
    assert "has no leader" in nobody_answers({A: NotLeader("a does not lead")}, "s1", None).message
