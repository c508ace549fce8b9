"""What retention holds and drops, as `dmq doctor`, `dmq group lag` and `dmq why` tell it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import dmq
from dmq.settings import StoreSettings
from dmq.testing import FakeClock
from tests.integration.broker_thread import SECONDS, ServedBroker
from tests.integration.cli.test_commands import dmq as run

STORE = {"segment_bytes": 64 << 10, "unit_bytes_max": 16 << 10, "body_bytes_max": 4 << 10, "retention_hours": 1.0}


@contextmanager
def past_retention(*, keep_unconsumed: bool) -> Iterator[tuple[ServedBroker, dmq.MessageId]]:
    """A broker after its retention, and a message that its group has not consumed."""
    clock = FakeClock()
    store = StoreSettings(**STORE, keep_unconsumed=keep_unconsumed)  # type: ignore[arg-type]
    with ServedBroker(clock=clock, store=store) as broker:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic("orders", queues=1)
            with client.consumer("orders", "billing") as consumer:
                consumer.pull(1, wait=0.0)
            producer = client.producer()
            receipts = [producer.send("orders", os.urandom(3000)) for _ in range(100)]
        clock.advance(2 * 3600)

        async def retain() -> int:
            return broker.broker.store.retain()

        asyncio.run_coroutine_threadsafe(retain(), broker.loop).result(SECONDS)
        yield broker, receipts[0].id


@pytest.mark.parametrize("keep_unconsumed", [True, False])
def test_what_retention_does_is_told(keep_unconsumed: bool) -> None:
    with past_retention(keep_unconsumed=keep_unconsumed) as (broker, first):
        doctor = run("doctor", "--url", broker.url)
        lag = run("group", "lag", "billing", "--url", broker.url)
        why = run("why", str(first), "--url", broker.url)
    if keep_unconsumed:
        assert "is past the retention and kept for groups that have not consumed it: billing in orders" in doctor.out
        assert "retention waits for this group" in lag.out
        assert "Group 'billing'" in why.out
    else:
        assert "messages that groups had not consumed" in doctor.out
        assert "of orders for billing" in doctor.out
        assert "store.disk_force or store.keep_unconsumed asks for it" in doctor.out
        assert "messages before the group had consumed them" in lag.out
        assert "of orders for billing" in why.err
