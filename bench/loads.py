"""The load that benchmarks of the store put on it, and the meters they read.

Bodies are all different, half of the batches random bytes and half JSON, made before the timed part. The key of a
message follows from its sequence, so that any message can be asked for later without remembering it.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import dmq
from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.storage.files import Buffer, File, OsFiles
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.checkpointer import CheckpointPlan

__all__ = ["Aside", "Load", "Meter", "MeteredFiles", "Spread", "key_of", "machine", "make_topics", "queue_of", "rss_mb"]

PRODUCER: Final = 7
QUEUES_A_TOPIC: Final = 250
_POOL_BYTES: Final = 1 << 22
_ADDRESS: Final = bytes(10) + b"\xff\xff\x7f\x00\x00\x01"


def key_of(sequence: int) -> str:
    """The key of the message a producer sent under this number."""
    return f"order-{sequence:012x}"


def queue_of(number: int) -> tuple[str, int]:
    """Topic and queue of the nth of thousands of queues."""
    return f"topic{number // QUEUES_A_TOPIC}", number % QUEUES_A_TOPIC


def sequence_of(key: str) -> int:
    """The opposite of `key_of`."""
    return int(key.removeprefix("order-"), 16)


class Load:
    """Makes encoded batches, no body twice."""

    def __init__(self, seed: int, body_bytes: int = 200, first_sequence: int = 1) -> None:
        self._rng = random.Random(seed)
        self._pool = self._rng.randbytes(_POOL_BYTES)
        self._hex = self._pool.hex().encode()
        self._body_bytes = body_bytes
        self.sequence = first_sequence

    def _bodies(self, count: int, kind: str) -> list[bytes]:
        size = self._body_bytes
        starts = [self._rng.randrange(_POOL_BYTES - size) for _ in range(count)]
        if kind == "random":
            return [self._pool[at : at + size - 8] + self._rng.randbytes(8) for at in starts]
        pad = size - 58
        return [
            b'{"order":%020d,"state":"paid","total":%07d,"note":"%s"}'
            % (self._rng.getrandbits(63), at % 10_000_000, self._hex[at : at + pad])
            for at in starts
        ]

    def batch(self, topic: str, queue: int, count: int, *, keys: bool = True, dues: Sequence[int] = ()) -> Batch:
        """The next batch: of random bytes and of JSON by turns."""
        kind = "random" if self.sequence // count % 2 else "json"
        first = self.sequence
        messages = [
            Message(body, key=key_of(first + index) if keys else None, tag="paid")
            for index, body in enumerate(self._bodies(count, kind))
        ]
        encoded = encode_batch(topic, "shop", messages, sent_at_ms=time.time_ns() // 1_000_000)
        self.sequence += count
        return Batch(
            topic=topic,
            queue=queue,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
            dues=np.asarray(dues, np.uint64),
            producer_id=PRODUCER,
            first_sequence=first,
            address=_ADDRESS,
            port=4000,
        )

    def batches(self, topic: str, queue: int, batches: int, count: int) -> list[Batch]:
        return [self.batch(topic, queue, count) for _ in range(batches)]

    def again(self, batches: Sequence[Batch]) -> list[Batch]:
        """The same bytes as new messages, which is cheaper than making others; for rounds after the first."""
        renewed = []
        for batch in batches:
            renewed.append(msgspec.structs.replace(batch, first_sequence=self.sequence))
            self.sequence += len(batch.lengths)
        return renewed


class Meter:
    """CPU and wall time spent in the calls that write and flush, and how long each flush took."""

    def __init__(self) -> None:
        self.write_cpu = 0.0
        self.sync_cpu = 0.0
        self.syncs: list[float] = []

    @property
    def cpu(self) -> float:
        return self.write_cpu + self.sync_cpu


class _MeteredFile:
    def __init__(self, file: File, meter: Meter) -> None:
        self._file = file
        self._meter = meter

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        before = time.thread_time()
        self._file.write(position, buffers)
        self._meter.write_cpu += time.thread_time() - before

    def sync(self) -> None:
        before, began = time.thread_time(), time.perf_counter()
        self._file.sync()
        self._meter.sync_cpu += time.thread_time() - before
        self._meter.syncs.append(time.perf_counter() - began)

    def read(self, position: int, size: int) -> bytes:
        return self._file.read(position, size)

    def read_aside(self, position: int, size: int) -> bytes:
        return self._file.read_aside(position, size)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def allocate(self, size: int) -> None:
        self._file.allocate(size)

    def reserve(self, start: int, end: int) -> bool:
        return self._file.reserve(start, end)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class MeteredFiles(OsFiles):
    """A real directory whose writes and flushes are metered."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.meter = Meter()

    def open(self, path: str, *, create: bool = False, write: bool = False) -> File:
        file = super().open(path, create=create, write=write)
        return _MeteredFile(file, self.meter) if write else file


class Aside:
    """Takes a store's checkpoints in a thread beside the one that appends, as a broker does."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1)
        self._plan: CheckpointPlan | None = None
        self._writing: Future[None] | None = None
        self.taken = 0

    def poll(self) -> None:
        """Call it after every append."""
        if self._writing is not None and self._writing.done():
            self._finish()
        if self._writing is None and self._store.checkpoint_due:
            self._plan = self._store.begin_checkpoint()
            if self._plan is not None:
                self._writing = self._pool.submit(self._plan.write)

    def _finish(self) -> None:
        assert self._writing is not None
        assert self._plan is not None
        error = self._writing.exception()
        self._store.finish_checkpoint(self._plan, error)
        if error is not None:
            raise error
        self._plan = self._writing = None
        self.taken += 1

    def drain(self) -> None:
        """Wait for the one under way."""
        if self._writing is not None:
            self._writing.exception()
            self._finish()

    def close(self) -> None:
        self.drain()
        self._pool.shutdown()


class Spread:
    """Median and range of repeated figures."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = sorted(values)
        self.median = statistics.median(values)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.values[0]:.3g}-{self.values[-1]:.3g})"

    def plain(self) -> dict[str, float]:
        return {"median": self.median, "min": self.values[0], "max": self.values[-1], "rounds": len(self.values)}

    def at(self, share: float) -> float:
        """The value that this share of them does not exceed."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]


def make_topics(store: MessageStore, queues: int) -> None:
    """A topic for the backlog, and as many others as so many queues need."""
    store.create_topic("orders", TopicConfig(queues=4))
    for start in range(0, queues, QUEUES_A_TOPIC):
        store.create_topic(queue_of(start)[0], TopicConfig(queues=QUEUES_A_TOPIC))


def status_mb(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def rss_mb() -> float:
    return status_mb("VmRSS")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "machine": platform.platform(),
        "processor": next(_processor(), platform.processor()),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "dmq": dmq.__version__,
    }


def _processor() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
