"""What `bench.pipeline` works on: messages in a broker, rows in files, a large archive, a paced producer; and memory.

Bodies are all different, random bytes, made within the process that sends them and outside of what is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

import dmq
from dmq.model import MessageId
from dmq.pipeline.archive.key_index import cover, index_rows
from dmq.pipeline.archive.parquet import Written, write_parquet
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.pipeline.decode.rows import message_batch
from dmq.pipeline.decode.units import decode_units
from dmq.pipeline.jobs.frames import GROUP_ROWS
from dmq.pipeline.tables import KEY_INDEX, MESSAGE, SCHEMAS
from dmq.testing.benchmark.benchmark import Load, percentile
from dmq.testing.processes import resident_bytes

__all__ = [
    "TOPIC",
    "Memory",
    "Names",
    "ack_all",
    "decode_seconds",
    "dump_journal",
    "fill_broker",
    "frame_of",
    "make_archive",
    "producer_at",
]

TOPIC: Final = "bench"
PACED: Final = "paced"
GROUP: Final = "bench"
BODY_BYTES: Final = 200
DAYS: Final = 365
BUSINESS_IDS_OF: Final = 50  # messages of one business id
_COLUMNS: Final = ("key", "body", "queue_offset")
_SAMPLE_SECONDS: Final = 0.5


# --- a broker, and its journal ----------------------------------------------------------------------------------------


def fill_broker(url: str, count: int) -> None:
    """Send the load."""
    with dmq.connect(url, app="bench") as client:
        client.admin.create_topic(TOPIC, queues=4)
        client.admin.create_topic(PACED, queues=4)
        producer = client.producer(compression="none", timeout=120.0)
        for first in range(0, count, 50_000):
            load = Load(min(50_000, count - first), BODY_BYTES, 5000, seed=first + 1)
            for at, group in enumerate(load.groups(load.bodies())):
                is_last = first + (at + 1) * load.batch >= count
                made = load.made(group, first + at * load.batch)
                producer.send_many(TOPIC, made, durability="flushed" if is_last else "stored")


def ack_all(url: str, count: int) -> None:
    """Let a group ack the load, once."""
    with dmq.connect(url, app="bench") as client:
        if GROUP in {group.name for group in client.admin.groups(TOPIC)}:
            return
        consumer = client.consumer(TOPIC, GROUP)
        settled = 0
        while settled < count:
            found = consumer.pull(5000, 10.0)
            found.ack()
            settled += len(found)
        consumer.close()
        client.admin.create_topic("acked")  # what is settled goes to the journal with the next unit, which is this one


def dump_journal(url: str, folder: Path) -> list[Path]:
    """The units of the journal as a reader gets them, in files."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces: list[Path] = []
    with JournalReader(url, app="bench") as reader:
        offsets = reader.offsets(TOPIC)
        for fetched in reader.units(offsets.first_journal_offset, offsets.visible_journal_offset):
            pieces.append(folder / f"{fetched.start}.units")
            pieces[-1].write_bytes(fetched.body)
    return pieces


def decode_seconds(pieces: list[Path], count: int) -> float:
    """How long two processes take to make the columns of all messages; they are there before it begins."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    counted = context.Queue()
    halves = [pieces[::2], pieces[1::2]]
    workers = [context.Process(target=_decode, args=(half, ready, go, counted)) for half in halves]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    found = sum(counted.get() for _ in workers)
    taken = time.perf_counter() - began
    for worker in workers:
        worker.join()
    assert found == count, f"{found} messages of {count}"
    return taken


def _decode(pieces: list[Path], ready: Any, go: Any, counted: Any) -> None:
    decode_units(pieces[0].read_bytes() if pieces else b"", columns=frozenset(_COLUMNS))  # warm
    ready.release()
    go.wait()
    found = 0
    for piece in pieces:
        rows = decode_units(piece.read_bytes(), columns=frozenset(_COLUMNS))
        found += message_batch(rows, _COLUMNS).num_rows
    counted.put(found)


def frame_of(spark: Any, folder: Path, count: int) -> Any:
    """Keys and bodies as a DataFrame."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-count // 4)
    for part, first in enumerate(range(0, count, step)):
        size = min(step, count - first)
        rows = pa.table({"key": [f"k-{first + number}" for number in range(size)], "value": body_array(size, first)})
        pq.write_table(rows, folder / f"{part}.parquet")
    return spark.read.parquet(str(folder))


def body_array(count: int, seed: int) -> pa.Array:
    """So many bodies, all different: random bytes that begin with a number."""
    raw = np.random.default_rng(seed).integers(0, 256, (count, BODY_BYTES), np.uint8)
    raw[:, :8] = np.arange(seed, seed + count, dtype=">u8").view(np.uint8).reshape(-1, 8)
    ends = np.arange(count + 1, dtype=np.int32) * BODY_BYTES
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(raw.ravel())])


# --- a large archive --------------------------------------------------------------------------------------------------


class Names:
    """What the messages of `make_archive` are called."""

    @staticmethod
    def message_id(number: int) -> str:
        return str(MessageId(7, number))

    @staticmethod
    def key(number: int) -> str:
        return f"order-{number}"

    @staticmethod
    def business_id(number: int) -> str:
        return f"u-{number // BUSINESS_IDS_OF}"

    @staticmethod
    def expected(way: str, number: int, count: int) -> int:
        """How many messages are found."""
        first = number // BUSINESS_IDS_OF * BUSINESS_IDS_OF
        return min(BUSINESS_IDS_OF, count - first) if way == "business_id" else 1


