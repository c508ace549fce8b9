"""`dmq archive replay --spark` as a user types it: a dry run, a run whose driver is killed, and one that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import dmq
from tests.patience import eventually

__all__ = ["arrived", "replay_and_kill"]

SECONDS = 600.0
RATE = 1000  # messages a second, so that it can be killed in the middle


def replay_and_kill(
    client: dmq.Client, url: str, tables: str, count: int, spark: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Bring all messages of topic `orders` back into topic `again`.

    Parameters:
        count: how many there are.
        spark: options that say where Spark is.
    """
    command = [sys.executable, "-m", "dmq.cli", "archive", "replay", "--tables", tables, "--replay-id", "once"]
    choice = ["--topic", "orders", "--to", "again"]
    by_spark = ["--broker", url, "--execute", "--spark", *spark]

    def said(*words: str) -> Any:
        ended = subprocess.run(
            [*command, *words, "--format", "json"], env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    assert said(*choice)["messages"] == count
    assert client.admin.topic("again").messages == 0, "it was a dry run"
    with subprocess.Popen(
        [*command, *choice, *by_spark, "--rate", str(RATE)], env=environment, start_new_session=True
    ) as driver:
        try:
            eventually(lambda: client.admin.topic("again").messages or driver.poll() is not None, seconds=SECONDS)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL
    stored = client.admin.topic("again").messages
    assert 0 < stored < count, "it was not killed in the middle"
    assert "begun" in said()["state"]
    facts = said(*by_spark)
    assert (facts["messages"], facts["sent"] + facts["found_stored"]) == (count, count)
    assert facts["found_stored"] >= stored
    assert said(*by_spark)["sent"] == 0


def arrived(client: dmq.Client, topic: str) -> Counter[str]:
    """The ids of all messages of a topic."""
    found: Counter[str] = Counter()
    for queue in client.admin.offsets(topic):
        at = queue.first_offset
        while page := client.admin.read(topic, queue.queue, at, limit=1000)[0]:
            found.update(str(message.id) for message in page)
            at = page[-1].offset + 1
    return found
