"""What the message store costs, and whether it holds its bars.

    python -m bench.store [--small] [--only append,read] [--dir FOLDER] [--json FILE] [--rounds N]

Every figure stands beside a baseline from the same run, taken turn by turn, as a median with its range. The full run
builds a store of 10 GB with 10,000 queues and 5 million pending delays, and one of 1 GB; it needs about 15 GB of disk
under `--dir` and removes what it made. `--small` does the same with 200 MB, to see that all is well: its figures for
size-dependent rows prove nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.large import Sizes, ask, filled, open_after_kills
from bench.loads import PRODUCER, Aside, Load, MeteredFiles, Spread, key_of, machine, make_topics, queue_of, sequence_of
from dmq.model import MessageId
from dmq.settings import StoreSettings
from dmq.storage.appending import Batch, Placement
from dmq.storage.commit import GroupCommit
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from dmq.storage.visibility import Durability

SEED = 7
UNIT_SIZES = (1, 8, 64, 500, 2000)
UNIT_BAR_US, RECORD_BAR_US = 60.0, 0.4
STORED = Durability.STORED


class Row(NamedTuple):
    """One line of the result."""

    what: str
    bar: str
    reached: str
    verdict: str
    figures: dict[str, Any]


def verdict(median_holds: bool, spread_holds: bool | None = None) -> str:
    """`ok` if the median holds the bar, `spread` if only the better end of the spread does, `MISS` otherwise."""
    if median_holds:
        return "ok"
    return "spread" if spread_holds else "MISS"


class Bench:
    """What all rows share: the folder, the sizes, how often."""

    def __init__(self, folder: Path, sizes: Sizes, rounds: int) -> None:
        self.folder = folder
        self.sizes = sizes
        self.rounds = rounds
        self._large: Path | None = None

    def empty(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def large(self) -> Path:
        """The store of 10 GB, made when first asked for."""
        if self._large is None:
            self._large = filled(self.folder / "large", self.sizes.large_bytes, self.sizes, SEED)
        return self._large


# --- appending ------------------------------------------------------------------------------------------------------


def append_cpu(bench: Bench) -> list[Row]:
    """CPU of an append less that of its write call, for units of different sizes."""
    files = MeteredFiles(bench.empty("append"))
    taken: dict[int, list[float]] = {size: [] for size in UNIT_SIZES}
    checkpoints: list[float] = []
    many: list[float] = []
    load = Load(SEED)
    with MessageStore(files, checkpoint_inline=False) as store:
        make_topics(store, 0)

        def measure(batches: list[list[Batch]]) -> float:
            written, began = files.meter.cpu, time.thread_time()
            for items in batches:
                store.append(items, STORED)
            return (time.thread_time() - began - (files.meter.cpu - written)) / len(batches) * 1e6

        for turn in range(bench.rounds + 1):
            records = 0
            for size in UNIT_SIZES:
                units = [[batch] for batch in load.batches("orders", 0, max(20, min(300, 20_000 // size)), size)]
                records += len(units) * size
                cost = measure(units)
                if turn:  # the first turn warms up
                    taken[size].append(cost)
            records += 64 * 50
            cost = measure([load.batches("orders", 0, 64, 1) for _ in range(50)]) / 64
            written, began = files.meter.cpu, time.thread_time()
            store.checkpoint()
            checkpoint = (time.thread_time() - began - (files.meter.cpu - written)) / records * 1e6
            if turn:
                many.append(cost)
                checkpoints.append(checkpoint)
    shutil.rmtree(bench.folder / "append")
    points = {size: Spread(values) for size, values in taken.items()}
    unit_us, record_us = _line([points[size].median for size in UNIT_SIZES])
    best_unit_us, best_record_us = _line([points[size].values[0] for size in UNIT_SIZES])
    more = Spread(checkpoints)

    def worst(share: float) -> float:
        """The size that comes closest to the bar, or goes farthest beyond it."""
        return max(points[size].at(share) / (UNIT_BAR_US + RECORD_BAR_US * size) for size in UNIT_SIZES)

    shown = ", ".join(f"{size}: {points[size].median:.0f} ({points[size].values[0]:.0f})" for size in UNIT_SIZES)
    return [
        Row(
            "append, CPU beyond the write call",
            f"<= {UNIT_BAR_US:.0f} us a unit + {RECORD_BAR_US} us a record",
            f"{unit_us:.0f} + {record_us:.3f} us, at best {best_unit_us:.0f} + {best_record_us:.3f}; "
            f"the worst size at {worst(0.5):.2f} of the bar, at best {worst(0):.2f}; "
            f"us a unit by records, median (best): {shown}; checkpoints add {more.median:.2f} us a record",
            verdict(
                unit_us <= UNIT_BAR_US and record_us <= RECORD_BAR_US and worst(0.5) <= 1,
                best_unit_us <= UNIT_BAR_US and best_record_us <= RECORD_BAR_US and worst(0) <= 1,
            ),
            {
                "us_a_unit": {str(size): point.plain() for size, point in points.items()},
                "fit_of_medians": {"us_a_unit": unit_us, "us_a_record": record_us},
                "fit_of_best": {"us_a_unit": best_unit_us, "us_a_record": best_record_us},
                "us_a_batch_of_one_in_units_of_64": Spread(many).plain(),
                "checkpoint_us_a_record": more.plain(),
            },
        )
    ]


def _line(costs: list[float]) -> tuple[float, float]:
    """Cost a unit and cost a record, of the line that fits the costs of the unit sizes best."""
    slope, intercept = np.polyfit(UNIT_SIZES, costs, 1).tolist()
    return intercept, slope


def append_wall(bench: Bench) -> list[Row]:
    """Messages a second, checkpoints included and taken aside, beside a plain write of the same bytes."""
    load = Load(SEED)
    count = bench.sizes.messages
    batches = load.batches("orders", 0, count // 500, 500)
    rates: list[float] = []
    plain_rates: list[float] = []
    ratios: list[float] = []
    cpus: list[float] = []
    files = OsFiles(bench.empty("wall"))
    plain_path = bench.folder / "plain"
    store = MessageStore(files, StoreSettings(retention_bytes=1 << 30), checkpoint_inline=False)
    make_topics(store, 0)
    aside = Aside(store)
    try:
        for turn in range(bench.rounds + 1):
            before = store.end
            items = load.again(batches)
            began, cpu = time.perf_counter(), time.thread_time()
            for batch in items:
                store.append([batch], STORED)
                aside.poll()
            wall, cpu = time.perf_counter() - began, time.thread_time() - cpu
            aside.drain()
            pad = bytes((store.end - before) // len(items) - len(items[0].data))
            fd = os.open(plain_path, os.O_RDWR | os.O_CREAT)
            began = time.perf_counter()
            at = 0
            for batch in items:
                at += os.pwritev(fd, (pad, batch.data), at)
            plain = time.perf_counter() - began
            os.close(fd)
            plain_path.unlink()
            store.retain()
            if turn:
                rates.append(count / wall)
                plain_rates.append(count / plain)
                ratios.append(plain / wall)
                cpus.append(cpu / count * 1e6)
    finally:
        aside.close()
        store.close()
        shutil.rmtree(bench.folder / "wall")
    rate, plain_rate, ratio = Spread(rates), Spread(plain_rates), Spread(ratios)
    absolute = plain_rate.median >= 2_000_000
    bar = ">= 1,000,000 msg/s" if absolute else ">= 0.6 of the plain write"
    return [
        Row(
            "append 200 B, 500 a batch, stored, wall",
            bar,
            f"{rate.median / 1e6:.2f} M msg/s ({rate.values[0] / 1e6:.2f}-{rate.values[-1] / 1e6:.2f}), "
            f"{ratio} of the plain write, which does {plain_rate.median / 1e6:.2f} M",
            verdict(rate.median >= 1_000_000, rate.values[-1] >= 1_000_000)
            if absolute
            else verdict(ratio.median >= 0.6, ratio.values[-1] >= 0.6),
            {
                "msg_per_s": rate.plain(),
                "plain_msg_per_s": plain_rate.plain(),
                "ratio": ratio.plain(),
                "cpu_us_a_message": Spread(cpus).plain(),
                "checkpoints": aside.taken,
            },
        )
    ]


class _Pair(NamedTuple):
    wall: Spread
    cpu: Spread


def _paired(rounds: int, base: Callable[[], tuple[float, float]], other: Callable[[], tuple[float, float]]) -> _Pair:
    """How fast `other` is, as a share of `base`: by wall and by CPU time, over interleaved pairs."""
    walls, cpus = [], []
    for turn in range(rounds + 1):
        # Whoever comes second finds a busier disk, so they take turns at that.
        pair = (base(), other()) if turn % 2 else (other(), base())[::-1]
        if turn:
            walls.append(pair[0][0] / pair[1][0])
            cpus.append(pair[0][1] / pair[1][1])
    return _Pair(Spread(walls), Spread(cpus))


def _timed_appends(store: MessageStore, groups: list[list[Batch]]) -> tuple[float, float]:
    def run() -> None:
        for items in groups:
            store.append(items, STORED)

    return _timed(run)


def many_queues(bench: Bench) -> list[Row]:
    """Batches of 10 in units of 50, all to one queue or each to the next of thousands; inline checkpoints."""
    count = bench.sizes.messages // 2
    stores = []
    loads = (Load(SEED), Load(SEED))
    for name in ("one", "many"):
        store = MessageStore(OsFiles(bench.empty(name)))
        make_topics(store, bench.sizes.queues)
        stores.append(store)
    at = 0

    def one() -> tuple[float, float]:
        batches = [loads[0].batch(*queue_of(0), 10) for _ in range(count // 10)]
        return _timed_appends(stores[0], [batches[i : i + 50] for i in range(0, len(batches), 50)])

    def many() -> tuple[float, float]:
        nonlocal at
        batches = [loads[1].batch(*queue_of((at + i) % bench.sizes.queues), 10) for i in range(count // 10)]
        at += len(batches)
        return _timed_appends(stores[1], [batches[i : i + 50] for i in range(0, len(batches), 50)])

    try:
        pair = _paired(bench.rounds, one, many)
    finally:
        for name, store in zip(("one", "many"), stores, strict=True):
            store.close()
            shutil.rmtree(bench.folder / name)
    return [
        Row(
            f"{bench.sizes.queues:,} queues round-robin, against one",
            ">= 0.8, checkpoints included",
            f"{pair.wall} by wall, {pair.cpu} by CPU",
            verdict(pair.wall.median >= 0.8, pair.wall.values[-1] >= 0.8),
            {"wall": pair.wall.plain(), "cpu": pair.cpu.plain()},
        )
    ]


def backlog_behind(bench: Bench) -> list[Row]:
    """Appends to a store of 10 GB, beside the same to an empty one; inline checkpoints."""
    count = bench.sizes.messages // 2
    load = Load(SEED, first_sequence=1 << 61)
    batches = load.batches("orders", 1, count // 500, 500)
    large = MessageStore(OsFiles(bench.large()))
    small = MessageStore(OsFiles(bench.empty("empty")))
    make_topics(small, 0)
    try:
        pair = _paired(
            bench.rounds,
            lambda: _timed_appends(small, [[batch] for batch in load.again(batches)]),
            lambda: _timed_appends(large, [[batch] for batch in load.again(batches)]),
        )
        stored = large.end - large.start
    finally:
        large.close()
        small.close()
        shutil.rmtree(bench.folder / "empty")
    return [
        Row(
            f"{stored / 1e9:.1f} GB backlog behind, against an empty store",
            ">= 0.95",
            f"{pair.wall} by wall, {pair.cpu} by CPU",
            verdict(pair.wall.median >= 0.95, pair.wall.values[-1] >= 0.95),
            {"wall": pair.wall.plain(), "cpu": pair.cpu.plain(), "stored_bytes": stored},
        )
    ]


def flushed(bench: Bench) -> list[Row]:
    """Group commit with 64 batches of 10 waiting at any time, each replaced as soon as it is done."""
    files = MeteredFiles(bench.empty("flushed"))
    load = Load(SEED)
    waits: list[float] = []
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    total = bench.sizes.flushes
    with MessageStore(files) as store:
        make_topics(store, 0)
        batches = load.batches("orders", 0, total, 10)
        commit = GroupCommit(store)

        def submit(batch: Batch) -> None:
            began = time.perf_counter()

            def finished(future: Future[Placement]) -> None:
                waits.append(time.perf_counter() - began)
                done.put(future.result().count)

            commit.submit(batch).add_done_callback(finished)

        files.meter.syncs.clear()
        for batch in batches[:64]:
            submit(batch)
        for batch in batches[64:]:
            done.get()
            submit(batch)
        for _ in range(64):
            done.get()
        commit.close()
        syncs = Spread(files.meter.syncs)
        flushes = len(files.meter.syncs)
    shutil.rmtree(bench.folder / "flushed")
    wait = Spread(waits[64:])
    return [
        Row(
            "flushed, 64 batches waiting: fdatasyncs",
            "<= 1/10 of the batches",
            f"{flushes} for {total} batches (1/{total / flushes:.0f})",
            verdict(flushes * 10 <= total),
            {"fdatasyncs": flushes, "batches": total},
        ),
        Row(
            "flushed, 64 batches waiting: p50 wait",
            "<= 2 fdatasyncs",
            f"{wait.median * 1e3:.2f} ms, {wait.median / syncs.median:.1f} of {syncs.median * 1e3:.2f} ms "
            f"(p99 {wait.at(0.99) * 1e3:.2f} ms)",
            verdict(wait.median <= 2 * syncs.median),
            {"wait_s": wait.plain(), "fdatasync_s": syncs.plain()},
        ),
    ]


# --- reading --------------------------------------------------------------------------------------------------------


def sequential_read(bench: Bench) -> list[Row]:
    """Reading 1 KB messages in order with `read`, 4 MiB at a time, beside reading the same file with `os.preadv`.

    Each round reads another part of the backlog, in the page cache but not in the store's, so all is verified.
    """
    store = MessageStore(OsFiles(bench.large()))
    walls, cpus, rates, plain_rates, touched = [], [], [], [], []
    buffer = bytearray(1 << 20)
    first, following = store.bounds("orders", 0)
    span = min((following - first) // 2, bench.sizes.read_messages)
    try:
        for turn in range(bench.rounds + 1):
            offset = first + turn * span % (following - first - span)
            where = next(store.read("orders", 0, offset, max_messages=1).records()).journal_offset
            size = _read_on(store, offset, offset + span)  # warms the page cache
            taken = _timed(partial(_read_on, store, offset, offset + span))
            plain = _timed(partial(_read_plain, bench.large(), where, size, buffer))
            decoded = _timed(partial(_touch, store, offset, offset + span // 10))
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


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    began, cpu = time.perf_counter(), time.thread_time()
    run()
    return time.perf_counter() - began, time.thread_time() - cpu


def _read_on(store: MessageStore, offset: int, stop: int) -> int:
    """Read a queue between two offsets; returns how many bytes."""
    size = 0
    while offset < stop:
        part = store.read("orders", 0, offset, max_messages=4000, max_bytes=4 << 20)
        size += int(part.lengths.sum())
        offset = part.next_offset
    return size


def _touch(store: MessageStore, offset: int, stop: int) -> None:
    """Read as a consumer does."""
    while offset < stop:
        part = store.read("orders", 0, offset)
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
        first, following = store.bounds("orders", 0)
        chosen = [rng.randrange(first, following) for _ in range(2 * bench.sizes.lookups)]
        wanted = [_sequence_at(store, offset) for offset in chosen]
        rng.shuffle(wanted)  # so that none is found because it was just read
        for turn, (by_key, by_id) in enumerate(zip(wanted[::2], wanted[1::2], strict=True)):
            for kind, sequence in (("key", by_key), ("id", by_id)):
                message_id = MessageId(PRODUCER, sequence)
                began = time.perf_counter()
                found = store.find(key=key_of(sequence)) if kind == "key" else store.find(message_id=message_id)
                took = time.perf_counter() - began
                assert [f.message_id for f in found] == [message_id], (kind, sequence, found)
                if turn >= bench.sizes.lookups // 4:
                    times[kind].append(took * 1e3)
        files = len(list((bench.large() / "index").iterdir()))
        stored = store.end - store.start
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
    key = next(store.read("orders", 0, offset, max_messages=1).records()).key
    assert key is not None
    return sequence_of(key)


# --- opening and memory ---------------------------------------------------------------------------------------------


def opening(bench: Bench) -> list[Row]:
    """Opening after kill -9 just before a checkpoint, with 10 GB stored and with 1 GB, by turns."""
    large = bench.large()
    small = filled(bench.folder / "small", bench.sizes.small_bytes, bench.sizes, SEED)
    taken = open_after_kills({"large": large, "small": small}, bench.rounds, SEED)
    shutil.rmtree(small)
    wall = {name: Spread([opened["wall"] for opened in opens]) for name, opens in taken.items()}
    ratio = Spread([a["wall"] / b["wall"] for a, b in zip(taken["large"], taken["small"], strict=True)])
    cpu = Spread([a["cpu"] / b["cpu"] for a, b in zip(taken["large"], taken["small"], strict=True)])
    best = wall["large"].values[0] / wall["small"].values[0]
    replayed = Spread([opened["left"] for opened in taken["large"]])
    figures = {"large_s": wall["large"].plain(), "small_s": wall["small"].plain(), "replayed_bytes": replayed.plain()}
    return [
        Row(
            f"open after kill -9 with {taken['large'][-1]['stored'] / 1e9:.1f} GB",
            "< 2 s",
            f"{wall['large']} s, {replayed.median / 1e6:.0f} MB since the checkpoint",
            verdict(wall["large"].values[-1] < 2, wall["large"].median < 2),
            figures,
        ),
        Row(
            f"the same, against {taken['small'][-1]['stored'] / 1e9:.1f} GB",
            "<= 1.3",
            f"{ratio} by wall, {cpu} by CPU; the best of each {best:.2f}",
            verdict(ratio.median <= 1.3, ratio.values[0] <= 1.3),
            {"wall": ratio.plain(), "cpu": cpu.plain(), "best": best},
        ),
    ]


def memory(bench: Bench) -> list[Row]:
    """A fresh process that opens the large store, reads, appends and takes delays."""
    used = ask("memory", bench.large(), SEED, queues=bench.sizes.queues)
    return [
        Row(
            f"memory: {used['stored'] / 1e9:.1f} GB, {used['queues']:,} queues, {used['delays']:,} delays",
            "< 200 MB RSS",
            f"{used['rss_mb']:.0f} MB, at most {used['peak_mb']:.0f} MB ({used['imports_mb']:.0f} MB are imports, "
            f"{used['opened_mb']:.0f} MB after opening)",
            verdict(used["peak_mb"] < 200),
            used,
        )
    ]


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "append": append_cpu,
    "wall": append_wall,
    "queues": many_queues,
    "flushed": flushed,
    "open": opening,
    "memory": memory,
    "lookup": lookup,
    "read": sequential_read,
    "backlog": backlog_behind,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="200 MB instead of 10 GB: a quick check")
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--dir", type=Path, help="where to put the stores; a temporary folder if left out")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved pairs of each comparison")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="dmq-bench-", dir=options.dir))
    sizes = Sizes.small() if options.small else Sizes()
    rows: list[Row] = []
    try:
        bench = Bench(folder, sizes, options.rounds)
        for name in (name for name in ROWS if name in names):
            for row in ROWS[name](bench):
                rows.append(row)
                print(f"{row.verdict:6} {row.what} | {row.bar} | {row.reached}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        settings = {"seed": SEED, "rounds": options.rounds, "small": options.small, "sizes": msgspec.to_builtins(sizes)}
        result = {**machine(), **settings, "load_average": os.getloadavg(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
