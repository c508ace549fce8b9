"""Archived messages come back into a topic, each once for every replay id, over a real broker."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dmq
from dmq.errors import InvalidMessage, InvalidRequest, UnknownTopic
from dmq.model import Durability, Message, MessageId
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay.plan import Selection
from dmq.pipeline.replay.replay import ReplayRequest, execute
from dmq.protocol import Command, decode_response
from dmq.protocol.batch import pack_records
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.records.replay import ReplayTarget
from dmq.testing.processes import BrokerProcess, free_port
from tests.integration.pipeline import replayer
from tests.unit.pipeline.archives import NOON, commit_messages, message_row

COUNT = 3000
SECONDS = 60.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive whose rows make some forty batches: bodies are large enough."""
    folder = tmp_path_factory.mktemp("archive")
    bodies = random.Random(1)
    rows = [
        message_row(
            number,
            stored_at=NOON + timedelta(milliseconds=number),
            body=bodies.randbytes(6000),
            tag=f"t{number % 3}",
            business_id=f"u-{number % 7}",
            flags=2 * (number % 2),
            priority=number % 10,
            headers=[{"key": "n", "value": b"%d" % number}],
        )
        for number in range(COUNT)
    ]
    commit_messages(Archive.create(str(folder)), rows)
    return folder


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(arguments=("--port", str(free_port()))) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(broker.url, app="test", timeout=SECONDS) as client:
        yield client


def received(client: dmq.Client, topic: str, count: int) -> list[Any]:
    """All messages of a topic, of which there are so many; nothing else comes."""
    found: list[Any] = []
    with client.consumer(topic, f"{topic}-readers") as consumer:
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            batch = consumer.pull(1000, wait=1.0)
            found += batch
            batch.ack()
            assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        found += consumer.pull(1000, wait=0.2)
    return found


def stored(client: dmq.Client, topic: str) -> int:
    return sum(queue.next_offset for queue in client.admin.offsets(topic))


def test_what_comes_back_is_what_was_archived(tables: Path, broker: BrokerProcess, client: dmq.Client) -> None:
    client.admin.create_topic("same", queues=4)
    archive = Archive(str(tables))
    outcome = execute(
        archive, broker.url, ReplayRequest(Selection(topic="orders", where="journal_offset < 30000"), "same", "same")
    )
    assert (outcome.sent, outcome.found) == (100, 0)
    found = {message.id: message for message in received(client, "same", 100)}
    assert len(found) == 100
    bodies = random.Random(1)
    for number in range(100):
        message = found[MessageId(7, number)]
        assert message.body == bodies.randbytes(6000)
        assert (message.key, message.tag, message.business_id) == (
            f"order-{number}",
            f"t{number % 3}",
            f"u-{number % 7}",
        )
        assert (message.priority, message.app, message.properties) == (number % 10, "shop", {"n": str(number)})
        assert message.sent_at == NOON + timedelta(milliseconds=number - 3)
        assert (message.replay, message.topic, message.attempt) == ("same", "same", 1)
    (by_id,) = client.admin.find("same", id=str(MessageId(7, 42)))
    (by_key,) = client.admin.find("same", key="order-42")
    assert by_id.body == by_key.body == found[MessageId(7, 42)].body
    steps = client.admin.trace(str(MessageId(7, 42))).steps
    assert {step.topic for step in steps} == {"same"}


