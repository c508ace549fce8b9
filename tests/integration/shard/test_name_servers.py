"""Shards of real processes with two name servers over one database: leaders, name servers and the database die.

What must hold is said in `tests.integration.shard.torture`. `./scripts/soak` does more of each.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import dmq
from tests.databases import DatabaseServer, DatabaseServers
from tests.integration.registry.name_servers import NameServerPair
from tests.integration.shard.processes import SETTINGS
from tests.integration.shard.torture import PATIENCE, Torture
from tests.sampling import sample_size

pytestmark = pytest.mark.uncounted

NAMED = "named"
# Sessions of 6 s, promises of 4 s: as a shard is by itself.
PLAIN = ("store.ballast_bytes=0",)


class NameServerTorture(Torture):
    """One shard of three, with two name servers.

    Parameters:
        database: a server that runs.
    """

    is_wired = False  # only the ways to the database are cut

    def __init__(self, folder: Path, name: str, database: DatabaseServer, *, session_seconds: float = 2.0) -> None:
        settings = PLAIN if session_seconds > 2 else (*SETTINGS, "shard.lag_seconds=1.5")
        super().__init__(folder, name, session_seconds=session_seconds, settings=settings)
        self.database = database

    def open_registry(self, opened: ExitStack) -> tuple[str, int]:
        session = f"{self.session_seconds}s"
        self.pair = opened.enter_context(NameServerPair(self.database, "shards", session=session))
        self.names = "dmq://" + ",".join(f"127.0.0.1:{address.port}" for address in self.pair.addresses)
        return self.names, 0

    def send_by_name_servers(self) -> None:
        """A client that knows no broker finds the leader."""
        with dmq.connect(self.names, app="stranger", timeout=PATIENCE) as client, client.producer() as producer:
            producer.send(NAMED, b"found", timeout=PATIENCE)

    def kill_leader(self) -> None:
        """And it comes back when another one serves."""
        leader = self.shard.leader()
        began = time.monotonic()
        self.shard.members[leader].kill()
        self.until_served(began)
        self.shard.members[leader].start()
        self.mended()

    def lose_name_server(self, number: int) -> None:
        """It dies, stands still, or is cut off from its database, for longer than a session."""
        server, way = self.pair.servers[number], self.pair.ways[number]
        what = self.rng.choice(["killed", "stopped", "cut off"]) if self.breaks else "killed"
        if what == "killed":
            server.kill()
        elif what == "stopped":
            server.signal(signal.SIGSTOP)
        else:
            way.stall()
        self._go_on_for(1.5 * self.session_seconds)
        if what == "killed":
            server.start()
        elif what == "stopped":
            server.signal(signal.SIGCONT)
        else:
            way.resume()
        self.until_served()
        self.breaks += 1

    def lose_database(self, seconds: float) -> None:
        self.database.kill()
        self._go_on_for(seconds)
        self.database.start()
        time.sleep(1.5 * self.session_seconds)  # past the term that sessions have then
        self.until_served()
        self.breaks += 1

    def _go_on_for(self, seconds: float) -> None:
        served = len(self.sender.answered)
        time.sleep(seconds)
        assert len(self.sender.answered) > served + seconds, "messages were taken all the while"


def check_loss(torture: NameServerTorture, *, kills: int, losses: int, down_seconds: float) -> None:
    with torture:
        with dmq.connect(torture.shard.url, app="test", timeout=PATIENCE) as client:
            client.admin.create_topic(NAMED, queues=1)
        torture.send_by_name_servers()
        leader, epoch = torture.shard.leader(), torture.epoch()
        torture.sender.slowest = 0.0
        for number in range(losses):
            torture.lose_name_server(number % 2)
        torture.lose_database(down_seconds)
        assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), (
            "a failover, though members heard each other"
        )
        assert torture.sender.errors == []
        slowest = torture.sender.slowest
        for number in range(kills):
            time.sleep(torture.rng.uniform(0, 1))
            if number % 5 == 4:
                # It has nobody to fail over to but the other one.
                torture.pair.servers[number % 2].kill()
                torture.kill_leader()
                torture.pair.servers[number % 2].start()
            else:
                torture.kill_leader()
        assert torture.sender.errors == []
        torture.send_by_name_servers()
        seconds = sorted(torture.seconds)
        p50, p95 = (seconds[math.ceil(share * len(seconds)) - 1] for share in (0.5, 0.95))
        print(torture.finish())
    print(
        f"{torture.name}: {losses} name servers lost and the database down for {down_seconds:g} s, slowest send "
        f"{slowest:.2f} s, no failover; {kills} leaders killed, served again after {p50:.1f} s (p50), {p95:.1f} s "
        "(p95)"
    )
    if torture.session_seconds > 2:
        assert p95 <= 10.0, seconds


@pytest.mark.sampled
def test_nothing_is_lost_with_name_servers_over_postgresql(tmp_path: Path, database_servers: DatabaseServers) -> None:
    torture = NameServerTorture(tmp_path, "PostgreSQL", database_servers.get("postgresql"))
    check_loss(torture, kills=sample_size(share=1, whole=5), losses=sample_size(share=1, whole=6), down_seconds=3.0)


@pytest.mark.soak
def test_nothing_is_lost_with_name_servers_over_mariadb(tmp_path: Path, database_servers: DatabaseServers) -> None:
    torture = NameServerTorture(tmp_path, "MariaDB", database_servers.get("mariadb"))
    check_loss(torture, kills=5, losses=6, down_seconds=10.0)


@pytest.mark.soak
def test_another_member_leads_within_ten_seconds_of_a_kill(tmp_path: Path, database_servers: DatabaseServers) -> None:
    torture = NameServerTorture(
        tmp_path, "PostgreSQL, leaders killed", database_servers.get("postgresql"), session_seconds=6.0
    )
    check_loss(torture, kills=30, losses=4, down_seconds=60.0)
