"""Outbox tables, consumer tables and the archive, made to disagree in every way there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from sqlalchemy import create_engine, insert, select, text

from dmq.deadletters.engines import make_engine
from dmq.deadletters.url import check_url
from dmq.errors import InvalidSettings
from dmq.outbox.repair.table_reader import OutboxReader
from dmq.outbox.schema import tables
from dmq.outbox.sender.envelope import SEND_ID, floor_send_id
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import reconcile
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.lookup.lookup import run_sql
from dmq.pipeline.tables import RECONCILE_DIFF
from tests.archive_rows import Days, archive_rows, table_rows
from tests.databases import DatabaseServers
from tests.object_store import ObjectStore
from tests.patience import eventually
from tests.spark import mortal_reconcile
from tests.spark.driver_process import run_driver
from tests.spark.python_workers import kill_workers
from tests.spark.quick_queries import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
SENT = NOW - timedelta(hours=3)
TABLES = tables()


def send_id(number: int, at: datetime = SENT) -> str:
    return floor_send_id(int(at.timestamp() * 1000))[:12] + f"{number:020x}"


class World:
    """A sender's database, a consumer's, and an archive, in which everything agrees until a test says otherwise.

    Parameters:
        urls: of the two databases; SQLite files if left out.
    """

    def __init__(self, folder: Path, tables: str = "", urls: Sequence[str] = ()) -> None:
        self.urls = [*urls] or [f"sqlite:///{folder / name}.db" for name in ("sender", "consumer")]
        self.sender, self.consumer = (make_engine(check_url(url, "--outbox")) for url in self.urls)
        for engine, mine in ((self.sender, (TABLES.send, TABLES.result)), (self.consumer, (TABLES.consumer,))):
            TABLES.metadata.create_all(engine, tables=list(mine))
        self.archive = Archive(tables or str(folder / "archive"))
        self.days = Days()

    def put(self, number: int, *, state: str = "DONE", groups: str | None = "billing", at: datetime = SENT) -> str:
        """A sender row."""
        name, at_ms = send_id(number, at), int(at.timestamp() * 1000)
        row = {
            "send_id": name,
            "app": "shop",
            "topic": "orders",
            "business_id": f"u-{number}",
            "is_ordered": 0,
            "priority": 4,
            "body": b"x",
            "expected_groups": groups,
            "state": state,
            "attempts": 1 if state != "NEW" else 0,
            "checks": 0,
            "due_at_ms": at_ms,
            "created_at_ms": at_ms,
            "sent_at_ms": None if state == "NEW" else at_ms,
        }
        self._insert(self.sender, TABLES.send, row)
        return name

    def told(self, name: str, state: str = "SUCCESS", group: str = "billing") -> None:
        """A result at the sender."""
        row = {"send_id": name, "consumer_group": group, "business_state": state, "consumer_id": "c"}
        self._insert(self.sender, TABLES.result, row | {"consumed_at_ms": 1, "received_at_ms": 2})

    def consumed(self, name: str, state: str = "SUCCESS", group: str = "billing") -> None:
        """A row at the consumer."""
        row = {"send_id": name, "consumer_group": group, "topic": "orders", "business_state": state}
        self._insert(self.consumer, TABLES.consumer, row | {"consumer_id": "c", "created_at_ms": 1})

    def stored(self, name: str, *, acked: bool = False) -> None:
        """A message in the archive."""
        headers = [{"key": "a", "value": b"b"}, {"key": SEND_ID, "value": name.encode()}]
        message = self.days.message("orders", 0, len(self.days.messages), SENT, headers=headers, message_id=f"m-{name}")
        if acked:
            self.days.settle(message, "billing", "acked", SENT)

    def good(self, number: int, **more: Any) -> str:
        name = self.put(number, **more)
        self.stored(name)
        self.consumed(name)
        self.told(name)
        return name

    def _insert(self, engine: Any, table: Any, row: dict[str, Any]) -> None:
        with engine.begin() as connection:
            connection.execute(insert(table), row)

    def states(self) -> dict[str, str]:
        with self.sender.connect() as connection:
            return {row.send_id: row.state for row in connection.execute(select(TABLES.send))}

    def waits_for_lock(self) -> bool:
        """Whether somebody does, at the consumer's PostgreSQL."""
        asked = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        with self.consumer.connect() as connection:
            return bool(connection.execute(asked).scalar())

    def run(self, spark: SparkSession, *, now: datetime = NOW, **options: str) -> Any:
        named = {f"reconcile.{name}": value for name, value in options.items()}
        return reconcile.run(
            spark, self.archive, JobContext(self.archive.uri, now, outbox_urls=tuple(self.urls), options=named)
        )

    def close(self) -> None:
        self.sender.dispose()
        self.consumer.dispose()


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with quick(spark):
        yield made
    made.close()


