"""What becomes of rows that a broker refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from dmq.errors import (
    DeadLettered,
    DMQError,
    InvalidMessage,
    NotConnected,
    OutOfRetries,
    RateLimited,
    TimedOut,
    UnknownTopic,
)
from dmq.model import Message
from dmq.outbox.alerts import Alert, alert_with
from dmq.outbox.metrics import Counts
from dmq.outbox.sender.dispatch import Dispatch


class FakeRow(msgspec.Struct):
    """A row as the sender table gives it, in the order of its columns."""

    number: int
    business_id: str | None = None
    attempts: int = 0
    body: bytes = b"x"

    @property
    def send_id(self) -> str:
        return f"{self.number:032d}"

    @property
    def is_ordered(self) -> int:
        return int(self.business_id is not None)

    def __iter__(self) -> Any:
        return iter(
            (self.number, self.send_id, "shop", "orders", self.business_id, None, self.is_ordered, None, None, 4,
             self.body, None, None, "NEW", self.attempts, 0, 0, None)
        )  # fmt: skip


class FakeClient:
    """Has a producer that answers as told."""

    def __init__(self, answer: Callable[[Sequence[Message]], None]) -> None:
        self.answer = answer
        self.calls: list[int] = []

    def producer(self, **_: Any) -> FakeClient:
        return self

    def send_many(self, topic: str, messages: Sequence[Message]) -> None:
        self.calls.append(len(messages))
        self.answer(messages)

    def close(self, timeout: float) -> None:
        pass


def dispatch(answer: Callable[[Sequence[Message]], None], alerts: list[Alert] | None = None) -> Dispatch:
    counts = Counts()
    told = alerts if alerts is not None else []
    return Dispatch(FakeClient(answer), 1.0, 3, alert_with(told.append, counts), counts)  # type: ignore[arg-type]


def refuse(error: DMQError) -> Callable[[Sequence[Message]], None]:
    def answer(_: Sequence[Message]) -> None:
        raise error

    return answer


def numbers(rows: Sequence[Any]) -> list[int]:
    return [row.number for row in rows]


ROWS: Any = [FakeRow(1, "u"), FakeRow(2, "u"), FakeRow(3, "v"), FakeRow(4)]


def test_what_a_broker_takes_is_sent() -> None:
    sent = dispatch(lambda _: None).send("orders", ROWS)
    assert numbers(sent.rows) == [1, 2, 3, 4]
    assert (sent.refused, sent.given_back, sent.trouble) == ([], [], None)


@pytest.mark.parametrize("kind", [NotConnected, TimedOut, OutOfRetries])
def test_trouble_with_the_broker_is_no_rows_fault(kind: type[DMQError]) -> None:
    sent = dispatch(refuse(kind("away", stored_indexes=[1]))).send("orders", ROWS)
    assert (numbers(sent.rows), numbers(sent.given_back), sent.refused) == ([2], [1, 3, 4], [])
    assert isinstance(sent.trouble, kind)


def test_a_limit_says_when_to_try_again() -> None:
    sent = dispatch(refuse(RateLimited("slowly", retry_after_ms=2500))).send("orders", ROWS)
    assert (len(sent.given_back), sent.wait_ms, sent.trouble) == (4, 2500, None)


def test_what_went_to_the_dead_letters_is_not_sent_again() -> None:
    assert len(dispatch(refuse(DeadLettered("kept"))).send("orders", ROWS).rows) == 4


def test_what_is_refused_waits_longer_each_time_and_becomes_an_alert_once() -> None:
    alerts: list[Alert] = []
    waits = []
    for attempts in range(9):
        rows: Any = [FakeRow(1, "u", attempts), FakeRow(2, None, attempts)]
        sent = dispatch(refuse(UnknownTopic("there is none")), alerts).send("orders", rows)
        assert (numbers(sent.refused), sent.reason) == ([1, 2], "there is none")
        waits.append(sent.wait_ms)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1_000, 60_000)
    assert [(alert.attempts, alert.count, alert.send_id) for alert in alerts] == [(3, 2, ROWS[0].send_id)]


def test_one_bad_message_is_found_and_holds_back_only_its_business() -> None:
    def answer(messages: Sequence[Message]) -> None:
        if any(message.body == b"bad" for message in messages):
            raise InvalidMessage("no")

    rows: Any = [FakeRow(1, "u"), FakeRow(2, "u", body=b"bad"), FakeRow(3, "u"), FakeRow(4, "v"), FakeRow(5)]
    sent = dispatch(answer).send("orders", rows)
    assert (numbers(sent.rows), numbers(sent.refused), numbers(sent.given_back)) == ([1, 4, 5], [2], [3])


def test_a_broker_that_goes_while_a_bad_message_is_looked_for() -> None:
    answers = iter([InvalidMessage("no"), None, NotConnected("away")])

    def answer(_: Sequence[Message]) -> None:
        error = next(answers)
        if error is not None:
            raise error

    sent = dispatch(answer).send("orders", ROWS)
    assert (numbers(sent.rows), numbers(sent.given_back)) == ([1], [2, 3, 4])
    assert isinstance(sent.trouble, NotConnected)


def test_an_alert_callback_that_fails_fails_alone() -> None:
    counts = Counts()

    def broken(_: Alert) -> None:
        raise ZeroDivisionError

    client: Any = FakeClient(refuse(UnknownTopic("none")))
    rows: Any = [FakeRow(1, None, 0)]
    assert Dispatch(client, 1.0, 1, alert_with(broken, counts), counts).send("orders", rows).refused
    assert counts.get("alerts_send") == 1


def test_the_log_says_that_a_topic_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    error = UnknownTopic("topic 'nowhere' does not exist: create it")
    sender = dispatch(refuse(error))
    for _ in range(3):
        sender.send("nowhere", [FakeRow(1), FakeRow(2)])  # type: ignore[list-item]
    (line,) = caplog.messages
    assert line == (
        "a broker refuses messages of the outbox: they stay in the table and are tried again topic=nowhere messages=2 "
        "attempts=1 again_seconds=1 reason=\"topic 'nowhere' does not exist: create it\""
    )
