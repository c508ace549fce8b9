"""`dmq nameserver` as a process: it is killed, stopped, stands still, and meets strangers."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dmq import cli
from dmq.clock import SystemClock
from dmq.errors import Busy, DMQError, NotAllowed, RegistryConflict, RegistryDown, Unsupported, WriteUnknown
from dmq.net.link import Link
from dmq.protocol.cluster.route import Route, RouteChanged, RouteReply, SlotRoute
from dmq.protocol.commands import Command, decode_request
from dmq.protocol.frame import Frame
from dmq.protocol.read import Offsets
from dmq.registry.contents import (
    ClusterContent,
    NodeContent,
    ShardContent,
    TopicContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.metadata import Metadata
from dmq.registry.name_server.client import NameServerClient, ServerAddress
from dmq.registry.name_server.server import NameServer
from dmq.registry.name_server.sql_backend import SqlBackend
from dmq.registry.name_server.sql_store import SqlStore
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Put
from dmq.testing.processes import BrokerProcess, free_port
from dmq.testing.proxy import ChaosProxy
from tests.integration.registry.name_servers import NameServerProcess, insist, run_on_loop, sqlite_url
from tests.integration.registry.registries import PATIENCE_S, eventually, new_root


def test_a_killed_name_server_forgets_nothing_and_no_session(tmp_path: Path) -> None:
    async def main() -> None:
        with NameServerProcess(sqlite_url(tmp_path), session="3s") as server:
            client = await NameServerClient.open([server.address], "b1", timeout=PATIENCE_S)
            root = await new_root(client)
            await client.write([Create(f"{root}/e", b"", ephemeral=True), Create(f"{root}/a", b"0")])
            session = client.session
            watch = client.watch(root)
            assert (await watch.next()).is_all
            for n in range(1, 11):
                await insist(client, f"{root}/a", b"%d" % n)
            server.kill()
            client.timeout = 0.2
            with pytest.raises((RegistryDown, WriteUnknown)):
                await client.write([Put(f"{root}/a", b"never", None)])
            client.timeout = PATIENCE_S
            server.start()
            found = await client.read(f"{root}/a")
            assert found is not None
            assert found.value == b"10"
            await insist(client, f"{root}/a", b"11")
            assert client.session == session, "the restart gave it another term"
            assert await client.read(f"{root}/e") is not None
            changes = await watch.next()
            assert changes.is_all
            await client.close()
            assert server.stop() == 0

    run_on_loop(main())


def test_a_name_server_that_stands_still_ends_no_session(tmp_path: Path) -> None:
    async def main() -> None:
        with NameServerProcess(sqlite_url(tmp_path), session="3s") as server:
            client = await NameServerClient.open([server.address], "b1", timeout=PATIENCE_S)
            root = await new_root(client)
            await client.write([Create(f"{root}/e", b"", ephemeral=True)])
            session = client.session
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(3.5)
            server.signal(signal.SIGCONT)
            await insist(client, f"{root}/e", b"1")
            assert client.session == session
            await client.close()

    run_on_loop(main())


def test_a_client_that_is_gone_without_a_word_is_missed_after_its_session(tmp_path: Path) -> None:
    async def main() -> None:
        with NameServerProcess(sqlite_url(tmp_path), session="2s") as server, ChaosProxy(server.address) as proxy:
            there = ServerAddress("127.0.0.1", proxy.port)
            client = await NameServerClient.open([there], "b1", timeout=PATIENCE_S)
            other = await NameServerClient.open([server.address], "b2", timeout=PATIENCE_S)
            root = await new_root(other)
            await client.write([Create(f"{root}/e", b"", ephemeral=True)])
            watch = other.watch(root)
            proxy.stall()
            while await other.read(f"{root}/e") is not None:
                await watch.next()
            assert client.deadline < SystemClock().boottime(), "it knew before"
            proxy.resume()
            await client.close()
            await other.close()

    run_on_loop(main())


def test_a_client_moves_to_the_next_name_server_by_itself(name_server: NameServerProcess) -> None:
    async def main() -> None:
        nobody = ServerAddress("127.0.0.1", free_port())
        with ChaosProxy(name_server.address) as proxy:
            ways = [nobody, ServerAddress("127.0.0.1", proxy.port), name_server.address]
            client = await NameServerClient.open(ways, "b1", timeout=PATIENCE_S)
            root = await new_root(client)
            await client.write([Create(f"{root}/e", b"0", ephemeral=True)])
            session = client.session
            for n in range(5):
                proxy.cut()
                await insist(client, f"{root}/e", b"%d" % n)
            assert client.session == session
            await client.close()

    run_on_loop(main())


def test_name_servers_of_two_databases_are_no_pair(tmp_path: Path) -> None:
    async def main() -> None:
        with (
            NameServerProcess(sqlite_url(tmp_path / "one")) as one,
            NameServerProcess(sqlite_url(tmp_path / "other")) as other,
        ):
            client = await NameServerClient.open([one.address, other.address], "b1", timeout=PATIENCE_S)
            (trouble,) = await client.troubles()
            assert "correct its --database" in trouble.what
            assert "dmq cluster import --from-members" in trouble.what, "the database may be lost"
            mine, stranger = (one, other) if client.address == one.address else (other, one)
            root = await new_root(client)
            mine.kill()
            client.timeout = 1.0
            with pytest.raises((RegistryDown, WriteUnknown)):
                await client.write([Create(f"{root}/a", b"")])
            mine.start()
            client.timeout = PATIENCE_S
            assert await client.read(root) is not None
            assert client.address != stranger.address
            await client.close()

    run_on_loop(main())


def test_nobody_there_is_one_sentence() -> None:
    async def main() -> None:
        port = free_port()
        with pytest.raises(RegistryDown, match=f"no name server answers at 127.0.0.1:{port}"):
            await NameServerClient.open([ServerAddress("127.0.0.1", port)], "b1", timeout=0.5)

    run_on_loop(main())


def test_a_broker_is_no_name_server_and_the_other_way_round(name_server: NameServerProcess) -> None:
    async def main() -> None:
        with BrokerProcess() as broker:
            port = int(broker.url.rpartition(":")[2])
            with pytest.raises(RegistryDown, match="REGISTRY_SESSION is not served by this broker"):
                await NameServerClient.open([ServerAddress("127.0.0.1", port)], "b1", timeout=0.5)
        link = await Link.open(
            name_server.address, "stranger", clock=SystemClock(), peer="name server", on_push=lambda _: None
        )
        with pytest.raises(Unsupported, match="ask a broker"):
            await link.request(Command.OFFSETS, Offsets("orders"))
        link.close(DMQError("done"))

    run_on_loop(main())


def test_strangers_do_no_harm(name_server: NameServerProcess) -> None:
    async def main() -> None:
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 100,
            b"\xff" * 100,
            bytes.fromhex("00000010d1010113") + bytes(12),
        ):
            reader, writer = await asyncio.open_connection(*name_server.address)
            writer.write(said)
            writer.write_eof()
            await reader.read()
            writer.close()
        client = await NameServerClient.open([name_server.address], "b1", timeout=PATIENCE_S)
        assert await client.children("/") is not None
        await client.close()

    run_on_loop(main())


def test_a_registry_can_be_read_with_the_tools_of_its_database(tmp_path: Path) -> None:
    async def main() -> None:
        paths = Paths()
        server = NameServer(SqlBackend(SqlStore(sqlite_url(tmp_path))), port=0)
        await server.start()
        host, port = server.address.split(":")
        client = await NameServerClient.open([ServerAddress(host, int(port))], "b1", timeout=PATIENCE_S)
        await client.write(paths.folders())
        content = ClusterContent(id=hex_id(7))
        await client.write([Create(paths.cluster, encode_content(content))])
        found = await client.read(paths.cluster)
        assert found is not None
        assert decode_content(ClusterContent, found.value, found.path) == content
        with pytest.raises(RegistryConflict):
            await client.write(paths.folders())
        database = sqlite3.connect(tmp_path / "registry.db")
        rows = list(database.execute("SELECT path, value FROM dmq_registry_entry"))
        database.close()
        assert (paths.cluster, encode_content(content)) in rows
        await client.close()
        await server.stop()

    run_on_loop(main())


def test_a_name_server_answers_route_and_tells_when_routes_change(name_server: NameServerProcess) -> None:
    async def main() -> None:
        pushed: asyncio.Queue[Frame] = asyncio.Queue()
        link = await Link.open(
            name_server.address, "app", clock=SystemClock(), peer="name server", on_push=pushed.put_nowait
        )
        client = await NameServerClient.open([name_server.address], "b1", timeout=PATIENCE_S)
        paths, leader = Paths(), hex_id(7)
        shard = ShardContent(number=1, members={"a": leader}, leader=leader, epoch=3)
        node = NodeContent(address="a:9611", shard="s1", replica=leader)
        await client.write(paths.folders())
        await client.write(
            [
                Create(paths.cluster, encode_content(ClusterContent(id=hex_id(9)))),
                Create(paths.shard("s1"), encode_content(shard)),
                Create(paths.node("a"), encode_content(node), ephemeral=True),
            ]
        )

        async def ask() -> RouteReply | None:
            try:
                reply: RouteReply = await link.request(Command.ROUTE, Route(["orders"], is_watched=True))
            except Busy:
                return None  # it has not read the cluster yet
            return reply if reply.shards else None

        await eventually(ask)
        topic = TopicContent(incarnation=hex_id(5), slots=[("s1", 4)])
        await Metadata(client, paths).write(
            [Create(paths.topic("orders"), encode_content(topic))], paths.topic("orders")
        )
        while True:
            changed = decode_request(await pushed.get())
            if isinstance(changed, RouteChanged) and changed.topics == ["orders"]:
                break
        found = await ask()
        assert found is not None
        assert (found.cluster, found.topics[0].slots) == (9, [SlotRoute(1, 4)])
        assert (found.shards[0].leader, found.shards[0].epoch) == ("a:9611", 3)
        await client.close()  # and the broker with it
        await eventually(lambda: _has_no_leader(link))
        link.close(DMQError("done"))

    run_on_loop(main())


async def _has_no_leader(link: Link) -> bool:
    reply: RouteReply = await link.request(Command.ROUTE, Route())
    return reply.shards[0].leader == ""


def test_a_pull_now_and_then_says_that_anything_may_have_changed(name_server: NameServerProcess) -> None:
    async def main() -> None:
        client = await NameServerClient.open([name_server.address], "b1", timeout=PATIENCE_S, pull_seconds=0.0)
        watch = client.watch("/")
        assert (await watch.next()).is_all
        assert (await watch.next()).is_all
        await client.close()

    run_on_loop(main())


def test_a_database_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "dmq.cli", "nameserver", "--database", "oracle://x/y"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "use sqlite" in done.stderr


def test_a_session_has_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["nameserver", "--database", "sqlite://", "--session", "100s"])
    assert ended.value.code == 2
    assert "a number from 1 to 60" in capsys.readouterr().err


def test_another_address_than_loopback_must_be_meant() -> None:
    with pytest.raises(NotAllowed, match="--insecure"):
        NameServer(SqlBackend(SqlStore("sqlite://")), host="0.0.0.0")


def test_a_second_name_server_on_one_file_is_refused(tmp_path: Path) -> None:
    store = SqlStore(sqlite_url(tmp_path))
    with pytest.raises(DMQError, match="another name server has"):
        NameServerProcess(sqlite_url(tmp_path)).start()
    store.close()


def test_a_name_server_tells_how_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        server = NameServer(SqlBackend(SqlStore(sqlite_url(tmp_path))), port=0, metrics_port=0)
        await server.start()
        try:
            host, port = server.address.split(":")
            client = await NameServerClient.open([ServerAddress(host, int(port))], "b1", timeout=PATIENCE_S)
            await client.write([Create("/a", b"")])
            await client.read("/a")  # its change has been looked for by now
            figures = await page(server.metrics_port, "/metrics")
            assert "\ndmq_nameserver_connections 1\n" in figures
            assert "\ndmq_nameserver_changes_total 1\n" in figures
            assert figures.count("# HELP") == figures.count("# TYPE") == 11
            assert "\ndmq_nameserver_database_up 1\n" in figures
            assert "\ndmq_nameserver_writes_total 1\n" in figures
            assert "200 OK" in await page(server.metrics_port, "/healthz")
            assert "200 OK" in await page(server.metrics_port, "/readyz")
            await client.close()
            with sqlite3.connect(tmp_path / "registry.db") as database:
                database.execute("ALTER TABLE dmq_registry_session RENAME TO gone")
            database.close()

            async def is_in_trouble() -> bool:
                said = await page(server.metrics_port, "/readyz")
                return "503" in said and "dmq_registry_session" in said

            await eventually(is_in_trouble)
            assert "200 OK" in await page(server.metrics_port, "/healthz")
        finally:
            await server.stop()

    run_on_loop(main())


async def page(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    said = await reader.read()
    writer.close()
    await writer.wait_closed()
    return said.decode()
