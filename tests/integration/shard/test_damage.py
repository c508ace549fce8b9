"""Bits that turned on a leader's disk: what another member has a copy of is delivered, whoever finds the damage."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dmq.aio
from dmq.broker.server import BrokerServer
from dmq.client.aio.client import AioClient
from dmq.errors import DMQError, StorageError
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.pipeline.decode.units import decode_fetched
from dmq.registry.memory import MemoryRegistry
from dmq.storage.store import MessageStore
from tests.integration.shard.test_follower_reads import is_level
from tests.integration.shard.test_member_server import member, settings_of
from tests.patience import PATIENCE_S, eventually_async
from tests.unit.broker.leading import on_a_loop

COUNT = 20


class Pair:
    """A shard of two members in this process, with a topic `orders` of one queue."""

    def __init__(self, folders: dict[BrokerServer, Path], client: AioClient) -> None:
        self.folders = folders
        self.leader, self.follower = folders
        self.client = client

    @property
    def store(self) -> MessageStore:
        broker = self.leader.dispatcher.broker
        assert broker is not None
        return broker.store

    async def fill(self) -> list[bytes]:
        await self.client.admin.create_topic("orders", queues=1)
        producer = self.client.producer()
        sent = [b"order %02d" % number for number in range(COUNT)]
        for body in sent:
            await producer.send("orders", body)
        await eventually_async(lambda: is_level(self.leader, self.follower))
        return sent

    async def pulled(self, group: str, count: int) -> list[bytes]:
        """So many messages of a group that is new."""
        found: list[bytes] = []
        async with self.client.consumer("orders", group) as consumer:
            while len(found) < count:
                batch = await consumer.pull(100, wait=PATIENCE_S)
                assert batch, f"{len(found)} of {count}"
                found += [message.body for message in batch]
                await consumer.ack(batch)
        return found

    def spoil(self, server: BrokerServer, body: bytes) -> None:
        """Turn a bit of the message with this body on a member's disk."""
        (segment,) = (self.folders[server] / "journal").glob("*.journal")
        at = segment.read_bytes().index(body)
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(bytes([body[0] ^ 1]))
        self.store._reader.cache.clear()


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    registry = MemoryRegistry(session_seconds=2.0)
    two = {"replicas": 2, "min_in_sync": 1}
    async with (
        member(registry, settings_of(folder / "a", shard=two, name="a")) as first,
        member(registry, settings_of(folder / "b", shard=two, name="b")) as second,
    ):
        folders = {first: folder / "a", second: folder / "b"}
        await eventually_async(lambda: any(server.dispatcher.broker is not None for server in folders))
        servers = sorted(folders, key=lambda server: server.dispatcher.broker is None)
        async with dmq.aio.connect(f"dmq://{servers[0].address}", app="shop") as client:
            yield Pair({server: folders[server] for server in servers}, client)


@on_a_loop
async def test_a_message_that_a_follower_has_is_not_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as shard:
        sent = await shard.fill()
        shard.spoil(shard.leader, sent[7])
        assert await shard.pulled("billing", COUNT) == sent, "in order, and none is missing"
        assert not shard.store.damage.ranges
        assert "messages wait for a copy from another member" in caplog.text
        assert "messages passed over" not in caplog.text


@on_a_loop
async def test_a_message_that_no_member_has_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path) as shard:
        sent = await shard.fill()
        shard.spoil(shard.leader, sent[7])
        shard.spoil(shard.follower, sent[7])
        assert await shard.pulled("billing", COUNT - 1) == sent[:7] + sent[8:]
        assert "messages passed over" in caplog.text


@on_a_loop
async def test_a_message_waits_for_a_member_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path) as shard:
        sent = await shard.fill()
        await shard.follower.stop()
        shard.spoil(shard.leader, sent[7])
        assert await shard.pulled("billing", 7) == sent[:7]
        await eventually_async(lambda: "damage is left" in caplog.text)
        found = await shard.client.admin.group("billing")
        assert found.lag == COUNT - 7, "the member may have it when it is back"
        assert "messages passed over" not in caplog.text


@on_a_loop
async def test_a_delayed_message_is_delivered_once_its_bytes_are_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as shard:
        await shard.client.admin.create_topic("orders", queues=1)
        await shard.client.producer().send("orders", b"a delayed order", delay=0.3)
        await eventually_async(lambda: is_level(shard.leader, shard.follower))
        shard.spoil(shard.leader, b"a delayed order")
        assert await shard.pulled("billing", 1) == [b"a delayed order"]


@on_a_loop
async def test_a_question_about_a_damaged_message_is_answered_when_it_is_mended(tmp_path: Path) -> None:
    async with pair(tmp_path) as shard:
        sent = await shard.fill()
        shard.spoil(shard.leader, sent[7])
        found, following = await shard.client.admin.read("orders", 0, 7, limit=1)
        assert ([message.body for message in found], following) == ([sent[7]], 8)


@on_a_loop
async def test_a_transaction_is_committed_when_its_message_is_mended(tmp_path: Path) -> None:
    async with pair(tmp_path) as shard:
        await shard.client.admin.create_topic("orders", queues=1)
        producer = shard.client.producer(group="shop", check=lambda message: "rollback")
        async with producer.transaction("orders", b"a prepared order"):
            await eventually_async(lambda: is_level(shard.leader, shard.follower))
            shard.spoil(shard.leader, b"a prepared order")
        assert await shard.pulled("billing", 1) == [b"a prepared order"]


def kept_rows(reader: JournalReader, start: int, end: int) -> tuple[int, list[DMQError]]:
    """How many messages a range of the journal has, and what was left out."""
    left_out: list[DMQError] = []
    parts = (
        part
        for fetched in reader.units(start, end)
        for part in decode_fetched(fetched, left_out.append, again=reader.fetch_checked, columns=("body",))
    )
    return sum(map(len, parts)), left_out


@on_a_loop
async def test_the_archive_leaves_nothing_out_that_a_member_has(tmp_path: Path) -> None:
    async with pair(tmp_path) as shard:
        sent = await shard.fill()
        shard.spoil(shard.leader, sent[7])
        shard.spoil(shard.follower, sent[9])
        reader = await asyncio.to_thread(JournalReader, f"{shard.leader.address},{shard.follower.address}")
        try:
            report = await asyncio.to_thread(reader.archived)
            count, left_out = await asyncio.to_thread(kept_rows, reader, report.first, report.visible)
        finally:
            await asyncio.to_thread(reader.close)
        assert (count, left_out) == (COUNT, [])


@pytest.mark.parametrize("is_leader", [False, True], ids=["follower", "leader"])
@on_a_loop
async def test_a_member_whose_directory_is_removed_ends(tmp_path: Path, is_leader: bool) -> None:
    """It would go on confirming into files that have no name."""
    async with pair(tmp_path) as shard:
        await shard.fill()
        server = shard.leader if is_leader else shard.follower
        shutil.rmtree(shard.folders[server])
        process = server.member
        assert process is not None
        failed = asyncio.ensure_future(process.failed.wait())  # a leader's store; whichever notices first
        await asyncio.wait((failed, process.ended), timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not (is_leader and failed.done()):
            assert process.ended.done()
            with pytest.raises(StorageError, match="was removed or moved"):
                process.ended.result()
        failed.cancel()
        other = shard.follower if is_leader else shard.leader
        await server.stop()
        await eventually_async(lambda: other.dispatcher.broker is not None)
