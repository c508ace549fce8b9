"""How long a failed message waits."""

from __future__ import annotations

import pytest

from dmq.broker.retry import retry_delay_ms


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
