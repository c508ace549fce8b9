"""Source and sink on a standalone cluster of two workers: each row is copied once, whatever is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

import dmq
from dmq.testing.processes import BrokerProcess
from tests.integration.pipeline.test_sink import stored
from tests.spark import copy_topic
from tests.spark.cluster import Cluster, command_line, descendants

MESSAGES = 30_000


def send(client: dmq.Client, topic: str) -> list[bytes]:
    bodies = [b"%06d " % number + b"x" * 100 for number in range(MESSAGES)]
    with client.producer() as producer:
        for first in range(0, MESSAGES, 500):
            producer.send_many(topic, [dmq.Message(body) for body in bodies[first : first + 500]])
    return bodies


@pytest.mark.soak
def test_each_row_is_copied_once_though_tasks_executors_and_the_driver_are_killed(tmp_path: Path) -> None:
    killed: list[str] = []
    with (
        BrokerProcess(tmp_path / "data") as broker,
        Cluster(tmp_path / "cluster") as cluster,
        dmq.connect(broker.url) as client,
    ):
        for topic in ("orders", "between", "copies"):
            client.admin.create_topic(topic, queues=3)
        sent = send(client, "orders")
        send(client, "between")  # so that the source leaves something out

        def pids_of(word: str) -> list[int]:
            if word == "driver":
                mine = descendants(os.getpid())
                return [pid for pid in mine if copy_topic.__name__.rpartition(".")[2] in command_line(pid)]
            return cluster.processes(word)[-1:]

        def kill() -> None:
            copied = 0
            # One after the other, each while tasks are at work: when rows have come since the last one.
            for word in ("pyspark.daemon", "CoarseGrainedExecutorBackend", "driver"):
                while (now := client.admin.topic("copies").messages) <= copied + 1000:
                    if over.wait(0.01):
                        return
                copied = now
                for pid in pids_of(word):
                    os.kill(pid, signal.SIGKILL)
                killed.append(word)

        over = threading.Event()
        killing = threading.Thread(target=kill)
        killing.start()
        servers = broker.url.removeprefix("dmq://")
        arguments = (servers, "orders", "copies", str(tmp_path / "checkpoint"))
        try:
            first = cluster.submit(Path(copy_topic.__file__), *arguments)
        finally:
            over.set()
            killing.join()
        assert killed == ["pyspark.daemon", "CoarseGrainedExecutorBackend", "driver"]
        assert first.returncode != 0
        assert client.admin.topic("copies").messages < MESSAGES, "it died in the middle"
        again = cluster.submit(Path(copy_topic.__file__), *arguments)
        assert again.returncode == 0, again.stderr
        assert Counter(message.body for message in stored(client, "copies", MESSAGES)) == Counter(sent)
