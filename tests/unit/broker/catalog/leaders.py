"""The leaders of several shards on one loop, each with a broker on a real store, over one registry in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_access import ClusterAccess, GroupChange
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.errors import NotConnected
from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.registry.cluster_view import ClusterView
from dmq.registry.contents import (
    ClusterContent,
    NodeContent,
    ShardContent,
    ShardState,
    TopicContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.memory import MemoryRegistry
from dmq.registry.metadata import Metadata
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Delete, Put
from dmq.registry.topic_entries import TopicEntries
from dmq.settings import BrokerSettings, Settings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.replica import join
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import PATIENCE_S
from tests.unit.broker.leading import FollowersFace, LeadingRig, SaidLeadership

PATHS = Paths()


class ShardLeader:
    """The leader of one shard, with its own client of the registry and its own view.

    Attributes:
        is_reached: whether other leaders reach it.
    """

    def __init__(self, cluster: Leaders, shard: str, topics: dict[str, TopicConfig], **settings: Any) -> None:
        self.cluster = cluster
        self.shard = shard
        self.number = len(cluster.shards) + 1
        files, clock = MemoryFiles(), cluster.clock
        join(files, cluster="c", shard=shard)
        dispatcher = Dispatcher(Settings(broker=BrokerSettings(**settings)), clock, COMMANDS, hello)
        dispatcher.face = FollowersFace()
        self.rig = LeadingRig(dispatcher, files, None)
        self.rig.store.append([self.rig.store.creation(name, config) for name, config in topics.items()] or [])
        self.client = cluster.registry.connect(beats=False)
        self.view = ClusterView(self.client, PATHS, clock)
        entries = TopicEntries(Metadata(self.client, PATHS), self.view)
        self.rig.service.access = ClusterAccess(shard, self.view, entries, cluster.ask, ask_group=cluster.ask_group)
        self.is_reached = True
        self._keeper: asyncio.Future[None] | None = None

    @property
    def broker(self) -> Broker:
        found = self.rig.dispatcher.broker
        assert found is not None
        return found

    async def begin(self, *, keeps: bool = True) -> None:
        """Lead; `keeps` its view of the registry by itself."""
        if keeps:
            self._keeper = asyncio.ensure_future(self.view.keep())
        await self.rig.begin()

    async def end(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self.rig.end()

    async def die(self) -> None:
        """Its process is gone, and its session over."""
        await self.cluster.writer.write([Delete(PATHS.node(self.shard), None)])
        for one in self.cluster.shards.values():
            one.view._stale_nodes = None
            await one.view.refresh()
        await self.end()

    async def come_back(self) -> None:
        """The next leader of the shard, with the same journal."""
        node = NodeContent(address=self.shard, shard=self.shard, replica=hex_id(self.number))
        await self.cluster.writer.write([Create(PATHS.node(self.shard), encode_content(node), ephemeral=True)])
        self.rig.store = self.rig._take_over(self.rig.files)
        self.rig.leadership = SaidLeadership(self.rig.store)
        await self.begin()

    def topic(self, name: str) -> Any:
        """What the journal has: queues, incarnation, version of the slots, whether it was removed; None if nothing."""
        found = self.broker.catalog.find(name)
        if found is None:
            return None
        return found.config.queues, found.incarnation, found.slots_version, found.is_removed

    async def write(self, topic: str, queue: int = 0) -> None:
        """One message, committed."""
        encoded = encode_batch(topic, "app", [Message(b"x")], sent_at_ms=1)
        self.rig.store.append([Batch(topic=topic, queue=queue, data=encoded.data, lengths=encoded.lengths)])
        self.rig.store.flush()
        self.rig.commit()

    async def create(self, name: str, queues: int = 2, *, allow_existing: bool = False, **more: Any) -> Any:
        config = TopicConfig(queues=queues, **more)
        catalog = self.broker.catalog
        return await (await catalog.changes.after(lambda: catalog.create(name, config, allow_existing=allow_existing)))

    async def delete(self, name: str) -> None:
        await (await self.broker.changes.after(lambda: self.broker.catalog.delete(name)))


class Leaders:
    """A cluster."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry = MemoryRegistry(self.clock)
        self.writer = self.registry.connect(beats=False)
        self.shards: dict[str, ShardLeader] = {}

    async def set_up(self) -> None:
        await self.writer.write(PATHS.folders())
        await self.writer.write([Create(PATHS.cluster, encode_content(ClusterContent(id=hex_id(7))))])

    async def add(
        self,
        shard: str,
        topics: dict[str, TopicConfig] | None = None,
        *,
        begins: bool = True,
        keeps: bool = True,
        **settings: Any,
    ) -> ShardLeader:
        """A shard with a leader."""
        number = len(self.shards) + 1
        node = NodeContent(address=shard, shard=shard, replica=hex_id(number))
        await self.writer.write(
            [
                Create(PATHS.shard(shard), encode_content(ShardContent(number=number, leader=hex_id(number), epoch=1))),
                Create(PATHS.node(shard), encode_content(node), ephemeral=True),
            ]
        )
        await Metadata(self.writer, PATHS).touch(PATHS.shard(shard))
        leader = self.shards[shard] = ShardLeader(self, shard, topics or {}, **settings)
        if begins:
            await leader.begin(keeps=keeps)
        return leader

    async def ask(self, address: str, topic: str) -> int:
        leader = self.shards[address]
        if not leader.is_reached or leader.rig.dispatcher.broker is None:
            raise NotConnected(f"{address} does not answer")
        assert leader.broker.cluster is not None
        return await leader.broker.cluster.sync(topic)

    async def ask_group(self, address: str, change: GroupChange) -> None:
        groups, changes = self.shards[address].broker.groups, self.shards[address].broker.changes
        if change.is_deleted:
            await (await changes.after(lambda: groups.delete(change.group, change.topic)))
        else:
            await changes.after(lambda: groups.create(change.group, change.topic))

    async def entry(self, topic: str) -> TopicContent | None:
        entry = await self.writer.read(PATHS.topic(topic))
        return None if entry is None else decode_content(TopicContent, entry.value, entry.path)

    async def put(self, topic: str, content: TopicContent) -> None:
        """As a person with the registry's own tools."""
        path, value = PATHS.topic(topic), encode_content(content)
        there = await self.writer.read(path)
        operation = Create(path, value) if there is None else Put(path, value, None)
        await Metadata(self.writer, PATHS).write([operation], path)

    async def set_state(self, shard: str, state: ShardState) -> None:
        path = PATHS.shard(shard)
        entry = await self.writer.read(path)
        assert entry is not None
        record = decode_content(ShardContent, entry.value, path)
        content = ShardContent(number=record.number, leader=record.leader, epoch=record.epoch, state=state)
        await Metadata(self.writer, PATHS).write([Put(path, encode_content(content), None)], path)

    async def until(self, condition: Callable[[], object]) -> None:
        """Turns of the loop until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def leaders(*shards: str, **settings: Any) -> AsyncIterator[Leaders]:
    """A cluster of these shards."""
    cluster = Leaders()
    await cluster.set_up()
    for shard in shards:
        await cluster.add(shard, **settings)
    try:
        yield cluster
    finally:
        for leader in cluster.shards.values():
            if leader.rig.dispatcher.broker is not None:
                await leader.end()
