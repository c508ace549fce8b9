"""Rows of `bench.store` about appending: CPU and wall time, many queues, a backlog behind, durable appends."""

from __future__ import annotations

import os
import queue
import shutil
import time
from concurrent.futures import Future

import numpy as np

from bench.loads import Aside, Load, MeteredFiles, Spread, make_topics, queue_of
from bench.rows import SEED, STORED, Bench, Row, paired, timed, verdict
from dmq.settings import StoreSettings
from dmq.storage.files import OsFiles
from dmq.storage.group_commit import GroupCommit
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.store import MessageStore

__all__ = ["append_cpu", "append_wall", "backlog_behind", "flushed", "many_queues"]

UNIT_SIZES = (1, 8, 64, 500, 2000)
UNIT_BAR_US, RECORD_BAR_US = 60.0, 0.4


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
            before = store.queries.end
            items = load.again(batches)
            began, cpu = time.perf_counter(), time.thread_time()
            for batch in items:
                store.append([batch], STORED)
                aside.poll()
            wall, cpu = time.perf_counter() - began, time.thread_time() - cpu
            aside.drain()
            pad = bytes((store.queries.end - before) // len(items) - len(items[0].data))
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


def _timed_appends(store: MessageStore, groups: list[list[Batch]]) -> tuple[float, float]:
    def run() -> None:
        for items in groups:
            store.append(items, STORED)

    return timed(run)


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
        pair = paired(bench.rounds, one, many)
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
        pair = paired(
            bench.rounds,
            lambda: _timed_appends(small, [[batch] for batch in load.again(batches)]),
            lambda: _timed_appends(large, [[batch] for batch in load.again(batches)]),
        )
        stored = large.queries.end - large.queries.start
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
