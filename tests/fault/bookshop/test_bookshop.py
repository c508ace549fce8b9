"""The bookshop example under kill -9, repeated and late deliveries, and with its results cut off."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.databases import DATABASE, DatabaseServers
from tests.fault.bookshop.rig import CUSTOMERS, CYCLE, ROOT, Bookshop
from tests.integration.outbox.effects import DRIVERS, KINDS
from tests.sampling import SEED


@contextmanager
def two_databases(kind: str, servers: DatabaseServers, folder: Path) -> Iterator[tuple[str, str]]:
    """Two empty databases of a kind; on a server, a second one beside that of all tests."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'orders.db'}", f"sqlite:///{folder / 'stock.db'}"
        return
    server = servers.get(kind)
    url = server.url.replace(f"{kind}://", f"{DRIVERS[kind]}://")
    server.add_database("stock")
    try:
        yield url, url.removesuffix(f"/{DATABASE}") + "/stock"
    finally:
        server.drop_database("stock")


def torment(folder: Path, servers: DatabaseServers, kind: str, plan: Sequence[str]) -> int:
    """Kill as planned, let it come to its end, and look; how many kills there were."""
    with (
        two_databases(kind, servers, folder) as urls,
        Bookshop(folder, *urls, f"{SEED} {kind}", orders=CUSTOMERS) as shop,
    ):
        shop.trouble(plan)
        shop.calm()
        found = shop.check()
    assert shop.proxy.late > 0
    assert all(shop.repeater.repeated.values()), shop.repeater.repeated
    print(f"{kind}: {found}, kills {dict(shop.kills)}, repeated {shop.repeater.repeated}, late {shop.proxy.late}")
    return shop.kills.total()


@pytest.mark.parametrize(("kind", "plan"), [("sqlite", CYCLE[:5]), ("mariadb", CYCLE[5:7]), ("postgresql", CYCLE[7:9])])
def test_every_order_has_one_effect_and_one_result_though_everybody_is_killed(
    kind: str, plan: Sequence[str], tmp_path: Path, database_servers: DatabaseServers
) -> None:
    assert torment(tmp_path, database_servers, kind, plan) >= len(plan)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_over_fifty_kills(kind: str, tmp_path: Path, database_servers: DatabaseServers) -> None:
    chance = random.Random(f"{SEED} {kind}")
    plan = [step for _ in range(5) for step in chance.sample(CYCLE, len(CYCLE))]
    assert torment(tmp_path, database_servers, kind, plan) >= 50


@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS if kind != "sqlite")]
)
def test_the_compensator_alone_repairs_what_results_did_not_say(
    kind: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    with (
        two_databases(kind, database_servers, tmp_path) as urls,
        Bookshop(tmp_path, *urls, "calm", orders=20) as shop,
    ):
        shop.proxy.cut_off = b"%RESULT%orders"
        shop.start("stock", "deaf")
        for role in ("serve", "relay", "compensate"):
            shop.start(role)
        shop.until(lambda: shop.states() == {"SENT": 16}, "orders are not sent")
        shop.until(shop.has_been_asked, "the compensator does not ask")
        assert shop.states() == {"SENT": 16}  # nobody can be asked, so nothing is known, and nothing is sent again
        assert shop.proxy.refused > 0
        shop.kill("stock")
        shop.start("stock")  # its confirm service is there again, and the results are not
        shop.until(shop.is_over, "the compensator does not repair")
        lost = shop.check()
        shop.proxy.cut_off = b""
        shop.until(shop.is_drained, "results do not get through again")
        assert shop.check() == lost  # late results change nothing


def test_the_example_runs_as_its_readme_says(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "examples/bookshop",
        "--orders",
        "20",
        "--pause",
        "0.02",
        "--torment",
        "2",
        "--seed",
        "3",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 orders placed, 4 withdrawn by the customer" in done.stdout
    assert done.stdout.endswith("the balance agrees\n")
    assert done.stdout.count("is killed") == 2
