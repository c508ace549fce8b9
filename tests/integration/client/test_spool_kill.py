"""A producer with a spool is killed again and again, its broker too: what it accepted is there, once, in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from crc32c import crc32c

import dmq
from dmq.model import MessageId
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles
from dmq.testing.processes import BrokerProcess, free_port, read_line
from tests.integration.client import spool_writer
from tests.sampling import SEED, sample_size

KILLS = sample_size(share=20, whole=100)
PATIENCE_S = 60.0


class Lives:
    """Producers, one after another on one spool."""

    def __init__(self, url: str, folder: Path) -> None:
        self._log = folder / "accepted"
        arguments = [url, str(folder / "spool"), str(self._log)]
        self._process = subprocess.Popen(
            [sys.executable, spool_writer.__file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def _begin(self, life: int) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % life)
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + PATIENCE_S)
        assert line is not None, "it does not get on"
        return int(line)

    def run_and_kill(self, life: int, rng: random.Random) -> None:
        """Let a producer have some more accepted, and kill it at once or a moment later."""
        log = self._log
        enough = (log.stat().st_size if log.exists() else 0) + rng.choice((1, 1000, 20_000))
        pause = rng.choice((0.0, rng.uniform(0, 0.1)))
        pid = self._begin(life)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not log.exists() or log.stat().st_size < enough:
                assert time.monotonic() < deadline, "it does not get on"
                time.sleep(0.001)
            time.sleep(pause)
        finally:
            os.kill(pid, signal.SIGKILL)
        assert self._read() == -signal.SIGKILL, "it ended by itself"

    def empty_the_spool(self) -> None:
        self._begin(0)
        assert self._read() == 0, "the spool was not emptied"


def restart(broker: BrokerProcess, after: float) -> None:
    time.sleep(after)
    broker.kill()
    time.sleep(after)
    broker.start()


def stored(data: Path) -> list[list[tuple[str, bytes]]]:
    """Every message of a broker that is stopped, as (id, body), by queue."""
    queues = []
    # A copy is looked at, and not through a consumer, which would suppress what comes twice.
    with MessageStore(MemoryFiles.load(data)) as store:
        topic = store.queries.topic(spool_writer.TOPIC)
        for queue in range(topic.config.queues):
            found: list[tuple[str, bytes]] = []
            at, end = store.queries.bounds(topic.name, queue)
            while at < end:
                got = store.queries.read(topic.name, queue, at, max_messages=5000)
                runs = store.queries.id_runs(topic, queue, got.offsets.tolist(), got.pieces)
                ids = [MessageId(producer, first + index) for count, producer, first in runs for index in range(count)]
                found += zip(map(str, ids), (record.body for record in got.records()), strict=True)
                at = got.next_offset
            queues.append(found)
    return queues


def consumed(client: dmq.Client, total: int) -> Counter[str]:
    """How often a group got each message."""
    counts: Counter[str] = Counter()
    with client.consumer(spool_writer.TOPIC, group="check", batch=1000) as consumer:
        while counts.total() < total:
            batch = consumer.pull(max_messages=5000, wait=PATIENCE_S)
            assert batch, "something is missing"
            counts.update(str(message.id) for message in batch)
            consumer.ack(batch)
    return counts


def check(queues: list[list[tuple[str, bytes]]], known: dict[str, int]) -> None:
    """Compare what is stored with what the producer says was accepted."""
    there = [message for queue in queues for message in queue]
    bodies = dict(there)
    assert [name for name in known if name not in bodies] == [], "accepted, and lost"
    assert [name for name, crc in known.items() if crc32c(bodies[name]) != crc] == [], "another content"
    assert len(bodies) == len(there), "an id is there twice"
    assert len({body for _, body in there}) == len(there), "a content is there twice"
    last: dict[bytes, tuple[int, int]] = {}
    for queue in queues:
        for _, body in queue:
            who, life, number = body.split()[:3]
            assert last.get(who, (0, -1)) < (int(life), int(number)), "out of order"
            last[who] = int(life), int(number)


@pytest.mark.sampled
def test_kill_9_of_the_producer_loses_nothing_accepted_and_doubles_nothing(tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} spool")
    try:
        with BrokerProcess(tmp_path / "data", ("--port", str(free_port()))) as broker:
            url = broker.url
            with dmq.connect(url) as client:
                client.admin.create_topic(spool_writer.TOPIC, queues=4)
            with Lives(url, tmp_path) as lives:
                for life in range(1, KILLS + 1):
                    reboot = threading.Thread(target=restart, args=(broker, rng.uniform(0.0, 0.3)))
                    if life % 5 == 0:
                        reboot.start()
                    lives.run_and_kill(life, rng)
                    if life % 5 == 0:
                        reboot.join()
                lives.empty_the_spool()
            with dmq.connect(url) as client:
                total = sum(queue.next_offset for queue in client.admin.offsets(spool_writer.TOPIC))
                counts = consumed(client, total)
        known = spool_writer.accepted(tmp_path / "accepted")
        check(stored(tmp_path / "data"), known)
        assert counts.total() == len(counts) == total >= len(known) > KILLS
        assert counts.keys() >= known.keys()
    except BaseException as error:
        error.add_note(f"DMQ_SEED={SEED}")
        raise
