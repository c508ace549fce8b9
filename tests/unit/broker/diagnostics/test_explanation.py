"""Why a message is not consumed, in words."""

from __future__ import annotations

from typing import Any

import pytest

from dmq.broker.diagnostics.explanation import Dead, Facts, Out, Reason, Retry, SettledHow, explain, paragraph, until
from dmq.broker.diagnostics.inquiry import unsettled_before
from dmq.storage.state.events import Outcome
from dmq.storage.state.positions import Position

NOW_MS = 1_700_000_000_000
BASE = Facts("billing", "orders", 2, 77, members=1, connected=1)


def reason(**facts: Any) -> Reason:
    return explain(BASE._replace(**facts), NOW_MS)


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        ({"before": 3}, "waiting", "in queue 2 of orders 3 messages stand before it"),
        ({"before": 1}, "waiting", "1 message stands before it"),
        ({}, "waiting", "it is next"),
        ({"before": 3, "is_ordered": True}, "waiting", "consumes in order"),
        ({"members": 0, "connected": 0, "before": 5}, "no members", "nobody consumes queue 2 of orders"),
        ({"members": 2, "connected": 0}, "no members", "2 members, none of which is connected"),
        ({"out": Out("c-1", NOW_MS, NOW_MS + 30_000, 2)}, "leased", "leased to member 'c-1'"),
        ({"out": Out("c-1", NOW_MS, NOW_MS + 30_000, 2)}, "leased", "in 30.0 s"),
        ({"out": Out("c-1", NOW_MS, NOW_MS + 9, 1, is_silent=True)}, "leased", "; the member gives no sign of life."),
        ({"members": 3, "connected": 2, "silent": 2}, "silent", "all its connected members (2) are silent"),
        ({"members": 3, "connected": 2, "silent": 1}, "waiting", "it is next"),
        ({"again_ms": NOW_MS + 9000, "attempt": 3}, "again", "handed out again in 9.0 s, as attempt 3"),
        ({"again_ms": NOW_MS}, "again", "as soon as a member takes it"),
        ({"retry": Retry(NOW_MS + 27_000, 4, "boom")}, "retrying", "attempt 4 (boom), and gets it again in 27.0 s"),
        ({"retry": Retry(0, 4, "boom")}, "retrying", "as soon as a member takes it"),
        ({"dead": Dead("REJECTED", "bad", NOW_MS, 2, "waiting")}, "dead", "REJECTED after 2 attempts (bad)"),
        ({"tags": "paid", "tag": "new", "is_matching": False}, "filtered", "consumes 'paid', and the message has the"),
        ({"tags": "paid", "is_matching": False, "is_settled": True}, "filtered", "the message has no tag"),
        ({"can_consume": False}, "off", "consuming of topic 'orders' is switched off"),
        ({"is_draining": True}, "draining", "put back in use"),
        ({"expires_ms": NOW_MS - 1}, "expired", "it has expired"),
        ({"expires_ms": NOW_MS + 1}, "waiting", "it is next"),
        ({"is_settled": True, "was_passed": True}, "passed", "was put behind it"),
        ({"is_settled": True}, "settled", "no longer has a record of how"),
        ({"is_settled": True, "is_complete": False}, "settled", "was not searched far enough"),
    ],
)  # fmt: skip
def test_each_reason_has_its_word_and_its_sentence(facts: dict[str, object], state: str, words: str) -> None:
    found = reason(**facts)
    assert found.state == state
    assert words in found.text
    assert found.text.startswith("Group 'billing' ")
    assert found.text.endswith(".")


@pytest.mark.parametrize(
    ("outcome", "error", "state", "words"),
    [
        (Outcome.ACKED, "", "consumed", "acked by member 'c-1' at 2023-11-14 22:13:20.000Z, attempt 2"),
        (Outcome.SKIPPED, "filtered", "filtered", "does not want it"),
        (Outcome.SKIPPED, "gone", "gone", "retention took it"),
        (Outcome.SKIPPED, "damaged", "skipped", "(damaged)"),
        (Outcome.EXPIRED, "", "expired", "expired before it was handed out"),
        (Outcome.RETRIED, "boom", "retrying", "(boom)"),
        (Outcome.DEAD, "boom", "dead", "gave it up by member 'c-1'"),
    ],
)
def test_what_was_settled_is_told_as_the_journal_has_it(outcome: Outcome, error: str, state: str, words: str) -> None:
    found = reason(is_settled=True, how=SettledHow(outcome, "c-1", NOW_MS, 2, error))
    assert found.state == state
    assert words in found.text


def test_what_has_to_go_away_first_is_said_first() -> None:
    both = reason(can_consume=False, members=0, connected=0, before=7)
    assert both.state == "off"
    dead = reason(dead=Dead("EXPIRED", "", NOW_MS, 1), is_settled=True)
    assert dead.state == "dead"


def test_a_paragraph_names_some_groups_and_counts_the_others() -> None:
    reasons = [reason(group=f"g-{number}") for number in range(25)]
    text = paragraph("Message x is stored.", reasons)
    assert text.startswith("Message x is stored. Group 'g-0' ")
    assert text.endswith("15 more groups: ask for one of them.")
    assert "\n" not in text


def test_times_are_told_in_the_unit_that_suits() -> None:
    assert until(NOW_MS - 5, NOW_MS) == "in 0.0 s"
    assert until(NOW_MS + 600_000, NOW_MS) == "in 10 min"
    assert until(NOW_MS + 36_000_000, NOW_MS) == "in 10.0 h"


def test_what_stands_before_a_message_is_what_is_kept_and_not_settled() -> None:
    position = Position(10, [(12, 15), (30, 40)])
    assert unsettled_before(position, 0, 20) == 7
    assert unsettled_before(position, 0, 35) == 35 - 10 - 3 - 5
    assert unsettled_before(position, 14, 20) == 5
    assert unsettled_before(position, 0, 10) == 0
    assert unsettled_before(position, 50, 20) == 0
