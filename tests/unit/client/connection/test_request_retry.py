"""What is asked again, how often, and after which pause."""

from __future__ import annotations

import pytest

import dmq
from dmq.client.connection.failover import BREAKS_MAX, PAUSE_MAX, PAUSE_MIN, Repeats, is_repeatable
from dmq.protocol import Command, Frame, FrameParser, Header, error_frame, response_head
from dmq.protocol.admin import TopicCreate, TopicDelete, TopicDescribe
from dmq.protocol.commands import SPECS, Way

BROKE = dmq.NotConnected("the connection broke")


def answer(error: dmq.DMQError | None) -> Frame:
    data = response_head(1, Header(), 1) if error is None else error_frame(error, Command.TOPIC_DESCRIBE, 1)
    (frame,) = FrameParser(1 << 20).feed(data)
    return frame


def test_nothing_that_makes_moves_or_takes_away_is_repeated() -> None:
    once = {
        Command.HELLO, Command.PRODUCE, Command.PULL, Command.SUBSCRIBE, Command.UNSUBSCRIBE, Command.CREDIT,
        Command.TOPIC_CREATE, Command.TOPIC_DELETE, Command.GROUP_DELETE,
        Command.DELAY_CANCEL, Command.DEAD_LETTER_RESEND, Command.DEAD_LETTER_DELETE,
    }  # fmt: skip
    asked = [command for command, spec in SPECS.items() if spec.way != Way.PUSH]
    assert once.isdisjoint(command for command in asked if is_repeatable(command, Header()))


@pytest.mark.parametrize("allow_existing", [True, False])
def test_a_topic_is_created_again_only_if_it_may_be_there(allow_existing: bool) -> None:
    header = TopicCreate("t", allow_existing=allow_existing)
    assert is_repeatable(Command.TOPIC_CREATE, header) is allow_existing


def test_a_question_is_repeated_at_once_then_after_growing_pauses_and_not_for_ever() -> None:
    repeats = Repeats(Command.TOPIC_DESCRIBE, TopicDescribe("t"))
    pauses = [repeats.after_break(BROKE) for _ in range(BREAKS_MAX - 1)]
    assert pauses[0] == 0.0
    assert 0 < pauses[1] <= PAUSE_MIN
    assert PAUSE_MAX / 2 < max(pauses) <= PAUSE_MAX
    with pytest.raises(dmq.NotConnected, match="broke 16 times"):
        repeats.after_break(BROKE)


def test_what_is_not_repeated_says_that_nobody_knows_whether_it_was_done() -> None:
    with pytest.raises(dmq.NotConnected, match="whether it was done is not known"):
        Repeats(Command.TOPIC_DELETE, TopicDelete("t")).after_break(BROKE)


def test_a_refusal_was_not_carried_out_so_anything_is_asked_again_after_the_time_it_names() -> None:
    repeats = Repeats(Command.TOPIC_DELETE, TopicDelete("t"))
    assert repeats.after_answer(answer(dmq.Busy("full", retry_after_ms=700))) == 0.7
    assert repeats.after_answer(answer(dmq.Busy("full", retry_after_ms=0))) == PAUSE_MIN
    pause = repeats.after_answer(answer(dmq.BrokerStopping("it stops")))
    assert pause is not None
    assert 0 < pause <= PAUSE_MIN


@pytest.mark.parametrize("error", [None, dmq.UnknownTopic("no"), dmq.ServerError("a defect"), dmq.RateLimited("slow")])
def test_everything_else_is_the_answer(error: dmq.DMQError | None) -> None:
    assert Repeats(Command.TOPIC_DESCRIBE, TopicDescribe("t")).after_answer(answer(error)) is None
