"""How a data directory becomes a member of its shard, and which ones do not."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dmq.errors import InvalidSettings
from dmq.model import TopicConfig
from dmq.registry.contents import ClusterContent, ShardContent, decode_content, encode_content, hex_id
from dmq.registry.memory import Fate
from dmq.registry.registry import Delete, Put
from dmq.shard.member import MemberSettings, Role
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.identity import read_identity
from dmq.testing import MemoryFiles
from tests.unit.shard.member_rig import SETTINGS, Machine, Shard, in_shard

RECORD = "/dmq/shard/s"


def record_of(shard: Shard) -> ShardContent:
    entry = shard.registry.read(RECORD)
    assert entry is not None
    return decode_content(ShardContent, entry.value, RECORD)


async def put_record(shard: Shard, record: ShardContent) -> None:
    client = shard.registry.connect()
    await client.write([Put(RECORD, encode_content(record), None)])
    await client.close()


def replica_of(machine: Machine) -> str:
    identity = read_identity(machine.files)
    assert identity is not None
    assert identity.member is not None
    return hex_id(identity.member.replica_id)


def test_members_are_in_the_record_with_their_lives() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        record = record_of(shard)
        assert record.number == 1
        assert record.members == {one.name: replica_of(one) for one in shard.machines}
        assert {*record.lives.values()} == {1}
        other = shard.followers[0]
        await other.stop()
        other.start()
        await shard.until(lambda: other.role is Role.FOLLOWING)
        assert record_of(shard).lives[replica_of(other)] == 2

    in_shard(test)


def test_a_role_that_changes_is_no_other_life() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        for _ in range(2):
            await shard.leader.member.hand_over()
            await shard.until(lambda: any(one.serves for one in shard.machines))
        identity = read_identity(first.files)
        assert identity is not None
        assert identity.member is not None
        assert identity.member.life == 1

    in_shard(test)


def test_shards_have_numbers_of_their_own() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        client = shard.registry.connect()
        for one in shard.machines:
            await one.stop(hand_over=False)
        await client.write([Delete(RECORD, None)])
        other = Machine(shard, "x", "other")
        shard.machines.append(other)
        other.start()
        await shard.until(lambda: other.role is not Role.STARTING)
        entry = shard.registry.read("/dmq/shard/other")
        assert entry is not None
        assert decode_content(ShardContent, entry.value, "").number == 2

    in_shard(test)


def test_a_shard_that_is_full_refuses_another_member() -> None:
    async def test(shard: Shard) -> None:
        for one in shard.machines[:3]:
            one.start()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        await shard.until(lambda: all(one.role is not Role.STARTING for one in shard.machines[:3]))
        fourth = shard.machines.pop().start()
        assert fourth.task is not None
        with pytest.raises(InvalidSettings, match="has 3 of 3 members already"):
            await fourth.task
        assert fourth.role is Role.STOPPED

    in_shard(test, 4)


def test_the_directory_of_a_lone_broker_seeds_a_shard() -> None:
    async def test(shard: Shard) -> None:
        first, *others = shard.machines
        with MessageStore(first.files, SETTINGS, shard.clock) as store:
            store.create_topic("t", TopicConfig(queues=1))
        first.start()
        await shard.until(lambda: first.role is Role.LEADING)
        for one in others:
            one.start()
        await shard.until(lambda: first.serves)
        first.shop.write(3)
        await shard.until(lambda: first.shop.messages == 3)
        await shard.until(lambda: len(first.member.report().in_sync) == 3)
        await asyncio.sleep(1)
        assert all(one.journal() == first.journal() for one in others)

    in_shard(test)


def test_a_directory_with_another_journal_is_refused() -> None:
    async def test(shard: Shard) -> None:
        first, second = shard.machines
        first.start()
        await shard.until(lambda: first.role is Role.LEADING)
        with MessageStore(second.files, SETTINGS, shard.clock) as store:
            store.create_topic("t", TopicConfig(queues=1))
        second.start()
        assert second.task is not None
        with pytest.raises(InvalidSettings, match="choose an empty directory"):
            await second.task
        shard.machines.pop()

    in_shard(test, 2)


def test_a_directory_of_another_cluster_or_shard_is_refused() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        one = shard.followers[0]
        await one.stop()
        one.place = msgspec.structs.replace(one.place, shard="t")
        one.start()
        assert one.task is not None
        with pytest.raises(InvalidSettings, match="is a member of shard 's', not of 't'"):
            await one.task
        one.place = msgspec.structs.replace(one.place, shard="s")
        other = Shard(1)
        other.machines[0].start()
        await other.until(lambda: other.machines[0].role is Role.LEADING)
        one.shard.registry, ours = other.registry, one.shard.registry
        one.start()
        with pytest.raises(InvalidSettings, match="the registry is that of cluster"):
            await one.task
        one.shard.registry = ours
        shard.machines.remove(one)
        await other.stop()

    in_shard(test)


def test_a_registry_that_becomes_another_cluster_s_parks_its_members() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        one = shard.followers[0]
        other = ClusterContent(id=hex_id(1))
        client = shard.registry.connect()
        await client.write([Put("/dmq/cluster", encode_content(other), None)])
        for pipe in shard.net.pipes:
            pipe.close()
        await shard.until(lambda: one.role is Role.PARKED)
        assert "give this member its own registry" in one.member.report().obstacle

    in_shard(test)


def test_a_registry_that_lost_the_record_makes_nothing_anew() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        for one in shard.machines:
            await one.stop(hand_over=False)
        client = shard.registry.connect()
        await client.write([Delete(RECORD, None)])
        one = shard.machines[0].start()
        await asyncio.sleep(10)
        assert one.role is Role.STARTING
        assert "an old copy or another registry" in one.member.report().obstacle
        assert shard.registry.read(RECORD) is None

    in_shard(test)


def test_nobody_stands_on_an_old_copy_of_the_registry() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        old = record_of(shard)
        old = msgspec.structs.replace(old, revision=old.revision - 2)
        others = [one for one in shard.machines if one is not leader]
        await asyncio.sleep(1)
        await put_record(shard, old)
        await leader.kill()
        await asyncio.sleep(30)
        assert not any(one.serves for one in shard.machines)
        assert {one.member.report().obstacle for one in others} == {
            "the registry's record is older than one that it has seen"
        }
        leader.start()
        await asyncio.sleep(10)
        assert leader.role is Role.STARTING
        assert "nobody stands until" in leader.member.report().obstacle

    in_shard(test)


def test_an_old_copy_of_a_directory_is_another_replica() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        one = shard.followers[0]
        await one.stop()
        copy = one.files.copy()
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        before = replica_of(one)
        await one.stop()
        one.files = copy
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        assert replica_of(one) != before
        await shard.until(lambda: replica_of(one) in record_of(shard).in_sync)
        assert before not in record_of(shard).in_sync
        assert before not in record_of(shard).members.values()
        leader.shop.write(1)
        await shard.level(leader)

    in_shard(test)


def test_an_enrolment_without_an_answer_is_known_again_by_its_mark() -> None:
    async def test(shard: Shard) -> None:
        await shard.start()
        one = shard.followers[0]
        before = replica_of(one)
        await one.stop()
        one.registry = shard.registry.connect()
        one.start(is_connected=True)
        one.registry.fates.extend([Fate.UNANSWERED])
        await shard.until(lambda: one.role is Role.FOLLOWING)
        assert replica_of(one) == before
        assert record_of(shard).lives[before] == 2

    in_shard(test)


@pytest.mark.parametrize("count", [2, 3])
def test_a_disk_that_is_replaced_joins_under_the_same_name(count: int) -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(5)
        await shard.level(leader)
        one = shard.followers[0]
        before = replica_of(one)
        await one.kill()
        one.files = MemoryFiles()
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        after = replica_of(one)
        await shard.until(lambda: after in record_of(shard).in_sync)
        await shard.until(lambda: before not in record_of(shard).in_sync)
        assert before != after
        leader.shop.write(1, first=5)
        await shard.until(lambda: leader.shop.messages == 6)
        await asyncio.sleep(1)
        assert one.journal() == leader.journal()

    in_shard(test, count)


def test_the_disk_of_the_leader_is_replaced_and_nothing_is_lost() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(5)
        await shard.level(leader)
        await leader.kill()
        leader.files = MemoryFiles()
        leader.start()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        second = shard.leader
        assert second is not leader
        assert second.shop.messages == 5
        await shard.until(lambda: len(record_of(shard).in_sync) == 3)
        await asyncio.sleep(1)
        assert leader.journal() == second.journal()

    in_shard(test)


def test_a_shard_of_two_that_lost_its_leader_s_disk_elects_the_other_one() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(5)
        await shard.level(leader)
        await leader.kill()
        leader.files = MemoryFiles()
        leader.start()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert shard.leader.shop.messages == 5

    in_shard(test, 2, settings=MemberSettings(replicas=2))


def test_all_start_at_once_on_an_empty_registry() -> None:
    async def test(shard: Shard) -> None:
        for one in shard.machines:
            one.start()
        await shard.until(lambda: any(one.serves for one in shard.machines))
        await shard.until(lambda: len(record_of(shard).in_sync) == 5)

    in_shard(test, 5, settings=MemberSettings(replicas=5))


def test_a_copy_of_a_running_directory_is_another_replica() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        one = shard.followers[0]
        await one.stop()
        one.files.place_id = "here"
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        before = replica_of(one)
        copy = one.files.copy()  # in the life that the record knows
        copy.place_id = "there"
        leader.shop.write(20)
        await shard.level(leader)
        await one.kill()  # which has confirmed what the copy lacks
        one.files, own = copy, one.files
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        assert replica_of(one) != before
        await shard.until(lambda: replica_of(one) in record_of(shard).in_sync)
        assert before not in record_of(shard).in_sync
        # The first one is started again elsewhere: its place is taken, and it is told so.
        other = Machine(shard, "z")
        other.place = msgspec.structs.replace(other.place, broker=one.name)
        other.files = own
        other.member = other._made()
        shard.machines.append(other)
        other.start()
        await asyncio.sleep(5)
        counted = [one for one in record_of(shard).in_sync if one == before]
        assert len(counted) <= 1
        assert len({*record_of(shard).members.values()}) == 3

    in_shard(test)


def test_a_directory_that_is_moved_after_a_stop_stays_the_same_replica() -> None:
    async def test(shard: Shard) -> None:
        await shard.start_with_topic()
        one = shard.followers[0]
        await one.stop()
        one.files.place_id = "here"
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        before = replica_of(one)
        await one.stop()
        moved = one.files.copy()
        moved.place_id = "there"
        one.files, stayed = moved, one.files
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        assert replica_of(one) == before
        await one.stop()
        one.files = stayed  # the one that was left behind has been started less often
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        assert replica_of(one) != before

    in_shard(test)


def test_a_clone_that_nothing_tells_apart_ends_the_part_of_the_one_that_runs() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        one = shard.followers[0]
        clone = Machine(shard, "z")
        clone.place = msgspec.structs.replace(clone.place, broker=one.name)
        clone.files = one.files.copy()  # as of a snapshot of the whole disk
        clone.member = clone._made()
        shard.machines.append(clone)
        clone.start()
        await shard.until(lambda: one.role is Role.PARKED)
        assert "copy of this data directory" in one.member.report().obstacle
        await one.kill()
        await shard.until(lambda: clone.role is Role.FOLLOWING)
        leader.shop.write(5)
        await shard.level(leader)

    in_shard(test)