def test_every_disagreement_is_found_once_and_what_agrees_is_not(spark: SparkSession, world: World) -> None:
    world.good(1)
    world.good(2, groups=None)
    nobody = world.put(3, groups="")
    world.stored(nobody)
    world.put(4, state="NEW", at=NOW - timedelta(minutes=1))  # too young to be judged
    world.put(5, state="NEW", at=NOW - timedelta(days=9))  # too old
    wrong = {
        "unsent": world.put(10, state="NEW"),
        "unmarked": world.put(11, state="NEW"),
        "lost": world.put(12, state="SENT"),
        "unconsumed": world.put(13, state="SENT"),
        "acked": world.put(14, state="SENT"),
        "any": world.put(15, state="SENT", groups=None),
        "half": world.put(16, state="SENT", groups="billing, audit"),
        "untold": world.put(17, state="SENT"),
        "lied": world.put(18),
        "done": world.put(19),
        "vanished": world.put(20),
        "stranger": send_id(21),
        "ghost": send_id(22),
    }
    for name in ("unmarked", "unconsumed", "any", "half", "untold", "lied", "done", "vanished", "ghost"):
        world.stored(wrong[name])
    world.stored(wrong["acked"], acked=True)
    for name in ("half", "untold", "lied", "stranger"):
        world.consumed(wrong[name])
    world.consumed(wrong["done"], "ROLLBACK")
    for name, state in (("half", "SUCCESS"), ("lied", "ROLLBACK"), ("done", "ROLLBACK"), ("vanished", "SUCCESS")):
        world.told(wrong[name], state)
    archive_rows(world.archive, world.days, 1)

    result = world.run(spark)

    names = {send: name for name, send in wrong.items()}
    rows = table_rows(world.archive, RECONCILE_DIFF)
    assert sorted((names.get(row["send_id"], row["send_id"]), row["problem"], row["group"]) for row in rows) == [
        ("acked", "not_consumed", "billing"),
        ("any", "not_consumed", None),
        ("done", "result_differs", "billing"),
        ("ghost", "unknown", None),
        ("half", "not_consumed", "audit"),
        ("lied", "result_differs", "billing"),
        ("lost", "not_archived", None),
        ("stranger", "unknown", "billing"),
        ("unconsumed", "not_consumed", "billing"),
        ("unmarked", "not_sent", None),
        ("unsent", "not_sent", None),
        ("untold", "no_result", "billing"),
        ("vanished", "result_differs", "billing"),
    ]
    details = {names[row["send_id"]]: row["detail"] for row in rows}
    assert "saw it acked" in details["acked"]
    assert "a broker has it" in details["unmarked"]
    assert {row["message_id"] for row in rows if row["problem"] == "no_result"} == {f"m-{wrong['untold']}"}
    assert "4 not_consumed" in result.notes

    world.run(spark)
    assert table_rows(world.archive, RECONCILE_DIFF) == rows, "the same moment is written once"
    assert set(world.states().values()) == {"NEW", "SENT", "DONE"}
    before = world.states()

    told = world.run(spark, now=NOW + timedelta(seconds=1), resend="true").notes
    changed = {names[send] for send, state in world.states().items() if state != before[send]}
    assert changed == {"lost", "unconsumed", "acked", "any", "half"}
    assert all(world.states()[wrong[name]] == "NEW" for name in changed)
    assert told[-1] == "5 are sent again"
    assert not [*Path(world.archive.table(RECONCILE_DIFF).uri).glob("_staging/*")]


