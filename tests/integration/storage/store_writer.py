"""Processes that write to a store until they are killed, in turn: `python store_writer.py DIRECTORY ACKNOWLEDGED`.

For each line on stdin, the name of a step, a process is forked, which says its number; when it is gone, that is said.
It stands for four clients whose sequences outlive the broker: a batch that was not acknowledged before is sent again,
with the same bounds. Each acknowledged batch goes to the file ACKNOWLEDGED as a line (producer, batch, CRC of its
content). At the step STOP names, the process says so on stdout and stands still there, to be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from crc32c import crc32c

from dmq.errors import TopicExists
from dmq.model import Durability, Message, TopicConfig
from dmq.records.encoder import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.files import File, OsFiles
from dmq.storage.group_commit import GroupCommit
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.checkpointer import CheckpointPlan

__all__ = ["BATCH", "PRODUCERS", "SETTINGS", "STOPS", "TOPIC", "acknowledged", "body"]

TOPIC = "orders"
PRODUCERS = 4
BATCH = 5
IN_FLIGHT = 3
SETTINGS = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=16 << 10,
    body_bytes_max=4 << 10,
    checkpoint_bytes=24 << 10,
    retention_hours=None,
)
# never: runs until it is killed. The others: before a checkpoint, before its run is written, after that, before it is
# put in force, after that; before a segment is begun, after that.
STOPS = ("never", "checkpoint", "run", "positions", "rename", "renamed", "segment", "segment made")


def body(producer: int, sequence: int) -> bytes:
    """The content of a message follows from its number."""
    text = b"%d:%d " % (producer, sequence)
    return text * (1 + sequence % 13)


def acknowledged(path: Path) -> dict[tuple[int, int], int]:
    """(producer, batch) of everything acknowledged, and the CRC of its content; a line cut short does not count."""
    if not path.exists():
        return {}
    whole = path.read_bytes().rpartition(b"\n")[0]
    rows = (line.split() for line in whole.splitlines())
    return {(int(producer), int(number)): int(crc) for producer, number, crc in rows}


class StandStill:
    """Stops the thread that reaches a step, for ever."""

    def __init__(self, step: str) -> None:
        self.step = step

    def reached(self, step: str) -> None:
        if step == self.step:
            os.write(1, b"%s\n" % step.encode())
            threading.Event().wait()


class SteppedFiles(OsFiles):
    """Real files that tell when they come to a step."""

    def __init__(self, root: str, steps: StandStill) -> None:
        super().__init__(root)
        self._steps = steps

    def open(self, path: str, *, create: bool = False, write: bool = False) -> File:
        if create and path.startswith("runs/"):
            self._steps.reached("run")
        if create and path.startswith("offset/"):
            self._steps.reached("positions")
        if create and path.startswith("journal/"):
            self._steps.reached("segment")
        return super().open(path, create=create, write=write)

    def rename(self, source: str, target: str) -> None:
        if target == "checkpoint":
            self._steps.reached("rename")
        super().rename(source, target)
        if target == "checkpoint":
            self._steps.reached("renamed")

    def sync_dir(self, path: str) -> None:
        if path == "journal":
            self._steps.reached("segment made")
        super().sync_dir(path)


class SteppedStore(MessageStore):
    """A store that tells when it is about to take a checkpoint."""

    steps: StandStill

    def begin_checkpoint(self) -> CheckpointPlan | None:
        self.steps.reached("checkpoint")
        return super().begin_checkpoint()


def batch_of(producer: int, number: int) -> Batch:
    first = number * BATCH
    messages = [Message(body(producer, sequence)) for sequence in range(first, first + BATCH)]
    made = encode_batch(TOPIC, "writer", messages, sent_at_ms=1)
    return Batch(
        topic=TOPIC,
        queue=producer,
        data=bytes(made.data),
        lengths=made.lengths,
        producer_id=producer + 1,
        first_sequence=first,
    )


def batches(producer: int, known: dict[tuple[int, int], int]) -> Iterator[int]:
    """The numbers of the batches to send: what was not acknowledged first."""
    number = 0
    while True:
        if (producer, number) not in known:
            yield number
        number += 1


def live(directory: str, log: str, stop: str) -> None:
    known = acknowledged(Path(log))
    acks = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    steps = StandStill("never")
    files = SteppedFiles(directory, steps)
    SteppedStore.steps = steps
    store = SteppedStore(files, SETTINGS)
    try:
        store.create_topic(TOPIC, TopicConfig(queues=PRODUCERS))
    except TopicExists:
        pass
    steps.step = stop  # opening is over
    commit = GroupCommit(store)
    room = [threading.Semaphore(IN_FLIGHT) for _ in range(PRODUCERS)]
    numbers = [batches(producer, known) for producer in range(PRODUCERS)]
    while True:
        for producer in range(PRODUCERS):
            room[producer].acquire()
            number = next(numbers[producer])
            content = b"".join(body(producer, number * BATCH + i) for i in range(BATCH))
            line = b"%d %d %d\n" % (producer, number, crc32c(content))

            def done(future: Future[Placement], line: bytes = line, producer: int = producer) -> None:
                future.result()
                os.write(acks, line)
                room[producer].release()

            durability = Durability.FLUSHED if number % 8 == 0 else Durability.STORED
            commit.submit(batch_of(producer, number), durability).add_done_callback(done)


def main(directory: str, log: str) -> None:
    for line in sys.stdin:
        pid = os.fork()  # which spares it all that has to be imported
        if pid == 0:
            os.write(1, b"%d\n" % os.getpid())
            live(directory, log, line.strip())
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
