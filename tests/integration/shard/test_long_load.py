"""Replicated load that goes on and on: segments go, checkpoints follow, and no member needs more and more of anything.

`./scripts/soak` does it for ten minutes and more; `./scripts/test` goes over the retention a few times.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import dmq
from tests.integration.shard.processes import SETTINGS, ShardProcesses
from tests.patience import eventually
from tests.sampling import SEED, sample_size

PATIENCE = 120.0
MESSAGES = 2_000  # of a round
SEGMENTS_MAX = 10  # the four that retention keeps, the one that is written, and those that wait for a checkpoint
GROWTH_MB = 48.0  # of a process: caches and buffers that fill
PEAK_BYTES = 64 << 20  # of a member's files while messages come, or an eighth of all that was written
LOOK_ROUNDS = 100
FOLDERS_OF_FILES = ("journal", "queue", "runs", "index", "offset", "delay")


@dataclass(frozen=True, slots=True)
class Needs:
    """What one member needs at a moment."""

    memory_mb: float
    descriptors: int
    files: int
    disk_bytes: int


def needs_of(pid: int, folder: Path) -> Needs:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = []
    for name in FOLDERS_OF_FILES:
        for path in (folder / name).rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue  # retention or a merge took it meanwhile
    return Needs(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), len(sizes), sum(sizes))


def segments_of(folder: Path) -> list[int]:
    return [int(segment.stem) for segment in (folder / "journal").glob("*.journal")]


def is_small(folder: Path) -> bool:
    return len(segments_of(folder)) <= SEGMENTS_MAX


def is_trimmed(folder: Path) -> bool:
    return min(segments_of(folder)) > 0 and is_small(folder)


def rest(shard: ShardProcesses) -> list[Needs]:
    """What the members need once retention has caught up: under load, segments wait for the next checkpoint."""
    for folder in shard.folders:
        eventually(partial(is_small, folder), "segments that were consumed stay")
    return [needs_of(member.pid, folder) for member, folder in zip(shard.members, shard.folders, strict=True)]


def orders(rng: random.Random, number: int) -> list[dmq.Message]:
    def order(at: int) -> bytes:
        items = [{"sku": f"A{rng.randrange(10**6):06}", "quantity": rng.randrange(1, 9)} for _ in range(4)]
        return json.dumps({"order": at, "customer": rng.randrange(10**5), "items": items}).encode()

    first = number * MESSAGES
    return [dmq.Message(order(at), key=f"o-{at}") for at in range(first, first + MESSAGES)]


@pytest.mark.sampled
def test_no_member_grows_under_replicated_load_that_goes_on(tmp_path: Path) -> None:
    rounds = sample_size(share=24, whole=15_000)
    rng = random.Random(SEED)
    settings = (*SETTINGS, "store.retention_bytes=4MiB")
    with (
        ShardProcesses(tmp_path, settings=settings) as shard,
        dmq.connect(shard.url, app="load", timeout=PATIENCE) as client,
        client.producer(timeout=PATIENCE) as producer,
    ):
        client.admin.create_topic("orders", queues=4)
        client.admin.create_group("billing", "orders")
        pids = [member.pid for member in shard.members]
        seen: list[list[Needs]] = []
        peak_bytes = 0
        with client.consumer("orders", group="billing") as consumer:
            for number in range(rounds):
                producer.send_many("orders", orders(rng, number), durability="replicated")
                left = MESSAGES
                while left:
                    batch = consumer.pull(max_messages=left, wait=PATIENCE)
                    assert batch, "messages that were acknowledged do not come"
                    consumer.ack(batch)
                    left -= len(batch)
                if number % LOOK_ROUNDS == 0:
                    needs = [needs_of(pid, folder) for pid, folder in zip(pids, shard.folders, strict=True)]
                    peak_bytes = max(peak_bytes, *(one.disk_bytes for one in needs))
                if (number + 1) % (rounds // 3) == 0:
                    seen.append(rest(shard))
        assert [member.pid for member in shard.members] == pids, "a member died"
        shard.until_whole()
        for folder in shard.folders:
            eventually(partial(is_trimmed, folder), "segments that were consumed stay")
            assert not [*(folder / "salvage").glob("*")], "something was cut"
        for number, (early, late) in enumerate(zip(seen[0], seen[-1], strict=True)):
            what = f"DMQ_SEED={SEED}, b{number}: {early} after a third, {late} at the end"
            assert late.memory_mb <= early.memory_mb + GROWTH_MB, what
            assert late.descriptors <= early.descriptors + 16, what
            assert late.files <= 2 * early.files + 16, what
            assert late.disk_bytes <= 2 * early.disk_bytes + (8 << 20), what
        written = max(segments_of(shard.folders[0]))
        assert peak_bytes <= max(PEAK_BYTES, written // 8), f"{peak_bytes} of {written} bytes lay there at once"
        print(f"DMQ_SEED={SEED}: {rounds} rounds, {written} bytes, at most {peak_bytes} at once; by thirds: {seen}")
        shard.check_equal()
