"""`dmq limit`, `dmq trace`, `dmq why`, topics switched off, and the telnet port, as a person uses them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from dmq.testing import TestBroker
from tests.integration.cli.test_commands import Done
from tests.integration.cli.test_commands import dmq as run


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


def dmq(broker: TestBroker, *arguments: str) -> Done:
    return run(*arguments, "--url", broker.url)


def test_limits_are_set_shown_and_taken_away(broker: TestBroker) -> None:
    assert "there are no limits" in dmq(broker, "limit", "show").out
    dmq(broker, "topic", "create", "orders")
    made = dmq(broker, "limit", "set", "--topic", "orders", "--messages", "10", "--bytes", "1KiB", "--format", "json")
    limit = {"topic": "orders", "app": None, "messages_per_second": 10, "bytes_per_second": 1024, "policy": "refuse"}
    assert json.loads(made.out) == limit
    assert dmq(broker, "limit", "set", "--app", "shop", "--messages", "5", "--policy", "dead-letter").code == 0
    assert json.loads(dmq(broker, "limit", "show", "--topic", "orders", "--format", "json").out) == [limit]
    assert "dead-letter" in dmq(broker, "limit", "show").out
    assert dmq(broker, "limit", "set", "--topic", "orders", "--none").out == "topic orders has no limit\n"
    assert "orders" not in dmq(broker, "limit", "show").out
    for wrong in (
        ["--messages", "1"],
        ["--topic", "orders"],
        ["--topic", "orders", "--app", "shop", "--messages", "1"],
        ["--topic", "orders", "--messages", "0"],
        ["--topic", "orders", "--bytes", "much"],
        ["--topic", "orders", "--bytes", "1", "--none"],
    ):
        assert dmq(broker, "limit", "set", *wrong).code == 2
    assert dmq(broker, "limit", "set", "--topic", "nothing", "--messages", "1").code == 1


def test_the_life_of_a_message_and_why_it_waits(broker: TestBroker) -> None:
    (sent,) = dmq(broker, "send", "orders", "hello", "--format", "json").out.splitlines()
    message_id = json.loads(sent)["id"]
    dmq(broker, "group", "create", "billing", "--topic", "orders")
    why = dmq(broker, "why", message_id)
    assert why.out.count("\n") == 1
    assert "Group 'billing' has no members" in why.out
    facts = json.loads(dmq(broker, "why", message_id, "--group", "billing", "--format", "json").out)
    assert [(row["group"], row["state"]) for row in facts["groups"]] == [("billing", "no members")]
    trace = dmq(broker, "trace", message_id)
    assert "stored" in trace.out
    assert "Note: " in trace.out
    steps = json.loads(dmq(broker, "trace", message_id, "--format", "json").out)["steps"]
    assert [step["what"] for step in steps][:2] == ["sent", "stored"]
    unknown = dmq(broker, "why", "0" * 26)
    assert unknown.code == 1
    assert "check the id" in unknown.err
    assert dmq(broker, "trace", "nonsense").code == 2


def test_a_topic_is_switched_off_and_on(broker: TestBroker) -> None:
    dmq(broker, "topic", "create", "orders")
    off = dmq(broker, "topic", "update", "orders", "--no-produce", "--no-consume", "--format", "json")
    assert (json.loads(off.out)["can_produce"], json.loads(off.out)["can_consume"]) == (False, False)
    refused = dmq(broker, "send", "orders", "hello")
    assert refused.code == 1
    assert "producing is switched off" in refused.err
    dmq(broker, "topic", "update", "orders", "--produce", "--consume")
    assert dmq(broker, "send", "orders", "hello").code == 0
