"""What is particular to ZooKeeper as the registry: what befalls its servers, and what others do to its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_acl

from dmq.clock import SystemClock
from dmq.errors import (
    InvalidName,
    RegistryDown,
    SessionExpired,
    UnknownEntry,
    WriteUnknown,
    WrongFormat,
)
from dmq.registry.contents import NodeContent, decode_content
from dmq.registry.registry import Check, Create, Delete, Put
from dmq.registry.url import open_registry
from dmq.registry.zookeeper.client import ZooKeeperClient, _other_session
from dmq.registry.zookeeper.ensemble import Ensemble
from dmq.testing.processes import free_port
from tests.integration.registry.registries import eventually, new_root
from tests.zookeepers import ZooKeeperProcess

LIMIT_S = 60.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    asyncio.run(main())


@contextlib.contextmanager
def shell(zookeeper: ZooKeeperProcess) -> Iterator[KazooClient]:
    """Somebody with another client."""
    client = KazooClient(hosts=str(zookeeper.address))
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_lives_as_long_as_the_server_grants(
    zookeeper: ZooKeeperProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq", 60.0), timeout=30.0)
        assert client.session_seconds == 10.0, "20 ticks"
        root = await new_root(client)
        before = SystemClock().boottime()
        await client.write([Create(f"{root}/e", b"", ephemeral=True)])
        assert before + 5.0 <= client.deadline <= SystemClock().boottime() + 5.0
        (found,) = await client.troubles()
        assert "grants sessions of 10 s where 60 s were asked for" in found.what
        assert "set maxSessionTimeout to 60000 or more on its servers" in found.advice
        await client.close()

    run(test())
    assert "grants sessions of 10 s where 60 s were asked for" in caplog.text


def test_servers_whose_ticks_are_long_are_told_which_to_set() -> None:
    found = _other_session(6.0, 40.0)
    assert found is not None
    assert "grants sessions of 40 s where 6 s were asked for, so a failover takes longer" in found.what
    assert found.advice == "set tickTime to 3000 or less on its servers, or minSessionTimeout to 6000"
    assert _other_session(6.0, 6.0) is None


def test_a_loop_that_stands_still_loses_its_session(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq", 2.0), timeout=30.0)
        root = await new_root(client)
        await client.write([Create(f"{root}/e", b"", ephemeral=True)])
        session = client.session
        with shell(zookeeper) as other:
            deadline = time.monotonic() + LIMIT_S
            while other.exists(f"{root}/e"):  # and no turn of our loop
                assert time.monotonic() < deadline, "kazoo's thread kept the session of a loop that stands still"
                time.sleep(0.05)

        async def is_new() -> bool:
            with contextlib.suppress(SessionExpired, WriteUnknown, RegistryDown):
                await client.write([Check(root, None)])
            return client.session not in (0, session)

        await eventually(is_new)
        await client.close()

    run(test())


def test_a_session_outlives_a_pause_of_its_loop_and_many_beats(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq", 2.0), timeout=30.0)
        root = await new_root(client)
        await client.write([Create(f"{root}/e", b"", ephemeral=True)])
        session = client.session
        time.sleep(0.3)
        await asyncio.sleep(3.0)  # nothing is asked: it lives by kazoo's pings
        await client.write([Put(f"{root}/e", b"1", 0)])
        assert client.session == session
        await client.close()

    run(test())


# --- servers that stop ------------------------------------------------------------------------------------------------


def test_a_zookeeper_that_is_stopped_killed_and_back_loses_nothing() -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((server.address,), "/dmq", 6.0), timeout=30.0)
        watch = client.watch("/dmq")
        await client.write([Create("/dmq", b"0"), Create("/dmq/e", b"", ephemeral=True)])
        session = client.session

        # Stopped: neither dead nor answering.
        server.signal(signal.SIGSTOP)
        client.timeout = 0.5
        with pytest.raises(WriteUnknown):
            await client.write([Put("/dmq", b"1", 0)])
        with pytest.raises(RegistryDown, match="ZooKeeper"):
            await client.read("/dmq")
        server.signal(signal.SIGCONT)
        client.timeout = 30.0
        await client.write([Check("/dmq", None)])
        found = await client.read("/dmq")  # settled
        assert found is not None
        assert (found.value, found.version) in ((b"0", 0), (b"1", 1))

        # Killed: what was answered is there when it is back, our session too.
        await client.write([Put("/dmq", b"2", None)])
        while watch.take() is not None:
            pass
        server.kill()
        client.timeout = 1.5
        with pytest.raises(RegistryDown, match=r"not reached.*check that it runs"):
            await client.read("/dmq")
        with pytest.raises(RegistryDown):
            await client.write([Put("/dmq", b"3", None)])
        await asyncio.to_thread(server.start)
        client.timeout = 30.0
        await client.write([Put("/dmq/e", b"again", None)])
        assert client.session == session
        assert (await watch.next()).is_all
        found = await client.read("/dmq")
        assert found is not None
        assert found.value == b"2", "it was refused with RegistryDown, and must not come later"
        await client.close()

    with ZooKeeperProcess() as server:
        run(test())


def test_nobody_at_the_address_is_told_with_what_to_do() -> None:
    async def test() -> None:
        with pytest.raises(RegistryDown, match=r"127\.0\.0\.1:1 is not reached .*check that it runs, and the address"):
            await open_registry("zk://127.0.0.1:1/dmq?session=1s", "test")

    run(test())


def test_a_member_without_its_quorum_is_told() -> None:
    async def test() -> None:
        with pytest.raises(RegistryDown, match=r"no quorum: start the other servers"):
            await ZooKeeperClient.open(Ensemble((alone.address,), "/dmq"), timeout=2.0)

    peers = [f"server.{n}=127.0.0.1:{free_port()}:{free_port()}" for n in (1, 2, 3)]
    alone = ZooKeeperProcess("initLimit=5", "syncLimit=2", *peers)
    (alone.folder / "myid").write_text("3\n")
    with alone:
        run(test())


# --- what others do to the nodes --------------------------------------------------------------------------------------


def test_nodes_whose_acl_is_for_others_are_told(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq"), timeout=30.0)
        root = await new_root(client)
        with shell(zookeeper) as other:
            other.create(f"{root}/closed", b"1", acl=[make_acl("digest", "other:x", all=True)])
            other.create(f"{root}/shown", b"1", acl=[make_acl("world", "anyone", read=True)])
        for attempt in (
            client.read(f"{root}/closed"),
            client.children(root),
            client.write([Put(f"{root}/shown", b"2", None)]),
            client.write([Check(root, None), Create(f"{root}/shown/new", b"")]),
        ):
            with pytest.raises(RegistryDown, match=r"no right to /.*getAcl.*setAcl"):
                await attempt
        assert await client.read(f"{root}/shown/new") is None
        await client.close()

    run(test())


def test_what_is_created_with_credentials_is_for_these_alone(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        async def opened(credentials: str | None) -> ZooKeeperClient:
            return await ZooKeeperClient.open(
                Ensemble((zookeeper.address,), "/acl/dmq", credentials=credentials), timeout=30.0
            )

        ours, again, wrong, nobody = [
            await opened(one) for one in ("broker:secret", "broker:secret", "broker:guess", None)
        ]
        await ours.write([Create("/acl", b""), Create("/acl/dmq", b"1"), Create("/acl/dmq/e", b"", ephemeral=True)])
        await again.write([Put("/acl/dmq", b"2", None), Create("/acl/dmq/x", b""), Delete("/acl/dmq/x", None)])
        assert [entry.name for entry in await again.children("/acl/dmq")] == ["e"]
        for client, why in ((wrong, r"as user 'broker': the password is not"), (nobody, "gave no credentials")):
            for attempt in (
                client.read("/acl/dmq"),
                client.children("/acl/dmq"),
                client.write([Put("/acl/dmq", b"3", None)]),
                client.write([Create("/acl/dmq/new", b"")]),
                client.write([Delete("/acl/dmq/e", None)]),
            ):
                with pytest.raises(RegistryDown, match=rf"no right to /acl/dmq.*{why}.*getAcl /acl/dmq"):
                    await attempt
        assert await ours.troubles() == []
        for client in (ours, again, wrong, nobody):
            await client.close()

    run(test())


def test_nodes_that_are_open_though_brokers_have_credentials_are_told(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        first = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/open"), timeout=30.0)
        await first.write([Create("/open", b"")])
        await first.close()
        ensemble = Ensemble((zookeeper.address,), "/open", credentials="broker:secret")
        client = await ZooKeeperClient.open(ensemble, timeout=30.0)
        (found,) = await client.troubles()
        assert "/open can be changed by everybody" in found.what
        assert "setAcl -R /open auth:broker:cdrwa" in found.advice
        await client.close()

    run(test())


def test_what_others_wrote_and_deleted_is_told(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq"), timeout=30.0)
        root = await new_root(client)
        with client.watch(root) as watch, shell(zookeeper) as other:
            assert (await watch.next()).is_all
            other.create(f"{root}/foreign", b"\xff not ours")
            other.create(f"{root}/empty")
            assert f"{root}/foreign" in (await watch.next()).paths
            assert [entry.value for entry in await client.children(root)] == [b"", b"\xff not ours"]
            with pytest.raises(WrongFormat, match="correct it with the registry's own tools"):
                decode_content(NodeContent, b"\xff not ours", f"{root}/foreign")
            other.delete(root, recursive=True)

            async def is_told() -> bool:
                return root in (await watch.next()).paths

            await eventually(is_told)
            with pytest.raises(UnknownEntry, match="nobody deleted it"):
                await client.children(root)
        await client.close()

    run(test())


def test_a_name_that_zookeeper_does_not_take_is_told(zookeeper: ZooKeeperProcess) -> None:
    async def test() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq"), timeout=30.0)
        root = await new_root(client)
        with pytest.raises(InvalidName, match="ZooKeeper takes no path"):
            await client.write([Create(f"{root}/🐘", b"")])
        await client.write([Delete(root, None)])
        await client.close()

    run(test())
