"""The load that a broker tells the cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.metrics import NodeLoad
from dmq.broker.maintenance import Audience
from dmq.testing.clock import FakeClock


def broker_with(messages: int, out: int) -> Broker:
    made: Any = SimpleNamespace(
        publisher=SimpleNamespace(messages_in=messages, bytes_in=messages * 100),
        channels=SimpleNamespace(traffic=SimpleNamespace(delivered=out, delivered_bytes=out * 100)),
        store=SimpleNamespace(space=SimpleNamespace(usage=SimpleNamespace(share=0.25))),
    )
    return cast("Broker", made)


def test_rates_are_those_since_the_last_time_and_a_new_broker_counts_from_its_start() -> None:
    clock = FakeClock()
    load = NodeLoad(cast("Audience", [object()] * 7), clock)
    clock.advance(10.0)
    assert {*load.take(None)} == {"cpu", "connections"}
    clock.advance(30.0)
    found = load.take(broker_with(300, 60))
    assert (found["messages_in"], found["bytes_in"], found["messages_out"], found["bytes_out"]) == (10, 1000, 2, 200)
    assert (found["connections"], found["disk_used"]) == (7, 0.25)
    clock.advance(30.0)
    assert load.take(broker_with(900, 60))["messages_in"] == 20
    clock.advance(30.0)
    assert load.take(broker_with(600, 0))["messages_in"] == 20, "another broker, which began at 0"
