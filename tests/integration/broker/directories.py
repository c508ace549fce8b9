"""Data directories for tests that spoil them, and processes that open them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dmq.model import Message, TopicConfig
from dmq.records.encoder import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.files import Files, OsFiles
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore

__all__ = ["SETTINGS", "batch", "bodies", "content", "fill", "make", "run"]

SETTINGS = StoreSettings(
    segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, checkpoint_bytes=64 << 10
)


def batch(body: bytes, *, topic: str = "orders", queue: int = 0, count: int = 1) -> Batch:
    made = encode_batch(topic, "app", [Message(body)] * count, sent_at_ms=1)
    return Batch(topic=topic, queue=queue, data=bytes(made.data), lengths=made.lengths)


def fill(store: MessageStore, count: int = 30) -> None:
    """Give a store a topic and messages that take three segments and more."""
    store.create_topic("orders", TopicConfig(queues=2))
    for number in range(count):
        store.append([batch(b"%d " % number + bytes(2000), count=3)])
    store.flush()


def make(directory: Path) -> list[bytes]:
    """A closed store in a directory; returns its messages."""
    with MessageStore(OsFiles(directory), SETTINGS) as store:
        fill(store)
        return bodies(store)


def bodies(store: MessageStore) -> list[bytes]:
    at, end = store.queries.bounds("orders", 0)
    found: list[bytes] = []
    while at < end:
        got = store.queries.read("orders", 0, at)
        found += [record.body for record in got.records()]
        at = got.next_offset
    return found


def open_again(files: Files) -> list[bytes]:
    """The messages another start finds."""
    with MessageStore(files, SETTINGS) as store:
        assert store.queries.damage == []
        return bodies(store)


def content(directory: Path) -> dict[str, bytes]:
    """Every file and what it holds, but for the lock, which names the process that tried last."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def run(program: str, *arguments: object) -> str:
    """Run Python code in a process of its own; what it says, or the traceback it ended with."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
