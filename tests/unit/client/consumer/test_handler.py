"""What a handler's end means, and how fast handlers may start."""

from __future__ import annotations

import pytest

import dmq
from dmq.client.consumer.handler import check_policy, check_pool, judge
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import InvalidSettings
from tests.unit.client.deliveries import bodies, book, core, frame, one


def outcome(error: BaseException | None, tries: int = 2, local_retries: int = 1) -> tuple[object, ...] | None:
    """What is said of a message; None if its handler is called again."""
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    message = ReceivedMessage(*one(made))
    verdict = judge(error, tries, local_retries)
    verdict.settle(message)
    if verdict.is_again:
        assert not made.reports(book(made))
        return None
    ((settlement,),) = [report.settlements for report in made.reports(book(made))]
    return settlement.outcome.name, settlement.delay_ms, settlement.reason


def test_a_handler_that_returns_acks() -> None:
    assert outcome(None) == ("ACK", -1, "")


def test_retry_and_reject_are_done_as_said() -> None:
    assert outcome(dmq.Retry("later", after=2.5), tries=1) == ("NACK", 2500, "later")
    assert outcome(dmq.Retry(), tries=1) == ("NACK", -1, "")
    assert outcome(dmq.Reject("broken"), tries=1) == ("REJECT", -1, "broken")


def test_any_other_error_is_tried_again_here_then_given_back() -> None:
    assert outcome(ValueError("bug"), tries=1) is None
    assert outcome(ValueError("bug"), tries=2) == ("NACK", -1, "ValueError: bug")
    assert outcome(ValueError("bug"), tries=1, local_retries=0) == ("NACK", -1, "ValueError: bug")
    assert outcome(SystemExit(1), tries=1) == ("NACK", -1, "SystemExit: 1")


@pytest.mark.parametrize("policy", ["drop", None, 7])
def test_a_policy_that_is_none_is_refused(policy: object) -> None:
    with pytest.raises(InvalidSettings, match="caller-runs"):
        check_policy(policy)


@pytest.mark.parametrize(("workers", "retries"), [(0, 1), (True, 1), (2000, 1), (1, -1), (1, "x")])
def test_a_pool_that_makes_no_sense_is_refused(workers: object, retries: object) -> None:
    with pytest.raises(InvalidSettings):
        check_pool(print, workers, retries)


@pytest.mark.parametrize("handler", [None, 7, "handle"])
def test_a_handler_that_cannot_be_called_is_refused(handler: object) -> None:
    with pytest.raises(InvalidSettings, match="takes a message"):
        check_pool(handler, 1, 1)


@pytest.mark.parametrize(("rate", "burst"), [(0, None), (-1, None), (1, 0)])
def test_a_rate_limit_is_above_zero(rate: float, burst: float | None) -> None:
    with pytest.raises(InvalidSettings):
        dmq.RateLimit(rate, burst)
