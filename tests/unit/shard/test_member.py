"""A shard of members: elections, failover, hand-over, and what is never lost."""

from __future__ import annotations

import asyncio

from dmq.shard.member import Role
from tests.unit.shard.member_rig import Shard, in_shard


def test_the_first_leads_when_another_one_is_in_sync() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        assert [one.role for one in shard.machines].count(Role.LEADING) == 1
        assert len(shard.followers) == 2
        leader.shop.write(100)
        end = leader.member.report().end
        await shard.until(lambda: leader.member.report().committed == end)
        assert leader.shop.messages == 100
        await shard.until(lambda: all(one.member.report().committed == end for one in shard.machines))
        assert len({tuple(sorted(one.journal().items())) for one in shard.machines}) == 1

    in_shard(test)


def test_a_follower_leads_when_the_leader_dies_and_nothing_is_lost() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(10)
        await shard.level(first)
        assert first.shop.messages == 10
        await first.kill()
        took = await shard.until(lambda: any(one.serves for one in shard.machines))
        assert took < 9
        second = shard.leader
        assert second is not first
        assert second.shop.messages == 10
        second.shop.write(5, first=10)
        first.start()
        await shard.until(lambda: first.role is Role.FOLLOWING)
        await shard.until(lambda: len(second.member.report().in_sync) == 3)
        await asyncio.sleep(2)
        assert first.journal() == second.journal()

    in_shard(test)
