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


def test_everything_is_read_in_one_round_trip() -> None:
    """On a machine that is too busy each takes a second, and an election needs to know all of it several times."""

    async def test(shard: Shard) -> None:
        leader = await shard.start()
        plain = leader.registry.read

        async def slow(path: str) -> Entry | None:
            found = await plain(path)
            await asyncio.sleep(1.0)
            return found

        leader.registry.read = slow  # type: ignore[method-assign]
        view = leader.member.view
        for names, round_trips in ((["a", "b", "c"], 1), (["a", "b"], 2), (["a", "b", "c", "gone"], 1)):
            view._members = names
            async with view._lock:
                began = shard.clock.monotonic()
                await view._read()
                assert round(shard.clock.monotonic() - began, 3) == round_trips
            assert {*view.nodes} == {"a", "b", "c"}

    in_shard(test)
