"""A real process that writes is killed again and again: what it acknowledged is there, once, in order."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crc32c import crc32c

from dmq.storage.files import Files, OsFiles
from dmq.storage.store import MessageStore
from dmq.storage.verification import verify
from dmq.testing import MemoryFiles
from tests.integration import writer
from tests.sampling import SEED, sample_size

KILLS = sample_size(share=50, whole=200)
PATIENCE_S = 60


def run_and_kill(directory: Path, log: Path, stop: str, rng: random.Random) -> None:
    """Let the writer come to a step, or acknowledge some more, and kill it there."""
    before = log.stat().st_size if log.exists() else 0
    enough = before + rng.randrange(1, 3000)
    process = subprocess.Popen(
        [sys.executable, writer.__file__, str(directory), str(log), stop], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if stop == "never":
            deadline = time.monotonic() + PATIENCE_S
            while not log.exists() or log.stat().st_size < enough:
                assert process.poll() is None, "it ended by itself"
                assert time.monotonic() < deadline, "it does not get on"
                time.sleep(0.001)
        else:
            assert process.stdout.readline().decode().strip() == stop
    finally:
        process.kill()
        process.communicate()


def check(files: Files, known: dict[tuple[int, int], int]) -> int:
    """Everything acknowledged is there, once and in order; returns how many messages there are."""
    report = verify(files)
    assert report.is_good, report.findings
    with MessageStore(files, writer.SETTINGS) as store:
        assert store.damage == []
        total = 0
        for producer in range(writer.PRODUCERS):
            at, end = store.bounds(writer.TOPIC, producer)
            bodies: list[bytes] = []
            while at < end:
                got = store.read(writer.TOPIC, producer, at, max_messages=5000)
                bodies += [record.body for record in got.records()]
                at = got.next_offset
            # In order, none missing, none twice: the offset of a message is its sequence.
            assert bodies == [writer.body(producer, sequence) for sequence in range(len(bodies))]
            for (owner, number), crc in known.items():
                if owner == producer:
                    content = b"".join(bodies[number * writer.BATCH : (number + 1) * writer.BATCH])
                    assert crc32c(content) == crc, (producer, number)
            total += len(bodies)
        return total


@pytest.mark.sampled
def test_kill_9_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    directory, log = tmp_path / "data", tmp_path / "acknowledged"
    rng = random.Random(f"{SEED} kill")
    total = 0
    for number in range(KILLS):
        stop = writer.STOPS[number % len(writer.STOPS)]
        try:
            run_and_kill(directory, log, stop, rng)
            known = writer.acknowledged(log)
            # A copy is looked at, so that the next run finds what the killed one left.
            total_now = check(MemoryFiles.load(directory), known)
            assert total_now >= total
            total = total_now
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, kill {number}, {stop}")
            raise
    assert check(OsFiles(directory), writer.acknowledged(log)) == total > 0
    assert len(list((directory / "journal").iterdir())) > 3
