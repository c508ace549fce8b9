"""A shard of members: elections, failover, hand-over, and what is never lost."""

from __future__ import annotations

import asyncio

import pytest

from dmq.errors import InvalidRequest, NotEnoughReplicas, NotLeader
from dmq.protocol.cluster.replication import Follow, Standing
from dmq.registry.memory import Fate
from dmq.shard.in_sync import LAG_SECONDS
from dmq.shard.member import MemberSettings, Role
from tests.unit.shard.member_rig import DirectPeers, Pipe, Shard, in_shard


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


def test_a_leader_hands_over_within_a_moment_and_follows() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(10)
        before = shard.clock.monotonic()
        name = await first.member.hand_over()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert shard.clock.monotonic() - before < 1.0
        second = shard.leader
        assert second.name == name
        assert second.shop.messages == 10
        await shard.until(lambda: first.role is Role.FOLLOWING)
        assert first.shop.dropped == 1
        with pytest.raises(NotLeader, match=f"ask {name}:9600"):
            await first.member.hand_over()
        with pytest.raises(InvalidRequest, match="choose one of"):
            await second.member.hand_over("z")
        assert await second.member.hand_over(first.name) == first.name
        await shard.until(lambda: first.serves)

    in_shard(test)


def test_a_hand_over_that_the_registry_does_not_answer_is_off() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.registry.fates.extend([Fate.LOST])
        with pytest.raises(NotEnoughReplicas, match="did not let go"):
            await first.member.hand_over()
        await shard.until(lambda: first.serves)
        assert not first.shop.is_held
        assert first.member.term is not None
        assert first.member.term.epoch == 1
        await asyncio.sleep(10)
        assert shard.leader is first
        assert first.member.report().right == "session"

    in_shard(test)


def test_nobody_is_handed_over_to_who_is_behind() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        shard.net.cut = {one.address for one in shard.followers}
        first.shop.write(10)
        await asyncio.sleep(1.5)
        with pytest.raises(NotEnoughReplicas, match="within a second"):
            await first.member.hand_over()
        assert first.serves

    in_shard(test)


def test_a_registry_that_is_gone_stops_nobody() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        for one in shard.machines:
            one.registry.cut()
        for number in range(30):
            await asyncio.sleep(1)
            assert first.serves, number
            first.shop.write(1, first=number)
        assert first.member.report().right == "promises"
        await shard.level(first)
        assert first.member.report().epoch == 1
        for one in shard.machines:
            one.registry.mend()
        await shard.until(lambda: first.member.report().right == "session")
        assert first.member.report().epoch == 1

    in_shard(test)


def test_a_leader_whose_session_is_lost_holds_its_place_in_the_next_one() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        for _ in range(5):
            shard.registry.expire(first.registry.session)
            await asyncio.sleep(3)
            assert first.serves
            assert first.member.report().right == "session"
        assert first.member.report().epoch == 1

    in_shard(test)


def test_a_leader_that_is_cut_off_from_all_ceases_to_serve_before_another_one_does() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(3)
        await shard.level(first)
        first.registry.cut()
        shard.net.cut = {first.address}
        first.shop.write(5, first=3)
        await shard.until(lambda: not first.serves)
        assert not any(one.serves for one in shard.machines)
        with pytest.raises(NotLeader):
            first.shop.write(1, first=8)
        await shard.until(lambda: any(one.serves for one in shard.machines))
        second = shard.leader
        assert second.shop.messages == 3
        assert first.role is Role.LEADING, "it does not know"
        first.registry.mend()
        shard.net.cut = set()
        await shard.until(lambda: first.role is Role.FOLLOWING)
        second.shop.write(1, first=3)
        await shard.level(second)
        await asyncio.sleep(1)
        assert first.journal() == second.journal()
        assert any(path.startswith("salvage/") for path in first.files.paths())
        assert [one.member.report().cuts for one in (first, second)] == [1, 0]

    in_shard(test)


