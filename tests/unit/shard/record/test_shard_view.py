"""What a member reads of the registry, and what it leaves alone."""

from __future__ import annotations

import asyncio

from dmq.registry.contents import NodeContent, encode_content
from dmq.registry.registry import Create, Entry, Put
from tests.unit.shard.member_rig import Shard, in_shard


def test_a_thousand_brokers_of_other_shards_cost_a_member_no_read() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        others = shard.registry.connect()
        paths = [f"/dmq/node/other-{number}" for number in range(100)]
        value = encode_content(NodeContent(address="h:1", shard="t"))
        await others.write([Create(path, value, ephemeral=True) for path in paths])
        read: list[str] = []
        plain = leader.registry.read

        async def counted(path: str) -> Entry | None:
            read.append(path)
            return await plain(path)

        leader.registry.read = counted  # type: ignore[method-assign]
        for path in paths:
            await others.write([Put(path, value, None)])
            await asyncio.sleep(0.03)
        await asyncio.sleep(10)
        assert not {*paths} & {*read}
        assert len(read) < 30, "it reads /leader once a second, and everything every 10 s"
        assert read.count("/dmq/cluster") <= 2
        # One of its own is noticed.
        follower = shard.followers[0]
        await follower.stop()
        await shard.until(lambda: follower.name not in leader.member.view.nodes, 1)
        await others.close()

    in_shard(test)
