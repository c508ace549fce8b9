"""FETCH from a member that does not lead: the committed journal, byte for byte, for Spark and the archive."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import dmq.aio
from dmq.broker.server import BrokerServer
from dmq.errors import OffsetGone
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.registry.memory import MemoryRegistry
from dmq.shard.committed_reader import CommittedReader, CommittedUnits
from dmq.storage.replica import Replica
from tests.integration.shard.test_member_server import member, settings_of
from tests.patience import eventually_async
from tests.unit.broker.leading import on_a_loop

BATCHES, COUNT = 20, 20


def read_all(reader: JournalReader) -> bytes:
    """The whole journal, in small bites."""
    report = reader.archived()
    return b"".join(bytes(part.body) for part in reader.units(report.first, report.visible, max_bytes=10_000))


def is_level(leader: BrokerServer, follower: BrokerServer) -> bool:
    """Whether the follower knows everything to be committed."""
    shard, broker = follower.member, leader.dispatcher.broker
    assert shard is not None
    assert shard.member is not None
    assert broker is not None
    return shard.member.report().committed == broker.store.queries.visible


async def _nothing(reader: CommittedReader, replica: Replica, offset: int, max_bytes: int) -> CommittedUnits:
    return CommittedUnits(offset, offset, 0, offset, journal_id=replica.journal_id, raw=b"")


@on_a_loop
async def test_a_reader_takes_the_journal_from_a_follower_and_from_the_leader_when_that_one_is_gone(
    tmp_path: Path,
) -> None:
    registry = MemoryRegistry(session_seconds=2.0)
    two = {"replicas": 2, "min_in_sync": 1}
    async with (
        member(registry, settings_of(tmp_path / "a", shard=two, name="a")) as first,
        member(registry, settings_of(tmp_path / "b", shard=two, name="b")) as second,
    ):
        servers = (first, second)
        await eventually_async(lambda: any(server.dispatcher.broker is not None for server in servers))
        leader, follower = sorted(servers, key=lambda server: server.dispatcher.broker is None)
        async with dmq.aio.connect(f"dmq://{leader.address}", app="shop") as client:
            await client.admin.create_topic("orders", queues=2)
            producer = client.producer()
            for batch in range(BATCHES):
                await producer.send_many("orders", [dmq.Message(b"%d-%d" % (batch, n) * 50) for n in range(COUNT)])
        await eventually_async(lambda: is_level(leader, follower))
        asked = follower.dispatcher.counters["requests"]
        reader = await asyncio.to_thread(JournalReader, f"{leader.address},{follower.address}")
        try:
            taken = await asyncio.to_thread(read_all, reader)
            assert follower.dispatcher.counters["requests"] >= asked + 5, "the follower gave it"
            broker = leader.dispatcher.broker
            assert broker is not None
            kept = broker.store.queries
            whole = b""
            while len(whole) < kept.visible - kept.start:
                whole += bytes(kept.read_units(kept.start + len(whole))[0])
            assert taken == whole
            with pytest.raises(OffsetGone) as gone:
                await asyncio.to_thread(reader.fetch, kept.visible + 1)
            assert gone.value.detail["next"] == kept.visible, "the leader has the last word"
            with pytest.MonkeyPatch.context() as patch:  # as if it had not heard of the last commit
                patch.setattr(CommittedReader, "read", _nothing)
                assert await asyncio.to_thread(read_all, reader) == whole
            await follower.stop()
            assert await asyncio.to_thread(read_all, reader) == whole
        finally:
            await asyncio.to_thread(reader.close)
