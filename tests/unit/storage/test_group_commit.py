"""Group commit: many threads, one owner; everybody gets the answer to their own batch."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dmq.errors import (
    DiskFull,
    DMQError,
    LimitReached,
    NotEnoughReplicas,
    SequenceConflict,
    StoreClosed,
    StoreFailed,
    UnknownTopic,
)
from dmq.model import Durability, Message, TopicConfig
from dmq.records.encoder import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.group_commit import GroupCommit
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import PATIENCE_S

STORED, FLUSHED = Durability.STORED, Durability.FLUSHED
SETTINGS = StoreSettings(segment_bytes=1 << 20, unit_bytes_max=8 << 10, body_bytes_max=4 << 10)


def batch(
    body: bytes, queue: int = 0, *, topic: str = "t", producer: int = 0, sequence: int = 0, count: int = 1
) -> Batch:
    made = encode_batch(topic, "app", [Message(body)] * count, sent_at_ms=1)
    return Batch(
        topic=topic,
        queue=queue,
        data=bytes(made.data),
        lengths=made.lengths,
        producer_id=producer,
        first_sequence=sequence,
    )


class Bench:
    """A store in memory and its owner."""

    def __init__(self, *, waiting_bytes_max: int = 64 << 20) -> None:
        self.files = MemoryFiles()
        self.store = MessageStore(self.files, SETTINGS, FakeClock())
        self.store.create_topic("t", TopicConfig(queues=4))
        self.commit = GroupCommit(self.store, waiting_bytes_max=waiting_bytes_max)

    @contextmanager
    def owner_busy(self) -> Iterator[None]:
        """Meanwhile the owner waits for the disk to flush a batch, so that what is submitted gathers."""
        reached, release = threading.Event(), threading.Event()

        def wait(path: str, number: int) -> bool:
            reached.set()
            assert release.wait(30)
            return False

        fault = self.files.fail("sync", wait)
        first = self.commit.submit(batch(b"first", 3))
        assert reached.wait(30)
        try:
            yield
        finally:
            release.set()
            first.result(30)
            self.files.heal(fault)

    def bodies(self, queue: int = 0) -> list[bytes]:
        return [record.body for record in self.store.queries.read("t", queue, 0, max_messages=100_000).records()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.commit.close()
    bench.store.close()


def test_batches_of_many_threads_are_stored_once_each_in_the_order_of_their_thread(bench: Bench) -> None:
    def send(thread: int) -> list[int]:
        places = []
        for number in range(50):
            durability = FLUSHED if (thread + number) % 3 else STORED
            sent = batch(b"%d-%d" % (thread, number), thread % 4, producer=thread + 1, sequence=number)
            places.append(bench.commit.submit(sent, durability).result(30).first_offset)
        return places

    with ThreadPoolExecutor(16) as threads:
        offsets = list(threads.map(send, range(16)))
    for queue in range(4):
        got = bench.bodies(queue)
        assert len(got) == 200
        for thread in range(queue, 16, 4):
            assert [got[offset] for offset in offsets[thread]] == [b"%d-%d" % (thread, n) for n in range(50)]


def test_what_gathers_during_a_flush_goes_out_with_one_flush(bench: Bench) -> None:
    with bench.owner_busy():
        before = bench.commit.flushes
        futures = [bench.commit.submit(batch(b"%d" % n)) for n in range(64)]
    for future in futures:
        future.result(30)
    assert bench.commit.flushes == before + 1
    assert bench.bodies() == [b"%d" % n for n in range(64)]


def test_a_future_is_done_only_when_its_batch_can_be_read(bench: Bench) -> None:
    with bench.owner_busy():
        future = bench.commit.submit(batch(b"x"))
        assert not future.done()
    place = future.result(30)
    assert bench.store.queries.visible >= place.unit_end
    assert bench.store.queries.flushed >= place.unit_end


def test_a_stored_batch_does_not_overtake_a_flushed_one_for_the_same_queue(bench: Bench) -> None:
    with bench.owner_busy():
        futures = [
            bench.commit.submit(batch(b"a", producer=9, sequence=1), FLUSHED),
            bench.commit.submit(batch(b"b", producer=9, sequence=2), STORED),
            bench.commit.submit(batch(b"c", 1), STORED),
        ]
    assert [future.result(30).first_offset for future in futures] == [0, 1, 0]
    assert bench.bodies() == [b"a", b"b"]


def test_the_error_of_one_batch_does_not_fail_the_others(bench: Bench) -> None:
    bench.commit.submit(batch(b"old", 1, producer=5, sequence=10)).result(30)
    with bench.owner_busy():
        good = [bench.commit.submit(batch(b"%d" % n)) for n in range(3)]
        unknown = bench.commit.submit(batch(b"?", topic="nosuch"))
        conflict = bench.commit.submit(batch(b"?", 1, producer=5, sequence=3))
        good += [bench.commit.submit(batch(b"%d" % n)) for n in range(3, 6)]
    with pytest.raises(UnknownTopic):
        unknown.result(30)
    with pytest.raises(SequenceConflict):
        conflict.result(30)
    assert [future.result(30).first_offset for future in good] == list(range(6))
    assert bench.bodies() == [b"%d" % n for n in range(6)]


@pytest.mark.parametrize("durability", [STORED, FLUSHED])
def test_a_disk_that_fills_up_half_way_fails_what_was_not_written_and_writes_nothing_twice(
    bench: Bench, durability: Durability
) -> None:
    large = b"x" * 3000  # two fit into a unit
    with bench.owner_busy():
        futures = [bench.commit.submit(batch(b"%d" % n + large), durability) for n in range(8)]
        bench.files.capacity_bytes = sum(bench.files.paths().values()) + 15_000
    results = [future.exception(30) or future.result().first_offset for future in futures]
    written = [result for result in results if isinstance(result, int)]
    assert written == list(range(len(written)))
    assert 0 < len(written) < 8
    assert all(isinstance(result, DiskFull) for result in results[len(written) :])
    bench.files.capacity_bytes = None
    assert bench.commit.submit(batch(b"after"), durability).result(30).first_offset == len(written)
    assert bench.bodies() == [b"%d" % n + large for n in range(len(written))] + [b"after"]


def test_a_batch_and_its_resend_side_by_side_are_stored_once(bench: Bench) -> None:
    with bench.owner_busy():
        futures = [bench.commit.submit(batch(b"x", producer=3, sequence=7)) for _ in range(2)]
    places = [future.result(30) for future in futures]
    assert [place.duplicate for place in places] == [False, True]
    assert bench.bodies() == [b"x"]


def test_a_failed_flush_fails_all_who_wait_for_it_and_is_not_tried_again() -> None:
    bench = Bench()
    fault = bench.files.fail("sync", lambda path, number: number > 1, errno.EIO)
    with bench.owner_busy():
        stored = bench.commit.submit(batch(b"stored", 1), STORED)
        futures = [bench.commit.submit(batch(b"%d" % n)) for n in range(5)]
    assert stored.result(30).first_offset == 0
    for future in futures:
        with pytest.raises(StoreFailed, match="start again"):
            future.result(30)
    with pytest.raises(StoreFailed):
        bench.commit.submit(batch(b"later")).result(30)
    assert fault.hits == 1
    assert bench.bodies() == []
    assert bench.bodies(1) == [b"stored"]
    bench.commit.close()
    bench.store.close()


def test_close_writes_what_is_waiting() -> None:
    bench = Bench()
    closing = threading.Thread(target=bench.commit.close)
    with bench.owner_busy():
        futures = [bench.commit.submit(batch(b"%d" % n)) for n in range(10)]
        closing.start()
    closing.join(30)
    assert [future.result(0).first_offset for future in futures] == list(range(10))
    with pytest.raises(StoreClosed):
        bench.commit.submit(batch(b"late"))
    bench.store.close()


def test_a_caller_may_refuse_to_wait_for_room() -> None:
    bench = Bench(waiting_bytes_max=1000)
    with bench.owner_busy():
        future = bench.commit.submit(batch(b"x" * 2000))  # alone it is taken, however large
        with pytest.raises(LimitReached, match="try again"):
            bench.commit.submit(batch(b"y"), wait=False)
    future.result(30)
    bench.commit.submit(batch(b"y"), wait=False).result(30)
    bench.commit.close()
    bench.store.close()


def test_a_caller_who_waits_for_room_goes_on_when_there_is_some() -> None:
    bench = Bench(waiting_bytes_max=1000)
    with ThreadPoolExecutor(1) as thread:
        with bench.owner_busy():
            futures = [bench.commit.submit(batch(b"x" * 2000))]
            blocked = thread.submit(lambda: bench.commit.submit(batch(b"y")))
        futures.append(blocked.result(30))
        assert [future.result(30).first_offset for future in futures] == [0, 1]
    bench.commit.close()
    bench.store.close()


def test_a_cancelled_batch_is_not_written_and_hurts_nobody(bench: Bench) -> None:
    with bench.owner_busy():
        cancelled = bench.commit.submit(batch(b"no"))
        kept = bench.commit.submit(batch(b"yes"))
        assert cancelled.cancel()
    assert kept.result(30).first_offset == 0
    with pytest.raises(CancelledError):
        cancelled.result(0)
    assert bench.bodies() == [b"yes"]


def test_durability_of_replicas_is_refused_where_there_are_none(bench: Bench) -> None:
    with pytest.raises(NotEnoughReplicas, match="flushed"):
        bench.commit.submit(batch(b"x"), Durability.REPLICATED)


class Broken(MessageStore):
    """A store with a defect."""

    def append(self, *args: object, **kwargs: object) -> list[object]:  # type: ignore[override]
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_store_leaves_nobody_waiting() -> None:
    store = Broken(MemoryFiles(), SETTINGS, FakeClock())
    commit = GroupCommit(store)
    future = commit.submit(batch(b"x"))
    with pytest.raises(DMQError, match="defect"):
        future.result(30)
    with pytest.raises(StoreClosed):
        commit.submit(batch(b"y"))
    commit.close()
    store.close()


def test_upkeep_is_done_under_load_too() -> None:
    files, clock = MemoryFiles(), FakeClock()
    store = MessageStore(files, StoreSettings(flush_seconds=1.0), clock)
    store.create_topic("t")
    commit = GroupCommit(store, clock=clock)
    commit.submit(batch(b"x"), STORED).result(30)
    assert store.queries.flushed < store.queries.end
    clock.advance(2.0)
    with ThreadPoolExecutor(1) as thread:
        while store.queries.flushed < store.queries.visible:
            thread.submit(lambda: commit.submit(batch(b"y"), STORED).result(30)).result(30)
            clock.advance(2.0)
    commit.close()
    assert store.queries.flushed == store.queries.end
    store.close()


def test_a_function_is_called_between_two_commits(bench: Bench) -> None:
    bench.commit.submit(batch(b"one"))
    assert bench.commit.call(lambda: bench.store.queries.bounds("t", 0)).result(PATIENCE_S) == (0, 1)


def test_what_a_function_raises_is_the_caller_s_and_the_store_goes_on(bench: Bench) -> None:
    with pytest.raises(UnknownTopic):
        bench.commit.call(lambda: bench.store.queries.topic("nowhere")).result(PATIENCE_S)
    assert bench.commit.submit(batch(b"one")).result(PATIENCE_S).first_offset == 0


def test_functions_are_called_before_the_close_and_refused_after(bench: Bench) -> None:
    with bench.owner_busy():
        future = bench.commit.call(lambda: 7)
        closing = threading.Thread(target=bench.commit.close)
        closing.start()
    closing.join(PATIENCE_S)
    assert future.result(0) == 7
    with pytest.raises(StoreClosed):
        bench.commit.call(lambda: 8)


def test_those_who_asked_are_told_in_the_order_of_the_queue(bench: Bench) -> None:
    told: list[int] = []
    with bench.owner_busy():
        for number in range(20):
            bench.commit.submit(batch(b"%d" % number), on_done=lambda done: told.append(done.result().first_offset))
    bench.commit.submit(batch(b"last")).result(PATIENCE_S)
    assert told == [*range(20)]
