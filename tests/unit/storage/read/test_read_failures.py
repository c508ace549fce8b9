"""When a range that the disk refuses is damage, and when it is still waited for."""

from __future__ import annotations

from dmq.storage.read.read_failures import PATIENCE_SECONDS, ReadFailures


class Rig:
    def __init__(self) -> None:
        self.seconds = 1000.0
        self.failures = ReadFailures(lambda: self.seconds)

    def fail(self, start: int = 100, end: int = 200, *, after: float = 0.0) -> bool:
        self.seconds += after
        return self.failures.failed(start, end)


def test_a_range_that_is_refused_once_is_waited_for() -> None:
    rig = Rig()
    assert not rig.fail()
    assert rig.failures.may_pass(199, 200)
    assert not rig.failures.may_pass(200, 300)
    assert not rig.failures.may_pass(0, 100)


def test_a_range_that_is_refused_many_times_in_a_moment_is_waited_for() -> None:
    rig = Rig()
    found = [rig.fail(after=0.01) for _ in range(100)]
    assert not any(found)
    assert rig.failures.count == 100
    assert len(rig.failures) == 1


def test_a_range_that_is_refused_for_long_is_damaged() -> None:
    rig = Rig()
    assert not rig.fail()
    assert not rig.fail(after=1)
    assert rig.fail(after=PATIENCE_SECONDS)
    assert not rig.failures.may_pass(100, 200)


def test_two_refusals_are_no_damage_however_far_apart() -> None:
    rig = Rig()
    assert not rig.fail()
    assert not rig.fail(after=2 * PATIENCE_SECONDS)


def test_a_range_that_was_read_in_between_is_waited_for_anew() -> None:
    rig = Rig()
    rig.fail()
    rig.fail()
    rig.failures.passed(100, 200)
    assert not rig.failures.may_pass(100, 200)
    assert not rig.fail(after=PATIENCE_SECONDS)
    assert rig.failures.may_pass(100, 200)


def test_a_refusal_long_ago_does_not_count() -> None:
    rig = Rig()
    rig.fail()
    rig.fail()
    assert not rig.fail(after=3600)
    assert not rig.fail()
    assert not rig.fail()
    assert rig.fail(after=PATIENCE_SECONDS)


def test_a_range_close_to_one_that_is_damaged_is_damaged_at_once() -> None:
    rig = Rig()
    for seconds in (0, 1, PATIENCE_SECONDS):
        rig.fail(after=seconds)
    assert rig.fail(200, 300)
    assert rig.fail(1 << 20, (1 << 20) + 1)
    assert not rig.fail(4 << 20, (4 << 20) + 1)


def test_a_damaged_range_that_was_read_says_nothing_of_those_around_it() -> None:
    rig = Rig()
    for seconds in (0, 1, PATIENCE_SECONDS):
        rig.fail(after=seconds)
    rig.failures.passed(100, 200)
    assert not rig.fail(200, 300)


def test_what_another_member_has_is_damaged_at_once() -> None:
    rig = Rig()
    rig.failures.is_patient = False
    assert rig.fail()
    assert not rig.failures.may_pass(100, 200)


def test_no_more_ranges_are_remembered_than_allowed() -> None:
    rig = Rig()
    for number in range(3000):
        rig.fail(number << 22, (number << 22) + 1)
    assert len(rig.failures) == 1000
    rig.failures.is_patient = False
    for number in range(3000):
        rig.fail(number << 22, (number << 22) + 1)
    assert len(rig.failures) == 0
