"""The answers of several shards to one question, and what becomes of those that do not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from dmq.client.admin.reports import (
    GroupReason,
    GroupReport,
    Lag,
    Move,
    QueueLag,
    ShardAnswers,
    StoredMessage,
    Topic,
    TraceReport,
    TraceStep,
    WhyReport,
    chosen_why,
    interleaved,
    joined_groups,
    joined_lag,
    joined_topic,
    joined_trace,
)
from dmq.errors import NotAllowed, NotConnected, NotLeader, UnknownGroup, UnknownMessage
from dmq.model import MessageId

T = TypeVar("T")

ID = MessageId(1, 2)


def answers(*found: tuple[int, T], missing: tuple[str, ...] = ()) -> ShardAnswers[T]:
    made: ShardAnswers[T] = ShardAnswers()
    made.found += found
    for name in missing:
        made.failed(name, NotConnected("away"))
    return made


def message(offset: int) -> StoredMessage:
    return StoredMessage(None, "t", 0, offset, b"", None, None, None, 4, offset, offset, "app", {})


def test_rows_name_their_shard_and_those_that_are_missing_are_named() -> None:
    found = answers((2, [Move(0, 5, 9)]), (1, [Move(1, 3, 4)]), missing=("s3",)).rows(lambda row: row.before)
    assert [(row.shard, row.before) for row in found] == [(1, 3), (2, 5)]
    assert found.missing == ("s3",)


def test_a_lone_broker_stays_as_it_is() -> None:
    (row,) = answers((0, [Move(0, 5, 9)])).rows(lambda row: row.before)
    assert row == Move(0, 5, 9)


def test_what_every_shard_would_refuse_is_raised_at_once() -> None:
    with pytest.raises(NotAllowed):
        answers((1, [])).failed("s2", NotAllowed("no"))


def test_what_no_shard_knows_is_unknown_and_says_who_may_know_more() -> None:
    found: ShardAnswers[None] = ShardAnswers()
    found.failed("s1", UnknownMessage("there is none"))
    with pytest.raises(UnknownMessage, match=r"^there is none$"):
        found.check()
    found.failed("s2", NotLeader("no leader"))
    with pytest.raises(UnknownMessage, match="there is none; shard s2 did not answer, and may know more"):
        found.check()


def test_who_is_away_is_told_if_nobody_answers_and_passed_over_if_one_does() -> None:
    with pytest.raises(NotConnected, match="away"):
        answers(missing=("s1", "s2")).check()
    known = answers((1, 7), missing=("s2",))
    known.failed("s3", UnknownGroup("never here"))
    known.check()
    assert known.missing == ["s2"]


def test_so_many_messages_are_taken_of_each_shard_as_of_the_others() -> None:
    dealt = interleaved(answers((1, [message(n) for n in range(5)]), (2, [message(7)]), missing=("s3",)), 4)
    assert [(row.shard, row.offset) for row in dealt] == [(1, 0), (1, 1), (1, 2), (2, 7)]
    assert dealt.missing == ("s3",)


def test_lags_and_groups_are_added_up() -> None:
    row = QueueLag("t", 0, 0, 9, 4, 1, 5, 0.0)
    lag = joined_lag(
        answers((2, Lag("g", 5, (row,), 1)), (1, Lag("g", 3, (replace(row, queue=1),), 2)), missing=("s3",))
    )
    assert (lag.total, lag.retrying, lag.missing) == (8, 3, ("s3",))
    assert [(one.shard, one.queue) for one in lag.queues] == [(1, 1), (2, 0)]
    groups = joined_groups(
        answers(
            (1, [GroupReport("g", ("a",), 2, 3)]), (2, [GroupReport("g", ("b",), 5, 2), GroupReport("f", (), 0, 0)])
        )
    )
    assert [(one.name, one.topics, one.lag, one.members) for one in groups] == [
        ("f", (), 0, 0),
        ("g", ("a", "b"), 7, 3),
    ]


def test_a_topic_has_the_newest_slots_and_what_all_shards_keep() -> None:
    topic = Topic("t", 4, False, None, None, {}, 3, 30, groups=("g",), stored=5, slots_version=2)
    both = joined_topic([topic, replace(topic, messages=4, bytes=40, groups=("f",), slots_version=1)])
    assert (both.messages, both.bytes, both.stored, both.groups, both.slots_version) == (7, 70, 10, ("f", "g"), 2)
    assert joined_topic([topic]) is topic


def test_a_history_is_not_complete_while_a_shard_is_missing() -> None:
    stored = TraceStep(1, "stored", "t", 0, 0, "", "", 0, "")
    acked = replace(stored, at_ms=5, what="acked")
    one, other = TraceReport(ID, (acked,), ("n",), True), TraceReport(ID, (stored,), ("n",), True)
    whole = joined_trace(answers((1, one), (2, other)))
    assert ([step.what for step in whole.steps], whole.notes, whole.is_complete) == (["stored", "acked"], ("n",), True)
    part = joined_trace(answers((1, one), missing=("s2",)))
    assert (part.is_complete, part.missing) == (False, ("s2",))


def test_the_reason_is_that_of_the_shard_that_has_the_message() -> None:
    empty = WhyReport(ID, "unknown", "", (), True)
    stored = WhyReport(ID, "stored", "it waits", (GroupReason("g", "waiting", ""),), True)
    assert chosen_why(answers((1, empty), (2, stored))) == stored
    assert chosen_why(answers((2, stored), missing=("s1",))) == replace(stored, is_complete=False, missing=("s1",))


@pytest.mark.parametrize(("is_change", "expected"), [(False, UnknownMessage), (True, NotConnected)])
def test_a_change_is_not_refused_where_a_shard_may_have_done_it(is_change: bool, expected: type[Exception]) -> None:
    asked: ShardAnswers[None] = ShardAnswers(is_change=is_change)
    asked.failed("s1", UnknownMessage("no such message"))
    asked.failed("s2", NotConnected("gone"))
    with pytest.raises(expected):
        asked.check()


def test_a_change_that_one_shard_did_is_done() -> None:
    asked: ShardAnswers[None] = ShardAnswers(is_change=True)
    asked.failed("s1", NotConnected("gone"))
    asked.found.append((2, None))
    asked.check()
    assert asked.missing == ["s1"]
