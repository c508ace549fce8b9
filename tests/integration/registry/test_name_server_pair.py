"""Two name servers over one PostgreSQL or MariaDB: they die, stand still and are cut off, and so is their database.

`tests/integration/shard/test_name_servers.py` does some of it in every run, with brokers.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, text

from dmq.errors import RegistryDown, WriteUnknown
from dmq.registry.name_server.client import NameServerClient, ServerAddress
from dmq.registry.name_server.sql_store import SqlStore
from dmq.registry.registry import Create, Put
from dmq.testing.proxy import ChaosProxy
from tests.databases import DatabaseServers
from tests.integration.registry.name_servers import NameServerPair, insist, run_on_loop
from tests.integration.registry.registries import PATIENCE_S, eventually, new_root

SESSION = 2.0
_names = itertools.count(1)

pytestmark = [pytest.mark.soak, pytest.mark.parametrize("kind", ["postgresql", "mariadb"])]


@pytest.fixture
def pair(kind: str, database_servers: DatabaseServers) -> Iterator[NameServerPair]:
    with NameServerPair(database_servers.get(kind), f"pair{next(_names)}", session=f"{SESSION}s") as pair:
        yield pair


def test_a_session_goes_on_whatever_happens_to_name_servers_and_their_database(kind: str, pair: NameServerPair) -> None:
    async def main() -> None:
        client = await NameServerClient.open(pair.addresses, "b1", timeout=PATIENCE_S)
        other = await NameServerClient.open(pair.addresses, "b2", timeout=PATIENCE_S)
        root = await new_root(client)
        await client.write([Create(f"{root}/e", b"", ephemeral=True), Create(f"{root}/a", b"")])
        await other.write([Create(f"{root}/o", b"", ephemeral=True)])
        session, rival = client.session, other.session
        watch = other.watch(f"{root}/a")
        assert (await watch.next()).is_all
        count = 0

        async def go_on(what: str) -> None:
            nonlocal count
            count += 1
            await insist(client, f"{root}/e", b"%d" % count)
            await insist(client, f"{root}/a", b"%d" % count)
            assert client.session == session, what
            async with asyncio.timeout(PATIENCE_S):
                while (await other.read(f"{root}/a")).value != b"%d" % count:  # type: ignore[union-attr]
                    await watch.next()

        for _ in range(3):
            for what, do, undo in troubles(pair):
                at = pair.serving(client)
                await asyncio.to_thread(do, at)
                await go_on(f"{what}: moved")
                assert client.address != pair.addresses[at], what
                await asyncio.to_thread(undo, at)
                await asyncio.sleep(SESSION)  # sessions live by beats, which nobody disturbs now
                await go_on(f"{what}: over")
        assert await client.read(f"{root}/o") is not None
        assert other.session == rival

        # The database is down for long; nobody's session ends by that.
        await asyncio.to_thread(pair.database.kill)
        client.timeout = other.timeout = 0.5
        with pytest.raises((RegistryDown, WriteUnknown)):
            await client.write([Put(f"{root}/a", b"never", None)])
        client.timeout = other.timeout = PATIENCE_S
        await asyncio.sleep(60.0)
        await asyncio.to_thread(pair.database.start)
        await go_on("the database is back")
        assert other.session == rival
        await other.close()
        assert await client.read(f"{root}/o") is None
        await client.close()

    run_on_loop(main())


def troubles(pair: NameServerPair) -> list[tuple[str, Callable[[int], object], Callable[[int], object]]]:
    """What befalls a name server, and how it ends."""
    return [
        ("killed", lambda at: pair.servers[at].kill(), lambda at: pair.servers[at].start()),
        (
            "stands still",
            lambda at: pair.servers[at].signal(signal.SIGSTOP),
            lambda at: pair.servers[at].signal(signal.SIGCONT),
        ),
        ("cut off from its database", lambda at: pair.ways[at].stall(), lambda at: pair.ways[at].resume()),
    ]


def test_what_one_writes_the_other_tells_soon(kind: str, pair: NameServerPair) -> None:
    async def main() -> None:
        one, other = [await NameServerClient.open([at], "b", timeout=PATIENCE_S) for at in pair.addresses]
        root = await new_root(one)
        watch = other.watch(root)
        assert (await watch.next()).is_all
        took = []
        for count in range(20):
            began = time.monotonic()
            await one.write([Create(f"{root}/{count}", b"")])
            while f"{root}/{count}" not in (await watch.next()).paths:
                pass
            took.append(time.monotonic() - began)
        print(f"{kind}: told after {min(took):.2f} to {max(took):.2f} s")
        await one.close()
        await other.close()

    run_on_loop(main())


def test_a_client_that_is_gone_is_missed_though_a_name_server_comes_and_goes(kind: str, pair: NameServerPair) -> None:
    async def main() -> None:
        with ChaosProxy(pair.addresses[0]) as proxy:
            gone = await NameServerClient.open([ServerAddress("127.0.0.1", proxy.port)], "b1", timeout=PATIENCE_S)
            client = await NameServerClient.open(pair.addresses[:1], "b2", timeout=PATIENCE_S)
            root = await new_root(client)
            await gone.write([Create(f"{root}/e", b"", ephemeral=True)])
            proxy.stall()
            stop = asyncio.Event()

            async def come_and_go() -> None:
                while not stop.is_set():
                    await asyncio.to_thread(pair.servers[1].kill)
                    await asyncio.to_thread(pair.servers[1].start)

            task = asyncio.create_task(come_and_go())

            async def is_missed() -> bool:
                return await client.read(f"{root}/e") is None

            await eventually(is_missed, "a name server that comes and goes keeps it alive")
            stop.set()
            await task
            proxy.resume()
            await gone.close()
            await client.close()

    run_on_loop(main())


def test_a_name_server_that_stands_still_in_a_transaction_stops_nobody(
    kind: str, database_servers: DatabaseServers
) -> None:
    server = database_servers.get(kind)
    stores = [SqlStore(server.url) for _ in range(2)]
    try:
        for store in stores:
            store.open()
        session = stores[1].open_session(0, "b")
        with stores[0]._engine.connect() as connection:
            # As in the middle of a write, with the row that all changes need.
            connection.execute(text("UPDATE dmq_registry_entry SET version = version WHERE path = '/'"))
            assert stores[1].write(session, 1, [Create("/a", b"")]) == (0,)
            connection.invalidate()
    finally:
        for store in stores:
            store.close()


def test_a_commit_whose_answer_is_lost_is_unknown_and_settled_by_the_next_write(
    kind: str, database_servers: DatabaseServers
) -> None:
    server = database_servers.get(kind)
    with ChaosProxy(("127.0.0.1", server.port)) as way:
        url = server.url.replace(f":{server.port}/", f":{way.port}/")
        store = SqlStore(url)
        try:
            store.open()
            session = store.open_session(0, "b")
            is_due = True

            @event.listens_for(store._engine, "commit")
            def commit(connection: Any) -> None:
                if is_due:
                    way.cut()

            with pytest.raises(WriteUnknown):
                store.write(session, 1, [Create("/a", b"")])
            is_due = False
            store.write(session, 2, [Create("/b", b"")])
            assert store.read("/b") is not None
        finally:
            store.close()


def test_a_database_that_never_answers_is_given_up(kind: str, pair: NameServerPair) -> None:
    async def main() -> None:
        client = await NameServerClient.open(pair.addresses[:1], "b1", timeout=PATIENCE_S)
        root = await new_root(client)
        pair.ways[0].stall()
        client.timeout = 1.0
        with pytest.raises((RegistryDown, WriteUnknown)):
            await client.write([Create(f"{root}/a", b"")])
        client.timeout = PATIENCE_S
        await asyncio.sleep(12)  # over every limit
        pair.ways[0].cut()
        pair.ways[0].resume()
        await insist(client, root, b"1")
        await client.close()

    run_on_loop(main())