def make_archive(uri: str, count: int, files: int) -> None:
    """Messages and their index, written as the archive job writes them, without a broker, over a year of days."""
    archive = Archive.create(uri)
    step = -(-count // files)
    days = min(files, DAYS)
    written: dict[str, list[Written]] = {MESSAGE: [], KEY_INDEX: []}
    for part, first in enumerate(range(0, count, step)):
        day = date(2030, 1, 1) + timedelta(days=part * days // files)
        messages = _messages(first, min(step, count - first), day)
        for name, rows, how in (
            (MESSAGE, messages, {"sort_by": ("topic", "queue", "queue_offset"), "bloom": ("key",)}),
            (KEY_INDEX, index_rows(messages), {"sort_by": ("bucket", "hash"), "row_group_rows": GROUP_ROWS[KEY_INDEX]}),
        ):
            archive.table(name).folder.make(f"dt={day.isoformat()}")
            folder = archive.table(name).folder._replace(is_local=False)  # not synced, which is most of the time
            written[name].append(write_parquet(rows, folder, **how))
    for name, some in written.items():
        archive.table(name).commit(some, app_id="bench", version=1)
    cover(archive)


def _messages(first: int, count: int, day: date) -> pa.Table:
    numbers = np.arange(first, first + count)
    begin = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1e6)
    at = pa.array(begin + numbers % 80_000_000 * 1000).cast(pa.timestamp("us", tz="UTC"))
    bodies = body_array(count, first)
    columns: dict[str, Any] = {
        "message_id": [Names.message_id(number) for number in range(first, first + count)],
        "journal_offset": numbers * 300,
        "queue": (numbers % 4).astype(np.int32),
        "queue_offset": numbers // 4,
        "key": [Names.key(number) for number in range(first, first + count)],
        "business_id": [Names.business_id(number) for number in range(first, first + count)],
        "sent_at": at,
        "received_at": at,
        "stored_at": at,
        "body": bodies,
        "body_crc": [crc32c(body.as_buffer()) for body in bodies],
    }
    same = {"broker": "0123456789abcdef", "topic": TOPIC, "topic_id": 3, "app": "bench", "priority": 4, "flags": 0}
    same |= {"client": "127.0.0.1:5000", "dt": day, "tag": None, "headers": None}
    schema = SCHEMAS[MESSAGE]
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.repeat(pa.scalar(same[field.name], field.type), count)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)


# --- a paced producer -------------------------------------------------------------------------------------------------


class PacedProducer:
    """A process that sends at a rate, or as fast as it can."""

    def __init__(self, url: str, rate: float | None, seconds: float) -> None:
        asked = [url, str(seconds), *([] if rate is None else ["--rate", str(rate)])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.pipeline_load", *asked], stdout=subprocess.PIPE, text=True
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> dict[str, float]:
        """What it measured."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0
        found: dict[str, float] = json.loads(output)
        return found


def producer_at(url: str, rate: float | None, seconds: float) -> PacedProducer:
    """Start one; None means no limit."""
    return PacedProducer(url, rate, seconds)


def _produce(url: str, rate: float | None, seconds: float) -> dict[str, float]:
    """Send single messages for a while, and see how long each takes to be stored."""
    taken: list[float] = []
    load = Load(50_000, BODY_BYTES, 1)
    bodies = load.bodies()
    sent = 0
    with dmq.connect(url, app="bench") as client:
        producer = client.producer(compression="none", timeout=60.0)
        for at in _moments(rate, seconds):
            body = sent.to_bytes(8, "big") + bodies[sent % len(bodies)][8:]

            def done(receipt: Any, error: Any, at: float = at) -> None:
                assert error is None, error
                taken.append(time.perf_counter() - at)

            producer.send_async(PACED, body, durability="stored", on_delivery=done)
            sent += 1
        began = time.perf_counter()
        producer.flush()
        late = time.perf_counter() - began
    while len(taken) < sent:
        time.sleep(0.01)
    ordered = sorted(taken)
    return {
        "per_second": sent / (seconds + late),
        "p50_ms": percentile(ordered, 0.5) * 1000,
        "p99_ms": percentile(ordered, 0.99) * 1000,
        "max_ms": ordered[-1] * 1000,
    }


def _moments(rate: float | None, seconds: float) -> Iterator[float]:
    """When each message was to be sent: also what waits for its turn counts as waiting."""
    begin = time.perf_counter()
    number = 0
    while True:
        now = time.perf_counter()
        due = now if rate is None else begin + number / rate
        if due - begin >= seconds:
            return
        if due > now + 0.0005:
            time.sleep(due - now)
        yield due
        number += 1


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """The most memory of the driver, the JVM and the Python workers below it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._most = {"driver": 0, "jvm": 0, "workers": 0}

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """From now on."""
        self._most = dict.fromkeys(self._most, 0)

    def most(self) -> dict[str, float]:
        self._look()
        return {name: round(size / 1e6, 1) for name, size in self._most.items()}

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        found = {"driver": resident_bytes(os.getpid()), "jvm": 0, "workers": 0}
        children = _children()
        for pid in children.get(os.getpid(), []):
            if _name(pid) == "java":
                found["jvm"] += resident_bytes(pid)
                found["workers"] += sum(resident_bytes(one) for one in _below(pid, children))
        self._most = {name: max(size, found[name]) for name, size in self._most.items()}


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            found.setdefault(parent, []).append(int(path.name))
    return found


def _below(pid: int, children: dict[int, list[int]]) -> list[int]:
    mine = children.get(pid, [])
    return mine + [one for child in mine for one in _below(child, children)]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rate", type=float)
    asked = parser.parse_args()
    print(json.dumps(_produce(asked.url, asked.rate, asked.seconds)))
