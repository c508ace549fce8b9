"""Driver and JVM of a replay are killed at five points: each message is in the target topic once."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive.table_store import Archive
from dmq.testing.processes import BrokerProcess
from tests.spark.driver_process import run_driver
from tests.spark.mortal_replay import POINTS
from tests.spark.replay_command import arrived, replay_and_kill
from tests.unit.pipeline.archives import NOON, commit_messages, message_row

COUNT = 6000


@pytest.mark.soak
def test_each_message_comes_once_though_driver_and_jvm_are_killed_at_five_points(tmp_path: Path) -> None:
    tables, scratch = tmp_path / "archive", tmp_path / "scratch"
    archive = Archive.create(str(tables))
    rows = [message_row(number, stored_at=NOON + timedelta(milliseconds=number)) for number in range(COUNT)]
    for start in range(0, COUNT, 1000):
        commit_messages(archive, rows[start : start + 1000])
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url, app="test") as client:
        client.admin.create_topic("again", queues=3)
        for point in POINTS:
            killed = run_driver(scratch, "tests.spark.mortal_replay", broker.url, str(tables), "once", point)
            assert killed.returncode == -9, (point, killed.stdout, killed.stderr)
        ended = run_driver(scratch, "tests.spark.mortal_replay", broker.url, str(tables), "once", "never")
        assert ended.stdout == f"{COUNT}\n", ended.stderr
        numbers: Counter[str | None] = Counter()
        for queue in client.admin.offsets("again"):
            at, before = queue.first_offset, -1
            while page := client.admin.read("again", queue.queue, at, limit=1000)[0]:
                for message in page:
                    number = int((message.key or "").removeprefix("order-"))
                    assert number > before
                    numbers[message.key], before = numbers[message.key] + 1, number
                at = page[-1].offset + 1
    assert numbers == {f"order-{number}": 1 for number in range(COUNT)}
    assert sorted(path.name for path in (tables / "replay" / "once").iterdir()) == ["done.json", "plan.json"]


@pytest.mark.soak
def test_the_command_line_shows_first_sends_once_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path / "archive"))
    rows = [message_row(number, stored_at=NOON + timedelta(milliseconds=number)) for number in range(COUNT)]
    commit_messages(archive, rows)
    place = ["--master", "local[2]", "--conf", f"spark.local.dir={tmp_path}"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SPARK_LOCAL_IP": "127.0.0.1"}
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url, app="test") as client:
        client.admin.create_topic("again", queues=3)
        replay_and_kill(client, broker.url, archive.uri, COUNT, place, environment)
        assert arrived(client, "again") == Counter(row["message_id"] for row in rows)
