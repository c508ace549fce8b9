"""Where a client stands when connections come and go."""

from __future__ import annotations

import logging

import pytest

from dmq.client.connection.failover import Failover, Standing
from dmq.client.connection.url import Address
from dmq.errors import NotConnected, NotLeader
from dmq.protocol.session import ShardInfo

A, B = Address("a", 1), Address("b", 2)
GONE = NotConnected("gone")


class Fake:
    """A connection to look at."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.broker = address.host
        self.is_usable = True


def standing(*addresses: Address, reconnect: bool = True) -> Standing[Fake]:
    return Standing(Failover(addresses or (A, B)), reconnect)


def test_interruptions_and_resumptions_alternate() -> None:
    here = standing()
    first, second = Fake(A), Fake(B)
    assert not here.use(first), "the first connection ends no interruption"
    loss = here.lost(first, GONE)
    assert (loss.is_interruption, loss.must_connect, loss.closed_by) == (True, True, None)
    assert not here.lost(first, GONE).is_interruption
    assert here.use(second)
    assert here.current() is second


def test_plain_mode_is_closed_by_the_first_loss() -> None:
    here = standing(reconnect=False)
    first = Fake(A)
    here.use(first)
    loss = here.lost(first, GONE)
    assert loss.is_interruption
    assert not loss.must_connect
    assert loss.closed_by is here.closed_by
    assert not here.begin_connecting()
    assert here.others(A) == []


def test_one_thread_at_a_time_looks_for_a_connection() -> None:
    here = standing()
    assert here.begin_connecting()
    assert not here.begin_connecting()
    here.use(Fake(A))
    assert here.begin_connecting()


def test_a_search_that_has_found_a_connection_is_over_also_when_another_one_goes_on() -> None:
    here = standing()
    first = Fake(A)
    here.use(first)
    here.lost(first, GONE)
    assert here.begin_connecting()
    before = here.searches
    assert here.is_searching(before)
    second = Fake(B)
    here.use(second)
    assert not here.is_searching(before)
    here.lost(second, GONE)
    assert here.begin_connecting()
    assert not here.is_searching(before), "the time of the first search says nothing of the second"
    assert here.is_searching(here.searches)


def test_a_connection_that_cannot_be_used_is_not_in_use() -> None:
    here = standing()
    first = Fake(A)
    here.use(first)
    first.is_usable = False
    assert here.current() is None
    assert here.known(A) is None


def test_moving_away_from_a_rebooting_broker_is_no_interruption() -> None:
    here = standing()
    first, second = Fake(A), Fake(B)
    here.use(first)
    assert here.rebooting(first)
    assert here.current() is None
    assert here.known(A) is first
    assert not here.is_retired(first, 0, True), "not before there is another one"
    assert not here.use(second)
    assert not here.is_retired(first, 3, False), "not while something runs there"
    assert here.is_retired(first, 3, True)
    assert not here.lost(first, GONE).is_interruption


def test_a_rebooting_broker_that_goes_too_early_is_an_interruption() -> None:
    here = standing()
    first = Fake(A)
    here.use(first)
    here.rebooting(first)
    assert here.lost(first, GONE).is_interruption
    assert here.use(Fake(B))


def test_the_only_broker_is_kept_while_it_reboots() -> None:
    here = standing(A)
    first = Fake(A)
    here.use(first)
    assert not here.rebooting(first)
    assert here.current() is first


def test_one_connection_to_a_broker_is_enough() -> None:
    here = standing()
    here.use(Fake(A))
    beside, late = Fake(B), Fake(B)
    assert here.keep_beside(beside) is beside
    assert here.keep_beside(late) is beside
    assert len(here.connections()) == 2


def test_closing_hands_out_all_connections_once() -> None:
    here = standing()
    first, second = Fake(A), Fake(B)
    here.use(first)
    here.keep_beside(second)
    assert {*here.close(GONE)} == {first, second}
    assert here.close(NotConnected("later")) == []
    assert here.closed_by is GONE
    assert here.keep_beside(Fake(B)) is None


def test_the_log_tells_which_broker_was_lost_and_which_is_used_now(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Address("logged-a", 1), Address("logged-b", 2)
    here = standing(one, other)
    with caplog.at_level(logging.INFO, "dmq.client"):
        for address in (one, other, other):
            connection = Fake(address)
            here.use(connection)
            here.lost(connection, NotConnected("the broker hung up"))
        here.use(Fake(one))
        here.rebooting(here.connections()[0], "new kernel")
    assert caplog.messages == [
        "connection lost address=logged-a:1 reason='the broker hung up'",
        "failed over to another broker before=logged-a:1 now=logged-b:2 broker=logged-b reason='the broker hung up'",
        "connection lost address=logged-b:2 reason='the broker hung up'",
        "connection restored address=logged-b:2 broker=logged-b lost='the broker hung up'",
        "failed over to another broker before=logged-b:2 now=logged-a:1 broker=logged-a reason='the broker hung up'",
        "the broker goes out of use address=logged-a:1 reason='new kernel'",
    ]


# --- a shard ----------------------------------------------------------------------------------------------------------


def test_a_deposed_leader_is_an_interruption_and_its_last_answers_are_waited_for() -> None:
    here = standing()
    first, second = Fake(A), Fake(B)
    here.use(first)
    loss = here.deposed(first, NotLeader("not any more", leader="b:2", epoch=2))
    assert (loss.is_interruption, loss.must_connect, loss.closed_by) == (True, True, None)
    assert here.current() is None
    assert here.known(A) is None, "it is not to be used again"
    assert here.connections() == [first]
    assert here.next_attempt().address == B
    assert not here.is_retired(first, 1, False)
    assert here.is_retired(first, 0, False), "whether another one is found or not"
    assert not here.deposed(first, NotLeader("said again")).is_interruption
    assert not here.lost(first, GONE).is_interruption
    assert here.use(second)


def test_in_plain_mode_a_deposed_leader_is_to_be_closed() -> None:
    here = standing(reconnect=False)
    first, error = Fake(A), NotLeader("not any more")
    here.use(first)
    assert here.deposed(first, error) == (False, False, error)
    assert here.lost(first, error).closed_by is not None


def test_where_any_member_will_do_none_is_deposed() -> None:
    here: Standing[Fake] = Standing(Failover((A, B)), True, any_member=True)
    first = Fake(A)
    assert here.refusal(A, ShardInfo("s1", 1, False)) is None
    here.use(first)
    assert here.deposed(first, NotLeader("it asks for the leader")) == (False, False, None)
    assert here.current() is first


def test_a_member_that_reboots_is_kept_until_it_says_who_leads() -> None:
    here = standing()
    assert here.refusal(A, ShardInfo("s1", 1, True)) is None
    first = Fake(A)
    here.use(first)
    assert not here.rebooting(first)
    assert here.current() is first
    assert here.others(A) == [], "nobody else takes what it refuses"


def test_a_connection_that_was_never_in_use_interrupts_nothing() -> None:
    here = standing()
    assert not here.lost(Fake(A), GONE).is_interruption
    assert not here.use(Fake(B))


def test_the_reason_why_no_leader_was_reached_is_told() -> None:
    here = standing()
    assert "shard" not in here.unreached(1.0).message
    refusal = here.refusal(A, ShardInfo("s1", 1, False, "b:2"))
    assert refusal is not None
    here.failed(A, refusal)
    here.failed(B, NotConnected("no broker answers at b:2"))
    assert "within 1 s: the leader of shard 's1' is advertised at b:2" in here.unreached(1.0).message
    assert "if it has just ended, wait for the election" in here.unreached(1.0).message
    here.use(Fake(B))
    assert "advertised" not in here.unreached(1.0).message
