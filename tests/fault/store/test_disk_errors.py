"""A disk that refuses: the store says so, shows nothing that failed, and goes on or recovers. (J-03, J-10)"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from dmq.errors import DiskFull, StorageError, StoreFailed
from dmq.model import TopicConfig
from dmq.settings import StoreSettings
from dmq.storage.store import MessageStore
from dmq.testing import Fault, MemoryFiles
from dmq.testing.disk.faults import Kind
from tests.fault.store.model import Sent
from tests.fault.store.rig import SMALL, Rig
from tests.sampling import SEED, sample_size

STRIDE = sample_size(share=13, whole=1)  # of the operations of a run, which are made to fail
BATCHES, BATCH = 50, 10
KINDS: tuple[Kind, ...] = ("write", "sync", "sync_dir", "rename", "truncate", "create", "unlink")


@dataclass
class Run:
    """500 messages, and what the store said to each batch of them."""

    rig: Rig
    acknowledged: list[Sent] = field(default_factory=list)
    refused: list[Sent] = field(default_factory=list)
    errors: list[StorageError] = field(default_factory=list)

    def send(self, batches: int = BATCHES) -> None:
        for number in range(batches):
            if self.rig.store.has_failed:
                self.restart()
            sent = self.rig.batch("orders", number % 2, self.rig.messages(BATCH, 600))
            self.deliver(sent)
            self.upkeep(number)

    def deliver(self, sent: Sent) -> None:
        visible = self.rig.store.queries.visible
        try:
            place = self.rig.append([sent])[0]
            self.rig.flush()
        except StorageError as error:
            self.errors.append(error)
            self.refused.append(sent)
            assert self.rig.store.queries.visible == visible or not self.holds(sent), "what failed can be seen"
        else:
            assert self.rig.store.queries.visible >= place.unit_end
            self.acknowledged.append(sent)

    def holds(self, sent: Sent) -> bool:
        return any(message.id == sent.ids[0] for message in self.rig.model.seen.messages)

    def upkeep(self, number: int) -> None:
        self.rig.clock.advance(150.0)
        try:
            if number % 8 == 7:
                self.rig.checkpoint()
            if number % 16 == 15:
                self.rig.retain()
        except StorageError as error:
            self.errors.append(error)

    def restart(self) -> None:
        """The process ends and another one starts: what was acknowledged is there."""
        self.rig.kill()
        self.check()

    def check(self) -> None:
        assert all(map(self.holds, self.acknowledged)), "an acknowledged batch is gone"
        self.rig.check(sample=2)


def new_run(seed: int, settings: StoreSettings = SMALL) -> Run:
    rig = Rig(seed, settings, MemoryFiles(rng=random.Random(seed), trace=10_000))
    rig.create("orders", TopicConfig(queues=2))
    rig.append([rig.delayed(0, rig.messages(3), [rig.clock.now_ms() + 9_000_000] * 3, "orders")])
    return Run(rig)


def operations(kind: Kind) -> int:
    """How many operations of a kind a run without faults has."""
    run = new_run(SEED)
    before = sum(operation.kind == kind for operation in run.rig.files.trace)
    run.send()
    assert run.errors == []
    return sum(operation.kind == kind for operation in run.rig.files.trace) - before


def assert_no_sync_after_a_failed_one(files: MemoryFiles, path: str) -> None:
    """Nothing is written to the journal, and its flush is not tried again, by the process that saw it fail."""
    later = [operation for operation in files.trace if operation.path == path and operation.kind in ("write", "sync")]
    assert later[-1].kind == "sync"


@pytest.mark.sampled
@pytest.mark.uncounted
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_failing_operation_loses_nothing_that_was_acknowledged(kind: Kind, error: int) -> None:
    """J-03: every Nth operation of a run fails; the store says so and goes on, or recovers when it starts again."""
    total = operations(kind)
    assert total
    for which in range(1 + SEED % STRIDE if total > STRIDE else 1, total + 1, STRIDE):
        run = new_run(SEED)
        fault = run.rig.files.fail(kind, which, error)
        try:
            check_one_failure(run, fault, error)
        except Exception as problem:
            raise AssertionError(f"seed {SEED}, {kind} {which} of {total}, errno {error}") from problem


@pytest.mark.sampled
@pytest.mark.parametrize("written", [0.3, 1.0])
def test_one_write_that_fails_half_way_loses_nothing_that_was_acknowledged(written: float) -> None:
    for which in range(1 + SEED % STRIDE, operations("write") + 1, STRIDE):
        run = new_run(SEED)
        fault = run.rig.files.fail("write", which, errno.ENOSPC, written=written)
        check_one_failure(run, fault, errno.ENOSPC)


def check_one_failure(run: Run, fault: Fault, error: int) -> None:
    files = run.rig.files
    run.send()
    assert fault.hits == 1
    for problem in run.errors:
        if fault.kind not in ("sync", "sync_dir") and not isinstance(problem, StoreFailed):
            assert isinstance(problem, DiskFull) == (error == errno.ENOSPC)
        assert str(problem)
    if files is not run.rig.files:  # it was given up, which only a failed flush of the journal is a reason for
        assert any(isinstance(problem, StoreFailed) for problem in run.errors)
    assert len(run.refused) <= 1, "one failure cost more than one batch"
    run.check()
    run.rig.crash(random.Random(SEED))
    run.check()


@pytest.mark.sampled
def test_a_failed_flush_is_not_followed_by_an_acknowledgement_nor_tried_again() -> None:
    """J-03: after a failed fsync the page cache cannot be trusted; only a new start, which writes again, can."""
    for which in range(1, 12):
        run = new_run(SEED)
        rig = run.rig
        fault = rig.files.fail("sync", nth_of_journal(which))
        sent = unacknowledged(run)
        assert fault.hits == 1
        failed = next(o.path for o in reversed(rig.files.trace) if o.kind == "sync")
        visible, flushed = rig.store.queries.visible, rig.store.queries.flushed
        for _ in range(2):
            with pytest.raises(StoreFailed):
                rig.store.flush()
            with pytest.raises(StoreFailed):
                rig.store.checkpoint()
            with pytest.raises(StoreFailed):
                rig.store.append([sent.batch])
        assert (rig.store.queries.visible, rig.store.queries.flushed) == (visible, flushed)
        assert not run.holds(sent)
        rig.store.close()
        assert_no_sync_after_a_failed_one(rig.files, failed)
        # The process ends, the next one reads what only the page cache has, acknowledges more; then the power goes.
        rig.files.heal()
        rig.kill()
        run.check()
        run.deliver(rig.batch("orders", 1, rig.messages(BATCH)))
        rig.crash(random.Random(which), "nothing")
        run.check()


def nth_of_journal(which: int) -> Callable[[str, int], bool]:
    """From the nth operation on, those on the journal."""
    return lambda path, seen: path.startswith("journal/") and seen >= which


def unacknowledged(run: Run) -> Sent:
    """Send until the store gives up; the batch it gave up at."""
    while True:
        sent = run.rig.batch("orders", 0, run.rig.messages(BATCH, 600))
        try:
            run.rig.append([sent])
            run.rig.flush()
        except StoreFailed:
            return sent
        run.acknowledged.append(sent)


def test_a_flush_that_fails_in_another_thread_counts_although_its_segment_is_full_by_now() -> None:
    """J-03: the kernel reports a lost page once, and not to a descriptor that flushed the segment in between."""
    run = new_run(SEED)
    rig = run.rig
    ticket = rig.store.begin_flush()
    while rig.store.stats()["segments"] < 2:
        rig.append([rig.batch("orders", 0, rig.messages(BATCH, 600))])
    rig.files.fail("sync")
    with pytest.raises(StorageError) as caught:
        ticket.run()
    with pytest.raises(StoreFailed):
        rig.store.finish_flush(ticket, caught.value)
    assert rig.store.has_failed


def test_a_flush_whose_segment_is_closed_by_now_has_nothing_left_to_do() -> None:
    run = new_run(SEED)
    rig = run.rig
    ticket = rig.store.begin_flush()
    while rig.store.stats()["segments"] < 4:
        rig.append([rig.batch("orders", 0, rig.messages(BATCH, 600))])
    ticket.run()
    rig.store.finish_flush(ticket)
    rig.flush()
    run.check()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [*KINDS, "mkdir", "rmdir", "read", "open", "listdir"])
def test_a_start_that_fails_leaves_everything_to_the_next_one(kind: Kind) -> None:
    """J-03, J-10: opening after a crash fails at its nth operation; nothing stays open, and the next try succeeds."""
    for which in range(1, 30, sample_size(share=3, whole=1)):
        run = new_run(SEED)
        run.send(30)
        files = run.rig.files.crash(random.Random(f"{SEED}/{which}"), "sectors")
        files.remove(random.Random(which).choice(("runs", "checkpoint", "LOCK")))
        fault = files.fail(kind, which)
        try:
            store = MessageStore(files, SMALL, run.rig.clock)
        except StorageError:
            assert files.handles == 0, "a file was left open"
        else:
            files.heal(fault)
            if not store.has_failed:
                store.close()
        files.heal()
        run.rig.files = files.kill()
        run.rig.open(durable=run.rig.store.queries.flushed)
        run.check()
        if not fault.hits:
            break


def test_a_full_disk_refuses_and_works_on_when_space_returns() -> None:
    """J-03: ENOSPC is not a reason to stop: the same store takes messages again once there is room."""
    run = new_run(SEED)
    rig = run.rig
    run.send(10)
    rig.files.capacity_bytes = sum(rig.files.paths().values()) + 20_000
    run.send(10)
    assert run.refused
    assert all(isinstance(error, DiskFull) for error in run.errors)
    assert rig.store.stats()["refusing"] is False or rig.store.queries.visible == rig.store.queries.flushed
    rig.files.capacity_bytes = None
    before = len(run.refused)
    run.send(10)
    assert len(run.refused) == before
    run.check()
    rig.crash(random.Random(1))
    run.check()


def test_a_batch_refused_for_space_can_be_sent_again() -> None:
    """D-15: what was refused was not remembered, so the same batch gets a place later."""
    run = new_run(SEED)
    sent = run.rig.batch("orders", 0, run.rig.messages(3, 600))
    run.rig.files.fail("write", 1, errno.ENOSPC)
    with pytest.raises(DiskFull):
        run.rig.append([sent])
    place = run.rig.append([sent])[0]
    run.rig.flush()
    assert not place.duplicate
    run.check()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_nearly_full_disk_lets_retention_carry_what_is_pending(checkpointed: bool) -> None:
    """D-14: above the mark for refusing, old segments still go, and the delays in them are written again first."""
    run = new_run(SEED, msgspec.structs.replace(SMALL, disk_force=0.85))
    rig = run.rig
    for _ in range(100):
        run.deliver(rig.batch("orders", 0, rig.messages(BATCH, 600)))
    if checkpointed:
        rig.checkpoint()
    start = rig.store.queries.start
    disk = rig.files.disk_usage()
    rig.files.capacity_bytes = int(disk.used / 0.92)
    rig.clock.advance(1.0)
    rig.upkeep(rig.store.tick)
    assert rig.store.queries.start > start
    assert rig.store.queries.delays_pending == 3
    rig.files.capacity_bytes = None
    rig.check()
    rig.crash(random.Random(1))
    rig.check()


def test_a_segment_that_could_not_be_begun_never_stands_in_the_way() -> None:
    """J-03: the disk fills up while a segment is begun; the old one grows on, and then the power goes."""
    for state in range(60):
        run = new_run(SEED)
        rig = run.rig
        fault = rig.files.fail(
            "write",
            lambda path, _: path.startswith("journal/") and "/" + "0" * 20 not in path,
            errno.ENOSPC,
            written=0.5,
        )
        while not fault.hits:
            run.deliver(rig.batch("orders", 0, rig.messages(9, 800)))
        for _ in range(20):
            run.deliver(rig.batch("orders", 0, rig.messages(1, 30)))
        assert run.rig.store.has_failed is False
        rig.crash(random.Random(state))
        run.check()
