"""Which broker to try next, and when."""

from __future__ import annotations

import pytest

from dmq.client.connection.failover import Backoff, Failover, nobody_answers
from dmq.client.connection.router import Listeners
from dmq.client.connection.url import Address
from dmq.errors import DMQError, NotConnected, VersionMismatch

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
    assert failover.next_attempt() == (C, 0.0)
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
    assert failover.next_attempt() == (A, 0.0)


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
