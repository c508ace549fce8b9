"""One leader in one epoch: when it may serve, what it writes to the registry, and when it gives way."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dmq.errors import NotInCluster, NotLeader
from dmq.protocol.cluster.replication import Follow
from dmq.registry.contents import ShardContent, decode_content, encode_content, hex_id
from dmq.registry.memory import Fate
from dmq.registry.registry import Put
from dmq.shard.member import Role
from tests.unit.shard.member_rig import Machine, Pipe, Shard, in_shard

RECORD = "/dmq/shard/s"
LEADER = "/dmq/shard/s/leader"


def record_of(shard: Shard) -> ShardContent:
    entry = shard.registry.read(RECORD)
    assert entry is not None
    return decode_content(ShardContent, entry.value, RECORD)


async def change(shard: Shard, **changes: object) -> None:
    """Somebody else writes the record."""
    record = record_of(shard)
    wanted = msgspec.structs.replace(record, revision=record.revision + 1, **changes)
    client = shard.registry.connect()
    await client.write([Put(RECORD, encode_content(wanted), None)])
    await client.close()


def test_leader_is_written_every_second_so_that_the_session_is_known_to_live() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        before = shard.registry.read(LEADER)
        assert before is not None
        for _ in range(20):
            await asyncio.sleep(0.5)
            assert leader.registry.deadline - shard.clock.boottime() > 1.2
        after = shard.registry.read(LEADER)
        assert after is not None
        assert 7 <= after.version - before.version <= 10

    in_shard(test)


def test_a_new_session_is_no_right_before_leader_is_held_in_it() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        for one in shard.followers:
            await one.kill()
        await asyncio.sleep(4)
        assert leader.member.report().right == "session"
        leader.registry.fates.extend([Fate.ANSWERED] + [Fate.LOST] * 200)
        shard.registry.expire(leader.registry.session)
        await leader.registry.read("/dmq")
        await leader.registry.write([Put("/dmq", b"", None)])
        assert not leader.serves, "there is a session again, and no entry that keeps others from standing"
        leader.registry.fates.clear()
        await shard.until(lambda: leader.member.report().right == "session")

    in_shard(test)


def test_a_disk_that_does_not_flush_makes_a_leader_give_way() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        assert leader.shop.store is not None
        encoded = leader.shop.store.creation("u")
        leader.shop.store.append([encoded])  # and its flush never ends
        await shard.until(lambda: any(one.serves and one is not leader for one in shard.machines), 12)
        assert leader.shop.dropped == 1

    in_shard(test)


def test_a_disk_that_does_not_flush_makes_nobody_give_way_while_nobody_can_be_elected() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        assert leader.shop.store is not None
        for one in shard.machines:
            one.registry.cut()
        leader.shop.store.append([leader.shop.store.creation("u")])
        await asyncio.sleep(15)
        assert leader.serves, "it leads on by the promises of the others"
        assert leader.shop.dropped == 0
        for one in shard.machines:
            one.registry.mend()
        await shard.until(lambda: any(one.serves and one is not leader for one in shard.machines), 30)
        assert leader.shop.dropped == 1

    in_shard(test)


def test_a_flush_that_ends_at_last_leaves_the_leader_in_its_place() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        assert leader.shop.store is not None
        epoch = record_of(shard).epoch
        for one in shard.machines:
            one.registry.cut()
        leader.shop.store.append([leader.shop.store.creation("u")])
        await asyncio.sleep(15)
        leader.shop.store.flush()
        for one in shard.machines:
            one.registry.mend()
        await shard.until(lambda: leader.member.report().right == "session", 30)
        assert (leader.serves, record_of(shard).epoch) == (True, epoch)

    in_shard(test)


def test_a_leader_without_an_heir_does_not_give_way_for_its_disk() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        assert leader.shop.store is not None
        for one in shard.followers:
            await one.kill()
        await asyncio.sleep(10)
        leader.shop.store.append([leader.shop.store.creation("u")])
        await asyncio.sleep(15)
        assert leader.role is Role.LEADING

    in_shard(test)


def test_a_winner_whose_first_flush_does_not_end_gives_way() -> None:
    async def test(shard: Shard) -> None:
        first = await shard.start_with_topic()
        first.shop.write(3)
        await shard.level(first)
        stuck = shard.followers[0]
        await first.member.hand_over(stuck.name)
        stuck.is_stuck = True
        await shard.until(lambda: stuck.role is Role.LEADING)
        await shard.until(lambda: any(one.serves for one in shard.machines), 30)
        assert shard.leader is not stuck
        assert shard.leader.shop.messages == 3
        assert stuck.member.leader_address == f"{shard.leader.name}:9600"
        stuck.is_stuck = False
        await shard.until(lambda: stuck.role is Role.FOLLOWING)

    in_shard(test)


def test_a_leader_that_the_record_does_not_name_any_more_ceases_at_once() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        other = shard.followers[0].member.report().replica
        await change(shard, epoch=9, leader=hex_id(other))
        await shard.until(lambda: leader.role is not Role.LEADING, 1)
        assert leader.shop.dropped == 1
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert record_of(shard).epoch > 9

    in_shard(test)


def test_a_change_of_the_least_is_in_force_without_another_election() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        for one in shard.followers:
            await one.kill()
        leader.shop.write(3)
        await asyncio.sleep(15)
        assert leader.shop.messages == 0
        await change(shard, min_in_sync=1)
        await shard.until(lambda: leader.shop.messages == 3, 2)
        assert record_of(shard).in_sync == [hex_id(leader.member.report().replica)]
        assert leader.member.report().epoch == 1
        assert leader.member.report().right in ("session", "alone")

    in_shard(test)


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.UNANSWERED, Fate.LATE])
def test_a_change_of_the_set_without_an_answer_counts_until_another_one_has_one(fate: Fate) -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        gone, stays = shard.followers
        await gone.kill()
        leader.shop.write(3)
        assert leader.member.term is not None
        in_sync, ids = leader.member.term.in_sync, [_replica(one) for one in (leader, gone, stays)]
        leader.registry.fates.extend([fate] * 1000)
        await shard.until(lambda: not in_sync.is_settled)
        assert in_sync.union == {*ids}
        await asyncio.sleep(2)
        assert in_sync.union == {*ids}, "no read settles it"
        assert leader.shop.messages == 0
        leader.registry.fates.clear()
        await shard.until(lambda: leader.shop.messages == 3, 3)
        assert in_sync.recorded == {ids[0], ids[2]}
        assert {int(one, 16) for one in record_of(shard).in_sync} == in_sync.recorded

    in_shard(test)


def _replica(machine: Machine) -> int:
    record = machine.shard.leader.member.view.record
    assert record is not None
    return int(record.members[machine.name], 16)


def test_strangers_do_not_follow() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        term, view = leader.member.term, leader.member.view
        assert term is not None
        assert view.cluster is not None
        assert view.record is not None
        request = Follow(view.cluster.id, "s", int(view.record.journal or "", 16), 77, term.epoch, 0)
        with pytest.raises(NotInCluster, match="is not a member of shard 's' as far as its leader knows"):
            leader.member.follow(request, Pipe(shard.net, ("x", leader.address), leader.member))
        with pytest.raises(NotLeader, match=f"ask {leader.name}:9600"):
            shard.followers[0].member.follow(request, Pipe(shard.net, ("x", "y"), leader.member))

    in_shard(test)


def test_a_directory_does_not_follow_any_more_once_a_copy_of_it_was_started() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        one = shard.followers[0]
        term, view = leader.member.term, leader.member.view
        assert term is not None
        assert view.cluster is not None
        assert view.record is not None
        replica, journal = _replica(one), int(view.record.journal or "", 16)
        life = view.record.lives[hex_id(replica)]
        await change(shard, lives=view.record.lives | {hex_id(replica): life + 1})
        await view.refresh()
        request = Follow(view.cluster.id, "s", journal, replica, term.epoch, 0, life=life)
        with pytest.raises(NotInCluster, match=f"follows in its life {life}, and was started again since"):
            leader.member.follow(request, Pipe(shard.net, ("x", leader.address), leader.member))
        for told in (0, life + 1):  # a member of an earlier version does not tell it
            newer = msgspec.structs.replace(request, life=told)
            assert (
                leader.member.follow(newer, Pipe(shard.net, ("x", leader.address), leader.member)).epoch == term.epoch
            )

    in_shard(test)


def test_a_member_that_follows_again_is_heard_on_its_new_connection_only() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        one = shard.followers[0]
        for pipe in shard.net.pipes:
            if one.address in pipe.ends:
                pipe.close()
        leader.shop.write(5)
        await shard.until(lambda: one.role is Role.WAITING)
        await shard.until(lambda: one.role is Role.FOLLOWING)
        await shard.until(lambda: leader.shop.messages == 5)
        report = next(each for each in leader.member.report().followers if each.broker == one.name)
        assert report.is_connected
        assert report.is_in_sync

    in_shard(test)
