"""The ends of many transactions share requests, and an end is sent until it is answered. (R-09)"""

from __future__ import annotations

import pytest

from dmq.client.admin.reports import StoredMessage
from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.core import Core, ProducerOptions
from dmq.client.producer.routes import Route, Routes
from dmq.client.producer.transaction import EndFuture, Transaction
from dmq.client.producer.transaction_core import GIVE_UP_SECONDS, Transactions, check_options, roll_back_late, spans_of
from dmq.errors import (
    BrokerStopping,
    DMQError,
    InvalidMessage,
    InvalidName,
    InvalidSettings,
    NotConnected,
    OutOfRetries,
    StaleEpoch,
    TimedOut,
    TransactionOver,
)
from dmq.model import Message, MessageId, TopicConfig
from dmq.protocol import Command
from dmq.protocol.produce import (
    ProduceFlag,
    TransactionCheck,
    TransactionEndReply,
    TransactionOutcome,
    TransactionRefusal,
)
from dmq.protocol.status import Status
from dmq.records import encode_batch
from dmq.testing import FakeClock
from tests.unit.client.links import FakeLink, FakeLinks, Request

COMMIT, ROLLBACK = TransactionOutcome.COMMIT, TransactionOutcome.ROLLBACK


class Bench:
    """A producer's core over a fake connection."""

    def __init__(self, check: object = None) -> None:
        self.clock = FakeClock()
        self.link = FakeLink()
        self.lines = FakeLinks(self.clock, self.link)
        routes = Routes()
        self.route = Route.of(TopicConfig(queues=4), self.clock.monotonic())
        routes.put("orders", self.route)
        self.core = Core.make("shop", ProducerOptions(), routes, self.lines, self.clock)
        self.transactions = Transactions(self.core, self.lines, self.clock, "pay", check)  # type: ignore[arg-type]

    def prepare(self, body: bytes = b"x") -> tuple[SendBatch, int]:
        """A half message on its way."""
        put = self.core.put(self.transactions.draft(self.route, "orders", body), attended=True, deadline=None)
        assert put is not None
        self.core.sender.pump(put[0].lane)
        return put

    def prepared(self, body: bytes = b"x") -> tuple[SendBatch, int]:
        """A half message that the broker has."""
        half = self.prepare(body)
        self.link.produced()[-1].store()
        return half

    def ends(self) -> list[Request]:
        return [request for request in self.link.requests if request.command == Command.TRANSACTION_END]


def test_a_half_message_goes_out_as_such_and_has_no_offset() -> None:
    bench = Bench()
    batch, index = bench.prepared()
    header = bench.link.produced()[0].header
    assert header.flags & ProduceFlag.HALF
    assert header.group == "pay"
    assert batch.receipt(index).offset == -1


def test_ends_gather_while_one_is_under_way() -> None:
    bench = Bench()
    halves = [bench.prepared() for _ in range(6)]
    first = bench.transactions.end([halves[0]], COMMIT)
    others = [bench.transactions.end([half], COMMIT) for half in halves[1:4]]
    other = bench.transactions.end([halves[4]], ROLLBACK)
    assert len(bench.ends()) == 1
    bench.ends()[0].answer(TransactionEndReply())
    assert first.is_done
    assert [(e.header.outcome, e.header.first_sequence) for e in bench.ends()[1:]] == [(COMMIT, 1)]
    assert [(s.first_sequence, s.count) for s in bench.ends()[1].header.others] == [(2, 1), (3, 1)]
    bench.ends()[1].answer(TransactionEndReply([TransactionRefusal(2, Status.TRANSACTION_OVER, "over")]))
    assert [type(end.error) for end in others] == [type(None), TransactionOver, type(None)]
    assert not other.is_done
    bench.ends()[2].answer(TransactionEndReply())
    assert other.is_done


def test_messages_of_one_transaction_end_in_one_request() -> None:
    bench = Bench()
    halves = [bench.prepared() for _ in range(5)]
    bench.transactions.end([halves[0], halves[1], halves[4]], COMMIT)
    (request,) = bench.ends()
    assert (request.header.first_sequence, request.header.count) == (0, 2)
    assert [(s.first_sequence, s.count) for s in request.header.others] == [(4, 1)]
    assert spans_of(halves) == [(0, 5)]


def test_an_end_is_sent_again_when_the_connection_broke() -> None:
    bench = Bench()
    end = bench.transactions.end([bench.prepared()], COMMIT)
    before = bench.ends()[0].header
    bench.link.lose()
    assert not end.ended()
    fresh = FakeLink()
    bench.lines.links = [fresh]
    bench.transactions.connected(fresh)
    again = [request for request in fresh.requests if request.command == Command.TRANSACTION_END]
    assert [request.header for request in again] == [before]
    again[0].answer(TransactionEndReply())
    assert end.ended()
    assert end.error is None