def test_a_leader_that_hears_nobody_gives_way_to_one_that_is_heard() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(3)
        await shard.level(first)
        shard.net.cut = {first.address}  # its replication port is blocked; the registry is reached
        await shard.until(lambda: any(one.serves and one is not first for one in shard.machines), 40)
        assert first.shop.dropped == 1
        assert shard.leader.shop.messages == 3

    in_shard(test)


def test_a_shard_with_too_few_in_sync_refuses_writes_and_goes_on_when_they_are_back() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        others = shard.followers
        for one in others:
            await one.kill()
        first.shop.write(5)
        await asyncio.sleep(25)
        assert first.shop.messages == 0
        with pytest.raises(NotEnoughReplicas, match="fewer than 2"):
            first.shop.write(1, first=5)
        assert len(first.member.report().in_sync) >= 2
        others[0].start()
        await shard.until(lambda: first.shop.messages == 5)
        first.shop.write(1, first=5)
        await shard.until(lambda: first.shop.messages == 6)

    in_shard(test)


def test_what_is_not_committed_is_bounded() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        shard.net.cut = {one.address for one in shard.followers}
        for number in range(11):
            first.shop.write(1, 100_000, first=number)
        with pytest.raises(NotEnoughReplicas, match="bytes wait"):
            first.shop.write(1, first=11)

    settings = MemberSettings(uncommitted_bytes_max=1 << 20)
    in_shard(test, settings=settings)


def test_all_members_die_at_once_and_nothing_is_lost() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        count = 0
        for _ in range(4):
            leader.shop.write(10, first=count)
            count += 10
            await shard.level(leader)
            for one in shard.machines:
                await one.kill(power=True)
            for one in shard.machines:
                one.start()
            await shard.until(lambda: any(one.serves for one in shard.machines))
            leader = shard.leader
            assert leader.shop.messages == count

    in_shard(test)


def test_a_lone_member_is_a_shard() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(3)
        assert leader.shop.messages == 3
        await leader.stop()
        leader.start()
        await shard.until(lambda: leader.serves)
        assert leader.shop.messages == 3
        assert leader.member.report().epoch == 2

    in_shard(test, 1, settings=MemberSettings(replicas=1, min_in_sync=1))


def test_an_election_without_an_answer_counts_as_lost() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        others = [one for one in shard.machines if one is not first]
        await first.kill()
        for one in others:
            one.registry.fates.extend([Fate.ANSWERED, Fate.UNANSWERED])  # an election comes after a write that settles
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert shard.leader.member.report().epoch >= 3

    in_shard(test)


def test_a_member_that_stops_hands_over_first() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(7)
        began = shard.clock.monotonic()
        await first.stop()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert shard.clock.monotonic() - began < 1.5
        assert shard.leader.shop.messages == 7
        assert first.name not in shard.leader.member.view.nodes

    in_shard(test)


def test_a_follower_whose_disk_is_full_goes_on_when_it_has_space() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        full = next(one for one in shard.machines if one is not first)
        full.files.capacity_bytes = 1
        first.shop.write(7)
        seconds = await shard.until(lambda: full.name not in first.member.report().in_sync)  # the record changes, too
        assert seconds < LAG_SECONDS / 2, "sends wait meanwhile"
        first.shop.write(7)
        await asyncio.sleep(5.0)
        assert full.role is Role.WAITING
        replica = full.member._replica
        assert replica is not None
        asked = Standing(replica.membership.cluster, "s", 7, now_ms=1)
        assert full.member.standing(asked).is_full
        full.files.capacity_bytes = None
        await shard.until(lambda: full.name in first.member.report().in_sync)
        assert not full.member.standing(asked).is_full

    in_shard(test)


def test_nobody_waits_for_the_answer_of_a_leader_that_is_none_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power answers nothing: neither that it leads nor that it does not."""

    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        follow = DirectPeers.follow

        async def unanswered(peers: DirectPeers, address: str, request: Follow) -> Pipe:
            if address == first.address:
                await asyncio.sleep(1000)
            return await follow(peers, address, request)

        monkeypatch.setattr(DirectPeers, "follow", unanswered)
        await first.kill()
        await shard.until(lambda: any(one.serves for one in shard.machines if one is not first), 12)

    in_shard(test)
