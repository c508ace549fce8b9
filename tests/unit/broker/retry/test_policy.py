"""How long a failed message waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.delivery.origin import is_exhausted
from dmq.broker.retry.policy import parse_retry_table, retry_delay_ms, wait_ms
from dmq.errors import InvalidSettings


def test_the_wait_grows_threefold_up_to_two_hours() -> None:
    """J-05: 3^(n-1) seconds, capped."""
    seconds = [retry_delay_ms(attempt) // 1000 for attempt in range(1, 12)]
    assert seconds == [1, 3, 9, 27, 81, 243, 729, 2187, 6561, 7200, 7200]
    assert retry_delay_ms(10**9) == 7_200_000


def test_a_table_replaces_the_schedule_and_its_last_entry_holds_on() -> None:
    """J-05: configurable."""
    assert [retry_delay_ms(n, [10, 20, 0]) for n in (1, 2, 3, 4, 99)] == [10, 20, 0, 0, 0]


@pytest.mark.parametrize(("attempt", "table"), [(0, None), (-1, [1]), (1, []), (1, [5, -1])])
def test_nonsense_is_refused(attempt: int, table: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"attempts count from 1|a retry table needs"):
        retry_delay_ms(attempt, table)


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_a_message_gets_as_many_attempts_as_it_may_have_and_no_more(attempts_max: int, failed: int) -> None:
    assert is_exhausted(failed, attempts_max) == (failed >= attempts_max)
    assert not is_exhausted(failed, 0)


def test_what_was_asked_for_goes_before_the_table() -> None:
    assert wait_ms(3, 0) == 0
    assert wait_ms(3, 70) == 70
    assert wait_ms(3, -1) == 9000
    assert wait_ms(3, -1, [1, 2]) == 2


@pytest.mark.parametrize(
    ("text", "table"), [("3^n", None), (" 3^n ", None), ("1", (1000,)), ("0.5, 2,60", (500, 2000, 60_000)), ("0", (0,))]
)
def test_a_table_is_written_in_seconds(text: str, table: tuple[int, ...] | None) -> None:
    assert parse_retry_table(text) == table


@pytest.mark.parametrize("text", ["", "soon", "1,,2", "-1", "1e9", "nan", ",".join(["1"] * 101)])
def test_what_is_no_table_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"as in '1,5,60'"):
        parse_retry_table(text)