def test_an_end_that_is_refused_for_the_moment_is_tried_again_and_others_fail() -> None:
    bench = Bench()
    end = bench.transactions.end([bench.prepared()], COMMIT)
    bench.ends()[0].refuse(BrokerStopping("not now"))
    bench.lines.advance(0.2)
    bench.ends()[1].refuse(StaleEpoch("too old"))
    assert isinstance(end.error, StaleEpoch)


def test_an_end_that_is_never_answered_is_given_up() -> None:
    bench = Bench()
    end = bench.transactions.end([bench.prepared()], COMMIT)
    bench.clock.advance(GIVE_UP_SECONDS + 1)
    bench.link.lose()
    assert isinstance(end.error, OutOfRetries)


def test_a_commit_may_be_asked_for_before_the_message_is_stored() -> None:
    bench = Bench()
    half = bench.prepare()
    future = EndFuture(bench.transactions.end_later([half], COMMIT))
    assert not bench.ends()
    bench.link.produced()[0].store()
    assert bench.ends()[0].header.first_sequence == 0
    assert not future.done()
    told: list[DMQError | None] = []
    future.add_done_callback(lambda done: told.append(done.exception(0)))
    with pytest.raises(TimedOut, match="a check decides"):
        future.result(0.0)
    bench.ends()[0].answer(TransactionEndReply())
    assert told == [None]
    future.result(0.0)


def test_a_message_that_cannot_be_stored_is_the_error_of_its_commit() -> None:
    bench = Bench()
    half = bench.prepare()
    end = bench.transactions.end_later([half], COMMIT)
    bench.link.produced()[0].refuse(InvalidMessage("no"))
    assert isinstance(end.error, InvalidMessage)
    assert not bench.ends()


def test_what_nobody_waits_for_any_more_is_rolled_back_when_it_is_stored_after_all() -> None:
    bench = Bench()
    batch, index = bench.prepare()
    roll_back_late(bench.transactions, batch, index)
    assert not bench.ends()
    bench.link.produced()[0].store()
    assert [request.header.outcome for request in bench.ends()] == [ROLLBACK]


@pytest.mark.parametrize(
    ("decision", "outcome"), [("commit", COMMIT), ("rollback", ROLLBACK), (None, None), ("maybe", None), (True, None)]
)
def test_a_check_is_answered_as_the_function_says(decision: object, outcome: TransactionOutcome | None) -> None:
    seen: list[StoredMessage] = []

    def check(message: StoredMessage) -> object:
        seen.append(message)
        return decision

    bench = Bench(check)
    message_id = MessageId(99, 5)
    record = bytes(encode_batch("orders", "other", [Message(b"half", key="k")], sent_at_ms=1).data)
    asked = TransactionCheck(message_id.to_bytes(), "pay", "orders", 1, 3)
    bench.transactions.pushed(bench.link, asked, record)
    bench.transactions.pushed(bench.link, TransactionCheck(message_id.to_bytes(), "others", "orders"), record)
    assert [(m.id, m.topic, m.body, m.key) for m in seen] == [(message_id, "orders", b"half", "k")]
    headers = [request.header for request in bench.ends()]
    assert [(h.producer_id, h.producer_epoch, h.first_sequence, h.outcome) for h in headers] == (
        [] if outcome is None else [(99, 3, 5, outcome)]
    )


def test_a_producer_with_a_check_says_so_on_every_connection_and_leaves_at_its_end() -> None:
    bench = Bench(lambda _: None)
    bench.transactions.connected(bench.link)
    bench.transactions.close(NotConnected("closed"))
    joins = [r.header for r in bench.link.requests if r.command == Command.TRANSACTION_JOIN]
    assert [(join.group, join.leaves) for join in joins] == [("pay", False), ("pay", True)]


def test_what_waits_when_the_producer_is_closed_fails() -> None:
    bench = Bench()
    half = bench.prepared()
    bench.lines.links = []
    waiting = bench.transactions.end([half], COMMIT)
    assert bench.transactions.unsettled() == [waiting]
    bench.transactions.close(NotConnected("closed"))
    late = bench.transactions.end([half], COMMIT)
    assert isinstance(waiting.error, NotConnected)
    assert isinstance(late.error, NotConnected)


def test_an_exception_in_the_block_is_not_hidden_by_a_rollback_that_fails() -> None:
    bench = Bench()
    half = bench.prepared()
    bench.lines.links = []
    tx = Transaction(bench.transactions, bench.prepare, half, 0.01)
    with pytest.raises(ZeroDivisionError), tx:
        raise ZeroDivisionError
    assert tx.is_ended


def test_options_that_make_no_sense_are_refused() -> None:
    check_options(None, None)
    check_options("pay", None)
    with pytest.raises(InvalidSettings, match="group="):
        check_options(None, lambda _: None)
    with pytest.raises(InvalidSettings, match="function"):
        check_options("pay", "commit")  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        check_options("not a name", None)
