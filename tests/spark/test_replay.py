"""A replay by Spark: the same plan as one process makes, each message once, whatever task is killed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import dmq
from dmq.client.admin.reports import StoredMessage
from dmq.errors import InvalidRequest, MessageTooLarge, OutOfRetries, UnknownMessage
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay.plan import Plans, Selection, Target
from dmq.pipeline.replay.plan_builder import make_plan
from dmq.pipeline.replay.replay import ReplayRequest, execute
from dmq.pipeline.replay.sender import ReplayProgress
from dmq.pipeline.replay.spark_replay import make_plan_by_spark
from dmq.testing.processes import BrokerProcess
from tests.object_store import ObjectStore
from tests.spark.python_workers import kill_workers
from tests.spark.quick_queries import quick
from tests.unit.pipeline.archives import NOON, commit_messages, message_row

COUNT = 1200
QUEUES = 3


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows in three files, some of them ordered; every tenth message is there twice, brought by an earlier replay."""
    archive = Archive.create(str(tmp_path_factory.mktemp("archive")))
    bodies = random.Random(1)
    rows = [
        message_row(
            number,
            stored_at=NOON + timedelta(milliseconds=number),
            body=bodies.randbytes(2000),
            business_id=f"u-{number % 7}",
            flags=2 * (number % 2),
            tag=f"t{number % 3}",
        )
        for number in range(COUNT)
    ]
    again = [
        row
        | {
            "journal_offset": row["journal_offset"] + 10_000_000,
            "stored_at": row["stored_at"] + timedelta(hours=1),
            "queue": (row["queue"] + 1) % 4,
            "flags": row["flags"] | 0x20,
        }
        for row in rows[::10]
    ]
    for part in (rows[: COUNT // 2], rows[COUNT // 2 :], again):
        commit_messages(archive, part)
    return archive.uri


@pytest.fixture(autouse=True)
def few_rows(spark: SparkSession) -> Iterator[None]:
    with quick(spark):
        yield


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(shared_broker.url, app="test", timeout=60.0) as client:
        yield client


@pytest.mark.parametrize(
    "selection",
    [
        Selection(topic="orders"),
        Selection(
            topic="orders", since=NOON + timedelta(milliseconds=100), where="tag = 't1' AND key[-1:] IN ('1', '7')"
        ),
        Selection(where="key IN (SELECT key FROM message WHERE journal_offset > 5000000)"),
    ],
)
def test_spark_makes_the_plan_that_one_process_makes(spark: SparkSession, tables: str, selection: Selection) -> None:
    archive, target = Archive(tables), Target("again", 7, QUEUES, False)
    name = f"same-{abs(hash(selection.words()))}"
    mine = make_plan(archive, selection, target, Plans(archive.folder, f"{name}-local"), 5)
    theirs = make_plan_by_spark(spark, archive, selection, target, plans=Plans(archive.folder, name), now_ms=5)
    assert (theirs.counts, theirs.bytes, theirs.digest) == (mine.counts, mine.bytes, mine.digest)
    assert 0 < theirs.total <= COUNT


def test_a_condition_that_is_none_and_a_choice_of_nothing_are_told_in_a_sentence(
    spark: SparkSession, tables: str
) -> None:
    archive, target = Archive(tables), Target("again", 7, QUEUES, False)

    def plan(selection: Selection) -> None:
        make_plan_by_spark(spark, archive, selection, target, plans=Plans(archive.folder, "none"), now_ms=5)

    with pytest.raises(InvalidRequest, match="cannot be answered"):
        plan(Selection(where="no_such_column = 1"))
    with pytest.raises(UnknownMessage, match="nothing to replay"):
        plan(Selection(topic="absent"))
    assert not [*Path(tables, "replay", "none").glob("*")]


def arrived(client: dmq.Client, topic: str) -> list[StoredMessage]:
    """All messages of a topic, queue by queue."""
    found: list[StoredMessage] = []
    for queue in client.admin.offsets(topic):
        at = queue.first_offset
        while page := client.admin.peek(topic, queue=queue.queue, at=at, limit=100):
            found += page
            at = page[-1].offset + 1
    return found


def check_arrived(client: dmq.Client, topic: str) -> None:
    """Each message is there once, and messages of one queue are in the order they had."""
    keys = Counter(message.key for message in arrived(client, topic))
    assert keys == {f"order-{number}": 1 for number in range(COUNT)}
    for queue in client.admin.offsets(topic):
        mine = [message for message in arrived(client, topic) if message.queue == queue.queue]
        numbers = [int((message.key or "").removeprefix("order-")) for message in mine]
        assert numbers == sorted(numbers)


def test_each_message_is_sent_once_though_workers_are_killed(
    spark: SparkSession, tables: str, shared_broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("again", queues=QUEUES)
    archive, request = Archive(tables), ReplayRequest(Selection(topic="orders"), "again", "killed", rate=150.0)
    killed: list[int] = []

    def kill(progress: ReplayProgress) -> None:
        if not killed and progress.stored:
            killed.extend(kill_workers())

    with pytest.raises(OutOfRetries, match="run it again with --replay-id killed"):
        execute(archive, shared_broker.url, request, kill, spark=spark)
    assert killed
    stored = sum(queue.next_offset for queue in client.admin.offsets("again"))
    assert 0 < stored < COUNT
    outcome = execute(archive, shared_broker.url, ReplayRequest(None, "", "killed"), spark=spark)
    assert outcome.sent + outcome.found == COUNT
    assert outcome.found >= stored
    check_arrived(client, "again")
    # One process finds all of it stored, and nothing is left of the rows.
    assert execute(archive, shared_broker.url, ReplayRequest(None, "", "killed"))[1:] == (0, COUNT)
    assert sorted(path.name for path in Path(tables, "replay", "killed").iterdir()) == ["done.json", "plan.json"]


def test_an_archive_in_an_object_store_is_replayed(
    spark: SparkSession, object_store: ObjectStore, shared_broker: BrokerProcess, client: dmq.Client
) -> None:
    archive = Archive.create(f"{object_store.bucket()}/archive")
    for start in (0, 50):
        commit_messages(archive, [message_row(number) for number in range(start, start + 50)])
    client.admin.create_topic("from-s3", queues=QUEUES)
    request = ReplayRequest(Selection(topic="orders"), "from-s3", "s3")
    assert [execute(archive, shared_broker.url, request, spark=spark).sent for _ in range(2)] == [100, 0]
    assert sorted(message.body for message in arrived(client, "from-s3")) == sorted(b"body %d" % n for n in range(100))
    kept = {path.removeprefix("s3/") for path in object_store.paths(f"{archive.uri}/replay")}
    assert kept == {"plan.json", "done.json", f"claim/_delta_log/{0:020d}.json"}


def test_an_error_that_another_attempt_would_meet_is_told_as_it_is(
    spark: SparkSession, shared_broker: BrokerProcess, client: dmq.Client, tmp_path: Path
) -> None:
    archive = Archive.create(str(tmp_path))
    commit_messages(archive, [message_row(1, body=random.Random(2).randbytes(5 << 20))])
    client.admin.create_topic("large", queues=1)
    with pytest.raises(MessageTooLarge, match="body_bytes_max there"):
        execute(archive, shared_broker.url, ReplayRequest(Selection(topic="orders"), "large", "large"), spark=spark)
