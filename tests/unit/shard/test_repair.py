"""Members mend each other's disks: by themselves where they find damage, and everything when a person asks."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from dmq.errors import BrokerStopping, Damaged, NotInCluster, OffsetGone
from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX, Repair, Standing
from dmq.shard.election import Obstacle, obstacle
from dmq.shard.member import Role
from dmq.storage.journal.unit import read_header
from dmq.testing import MemoryFiles
from tests.unit.shard.member_rig import Machine, Shard, in_shard
from tests.unit.shard.test_election import ME, READY, record


async def filled(shard: Shard) -> Machine:
    """A shard whose journal has several segments, all committed and known to be; returns the leader."""
    leader = await shard.start_with_topic()
    for number in range(8):
        leader.shop.write(10, 10_000, first=10 * number)
        await shard.level(leader)
        assert leader.shop.store is not None
        leader.shop.store.retain()
    end = leader.member.report().end
    await shard.until(lambda: all(one.member.report().committed == end for one in shard.machines))
    assert len(leader.journal()) > 1
    return leader


def turn_bits(one: Machine, *, share: int = 3) -> None:
    """Turn a bit in some places of each segment."""
    for path, raw in one.journal().items():
        for part in range(share):
            one.files.flip_bit(path, len(raw) * (2 * part + 1) // (2 * share) - 1, part)


def test_a_follower_that_is_asked_to_looks_through_its_journal_and_follows_again() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        follower = shard.followers[0]
        turn_bits(follower)
        assert follower.journal() != leader.journal()
        mended = await follower.member.mend()
        assert follower.journal() == leader.journal()
        assert len(mended.mended) >= 3
        assert not mended.left
        await shard.until(lambda: follower.role is Role.FOLLOWING)
        leader.shop.write(1, first=80)
        await shard.level(leader)
        assert (await follower.member.mend()).mended == []

    in_shard(test)


def test_a_leader_that_is_asked_to_leads_on_meanwhile() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        whole = leader.journal()
        turn_bits(leader)
        mended = await leader.member.mend()
        assert len(mended.mended) >= 3
        assert leader.journal() == whole
        assert leader.serves
        assert leader.member.term is not None
        assert leader.member.term.epoch == 1

    in_shard(test)


def test_what_a_read_finds_damaged_is_mended_by_itself() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        whole, store = leader.journal(), leader.shop.store
        assert store is not None
        turn_bits(leader, share=1)
        store._reader.cache.clear()
        with pytest.raises(Damaged):
            _ = [store.queries.read("t", 0, offset, max_messages=1) for offset in range(80)]
        assert leader.member.standing(standing_of(leader)).damaged == 1
        await shard.until(lambda: not store.damage.ranges)
        damaged = sum(raw != leader.journal()[path] for path, raw in whole.items())
        assert damaged == len(whole) - 1, "only what was read is known"

    in_shard(test)


def test_what_is_found_after_a_repair_waits_for_no_next_try() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        whole, store = leader.journal(), leader.shop.store
        assert store is not None
        turn_bits(leader, share=1)
        began_at = shard.clock.boottime()
        for segment in range(3):  # as a consumer meets one after the other
            assert sum(raw != leader.journal()[path] for path, raw in whole.items()) == len(whole) - segment
            store._reader.cache.clear()
            with pytest.raises(Damaged):
                _ = [store.queries.read("t", 0, offset, max_messages=1) for offset in range(80)]
            await shard.until(lambda: not store.damage.ranges)
        assert shard.clock.boottime() - began_at < 5.0

    in_shard(test)


def standing_of(one: Machine) -> Standing:
    replica = one.member._replica
    assert replica is not None
    return Standing(replica.membership.cluster, "s", 7, now_ms=1)


def test_damage_that_a_member_finds_when_it_opens_is_mended_before_it_follows() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        follower = shard.followers[0]
        await follower.stop()
        second = sorted(follower.journal())[1]
        follower.files.flip_bit(second, 30)
        for path in [one for one in follower.files.paths() if one.startswith("index/")]:
            follower.files.remove(path)  # so that it must read all of its journal
        follower.start()
        await shard.until(lambda: follower.role is Role.FOLLOWING)
        assert follower.journal()[second] == leader.journal()[second]
        replica = follower.member._replica
        assert replica is not None
        assert not replica.damage.ranges

    in_shard(test)


def test_damage_that_a_follower_needs_is_mended_from_another_one() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        behind = shard.followers[0]
        await behind.kill()
        await shard.until(lambda: len(leader.member.report().in_sync) == 2)
        end = leader.member.report().end
        leader.shop.write(20, 10_000, first=80)
        await shard.level(leader)
        store = leader.shop.store
        assert store is not None
        whole = leader.journal()
        path = max(path for path in whole if int(path[-28:-8]) <= end)
        leader.files.flip_bit(path, end - int(path[-28:-8]) + 25_000)  # within what it lacks
        store._reader.cache.clear()  # so that it is read from the disk
        behind.start()
        await shard.until(lambda: behind.member.report().committed == leader.member.report().end)
        assert leader.journal() == whole == behind.journal()

    in_shard(test)


@pytest.mark.parametrize("unit", [0, 1, 2, 9])
def test_empty_followers_of_a_damaged_leader_wait_and_say_so(unit: int, caplog: pytest.LogCaptureFixture) -> None:
    """They do not begin anew again and again; and they go on when one comes that has what is missing."""

    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(10, 10_000)
        await shard.level(leader)
        whole, (away, empty) = leader.journal(), shard.followers
        await away.kill()
        await empty.kill()
        empty.files = MemoryFiles()
        path, raw = min(whole.items())
        for _ in range(unit):
            raw = raw[read_header(raw).length :]  # type: ignore[union-attr]
        at = len(whole[path]) - len(raw)
        leader.files.flip_bit(path, at + read_header(raw).length - 1)  # type: ignore[union-attr]
        assert leader.shop.store is not None
        leader.shop.store._reader.cache.clear()
        empty.start()
        await shard.until(lambda: empty.member.report().obstacle == Obstacle.LEADER_DAMAGED)
        follows, begun = caplog.text.count("followed"), caplog.text.count("begun anew")
        await asyncio.sleep(180)
        assert empty.member.report().obstacle == Obstacle.LEADER_DAMAGED
        assert caplog.text.count("followed") == follows
        assert caplog.text.count("begun anew") == begun
        assert caplog.text.count("damage is left") <= 4
        assert leader.role is Role.LEADING
        away.start()
        await shard.until(lambda: len(leader.member.report().in_sync) == 3)
        assert leader.journal() == empty.journal() == away.journal()

    with caplog.at_level(logging.INFO):
        in_shard(test)


def test_what_nobody_has_is_said_and_the_member_goes_on() -> None:
    async def test(shard: Shard) -> None:
        await filled(shard)
        follower = shard.followers[0]
        path = min(follower.journal())
        for one in shard.machines:
            one.files.flip_bit(path, 5000)
        mended = await follower.member.mend()
        assert len(mended.left) == 1
        assert "fails its checksum" in mended.reason
        await shard.until(lambda: follower.role is Role.FOLLOWING)

    in_shard(test)


def test_a_member_gives_only_what_is_committed_and_its_own() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        follower = shard.followers[0]
        replica = follower.member._replica
        assert replica is not None
        cluster, end = replica.membership.cluster, leader.member.report().end
        for one in (leader, follower):
            asked = Repair(cluster, "s", replica.journal_id, 0, end=end)
            reply, body = await one.member.repair(asked)
            assert (reply.start, reply.end) == (0, len(body))
            assert len(body) <= JOURNAL_BYTES_MAX
            assert bytes(body) == leader.journal()[min(leader.journal())][: len(body)]
            with pytest.raises(OffsetGone):
                await one.member.repair(Repair(cluster, "s", replica.journal_id, end, end=end + 10))
            with pytest.raises(NotInCluster):
                await one.member.repair(Repair(cluster, "s", replica.journal_id + 1, 0, end=end))
        replica.damage.add(100, 200)
        with pytest.raises(Damaged):
            await follower.member.repair(Repair(cluster, "s", replica.journal_id, 0, end=end))

    in_shard(test)


def test_a_member_that_stops_says_so() -> None:
    async def test(shard: Shard) -> None:
        await filled(shard)
        follower = shard.followers[0]
        asking = asyncio.ensure_future(follower.member.mend())
        await asyncio.sleep(0)
        await follower.stop()
        with pytest.raises(BrokerStopping):
            await asking
        with pytest.raises(BrokerStopping):
            await follower.member.mend()

    in_shard(test)


def test_a_member_with_holes_does_not_stand_unless_it_is_alone() -> None:
    holed = msgspec.structs.replace(READY, has_holes=True)
    assert obstacle(holed) is Obstacle.DAMAGED
    assert obstacle(msgspec.structs.replace(holed, record=record(ME))) is Obstacle.NONE