def test_tables_that_tasks_read_are_compared_alike_and_in_an_object_store(
    spark: SparkSession, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "LOCAL_ROWS_MAX", 5)
    monkeypatch.setattr(OutboxReader.pages, "__defaults__", (3,))
    world = World(tmp_path, f"{object_store.bucket()}/archive")
    wrong = set()
    for number in range(40):
        at = SENT + timedelta(milliseconds=number // 3 * 1000)
        if number % 7:
            world.good(number, at=at)
        else:
            wrong.add(world.put(number, state="SENT", at=at))
    archive_rows(world.archive, world.days, 1)
    found = []
    with quick(spark):
        for later, tasks in enumerate((None, "1", "3")):
            now = NOW + timedelta(seconds=later)
            result = world.run(spark, now=now, **({} if tasks is None else {"tasks": tasks}))
            assert result.notes == ("6 not_archived",)
            rows = run_sql(world.archive.uri, "SELECT send_id, found_at FROM reconcile_diff").table.to_pylist()
            found.append({row["send_id"] for row in rows if row["found_at"] == now})
    assert found == [wrong] * 3
    world.close()


def fill(world: World, count: int) -> dict[str, str]:
    """Messages of all kinds, some hundred in a second, every seventh of which is wrong; the problem by send id."""
    wrong: dict[str, str] = {}
    for number in range(count):
        at = SENT + timedelta(milliseconds=number * 7)
        if number % 7:
            world.good(number, at=at)
            continue
        kind = ("not_sent", "not_archived", "not_consumed", "no_result")[number // 7 % 4]
        name = world.put(number, state="NEW" if kind == "not_sent" else "SENT", at=at)
        wrong[name] = kind
        if kind in ("not_consumed", "no_result"):
            world.stored(name)
        if kind == "no_result":
            world.consumed(name)
    archive_rows(world.archive, world.days, 1)
    return wrong


def problems(world: World, now: datetime = NOW) -> Counter[tuple[str, str]]:
    rows = table_rows(world.archive, RECONCILE_DIFF)
    return Counter((row["send_id"], row["problem"]) for row in rows if row["found_at"] == now)


@pytest.mark.soak
def test_tasks_find_in_servers_what_one_process_finds_though_driver_and_workers_are_killed(
    spark: SparkSession, database_servers: DatabaseServers, tmp_path: Path
) -> None:
    """The sender has MariaDB, the consumer PostgreSQL; each moment is compared as if nothing had happened."""
    world = World(tmp_path, urls=[database_servers.get(kind).url for kind in ("mariadb", "postgresql")])
    wrong = fill(world, 400)
    for later, tasks in enumerate(("1", "3")):
        world.run(spark, now=NOW + timedelta(seconds=later), tasks=tasks)
    at = NOW + timedelta(minutes=1)
    for point in mortal_reconcile.POINTS:
        words = (world.archive.uri, at.isoformat(), point, *world.urls)
        killed = run_driver(tmp_path / "scratch", mortal_reconcile.__name__, *words)
        assert killed.returncode == -9, (point, killed.stdout, killed.stderr)
    states = world.states()
    assert [states[name] for name, problem in wrong.items() if problem == "not_consumed"] == ["SENT"] * 14
    # The last one that was killed had ordered no resends: the next run does.
    assert world.run(spark, now=at + timedelta(seconds=1), tasks="3", resend="true").notes[-1] == "29 are sent again"
    moments = (NOW, NOW + timedelta(seconds=1), at, at + timedelta(seconds=1))
    assert [problems(world, moment) for moment in moments] == [Counter(wrong.items())] * 4

    # Workers die while they wait for a table that somebody has locked.
    at += timedelta(minutes=1)
    with world.consumer.begin() as lock, ThreadPoolExecutor(1) as thread:
        lock.execute(text(f"LOCK TABLE {TABLES.consumer.name} IN ACCESS EXCLUSIVE MODE"))
        running = thread.submit(world.run, spark, now=at, tasks="3")
        eventually(lambda: world.waits_for_lock() or running.done())
        assert kill_workers()
        with pytest.raises(Py4JJavaError, match="worker exited unexpectedly"):
            running.result()
    assert problems(world, at) == Counter()
    world.run(spark, now=at, tasks="3")
    again = {name: "no_result" if problem == "no_result" else "not_sent" for name, problem in wrong.items()}
    assert problems(world, at) == Counter(again.items())
    world.close()


def test_without_a_consumers_database_nobody_is_blamed_and_without_tables_it_is_refused(
    spark: SparkSession, world: World, tmp_path: Path
) -> None:
    name = world.put(1, state="SENT")
    world.stored(name)
    archive_rows(world.archive, world.days, 1)
    world.urls = world.urls[:1]
    assert world.run(spark).notes == ("everything agrees",)
    assert world.archive.table(RECONCILE_DIFF).version_of("dmq-reconcile") is not None
    create_engine(f"sqlite:///{tmp_path / 'other'}.db").connect().close()
    world.urls = [f"sqlite:///{tmp_path / 'other'}.db"]
    with pytest.raises(InvalidSettings, match="has none of the outbox's tables"):
        world.run(spark)
    world.urls = []
    assert "nothing to compare" in world.run(spark).notes[0]
