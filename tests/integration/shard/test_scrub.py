"""A shard of three real processes: what turned in a cold segment, on a follower's disk and on the leader's, is mended
before anybody reads it. (R-12)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
from tests.integration.broker.test_scrub import turn_bit
from tests.integration.shard.processes import SETTINGS, ShardProcesses
from tests.patience import eventually

pytestmark = pytest.mark.uncounted

QUICK = (*SETTINGS, "store.segment_bytes=256KiB", "store.scrub_hours=0.0008")


def journals(shard: ShardProcesses) -> list[dict[str, bytes]]:
    return [
        {path.name: path.read_bytes() for path in sorted((folder / "journal").glob("*.journal"))}
        for folder in shard.folders
    ]


def is_alike(shard: ShardProcesses) -> bool:
    first, *others = journals(shard)
    return all(other == first for other in others)


def test_a_cold_segment_of_a_follower_and_of_the_leader_is_mended_and_all_journals_are_equal(tmp_path: Path) -> None:
    with ShardProcesses(tmp_path, settings=QUICK) as shard:
        with dmq.connect(shard.url, timeout=30) as client:
            client.admin.create_topic("orders", queues=1)
            producer = client.producer(compression="none", timeout=30)
            for number in range(80):
                body = b"order %02d " % number + bytes(range(256)) * 60
                producer.send("orders", body, durability="replicated")
        shard.until(lambda found: all(one.end and one.end == one.committed for one in found.members), "not at rest")
        eventually(lambda: is_alike(shard))
        leader = shard.leader()
        epoch = epoch_of(shard)
        for number in sorted(range(3), key=lambda one: one == leader):
            before = journals(shard)[number]
            segment, _ = turn_bit(shard.folders[number], b"order 05")
            whole = before[segment.name]
            assert segment.read_bytes() != whole
            eventually(is_whole(segment, whole))
            assert list((shard.folders[number] / "salvage").glob("*.damaged")), "what stood there is kept"
        eventually(lambda: is_alike(shard))
        shard.until_whole()
        assert epoch_of(shard) == epoch, "nobody else had to lead for that"
        shard.until(lambda found: not any(one.damaged for one in found.members), "damage is left")


def is_whole(segment: Path, whole: bytes) -> Callable[[], bool]:
    return lambda: segment.read_bytes() == whole


def epoch_of(shard: ShardProcesses) -> int:
    with dmq.connect(shard.url, timeout=30) as client:
        return client.admin.shard().epoch
