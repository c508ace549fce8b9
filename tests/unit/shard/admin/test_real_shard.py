"""Looking at members that run, and operating them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dmq.errors import InvalidSettings, NotEnoughReplicas, NotLeader, ShardConflict
from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import CLUSTER_FORMAT, ClusterContent, ShardState, decode_content, encode_content
from dmq.registry.memory import Fate
from dmq.registry.paths import Paths
from dmq.registry.registry import Put
from dmq.shard.admin.operations import Operations
from dmq.shard.admin.record_change import RecordChange
from dmq.shard.admin.visitor import Visitor
from dmq.shard.member import MemberSettings, Role
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
        with pytest.raises(ShardConflict, match="only 1 would be left in the in-sync set"):
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


def test_a_drained_leader_hands_over_and_leads_no_more_until_it_is_put_back() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        other = next(one for one in shard.machines if one is not leader)
        done = await operations(other).drain(leader.name, by="me")
        assert done.shard.leader not in ("", leader.name)
        assert f"{leader.name} is drained: it does not lead" in [found.what for found in done.shard.findings]
        await shard.until(lambda: leader.role is Role.FOLLOWING)
        await shard.until(lambda: any(one.serves for one in shard.machines))
        now = shard.leader
        third = next(one for one in shard.machines if one not in (leader, now))
        await shard.until(lambda: len(now.member.report().in_sync) == 3)
        with pytest.raises(ShardConflict, match="is drained"):
            await operations(now).hand_over("", leader.name, by="me")
        await now.kill()
        await shard.until(lambda: third.serves)  # though the drained one is as far
        with pytest.raises(ShardConflict, match="nobody could lead"):
            await operations(third).drain(third.name, by="me")
        await operations(third).drain(leader.name, undo=True, by="me")
        assert not (await operations(third).shard()).record.drained
        await operations(third).hand_over("", leader.name, by="me")
        await shard.until(lambda: leader.serves)

    in_shard(test)


def test_a_leader_that_is_removed_hands_over_and_is_told() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leader.shop.write(3)
        await shard.level(leader)
        other = next(one for one in shard.machines if one is not leader)
        done = await operations(other).remove(leader.name, by="me")
        assert leader.name not in done.shard.record.members
        assert (done.shard.record.replicas, done.shard.record.drained) == (2, [])
        await shard.until(lambda: leader.role is Role.PARKED)
        assert "it was removed from shard 's'" in leader.member.report().obstacle
        await shard.until(lambda: len(shard.leader.member.report().in_sync) == 2)
        shard.leader.shop.write(3, first=3)
        await shard.level(shard.leader)
        kept = next(one for one in shard.machines if one is not leader and not one.serves)
        with pytest.raises(ShardConflict, match="min_in_sync is 2"):
            await operations(other).remove(kept.name, by="me")
        await leader.stop()
        leader.start()  # its directory is told, too
        await shard.until(lambda: "it was removed" in leader.member.report().obstacle)
        assert leader.role is Role.STARTING
        await operations(other).add("s", leader.name, by="me")
        await shard.until(lambda: len(shard.leader.member.report().in_sync) == 3)
        assert leader.journal() == shard.leader.journal()

    in_shard(test)


def test_a_leader_without_which_too_few_were_left_is_not_removed_and_leads_on() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        other = next(one for one in shard.machines if one is not leader)
        await operations(other).change("s", RecordChange(min_in_sync=3), by="me")
        with pytest.raises(ShardConflict, match="min_in_sync is 3"):
            await operations(other).remove(leader.name, by="me")
        view = await operations(other).shard("s")
        assert (view.leader, view.record.epoch, view.record.drained) == (leader.name, 1, [])

    in_shard(test)


def test_a_member_that_runs_joins_again_when_its_removal_is_taken_back() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        one = shard.followers[0]
        await operations(leader).remove(one.name, by="me")
        await shard.until(lambda: one.role is Role.PARKED)
        assert "already" not in (await operations(leader).add("s", one.name, by="me")).what
        await shard.until(lambda: one.name in leader.member.report().in_sync)
        assert (await operations(leader).add("s", one.name, by="me")).what == f"{one.name} is a member already"

    in_shard(test)


def test_an_asynchronous_shard_commits_by_its_leader_alone_and_fails_over_by_command() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        admin = operations(leader)
        done = await admin.change("", RecordChange(asynchronous=True), by="me")
        assert "it is asynchronous" in done.what
        await shard.until(lambda: leader.member.report().in_sync == (leader.name,))
        others = [one for one in shard.machines if one is not leader]
        shard.net.cut.update(one.address for one in others)
        leader.shop.write(5)
        assert leader.member.report().committed == leader.member.report().end
        await asyncio.sleep(30)
        leader.shop.write(5, first=5)  # nobody has to keep up
        view = await admin.shard()
        assert view.findings[-1].what.startswith(f"the shard is asynchronous: what {leader.name} acknowledges")
        shard.net.cut.clear()
        await shard.until(lambda: all(one.member.report().end == leader.member.report().end for one in others))
        assert leader.member.report().in_sync == (leader.name,)
        await leader.kill()
        await asyncio.sleep(60)
        assert not any(one.serves for one in shard.machines)
        await operations(others[0]).promote("", others[0].name, accept_loss=True, by="me")
        await shard.until(lambda: others[0].serves)
        others[0].shop.write(1, first=10)
        await operations(others[0]).change("", RecordChange(asynchronous=False), by="me")
        await shard.until(lambda: len(others[0].member.report().in_sync) == 2)
        others[0].shop.write(1, first=11)
        await shard.level(others[0])
        assert others[0].shop.messages == 12

    in_shard(test)


def test_a_read_only_shard_takes_no_messages_and_an_open_one_does() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        leadership = leader.shop.leadership
        assert leadership is not None
        leadership.check_open()
        done = await operations(leader).change("", RecordChange(state=ShardState.READ_ONLY, weight=50), by="me")
        assert "it is read-only, with weight 50" in done.what
        await asyncio.sleep(1)
        with pytest.raises(ShardConflict, match="takes no messages"):
            leadership.check_open()
        leadership.check_writable()  # positions and delays go on
        await operations(leader).change("", RecordChange(state=ShardState.OPEN), by="me")
        await asyncio.sleep(1)
        leadership.check_open()

    in_shard(test, 1, settings=MemberSettings(min_in_sync=1))


def test_a_shard_is_made_before_its_members_and_its_number_is_given_once() -> None:
    async def test(shard: Shard) -> None:
        client = shard.registry.connect()
        visitor = Operations(Visitor(client, Paths()), DirectPeers(shard.net, ""), shard.clock, "me")
        done = await visitor.create("other", replicas=1, min_in_sync=1, by="me")
        assert done.shard.record.number == 1
        done = await visitor.create("s", replicas=2, min_in_sync=1, by="me")
        assert (done.shard.record.number, done.shard.members) == (2, [])
        assert done.shard.findings[0].what == "the shard has no members"
        with pytest.raises(ShardConflict, match="shard 's' exists already"):
            await visitor.create("s", replicas=3, min_in_sync=2, by="me")
        with pytest.raises(InvalidSettings, match="above replicas"):
            await visitor.create("t", replicas=1, min_in_sync=2, by="me")
        leader = await shard.start()
        record = (await operations(leader).shard()).record
        assert (record.number, record.replicas, record.min_in_sync) == (2, 2, 1)
        client.fates.extend([Fate.UNANSWERED])
        done = await visitor.create("u", replicas=2, min_in_sync=1, by="me")
        assert done.shard.record.number == 3

    in_shard(test, 2)


def test_what_older_members_do_not_know_waits_for_the_format() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        paths = Paths()
        entry = shard.registry.read(paths.cluster)
        assert entry is not None
        content = decode_content(ClusterContent, entry.value, entry.path)
        assert content.format == CLUSTER_FORMAT
        client = shard.registry.connect()
        await client.write([Put(paths.cluster, encode_content(msgspec.structs.replace(content, format=1)), None)])
        for work in (
            operations(leader).drain("b", by="me"),
            operations(leader).remove("b", by="me"),
            operations(leader).change("", RecordChange(asynchronous=True), by="me"),
        ):
            with pytest.raises(ShardConflict, match="dmq cluster finalize"):
                await work
        await client.write([Put(paths.cluster, encode_content(msgspec.structs.replace(content, format=99)), None)])
        one = shard.followers[0]
        await one.stop()
        one.start()
        await shard.until(lambda: "upgrade this broker" in one.member.report().obstacle)

    in_shard(test)
