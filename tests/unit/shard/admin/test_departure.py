"""A member's directory becomes that of a broker by itself."""

from __future__ import annotations

import asyncio

import pytest

from dmq.errors import DirectoryInUse, InvalidSettings
from dmq.shard.admin.departure import depart
from dmq.shard.member import Role
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.identity import read_identity
from dmq.testing import MemoryFiles
from tests.unit.shard.member_rig import SETTINGS, Shard, in_shard


def test_a_directory_that_left_is_a_broker_s_by_itself_and_is_never_taken_for_the_shard_s_again() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(5)
        await shard.level(leader)
        one = shard.followers[0]
        with pytest.raises(DirectoryInUse):
            depart(one.files, SETTINGS)
        await one.kill()
        with pytest.raises(InvalidSettings, match="dmq shard leave"):
            MessageStore(one.files, SETTINGS, shard.clock)
        left = depart(one.files, SETTINGS)
        assert left.member.shard == "s"
        identity = read_identity(one.files)
        assert identity is not None
        assert identity.member is None
        with pytest.raises(InvalidSettings, match="belongs to no shard"):
            depart(one.files, SETTINGS)

        store = MessageStore(one.files, SETTINGS, shard.clock, new_epoch=True)
        assert store.queries.bounds("t", 0) == (0, 5)
        store.append([store.creation("mine", store.queries.topic("t").config)])
        store.flush()
        own = store.queries.end
        store.close()
        leader.shop.write(5, first=5)  # the shard goes on, and its journal is another from here on
        one.start()
        await shard.until(lambda: one.role is Role.PARKED)  # nothing of its own is cut
        assert "is committed here" in one.member.report().obstacle
        await one.stop()
        assert depart(one.files, SETTINGS).end == own > left.end
        one.files = MemoryFiles()
        one.start()
        await shard.until(lambda: len(leader.member.report().in_sync) == 3)
        await shard.until(lambda: one.member.report().end == leader.member.report().end)
        assert one.journal() == leader.journal()

    in_shard(test)


def test_an_empty_directory_belongs_to_nobody() -> None:
    with pytest.raises(InvalidSettings, match="belongs to no shard"):
        depart(MemoryFiles(), SETTINGS)


def test_a_member_that_never_had_anything_leaves_an_empty_store() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        one = shard.followers[0]
        shard.net.cut.add(one.address)
        await one.kill()
        one.files = MemoryFiles()
        one.start()
        await asyncio.sleep(3)
        await one.kill()
        assert depart(one.files, SETTINGS).end == 0
        MessageStore(one.files, SETTINGS, shard.clock).close()

    in_shard(test)
