"""A real process that writes is killed again and again: what it acknowledged is there, once, in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from crc32c import crc32c

from dmq.storage.files import Files, OsFiles
from dmq.storage.offline.verification import verify
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles
from dmq.testing.processes import read_line
from tests.integration.storage import store_writer
from tests.sampling import SEED, sample_size

KILLS = sample_size(share=50, whole=200)
PATIENCE_S = 60


class Writers:
    """Writers, one after another on one directory."""

    def __init__(self, directory: Path, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, store_writer.__file__, str(directory), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + PATIENCE_S)
        assert line, "it does not get on"
        return line.strip()

    def run_and_kill(self, stop: str, rng: random.Random) -> None:
        """Let a writer come to a step, or acknowledge some more, and kill it there."""
        log = self._log
        enough = (log.stat().st_size if log.exists() else 0) + rng.randrange(1, 3000)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{stop}\n".encode())
        self._process.stdin.flush()
        pid = int(self._read())
        try:
            if stop == "never":
                deadline = time.monotonic() + PATIENCE_S
                while not log.exists() or log.stat().st_size < enough:
                    assert time.monotonic() < deadline, "it does not get on"
                    time.sleep(0.001)
            else:
                assert self._read() == stop
        finally:
            os.kill(pid, signal.SIGKILL)
        assert self._read() == "gone"


def check(files: Files, known: dict[tuple[int, int], int]) -> int:
    """Everything acknowledged is there, once and in order; returns how many messages there are."""
    report = verify(files)
    assert report.is_good, report.findings
    with MessageStore(files, store_writer.SETTINGS) as store:
        assert store.queries.damage == []
        total = 0
        for producer in range(store_writer.PRODUCERS):
            at, end = store.queries.bounds(store_writer.TOPIC, producer)
            bodies: list[bytes] = []
            while at < end:
                got = store.queries.read(store_writer.TOPIC, producer, at, max_messages=5000)
                bodies += [record.body for record in got.records()]
                at = got.next_offset
            # In order, none missing, none twice: the offset of a message is its sequence.
            assert bodies == [store_writer.body(producer, sequence) for sequence in range(len(bodies))]
            for (owner, number), crc in known.items():
                if owner == producer:
                    content = b"".join(bodies[number * store_writer.BATCH : (number + 1) * store_writer.BATCH])
                    assert crc32c(content) == crc, (producer, number)
            total += len(bodies)
        return total


@pytest.mark.sampled
def test_kill_9_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    directory, log = tmp_path / "data", tmp_path / "acknowledged"
    rng = random.Random(f"{SEED} kill")
    total = 0
    with Writers(directory, log) as writers:
        for number in range(KILLS):
            stop = store_writer.STOPS[number % len(store_writer.STOPS)]
            try:
                writers.run_and_kill(stop, rng)
                known = store_writer.acknowledged(log)
                # A copy is looked at, so that the next run finds what the killed one left.
                total_now = check(MemoryFiles.load(directory), known)
                assert total_now >= total
                total = total_now
            except BaseException as error:
                error.add_note(f"DMQ_SEED={SEED}, kill {number}, {stop}")
                raise
    assert check(OsFiles(directory), store_writer.acknowledged(log)) == total > 0
    assert len(list((directory / "journal").iterdir())) > 3
