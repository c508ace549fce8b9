"""Dead letters at the client: how they are named, and how many go at a time."""

from __future__ import annotations

import pytest

from dmq.client.admin.dead_letters import named, steps
from dmq.errors import InvalidRequest, InvalidSettings
from dmq.model import MessageId


def test_many_go_in_parts_of_a_hundred() -> None:
    parts = list(steps(range(1, 251), None))
    assert [len(part) for part, _ in parts] == [100, 100, 50]
    assert [number for part, _ in parts for number in part] == [*range(1, 251)]
    assert {seconds for _, seconds in parts} == {0.0}


@pytest.mark.parametrize(("rate", "size"), [(20.0, 4), (2.0, 1), (0.5, 1), (1_000_000.0, 100)])
def test_a_rate_makes_parts_that_take_their_time(rate: float, size: int) -> None:
    parts = list(steps(range(200), rate))
    assert len(parts[0][0]) == size
    assert sum(seconds for _, seconds in parts) == pytest.approx(200 / rate)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_nothing(rate: float) -> None:
    with pytest.raises(InvalidSettings, match="rate is a number of letters a second"):
        list(steps([1], rate))


def test_numbers_need_no_question() -> None:
    call = named([3, "2", 3], "", "", "")
    with pytest.raises(StopIteration) as ended:
        next(call)
    assert ended.value.value == [3, 2]


@pytest.mark.parametrize("bad", [0, -1, True, "x", "", 1 << 63])
def test_what_names_no_letter_is_told(bad: object) -> None:
    with pytest.raises(InvalidRequest):
        next(named([bad], "", "", ""))  # type: ignore[list-item]


def test_a_message_id_is_looked_up() -> None:
    command, header = next(named(MessageId(1, 2), "", "", ""))
    assert command.name == "DEAD_LETTER_LIST"
    assert header.filter.message_ids == [MessageId(1, 2).to_bytes()]  # type: ignore[attr-defined]
