"""Rows of `bench.store` about reading: a backlog from end to end, and messages by key and id."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

from bench.loads import PRODUCER, Spread, key_of, sequence_of
from bench.rows import SEED, Bench, Row, timed, verdict
from dmq.model import MessageId
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore

__all__ = ["lookup", "sequential_read"]


def sequential_read(bench: Bench) -> list[Row]:
    """Reading 1 KB messages in order with `read`, 4 MiB at a time, beside reading the same file with `os.preadv`.

    Each round reads another part of the backlog, in the page cache but not in the store's, so all is verified.
    """
    store = MessageStore(OsFiles(bench.large()))
    walls, cpus, rates, plain_rates, touched = [], [], [], [], []
    buffer = bytearray(1 << 20)
    first, following = store.queries.bounds("orders", 0)
    span = min((following - first) // 2, bench.sizes.read_messages)
    try:
        for turn in range(bench.rounds + 1):
            offset = first + turn * span % (following - first - span)
            where = next(store.queries.read("orders", 0, offset, max_messages=1).records()).journal_offset
            size = _read_on(store, offset, offset + span)  # warms the page cache
            taken = timed(partial(_read_on, store, offset, offset + span))
            plain = timed(partial(_read_plain, bench.large(), where, size, buffer))
            decoded = timed(partial(_touch, store, offset, offset + span // 10))
            if turn:
                walls.append(plain[0] / taken[0])
                cpus.append(plain[1] / taken[1])
                rates.append(size / taken[0] / 1e9)
                plain_rates.append(size / plain[0] / 1e9)
                touched.append(decoded[1] / (span // 10) * 1e6)
    finally:
        store.close()
    wall, cpu, rate = Spread(walls), Spread(cpus), Spread(rates)
    return [
        Row(
            "sequential read of a backlog, 1 KB",
            ">= 0.7 of os.preadv",
            f"{wall} by wall, {cpu} by CPU; {rate.median:.2f} GB/s of {Spread(plain_rates).median:.2f}",
            verdict(wall.median >= 0.7, wall.values[-1] >= 0.7),
            {
                "wall": wall.plain(),
                "cpu": cpu.plain(),
                "gb_per_s": rate.plain(),
                "plain_gb_per_s": Spread(plain_rates).plain(),
                "cpu_us_a_message_with_body_and_key": Spread(touched).plain(),
            },
        )
    ]


def _read_on(store: MessageStore, offset: int, stop: int) -> int:
    """Read a queue between two offsets; returns how many bytes."""
    size = 0
    while offset < stop:
        part = store.queries.read("orders", 0, offset, max_messages=4000, max_bytes=4 << 20)
        size += int(part.lengths.sum())
        offset = part.next_offset
    return size


def _touch(store: MessageStore, offset: int, stop: int) -> None:
    """Read as a consumer does."""
    while offset < stop:
        part = store.queries.read("orders", 0, offset)
        for record in part.records():
            _ = record.body, record.key
        offset = part.next_offset


def _read_plain(root: Path, where: int, size: int, buffer: bytearray) -> int:
    """Read so many bytes of the journal from an offset on; returns how many there were."""
    read = 0
    paths = sorted((root / "journal").iterdir())
    for path in paths:
        start, length = int(path.stem), path.stat().st_size
        if start + length <= where or read >= size:
            continue
        fd = os.open(path, os.O_RDONLY)
        at = max(0, where - start)
        while read < size and (got := os.preadv(fd, [buffer], at)):
            at += got
            read += got
        os.close(fd)
    return read


def lookup(bench: Bench) -> list[Row]:
    """Finding messages by key and by id, anywhere in the store, once the store is warm."""
    rng = random.Random(SEED)
    store = MessageStore(OsFiles(bench.large()))
    times: dict[str, list[float]] = {"key": [], "id": []}
    try:
        first, following = store.queries.bounds("orders", 0)
        chosen = [rng.randrange(first, following) for _ in range(2 * bench.sizes.lookups)]
        wanted = [_sequence_at(store, offset) for offset in chosen]
        rng.shuffle(wanted)  # so that none is found because it was just read
        for turn, (by_key, by_id) in enumerate(zip(wanted[::2], wanted[1::2], strict=True)):
            for kind, sequence in (("key", by_key), ("id", by_id)):
                message_id = MessageId(PRODUCER, sequence)
                began = time.perf_counter()
                found = (
                    store.queries.find(key=key_of(sequence))
                    if kind == "key"
                    else store.queries.find(message_id=message_id)
                )
                took = time.perf_counter() - began
                assert [f.message_id for f in found] == [message_id], (kind, sequence, found)
                if turn >= bench.sizes.lookups // 4:
                    times[kind].append(took * 1e3)
        files = len(list((bench.large() / "index").iterdir()))
        stored = store.queries.end - store.queries.start
    finally:
        store.close()
    rows = []
    for kind, values in times.items():
        spread = Spread(values)
        rows.append(
            Row(
                f"lookup by {kind} over {stored / 1e9:.1f} GB",
                "< 10 ms warm",
                f"p50 {spread.median:.2f} ms, p99 {spread.at(0.99):.2f} ms, max {spread.values[-1]:.2f} ms",
                verdict(spread.at(0.99) < 10, spread.median < 10),
                {"ms": spread.plain(), "p99_ms": spread.at(0.99), "index_files": files},
            )
        )
    return rows


def _sequence_at(store: MessageStore, offset: int) -> int:
    key = next(store.queries.read("orders", 0, offset, max_messages=1).records()).key
    assert key is not None
    return sequence_of(key)
