"""The spool on a disk that does as a test says."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from dmq.client.spool.parcel import Head
from dmq.client.spool.spool import BYTES_MIN, Spool
from dmq.errors import (
    Damaged,
    DirectoryInUse,
    DiskFull,
    DMQError,
    InvalidSettings,
    StoreClosed,
    StoreFailed,
    WrongFormat,
)
from dmq.model import TopicConfig
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import eventually

HEAD = Head("orders", 1, 3, 0, 2)


def opened(files: MemoryFiles, bytes_max: int = 1 << 20) -> Spool:
    return Spool(files, bytes_max, FakeClock())


def append(spool: Spool, body: bytes = b"x" * 100, head: Head = HEAD) -> int:
    """Add a batch, wait until it is kept, and return its number."""
    ended = threading.Event()
    outcome: list[tuple[int, DMQError | None]] = []

    def on_kept(offset: int, error: DMQError | None) -> None:
        outcome.append((offset, error))
        ended.set()

    spool.append(head, (body,), on_kept)
    assert ended.wait(20)
    ((offset, error),) = outcome
    if error is not None:
        raise error
    return offset


def bodies(spool: Spool, start: int = 0, stop: int = 1 << 30) -> dict[int, bytes]:
    found = {}
    while start < stop:
        kept, after = spool.read(start, stop, 1 << 20)
        found.update({one.offset: b"".join(one.body) for one in kept})
        if after == start:
            break
        start = after
    return found


def do(spool: Spool, function: Callable[[], None]) -> None:
    """Have something done, and wait until the spool's thread has done it."""
    function()
    spool.flush()


def test_what_was_added_can_be_read_as_it_was() -> None:
    spool = opened(MemoryFiles())
    assert append(spool, b"first") == 0
    assert append(spool, b"second", Head("other", 2, 1, 1, 3, True, True)) == 1
    (first, second), _ = spool.read(0, 2, 1 << 20)
    assert (first.head, b"".join(first.body)) == (HEAD, b"first")
    assert (second.head, b"".join(second.body)) == (Head("other", 2, 1, 1, 3, True, True), b"second")
    spool.close()


def test_ids_go_on_where_they_were() -> None:
    files = MemoryFiles()
    spool = opened(files)
    producer_id = spool.producer_id
    assert [append(spool) for _ in range(3)] == [0, 1, 2]
    spool.close()
    spool = opened(files)
    assert spool.producer_id == producer_id != 0
    assert spool.next == append(spool) == 3
    assert spool.first_sequence(3) == 3 * 4096
    spool.close()


def test_ids_go_on_after_everything_was_settled_and_dropped() -> None:
    files = MemoryFiles()
    spool = opened(files, BYTES_MIN)
    for _ in range(40):
        offset = append(spool, b"y" * 10_000)
        do(spool, lambda offset=offset: spool.settle(offset))  # type: ignore[misc]
    eventually(lambda: len(files.listdir("journal")) <= 2)
    spool.close()
    spool = opened(files, BYTES_MIN)
    assert (spool.floor, append(spool)) == (40, 40)
    spool.close()


def test_what_is_settled_is_not_read_again() -> None:
    files = MemoryFiles()
    spool = opened(files)
    for _ in range(6):
        append(spool)
    for offset in (4, 0, 1):
        do(spool, lambda offset=offset: spool.settle(offset))  # type: ignore[misc]
    assert bodies(spool, 0, 6).keys() == {2, 3, 5}
    assert spool.floor == 2
    spool.close()
    spool = opened(files)
    assert bodies(spool, spool.floor, spool.next).keys() == {2, 3, 5}
    spool.close()


def test_what_was_settled_is_proven_by_the_next_flush() -> None:
    spool = opened(MemoryFiles())
    proven: list[int] = []
    spool.on_proven = proven.extend
    append(spool)
    append(spool)
    spool.settle(0)
    spool.read(0, 2, 1000)  # the spool's thread has come to it
    assert proven == []
    append(spool)
    spool.flush()
    assert proven == [0]
    spool.close()


