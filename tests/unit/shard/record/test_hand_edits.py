"""What people do to a shard's entries by hand: a clear state for each, and what members put right they put right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dmq.registry.contents import LeaderContent, NodeContent, decode_content, encode_content
from dmq.registry.registry import Create, Delete, Operation, Put
from dmq.shard.member import Role
from tests.unit.shard.member_rig import Machine, Shard, in_shard

RECORD = "/dmq/shard/s"
LEADER = "/dmq/shard/s/leader"


async def by_hand(shard: Shard, *operations: Operation) -> None:
    client = shard.registry.connect()
    await client.write(operations)
    await client.close()


def held(shard: Shard) -> LeaderContent | None:
    entry = shard.registry.read(LEADER)
    return None if entry is None else decode_content(LeaderContent, entry.value, LEADER)


def goes_on(work: Callable[[Shard, Machine], Awaitable[None]]) -> None:
    """A test in which the leader leads on, and serves at its end."""

    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        epoch = leader.member.report().epoch
        await work(shard, leader)
        leader.shop.write(1)
        await shard.level(leader)
        assert leader.serves
        assert leader.member.report().epoch == epoch, "nobody else was elected"

    in_shard(test)


# --- /leader ----------------------------------------------------------------------------------------------------------


def test_a_leader_creates_its_entry_again() -> None:
    async def work(shard: Shard, leader: Machine) -> None:
        await by_hand(shard, Delete(LEADER, None))
        await shard.until(lambda: held(shard) is not None, 5)
        await shard.until(lambda: leader.member.report().right == "session", 5)

    goes_on(work)


def test_a_leader_writes_over_what_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def work(shard: Shard, leader: Machine) -> None:
        await by_hand(shard, Put(LEADER, b"\xff", None))
        await asyncio.sleep(5)
        assert held(shard) is not None
        assert leader.member.report().right == "session"

    goes_on(work)
    assert "/dmq/shard/s/leader in the registry cannot be read" in caplog.text
    assert "the registry's entries are right again" in caplog.text


def test_an_entry_that_no_broker_made_is_named_as_what_keeps_a_shard_from_electing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        await leader.kill()
        await by_hand(shard, Delete(LEADER, None), Create(LEADER, b"mine"))
        await asyncio.sleep(30)
        obstacles = [one.member.report().obstacle for one in shard.machines if one is not leader]
        assert all("was not created by a broker" in one and "delete it" in one for one in obstacles), obstacles
        await by_hand(shard, Delete(LEADER, None))
        await shard.until(lambda: any(one.serves for one in shard.machines if one is not leader))

    in_shard(test)
    assert "/dmq/shard/s/leader was not created by a broker" in caplog.text


# --- the record and the cluster ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [(LEADER, RECORD), (LEADER, RECORD, "/dmq/cluster")], ids=["record", "cluster"])
def test_what_was_deleted_stops_nobody_and_is_told(paths: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    async def work(shard: Shard, leader: Machine) -> None:
        kept = {path: shard.registry.read(path) for path in paths if path != LEADER}
        await by_hand(shard, *(Delete(path, None) for path in paths))
        await asyncio.sleep(20)
        leader.shop.write(1)
        assert leader.member.report().right == "promises"
        assert all(shard.registry.read(path) is None for path in paths), "nothing is made anew"
        trouble = leader.member.view.trouble
        assert f"{paths[-1]} is gone" in trouble
        assert "dmq cluster import --from-members" in trouble
        await by_hand(shard, *(Create(path, entry.value) for path, entry in kept.items() if entry is not None))
        await shard.until(lambda: leader.member.report().right == "session")
        assert not leader.member.view.trouble

    goes_on(work)
    assert "the registry's entries are not right" in caplog.text


@pytest.mark.parametrize("path", [RECORD, "/dmq/cluster"])
def test_what_was_spoiled_stops_nobody_and_is_told(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(shard: Shard, leader: Machine) -> None:
        before = shard.registry.read(path)
        assert before is not None
        await by_hand(shard, Put(path, b"{", None))
        await asyncio.sleep(20)
        assert leader.serves
        assert f"{path} in the registry cannot be read" in leader.member.view.trouble
        await by_hand(shard, Put(path, before.value, None))
        await shard.until(lambda: not leader.member.view.trouble)
        await shard.until(lambda: leader.member.report().right == "session")

    goes_on(work)
    assert "put back what stood there" in caplog.text


# --- brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [
        [Delete("/dmq/node/b", None)],
        [Put("/dmq/node/b", b"?", None)],
        [Delete("/dmq/node/b", None), Create("/dmq/node/b", b"by hand")],
        [*(Delete(f"/dmq/node/{name}", None) for name in "abc"), Delete("/dmq/node", None)],
    ],
    ids=["deleted", "spoiled", "made by hand", "folder deleted"],
)
def test_a_broker_registers_again_within_seconds(edits: list[Operation]) -> None:
    async def work(shard: Shard, leader: Machine) -> None:
        await by_hand(shard, *edits)

        def is_back() -> bool:
            entry = shard.registry.read("/dmq/node/b")
            return entry is not None and entry.is_ephemeral and entry.value.startswith(b'{"address"')

        await shard.until(is_back, 8)

    goes_on(work)


def test_a_broker_waits_for_the_session_of_its_last_process_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test(shard: Shard) -> None:
        await shard.start()
        follower = shard.followers[0]
        await follower.kill()
        follower.start()
        await shard.until(lambda: follower.role is Role.FOLLOWING)
        await asyncio.sleep(10)

    in_shard(test)
    assert "the session of this broker's last process is still registered broker=b waiting='up to" in caplog.text
    assert "another process" not in caplog.text


def test_a_broker_waits_for_its_last_session_as_long_as_the_registry_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test(shard: Shard) -> None:
        await shard.start()
        follower = shard.followers[0]
        last = follower.registry.session
        await follower.kill()
        follower.start()
        await shard.until(lambda: "is still registered broker=b" in caplog.text)
        follower.registry.cut()
        for _ in range(60):  # a registry that is away ends no session
            shard.registry.renew(last)
            await asyncio.sleep(0.5)
        follower.registry.mend()
        for _ in range(4):
            shard.registry.renew(last)
            await asyncio.sleep(0.5)
        await asyncio.sleep(10)

    in_shard(test)
    assert "another process" not in caplog.text


def test_two_brokers_of_one_name_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test(shard: Shard) -> None:
        other = shard.registry.connect(beats=True)
        first, second, third = shard.machines
        first.start()
        await shard.until(lambda: first.role is Role.LEADING)
        content = NodeContent(address="elsewhere:9600")
        await other.write([Create(f"/dmq/node/{second.name}", encode_content(content), ephemeral=True)])
        second.start()
        await asyncio.sleep(10)
        await other.close()
        third.start()
        await shard.until(lambda: len(shard.leader.member.report().in_sync) == 3)

    in_shard(test)
    assert "another process is registered under this broker's name" in caplog.text
    assert "at=elsewhere:9600" in caplog.text
