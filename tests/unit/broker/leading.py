"""The broker of a shard's leader without a member: a leadership that says what the test wants, on a real store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from dmq.broker.shard_process import ShardService
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.errors import NotEnoughReplicas, NotLeader
from dmq.model import TopicConfig
from dmq.protocol.cluster.route import RouteReply, ShardRoute
from dmq.protocol.read import Fetch, FetchReply
from dmq.protocol.session import BrokerInfo, ShardInfo
from dmq.settings import BrokerSettings, Settings, StoreSettings
from dmq.storage.files import Buffer
from dmq.storage.replica import Replica, join
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import PATIENCE_S
from tests.unit.broker.turns import Rig


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

    def figures(self) -> dict[str, float]:
        return {}

    async def routes(self, topics: Sequence[str]) -> RouteReply:
        return RouteReply(1, [ShardRoute(1, "s", leader="127.0.0.1:1")])

    async def committed_units(self, asked: Fetch) -> tuple[FetchReply, list[Buffer]]:
        raise NotLeader("this follower is not open", leader="127.0.0.1:1")


class SaidLeadership:
    """Answers as the test says.

    Attributes:
        follows: whether what is flushed here is committed at once.
    """

    epoch = 1
    shard = 1

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

    def check_open(self) -> None:
        pass

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

    def __init__(self, dispatcher: Dispatcher, files: MemoryFiles, settings: StoreSettings | None) -> None:
        self._settings = settings
        self._clock = dispatcher.clock
        self._epoch = 0
        super().__init__(dispatcher, self._take_over(files), files)
        self.leadership = SaidLeadership(self.store)
        self.service = ShardService(dispatcher, letters=None)

    def _take_over(self, files: MemoryFiles) -> MessageStore:
        self._epoch += 1
        replica = Replica(files, self._settings, self._clock)
        return MessageStore(Leading(replica, self._epoch), self._settings, self._clock, checkpoint_inline=False)

    async def begin(self) -> None:
        """The start of the epoch is committed, and with it all before it."""
        self.store.flush()
        self.leadership.commit()
        await self.service.begin(self.store, self.leadership)

    async def end(self) -> None:
        """It does not lead any more."""
        await self.service.drop()
        self.store.abandon()

    async def fail_over(self, *, is_committed: bool = True) -> None:
        """A member that has the same journal leads, in the next epoch.

        Parameters:
            is_committed: its start; if not, `begin` is the test's affair.
        """
        await self.end()
        self.store = self._take_over(self.files)
        self.leadership = SaidLeadership(self.store)
        if is_committed:
            await self.begin()

    async def until(self, condition: Callable[[], object]) -> None:
        """Turns of the loop until something is so."""
        async with asyncio.timeout(PATIENCE_S):
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
    dispatcher = Dispatcher(Settings(broker=BrokerSettings(**settings)), clock, COMMANDS, hello)
    dispatcher.face = FollowersFace()
    rig = LeadingRig(dispatcher, files, store_settings)
    rig.store.append([rig.store.creation("orders", TopicConfig(queues=4))])
    await rig.begin()
    try:
        yield rig
    finally:
        await rig.end()