def test_room_is_what_lies_between_the_oldest_unsettled_and_the_end() -> None:
    spool = opened(MemoryFiles())
    assert spool.used == 0
    append(spool, b"x" * 1000)
    one = spool.used
    assert one > 1000
    append(spool, b"x" * 1000)
    assert spool.used > 2000
    do(spool, lambda: spool.settle(1))
    assert spool.used > 2000
    do(spool, lambda: spool.settle(0))
    assert spool.used == 0
    append(spool, b"x" * 1000)
    assert spool.used == one
    spool.close()


def test_a_power_cut_takes_nothing_that_was_kept() -> None:
    for seed in range(30):
        files = MemoryFiles()
        spool = opened(files)
        kept = {append(spool, b"%d" % number): b"%d" % number for number in range(seed % 7 + 1)}
        spool.settle(0)
        after = opened(files.copy().crash(random.Random(seed)))
        found = bodies(after, after.floor, after.next)
        assert {offset: body for offset, body in kept.items() if offset} == {
            offset: body for offset, body in found.items() if offset
        }
        assert append(after) == len(kept)
        after.close()
        spool.close()


def test_a_full_disk_refuses_and_leaves_no_trace() -> None:
    files = MemoryFiles(capacity_bytes=200_000)
    spool = opened(files)
    append(spool, b"small")
    with pytest.raises(DiskFull):
        append(spool, b"x" * 300_000)
    files.capacity_bytes = None
    assert append(spool, b"again") == 1
    assert bodies(spool, 0, 2) == {0: b"small", 1: b"again"}
    spool.close()
    spool = opened(files)
    assert bodies(spool, 0, 2) == {0: b"small", 1: b"again"}
    spool.close()


def test_what_a_full_disk_kept_from_being_settled_is_settled_later() -> None:
    files = MemoryFiles()
    spool = opened(files)
    append(spool)
    files.capacity_bytes = 0
    spool.settle(0)
    spool.read(0, 1, 1000)
    assert spool.floor == 0
    files.capacity_bytes = None
    do(spool, spool.settle_again)
    assert spool.floor == 1
    spool.close()


def test_a_spool_belongs_to_one_producer() -> None:
    files = MemoryFiles()
    spool = opened(files)
    with pytest.raises(DirectoryInUse, match=r"in use by another producer .* name another directory"):
        opened(files)
    spool.close()
    opened(files).close()


def test_a_broker_s_data_is_no_spool() -> None:
    files = MemoryFiles()
    with MessageStore(files) as store:
        store.create_topic("orders")
    with pytest.raises(WrongFormat, match="broker's data"):
        opened(files)
    with MessageStore(files) as store:
        assert store.queries.topic("orders").config.queues == 4


def test_a_damaged_spool_is_not_used() -> None:
    files = MemoryFiles()
    spool = opened(files)
    for _ in range(3):
        append(spool, b"z" * 1000)
    spool.close()
    (name,) = files.listdir("journal")
    files.unlink("checkpoint")
    file = files.open(f"journal/{name}", write=True)
    where = file.read(0, file.size()).index(b"z" * 1000)
    file.write(where, [b"!"])
    file.close()
    with pytest.raises(Damaged, match="move it away"):
        opened(files)


def test_a_closed_spool_takes_nothing() -> None:
    spool = opened(MemoryFiles())
    spool.close()
    with pytest.raises(StoreClosed):
        spool.append(HEAD, (b"x",), lambda offset, error: None)
    spool.settle(0)
    spool.close()


def test_topics_are_remembered() -> None:
    files = MemoryFiles()
    spool = opened(files)
    spool.remember("orders", TopicConfig(queues=8))
    spool.remember("urgent", TopicConfig(queues=10, priority=True))
    spool.remember("orders", TopicConfig(queues=3))
    spool.flush()
    spool.close()
    spool = opened(files)
    assert spool.topics() == {"orders": TopicConfig(queues=3), "urgent": TopicConfig(queues=10, priority=True)}
    spool.close()


def test_a_failed_flush_is_told() -> None:
    files = MemoryFiles()
    spool = opened(files)
    append(spool)
    files.fail("sync", lambda path, number: path.startswith("journal/"))
    with pytest.raises(StoreFailed):
        append(spool)
    with pytest.raises(StoreFailed):
        append(spool)
    spool.close()


def test_a_spool_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="spool_bytes_max"):
        opened(MemoryFiles(), 1000)
