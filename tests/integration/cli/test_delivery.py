"""`dmq delay`, `dmq tx` and `dmq send --delay`, as a person uses them."""

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


def test_delays_are_sent_listed_and_taken_back(broker: TestBroker) -> None:
    assert "no message waits" in dmq(broker, "delay", "list").out
    sent = dmq(broker, "send", "orders", "one", "two", "--delay", "2h", "--format", "json")
    ids = [json.loads(line)["id"] for line in sent.out.splitlines()]
    listed = json.loads(dmq(broker, "delay", "list", "--format", "json").out)
    assert sorted(row["id"] for row in listed) == sorted(ids)
    assert {row["topic"] for row in listed} == {"orders"}
    assert all(7_100_000 < row["due_at_ms"] - broker.clock.now_ms() <= 7_200_000 for row in listed)
    cancelled = dmq(broker, "delay", "cancel", ids[0])
    assert (cancelled.code, cancelled.out) == (0, f"{ids[0]} is cancelled\n")
    assert ids[1] in dmq(broker, "delay", "list", "--topic", "orders").out
    assert ids[0] not in dmq(broker, "delay", "list").out
    again = dmq(broker, "delay", "cancel", ids[0])
    assert again.code == 1
    assert "may be delivered or cancelled" in again.err
    assert dmq(broker, "delay", "cancel", "nonsense").code == 2


def test_open_transactions_are_listed(broker: TestBroker) -> None:
    assert "no transaction is open" in dmq(broker, "tx", "list").out
    tx = broker.connect().producer(group="shop").transaction("orders", b"open")
    (row,) = json.loads(dmq(broker, "tx", "list", "--format", "json").out)
    assert (row["id"], row["topic"], row["group"], row["checks"]) == (str(tx.id), "orders", "shop", 0)
    assert "shop" in dmq(broker, "tx", "list", "--topic", "orders").out
    assert "no transaction is open" in dmq(broker, "tx", "list", "--topic", "other").out
