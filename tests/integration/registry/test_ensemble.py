"""An ensemble of three servers as the registry: some of them are killed, stopped, without a quorum; and its limits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dmq.broker.diagnostics.doctor import State, diagnose_registry
from dmq.errors import RegistryDown, SessionExpired, WriteUnknown
from dmq.net.address import ServerAddress
from dmq.registry.registry import Check, Create, Delete, Operation, Put
from dmq.registry.zookeeper.client import ZooKeeperClient
from dmq.registry.zookeeper.ensemble import Ensemble
from tests.integration.registry.registries import eventually, new_root
from tests.zookeepers import REQUEST_BYTES_MAX, ZooKeeperEnsemble, ZooKeeperProcess

LIMIT_S = 120.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(main())


@asynccontextmanager
async def client_of(
    ensemble: ZooKeeperEnsemble, seconds: float = 6.0, addresses: Sequence[ServerAddress] = ()
) -> AsyncIterator[ZooKeeperClient]:
    named = tuple(addresses or ensemble.addresses)
    client = await ZooKeeperClient.open(Ensemble(named, "/dmq", seconds), timeout=20.0)
    client.timeout = None
    try:
        yield client
    finally:
        await client.close()


def served_by(client: ZooKeeperClient, ensemble: ZooKeeperEnsemble) -> ZooKeeperProcess:
    """The server that a client is connected to."""
    assert client._link is not None
    port = client._link._kazoo._connection._socket.getpeername()[1]
    return next(server for server in ensemble.servers if server.port == port)


async def written(client: ZooKeeperClient, *operations: Operation) -> None:
    """Write as members do: again until it is answered, in whatever session."""

    async def is_answered() -> bool:
        try:
            await client.write(operations)
        except (RegistryDown, WriteUnknown, SessionExpired):
            return False
        return True

    await eventually(is_answered, "it was never answered")


def test_servers_that_are_killed_in_turn_cost_no_session(zookeeper_ensemble: ZooKeeperEnsemble) -> None:
    async def test() -> None:
        async with client_of(zookeeper_ensemble) as client:
            root = await new_root(client)
            await client.write([Create(f"{root}/e", b"", ephemeral=True)])
            session = client.session
            for _ in range(2):
                server = served_by(client, zookeeper_ensemble)
                server.kill()
                await written(client, Put(f"{root}/e", b"again", None))
                assert served_by(client, zookeeper_ensemble) is not server
                assert client.session == session, "the session moved to another server"
                await asyncio.to_thread(zookeeper_ensemble.heal)

    run(test)


def test_a_server_that_stands_still_is_left_for_another_one_within_the_session(
    zookeeper_ensemble: ZooKeeperEnsemble,
) -> None:
    async def test() -> None:
        # Not the leader: the others would elect another one first, which takes longer than a session.
        followers = [server.address for server in zookeeper_ensemble.servers if server.mode == "follower"]
        async with client_of(zookeeper_ensemble, 4.0, followers) as client:
            root = await new_root(client)
            await client.write([Create(f"{root}/e", b"", ephemeral=True)])
            session, server = client.session, served_by(client, zookeeper_ensemble)
            server.signal(signal.SIGSTOP)
            try:
                with pytest.raises(WriteUnknown):
                    await client.write([Put(f"{root}/e", b"1", None)])
                await written(client, Put(f"{root}/e", b"2", None))
                assert served_by(client, zookeeper_ensemble) is not server
                entry = await client.read(f"{root}/e")
                assert entry is not None
                assert (entry.value, entry.session) == (b"2", session)
            finally:
                await asyncio.to_thread(zookeeper_ensemble.heal)

    run(test)


def test_without_a_quorum_nothing_is_written_and_each_server_is_named(zookeeper_ensemble: ZooKeeperEnsemble) -> None:
    async def test() -> None:
        async with client_of(zookeeper_ensemble, 2.0) as client:
            root = await new_root(client)
            await client.write([Create(f"{root}/kept", b"1")])
            alone, *others = zookeeper_ensemble.servers
            for server in others:
                server.kill()

            unknown: list[str] = []

            async def says(what: str) -> bool:
                try:
                    await client.write([Put(f"{root}/kept", b"2", None)])
                except WriteUnknown:
                    unknown.append(what)  # it may have been on its way to the others when they were killed
                    return False
                except SessionExpired:
                    return False
                except RegistryDown as error:
                    told = str(error)
                    assert "no ZooKeeper server takes this client" in told or "no ZooKeeper server answers" in told
                    return f"{alone.address} {what}" in told and f"{others[0].address} is not reached" in told
                raise AssertionError("a write was answered without a quorum")

            await eventually(lambda: says("has no quorum: start the other servers"))
            # A server that may serve reads without a quorum does, after a while; it is not used.
            await eventually(lambda: says("serves reads only, since it has no quorum, and is not used"))
            with pytest.raises(RegistryDown, match="serves reads only"):
                await client.read(f"{root}/kept")
            (found,) = await asyncio.to_thread(
                lambda: list(diagnose_registry(f"zk://{zookeeper_ensemble.hosts}/dmq?session=1s"))
            )
            assert found.state is State.PROBLEM
            assert "serves reads only" in found.what

            others[0].launch()
            await written(client, Check(root, None))
            entry = await client.read(f"{root}/kept")
            assert entry is not None
            assert entry.value == b"1" or unknown, "what was refused was not written"
            # Two of three: it serves, and the doctor names the third.
            found, warning, *_ = await asyncio.to_thread(
                lambda: list(diagnose_registry(f"zk://{zookeeper_ensemble.hosts}/dmq?session=2s"))
            )
            assert (found.state, warning.state) == (State.OK, State.WARNING)
            assert f"{others[1].address} is not reached" in warning.what
            await asyncio.to_thread(zookeeper_ensemble.heal)

    run(test)


def test_a_write_that_is_larger_than_servers_take_is_told(zookeeper_ensemble: ZooKeeperEnsemble) -> None:
    async def test() -> None:
        async with client_of(zookeeper_ensemble) as client:
            root = await new_root(client)
            with pytest.raises(WriteUnknown, match=r"has 40960 bytes.*jute\.maxbuffer is too small"):
                await client.write([Create(f"{root}/large", bytes(REQUEST_BYTES_MAX))])
            await written(client, Check(root, None))
            assert await client.read(f"{root}/large") is None
            await written(client, Delete(root, None))

    run(test)
