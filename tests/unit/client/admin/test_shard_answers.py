"""What several shards say together."""

from __future__ import annotations

import pytest

from dmq.client.admin.shard_answers import ShardAnswers
from dmq.errors import NotConnected, UnknownMessage


@pytest.mark.parametrize(("is_change", "expected"), [(False, UnknownMessage), (True, NotConnected)])
def test_a_change_is_not_refused_where_a_shard_may_have_done_it(is_change: bool, expected: type[Exception]) -> None:
    answers: ShardAnswers[None] = ShardAnswers(is_change=is_change)
    answers.failed("s1", UnknownMessage("no such message"))
    answers.failed("s2", NotConnected("gone"))
    with pytest.raises(expected):
        answers.check()


def test_a_change_that_one_shard_did_is_done() -> None:
    answers: ShardAnswers[None] = ShardAnswers(is_change=True)
    answers.failed("s1", NotConnected("gone"))
    answers.found.append((2, None))
    answers.check()
    assert answers.missing == ["s1"]
