"""Open transactions are asked about in time, so many times, and then given up. (R-09)"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dmq.broker.schedule.transactions import Action, TransactionChecks

FIRST, EVERY, TIMES = 6_000, 30_000, 15
ONE = b"1" * 16


def test_the_first_check_comes_after_six_seconds_and_the_others_every_thirty() -> None:
    checks = TransactionChecks(FIRST, EVERY, TIMES)
    checks.opened(ONE, 1_000)
    assert checks.due(6_999, 10) == []
    assert checks.due(7_000, 10) == [Action(ONE, 1)]
    assert checks.due(36_999, 10) == []
    assert checks.due(37_000, 10) == [Action(ONE, 2)]
    assert checks.attempts(ONE) == 2


def test_after_fifteen_checks_it_is_given_up_once() -> None:
    checks = TransactionChecks(FIRST, EVERY, TIMES)
    checks.opened(ONE, 0)
    now_ms = 0
    asked: list[Action] = []
    while len(asked) < TIMES + 1:
        now_ms += 1_000
        asked += checks.due(now_ms, 10)
    assert asked == [*(Action(ONE, n) for n in range(1, TIMES + 1)), Action(ONE, 0)]
    assert now_ms == FIRST + TIMES * EVERY
    assert checks.due(now_ms + 10 * EVERY, 10) == []  # its giving up is under way


def test_one_that_could_not_be_given_up_is_tried_again() -> None:
    checks = TransactionChecks(0, 0, 1)
    checks.opened(ONE, 0)
    assert checks.due(0, 1) == [Action(ONE, 1)]
    assert checks.due(0, 1) == [Action(ONE, 0)]
    checks.postpone(ONE, 0, 1_000)
    assert checks.due(999, 1) == []
    assert checks.due(1_000, 1) == [Action(ONE, 0)]


def test_one_that_has_ended_is_not_asked_about() -> None:
    checks = TransactionChecks(FIRST, EVERY, TIMES)
    checks.opened(ONE, 0)
    checks.ended(ONE)
    assert checks.due(1 << 40, 10) == []
    assert len(checks) == 0


@given(st.integers(1, 5_000))
def test_what_ended_early_is_swept_out(count: int) -> None:
    checks = TransactionChecks(FIRST, EVERY, TIMES)
    for number in range(count):
        message_id = number.to_bytes(16, "big")
        checks.opened(message_id, number)
        checks.ended(message_id)
    assert len(checks._heap) <= 1_025


class Model(RuleBasedStateMachine):
    """Any order of events, against a dictionary that is looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.checks = TransactionChecks(100, 300, 3)
        self.open: dict[bytes, tuple[int, int]] = {}  # id -> next moment (-1: being given up), checks so far

    @rule(number=st.integers(0, 8))
    def opens(self, number: int) -> None:
        message_id = number.to_bytes(16, "big")
        self.checks.opened(message_id, self.now_ms)
        self.open.setdefault(message_id, (self.now_ms + 100, 0))

    @rule(number=st.integers(0, 8))
    def ends(self, number: int) -> None:
        message_id = number.to_bytes(16, "big")
        self.checks.ended(message_id)
        self.open.pop(message_id, None)

    @rule(number=st.integers(0, 8), wait_ms=st.integers(0, 500))
    def is_postponed(self, number: int, wait_ms: int) -> None:
        message_id = number.to_bytes(16, "big")
        self.checks.postpone(message_id, self.now_ms, wait_ms)
        if self.open.get(message_id, (0, 0))[0] == -1:
            self.open[message_id] = (self.now_ms + wait_ms, self.open[message_id][1])

    @rule(passed_ms=st.integers(0, 400), limit=st.integers(1, 4))
    def looks(self, passed_ms: int, limit: int) -> None:
        self.now_ms += passed_ms
        due = {mid: at for mid, (at, _) in self.open.items() if 0 <= at <= self.now_ms}
        actions = self.checks.due(self.now_ms, limit)
        assert len(actions) == min(limit, len(due))
        moments = [due[action.message_id] for action in actions]
        assert moments == sorted(moments)
        assert not [at for mid, at in due.items() if mid not in {a.message_id for a in actions} and at < max(moments)]
        for message_id, attempt in actions:
            done = self.open[message_id][1]
            assert attempt == (done + 1 if done < 3 else 0)
            self.open[message_id] = (self.now_ms + 300, done + 1) if attempt else (-1, done)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.checks) == len(self.open)
        assert all(self.checks.attempts(mid) == done for mid, (_, done) in self.open.items())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
