"""Who takes the messages of which subscription, at a pool of either kind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dmq.client.aio.pool import AioPool
from dmq.client.connection.pool import BrokerAt, Pool, PoolSettings
from dmq.client.connection.url import Address
from dmq.errors import NotConnected
from dmq.protocol.session import Hello
from dmq.testing import FakeClock
from tests.unit.client.links import FakeLinks


class Owner(FakeLinks):
    """The router, which has nothing to do here."""

    def spawn(self, work: Any) -> None:
        raise AssertionError


class Watcher:
    """Is told nothing: there is no connection."""


@pytest.mark.parametrize("kind", [Pool, AioPool])
def test_a_subscription_is_its_watchers_until_that_leaves_or_another_takes_it(kind: Any) -> None:
    async def watched() -> None:
        clock = FakeClock()
        pool = kind(BrokerAt(0, (Address("one", 9611),)), PoolSettings(Hello("test"), clock), Owner(clock))
        first, again, second, producer = Watcher(), Watcher(), Watcher(), Watcher()
        pool.watch(first, 1)
        pool.watch(second, 2)
        pool.watch(producer)
        assert pool.consumers == {1: first, 2: second}
        pool.watch(again, 1)
        pool.unwatch(first)
        assert pool.consumers == {1: again, 2: second}, "the subscription is another's by then"
        pool.unwatch(again)
        assert pool.consumers == {2: second}
        pool.retire(NotConnected("it is gone"))
        assert pool.consumers == {}

    asyncio.run(watched())
