"""What becomes of a gap in a strict sequence."""

from __future__ import annotations

import pytest

import dmq
from dmq.outbox.alerts import Alert, AlertKind
from dmq.outbox.inbox.consumption import GAP_POLICIES, Consumption, GapPolicy, judge_gap
from dmq.outbox.inbox.recorder import Gap, Row

ROW = Row("s" * 32, "stock", "orders", "u-1", 5, "c", 0)


@pytest.mark.parametrize("policy", GAP_POLICIES)
def test_a_young_gap_waits_longer_each_time(policy: str) -> None:
    gaps = GapPolicy(policy, seconds=300.0)
    pauses = [gaps.judge(5, 3, 0.0, attempt).after for attempt in range(1, 9)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_the_last_pause_ends_when_the_policy_is_due() -> None:
    assert GapPolicy("skip", seconds=300.0).judge(5, 3, 290.0, 9).after == 10.0
    assert GapPolicy("skip", seconds=300.0).judge(5, 3, 299.9, 9).after == 1.0
    assert GapPolicy("wait", seconds=300.0).judge(5, 3, 299.9, 9).after == 30.0


def test_an_old_gap_is_passed_over_given_up_or_waited_for() -> None:
    assert GapPolicy("skip", 60.0).judge(5, 3, 60.0, 9) is None
    given_up = GapPolicy("dead-letter", 60.0).judge(5, 3, 60.0, 9)
    assert isinstance(given_up, dmq.Reject)
    assert given_up.reason == "number 5 waits for number 4, which did not come in 60 seconds"
    assert isinstance(GapPolicy("wait", 60.0).judge(5, 3, 1e9, 9), dmq.Retry)


def test_somebody_is_told_only_when_the_policy_gives_up() -> None:
    alerts: list[Alert] = []
    taken = Consumption(ROW, "shop", 3)
    for since_ms in (None, 10_000):
        with pytest.raises(dmq.Retry):
            judge_gap(GapPolicy("skip", 60.0), taken, Gap(3, since_ms), 60_000, alerts.append)
    assert alerts == []
    judge_gap(GapPolicy("skip", 60.0), taken, Gap(3, 0), 60_000, alerts.append)
    with pytest.raises(dmq.Reject):
        judge_gap(GapPolicy("dead-letter", 60.0), taken, Gap(3, 0), 60_000, alerts.append)
    assert [(alert.kind, alert.group, alert.business_id) for alert in alerts] == [(AlertKind.GAP, "stock", "u-1")] * 2
    assert alerts[0].reason == "number 4 did not come in 60 seconds: number 5 is consumed without it"


@pytest.mark.parametrize("wrong", [GapPolicy("never"), GapPolicy(seconds=-1.0), GapPolicy(patience=float("nan"))])
def test_a_policy_that_makes_no_sense_is_refused(wrong: GapPolicy) -> None:
    with pytest.raises(dmq.InvalidSettings):
        wrong.check()
