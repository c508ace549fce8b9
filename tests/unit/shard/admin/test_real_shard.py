"""Looking at members that run, and operating them."""

from __future__ import annotations

import pytest

from dmq.errors import NotEnoughReplicas, NotLeader, ShardConflict
from dmq.protocol.cluster.shard import Severity
from dmq.shard.admin.operations import Operations, RecordChange
from dmq.shard.member import Role
from tests.unit.shard.member_rig import DirectPeers, Machine, Shard, in_shard


def operations(machine: Machine) -> Operations:
    shard = machine.shard
    return Operations(machine.member, DirectPeers(shard.net, machine.address), shard.clock, machine.name)


def is_refused(leader: Machine) -> bool:
    """Whether a send is."""
    assert leader.shop.leadership is not None
    try:
        leader.shop.leadership.check_writable()
    except NotEnoughReplicas:
        return True
    return False


def test_every_member_tells_the_same_of_a_sound_shard() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(10)
        await shard.level(leader)
        committed = leader.member.report().committed
        await shard.until(lambda: all(one.member.report().committed == committed for one in shard.machines))
        for machine in shard.machines:
            view = await operations(machine).shard()
            assert [found.severity for found in view.findings] == [Severity.OK]
            assert view.leader == leader.name
            told = [(one.role, one.lag, one.said and one.said.committed, one.is_in_sync) for one in view.members]
            roles = ["leader" if one is leader else "follower" for one in shard.machines]
            assert told == [(role, 0, committed, True) for role in roles]

    in_shard(test)


def test_a_shard_goes_on_with_fewer_copies_when_it_is_told_to() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        others = [one for one in shard.machines if one is not leader]
        for other in others:
            await other.kill()
        await shard.until(lambda: is_refused(leader))
        admin = operations(leader)
        view = await admin.shard()
        assert "NOT_ENOUGH_REPLICAS" in view.findings[0].what
        assert [one.is_in_sync for one in view.members].count(True) == 1
        gone, kept = (other.name for other in others)  # both are kept in the set, or nobody could be elected
        await admin.change("", RecordChange(remove=gone), by="me")
        with pytest.raises(ShardConflict, match="the in-sync set would have 1"):
            await admin.change("", RecordChange(remove=kept), by="me")
        await admin.change("", RecordChange(min_in_sync=1), by="me")
        await shard.until(lambda: not is_refused(leader))
        leader.shop.write(5)
        await shard.level(leader)
        assert leader.shop.messages == 5
        done = await admin.change("", RecordChange(remove=kept), by="me")
        assert [*done.shard.record.members] == [leader.name]

    in_shard(test)


def test_the_leader_hands_over_to_the_one_that_is_named() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        to = next(one for one in shard.machines if one is not leader)
        with pytest.raises(NotLeader) as caught:
            await operations(to).hand_over("", to.name, by="me")
        assert caught.value.detail["leader"] == f"{leader.name}:9600"
        done = await operations(leader).hand_over("", to.name, by="me")
        assert done.shard.leader == to.name
        await shard.until(lambda: to.serves)

    in_shard(test)


def test_a_follower_that_is_behind_does_not_take_over() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        to = next(one for one in shard.machines if one is not leader)
        shard.net.cut.add(to.address)
        leader.shop.write(1)
        with pytest.raises(ShardConflict, match=f"{leader.name} leads on: "):
            await operations(leader).hand_over("", to.name, by="me")
        assert leader.serves

    in_shard(test)


def test_a_member_is_promoted_with_loss_and_the_others_follow_it() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        kept, late = (one for one in shard.machines if one is not leader)
        leader.shop.write(3)
        await shard.level(leader)
        await late.kill()
        await shard.until(lambda: len(leader.member.report().in_sync) == 2)
        leader.shop.write(4, first=3)  # which the late one never gets
        await shard.level(leader)
        await leader.kill()
        await kept.kill()
        late.start()
        await shard.until(lambda: late.role is Role.WAITING)
        admin = operations(late)
        await shard.until(lambda: leader.name not in late.member.view.nodes and kept.name not in late.member.view.nodes)
        view = await admin.shard()
        assert view.leader == ""
        assert view.findings[0].what.startswith("there is no leader: no member of the in-sync set runs")
        with pytest.raises(ShardConflict, match=r"nothing was changed: .* is not in the in-sync set"):
            await admin.promote("", late.name, accept_loss=False, by="me")
        done = await admin.promote("", late.name, accept_loss=True, by="me")
        assert done.shard.leader == late.name
        assert f"The leader before was {leader.name}" in done.what
        assert not late.serves  # it is alone, and two must have everything
        await admin.change("", RecordChange(min_in_sync=1), by="me")
        await shard.until(lambda: late.serves and not is_refused(late))
        kept.start()
        leader.start()
        assert late.shop.messages == 3
        late.shop.write(2, first=3)
        await shard.until(lambda: len(late.member.report().in_sync) == 3)
        await shard.level(late)
        end = late.member.report().end
        await shard.until(lambda: {one.member.report().committed for one in shard.machines} == {end})
        assert len({tuple(sorted(one.journal().items())) for one in shard.machines}) == 1

    in_shard(test)