def test_the_same_replay_again_sends_nothing_and_another_sends_all(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("twice", queues=2)
    archive, few = Archive(str(tables)), Selection(where="journal_offset < 3000")
    with pytest.raises(InvalidRequest, match="no replay twice-1 to go on with"):
        execute(archive, broker.url, ReplayRequest(None, "", "twice-1"))
    assert execute(archive, broker.url, ReplayRequest(few, "twice", "twice-1"))[1:] == (10, 0)
    assert execute(archive, broker.url, ReplayRequest(few, "twice", "twice-1"))[1:] == (0, 10)
    assert execute(archive, broker.url, ReplayRequest(None, "", "twice-1"))[1:] == (0, 10)
    with pytest.raises(InvalidRequest, match="replay twice-1 sends other messages"):
        execute(archive, broker.url, ReplayRequest(Selection(topic="orders"), "twice", "twice-1"))
    assert execute(archive, broker.url, ReplayRequest(few, "twice", "twice-2"))[1:] == (10, 0)
    # The same ids, of two replays, are no duplicates to a consumer.
    found = received(client, "twice", 20)
    assert Counter(message.replay for message in found) == {"twice-1": 10, "twice-2": 10}


def test_one_that_lost_its_plan_is_recognised_by_the_broker(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("lost", queues=2)
    archive, few = Archive(str(tables)), Selection(where="journal_offset < 3000")
    assert execute(archive, broker.url, ReplayRequest(few, "lost", "lost"))[1:] == (10, 0)
    folder = tables / "replay" / "lost"
    for path in folder.iterdir():
        path.unlink()
    assert execute(archive, broker.url, ReplayRequest(few, "lost", "lost"))[1:] == (0, 10)
    assert stored(client, "lost") == 10


def test_a_topic_that_is_missing_or_was_made_anew_is_told(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    archive, few = Archive(str(tables)), Selection(where="journal_offset < 3000")
    with pytest.raises(UnknownTopic, match="no topic 'absent' to replay into"):
        execute(archive, broker.url, ReplayRequest(few, "absent", "absent"))
    client.admin.create_topic("anew")
    run(tables, broker, "anew", "anew", "planned", 1)
    client.admin.delete_topic("anew")
    client.admin.create_topic("anew")
    with pytest.raises(UnknownTopic, match="was made anew since"):
        execute(archive, broker.url, ReplayRequest(None, "", "anew"))


def test_a_message_that_fails_is_retried_and_dies_in_the_topic_it_came_to(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("failing")
    execute(Archive(str(tables)), broker.url, ReplayRequest(Selection(keys=("order-5",)), "failing", "failing"))
    with client.consumer("failing", "failing-readers", max_attempts=2) as consumer:
        for attempt in (1, 2):
            (message,) = consumer.pull(1, wait=SECONDS)
            assert (message.id, message.attempt, message.replay) == (MessageId(7, 5), attempt, "failing")
            assert (message.topic, message.key) == ("failing", "order-5")
            message.nack(delay=0.0, reason="it failed")
    deadline = time.monotonic() + SECONDS
    while not (letters := client.admin.dead_letters("failing")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [(letter.topic, letter.id, letter.key) for letter in letters] == [("failing", MessageId(7, 5), "order-5")]


NAMED, REPLAYED = int(ProduceFlag.NAMED), int(ProduceFlag.NAMED | ProduceFlag.REPLAYED)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"flags": int(ProduceFlag.REPLAYED)}, "named producer"),
        ({"producer_id": 0}, "named producer"),
        ({"queue": 255}, "named producer"),
        ({"topic": "%SCHEDULE"}, "names that begin with %"),
        ({"flags": REPLAYED | int(ProduceFlag.HALF)}, "neither delayed nor prepared"),
        ({"flags": REPLAYED | int(ProduceFlag.EXPIRING)}, "do not expire"),
        ({"durability": Durability.CONSUMED, "group": "g"}, "answered when it is stored"),
        ({"flags": NAMED}, "system flags 0x28 are not allowed"),
        ({"topic": "others"}, "another topic"),
    ],
)
def test_a_broker_takes_replayed_messages_from_replays_only(
    client: dmq.Client, changed: dict[str, Any], problem: str
) -> None:
    for topic in ("refused", "others"):
        client.admin.create_topic(topic, allow_existing=True)
    record = ReplayTarget("refused", "r", 1).record(
        MessageId(1, 1).to_bytes(), Message(b"body"), app="a", first_sent_at_ms=1
    )
    asked = msgspec.structs.replace(Produce("refused", 0, 1, 0, 77, 0, 0, flags=REPLAYED), **changed)
    frame = client._router.home.connection().request(
        Command.PRODUCE, asked, [pack_records([len(record)]), record], timeout=SECONDS
    )
    with pytest.raises((InvalidRequest, InvalidMessage), match=problem):
        decode_response(frame)
    assert stored(client, "refused") == stored(client, "others") == 0


def test_the_command_line_shows_first_and_sends_when_told(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("told")
    command = [sys.executable, "-m", "dmq.cli", "archive", "replay", "--tables", str(tables), "--topic", "orders"]
    command += ["--key", "order-7", "--key", "order-8", "--to", "told", "--broker", broker.url]
    dry = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "this was a dry run of 2 messages into topic told" in dry.stdout
    assert stored(client, "told") == 0
    done = subprocess.run([*command, "--execute"], capture_output=True, text=True, timeout=SECONDS)
    name = done.stderr.strip().removeprefix("replay id: ")
    assert done.stdout == f"replay {name}: 2 of 2 messages sent to told\n"
    again = subprocess.run(
        [*command[:7], "--replay-id", name, "--execute", "--broker", broker.url, "--format", "json"],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    said = {"replay_id": name, "to": "told", "messages": 2, "sent": 0, "found_stored": 2}
    assert json.loads(again.stdout) == said
    assert {message.key for message in received(client, "told", 2)} == {"order-7", "order-8"}


def run(tables: Path, broker: BrokerProcess, name: str, topic: str, stop: str, count: int) -> str:
    """Let a process replay; kill it where it is to stop. Returns the last line it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", replayer.__name__, str(tables), broker.url, name, topic, stop, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        return process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_nothing_is_lost_or_doubled_wherever_a_run_is_killed(
    tables: Path, broker: BrokerProcess, client: dmq.Client
) -> None:
    client.admin.create_topic("killed", queues=3)
    points = [("staged", 1), ("planned", 1), ("asked", 1), ("asked", 5), ("answered", 1), ("answered", 9), ("asked", 8)]
    before = 0
    for stop, count in [*points, ("sent", 1)]:
        assert run(tables, broker, "killed", "killed", stop, count) == stop
        now = stored(client, "killed")
        assert now >= before
        before = now
    assert before == COUNT
    assert run(tables, broker, "killed", "killed", "never", 1) == f"done 0 {COUNT}"
    found = received(client, "killed", COUNT)
    assert Counter(message.id for message in found) == {MessageId(7, number): 1 for number in range(COUNT)}
    by_queue: dict[int, list[int]] = {}
    for message in sorted(found, key=lambda message: message.offset):
        by_queue.setdefault(message.queue, []).append(message.id.sequence)
    assert all(numbers == sorted(numbers) for numbers in by_queue.values())


def test_nothing_is_lost_or_doubled_when_the_broker_is_killed(tables: Path) -> None:
    with (
        BrokerProcess(arguments=("--port", str(free_port()))) as broker,
        dmq.connect(broker.url, app="test", timeout=SECONDS) as client,
    ):
        client.admin.create_topic("orders", queues=3)
        options = f"--topic orders --replay-id restarted --rate 1500 --execute --broker {broker.url} --format json"
        process = subprocess.Popen(
            [sys.executable, "-m", "dmq.cli", "archive", "replay", "--tables", str(tables), *options.split()],
            stdout=subprocess.PIPE,
        )
        try:
            for enough in (1, COUNT // 2):
                deadline = time.monotonic() + SECONDS
                while stored(client, "orders") < enough:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.01)
                broker.kill()
                broker.start()
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0
        said = json.loads(output)
        assert said["sent"] + said["found_stored"] == COUNT
        found = received(client, "orders", COUNT)
        assert Counter(message.id for message in found) == {MessageId(7, number): 1 for number in range(COUNT)}
