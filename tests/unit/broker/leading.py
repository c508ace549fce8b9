"""The broker of a shard's leader without a member: a leadership that says what the test wants, on a real store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from dmq.broker.shard_service import ShardService
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.errors import NotEnoughReplicas, NotLeader
from dmq.model import TopicConfig
from dmq.protocol.session import BrokerInfo, ShardInfo
from dmq.settings import BrokerSettings, Settings, StoreSettings
from dmq.storage.replica import Replica, join
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.broker.turns import Rig

_PATIENCE_SECONDS = 20.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class FollowersFace:
    """What a follower says."""

    def info(self) -> ShardInfo:
        return ShardInfo("s", leader="127.0.0.1:1")

    def brokers(self) -> list[BrokerInfo]:
        return []


class SaidLeadership:
    """Answers as the test says.

    Attributes:
        follows: whether what is flushed here is committed at once.
    """

    epoch = 1

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.serves = True
        self.has_replicas = True
        self.follows = True
        self.writes = 0
        self.flushes = 0

    def may_serve(self) -> bool:
        return self.serves

    def check_serving(self) -> None:
        if not self.serves:
            raise NotLeader("another member leads: ask there", leader="127.0.0.1:1")

    def check_writable(self) -> None:
        self.check_serving()
        if not self.has_replicas:
            raise NotEnoughReplicas("one of two members is in sync: start the others")

    def wrote(self) -> None:
        self.writes += 1

    def flushed(self) -> None:
        self.flushes += 1
        if self.follows:
            self.commit()

    def commit(self) -> None:
        """The followers have all that is flushed here."""
        self._store.confirm_replicated(self._store.queries.flushed)


class LeadingRig(Rig):
    """The broker of a leader, and its leadership."""

    def __init__(self, dispatcher: Dispatcher, store: MessageStore, files: MemoryFiles) -> None:
        super().__init__(dispatcher, store, files)
        self.leadership = SaidLeadership(store)
        self.service = ShardService(dispatcher, letters=None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Turns of the loop until something is so."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(0.001)

    async def flushed(self) -> None:
        """Everything that was written is flushed here."""
        queries = self.store.queries
        await self.until(lambda: queries.flushed == queries.end)
        await asyncio.sleep(0)

    def commit(self) -> None:
        """The followers have it, too."""
        self.leadership.commit()
        self.service.committed()


@contextlib.asynccontextmanager
async def leading(store_settings: StoreSettings | None = None, **settings: Any) -> AsyncIterator[LeadingRig]:
    """The broker of a shard's leader, with the topic `orders` of four queues."""
    files, clock = MemoryFiles(), FakeClock()
    join(files, cluster="c", shard="s")
    replica = Replica(files, store_settings, clock)
    store = MessageStore(Leading(replica, 1), store_settings, clock, checkpoint_inline=False)
    store.append([store.creation("orders", TopicConfig(queues=4))])
    store.flush()
    store.confirm_replicated(store.queries.end)
    dispatcher = Dispatcher(Settings(broker=BrokerSettings(**settings)), clock, COMMANDS, hello)
    dispatcher.face = FollowersFace()
    rig = LeadingRig(dispatcher, store, files)
    await rig.service.begin(store, rig.leadership)
    try:
        yield rig
    finally:
        await rig.service.drop()
        store.abandon()
