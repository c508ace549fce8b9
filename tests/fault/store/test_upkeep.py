"""Retention and carrying forward, and what the settings do to it. (D-14, D-15, D-16, R-04)"""

from __future__ import annotations

import errno
import random

import msgspec
import pytest

from dmq.errors import DiskFull, LimitReached, StorageError
from dmq.model import TopicConfig
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.state.events import Archived, DelaysDone, TransactionEnded, pack_offsets
from dmq.testing import CrashNow
from tests.fault.store.comparison import check_producers
from tests.fault.store.model import Spot
from tests.fault.store.rig import SMALL, Rig

DAY = 86_400.0


def rig_with(**changes: object) -> Rig:
    rig = Rig(1, msgspec.structs.replace(SMALL, **changes))
    rig.create("orders", TopicConfig(queues=2))
    rig.create("%DLQ%g", TopicConfig(queues=1, carry_for="g"))
    return rig


def fill(rig: Rig, segments: int) -> None:
    """Begin so many more segments."""
    before = rig.store.stats()["segments"]
    while rig.store.stats()["segments"] < before + segments:
        rig.append([rig.batch("orders", 0, rig.messages(20, 1000))])
    rig.flush()


def test_a_message_that_is_handed_out_is_not_carried_forward_as_well() -> None:
    """D-14: its segment stays until it is delivered; then it goes, and the message has come once."""
    rig = rig_with()
    rig.append([rig.delayed(0, rig.messages(2), [rig.clock.now_ms()] * 2, "orders")])
    rig.flush()
    taken = rig.store.take_due(rig.clock.now_ms(), 1)
    fill(rig, 3)
    rig.clock.advance(DAY)
    rig.retain()
    assert rig.store.queries.start == 0
    for delay in taken:
        rig.deliver(delay)
    rig.flush()
    rig.retain()
    assert rig.store.queries.start > 0
    assert rig.store.queries.delays_pending == 1
    rig.check()


def test_what_is_wanted_is_carried_a_little_at_a_time_while_some_of_it_ends() -> None:
    """No call writes more than it was allowed; what is delivered or ends in between is not carried as well."""
    rig = rig_with()
    later, soon = rig.clock.now_ms() + 90 * 86_400_000, rig.clock.now_ms() + 1000
    rig.append([rig.delayed(0, rig.messages(10), [later] * 6 + [soon] * 4, "orders")])
    rig.append([rig.half(0, rig.messages(4), "orders"), rig.batch("%DLQ%g", 0, rig.messages(5))])
    rig.append([rig.settle("g", "%DLQ%g", 0, 1, 2)])
    fill(rig, 3)
    segments = rig.store.stats()["segments"]
    rig.clock.advance(DAY)
    rig.retain(2)
    assert rig.store.stats()["segments"] == segments
    rig.flush()
    for delay in rig.store.take_due(rig.clock.now_ms(), 10):
        rig.deliver(delay)
    cancelled = rig.store.queries.delays_after(soon, 1 << 60, 1)
    rig.append([DelaysDone(pack_offsets([cancelled[0].offset]), "cancelled")])
    rig.flush()
    calls = 0
    while rig.store.queries.start == 0:
        before = rig.store.queries.end
        rig.retain(2)
        assert rig.store.stats()["segments"] <= segments + 1, f"{rig.store.queries.end - before} bytes were written"
        calls += 1
        assert calls < 20
    assert calls > 4
    assert not rig.store.is_retaining
    assert rig.store.queries.delays_pending == 5
    assert len(rig.store.queries.transactions()) == 4
    rig.check()


def test_what_ended_but_is_not_visible_yet_is_not_carried_behind_its_end() -> None:
    """A cancelled delay, a rolled back transaction and a settled dead letter stay ended."""
    rig = rig_with()
    rig.append([rig.delayed(0, rig.messages(1), [1 << 42], "orders"), rig.half(0, rig.messages(1), "orders")])
    rig.append([rig.batch("%DLQ%g", 0, rig.messages(1))])
    fill(rig, 3)
    rig.clock.advance(DAY)
    (offset,) = rig.model.seen.delays
    (message_id,) = rig.model.seen.transactions
    rig.append([DelaysDone(pack_offsets([offset]), "cancelled")])
    rig.append([TransactionEnded(message_id.to_bytes(), "rolled back"), rig.settle("g", "%DLQ%g", 0, 0, 1)])
    rig.retain()
    assert rig.store.queries.start > 0
    assert (rig.store.queries.delays_pending, rig.store.queries.transactions()) == (0, {})
    assert rig.store.queries.bounds("%DLQ%g", 0) == (1, 1)
    rig.check()


def test_a_dead_letter_is_carried_once_however_often_retention_is_interrupted() -> None:
    """D-16: the disk refuses the checkpoint, or the segments; each next try finds the copy that is there."""
    rig = rig_with()
    rig.append([rig.batch("%DLQ%g", 0, rig.messages(5))])
    rig.append([rig.settle("g", "%DLQ%g", 0, 1, 2)])
    fill(rig, 3)
    rig.clock.advance(DAY)
    for _ in range(3):
        rig.files.fail("write", lambda path, _: not path.startswith("journal/"))
        with pytest.raises(StorageError):
            rig.retain()
        rig.files.heal()
        rig.check()
    assert rig.store.queries.start == 0
    rig.retain()
    assert rig.store.queries.start > 0
    rig.check()
    key = (rig.id_of("%DLQ%g"), 0)
    spot = rig.model.seen.positions["g"].get(key, Spot())
    first, following = rig.store.queries.bounds("%DLQ%g", 0)
    assert [offset for offset in range(first, following) if not spot.holds(offset)] == [5, 6, 7]


def test_no_crash_leaves_a_hole_where_several_segments_go() -> None:
    """J-03: those that are left follow each other, whichever of the removals became durable."""
    for state in range(120):
        rig = rig_with()
        rig.append([rig.delayed(0, rig.messages(1), [1 << 42], "orders")])
        fill(rig, 5)
        rig.checkpoint()
        rig.clock.advance(DAY)
        fill(rig, 1)
        rig.files.crash_at = rig.files.operations + state % 30 + 1
        try:
            rig.retain()
        except CrashNow:
            pass
        rig.crash(random.Random(state))
        rig.check()


def test_a_disk_that_does_not_remove_segments_is_no_reason_to_show_them() -> None:
    rig = rig_with()
    fill(rig, 4)
    rig.clock.advance(DAY)
    fill(rig, 1)
    rig.files.fail("unlink", lambda path, seen: path.startswith("journal/"))
    with pytest.raises(StorageError):
        rig.upkeep(rig.store.retain)
    assert rig.store.queries.start > 0
    rig.check()
    rig.files.heal()
    rig.kill()
    rig.check()
    rig.retain()
    assert rig.store.queries.start > 0
    rig.check()


def test_open_transactions_at_their_limit_are_carried_all_the_same() -> None:
    """The limit is for new ones."""
    rig = rig_with(transactions_max=2)
    rig.append([rig.half(0, rig.messages(2), "orders")])
    rig.flush()
    with pytest.raises(LimitReached):
        rig.append([rig.half(0, rig.messages(1), "orders")])
    fill(rig, 3)
    rig.clock.advance(DAY)
    rig.retain()
    assert rig.store.queries.start > 0
    assert len(rig.store.queries.transactions()) == 2
    rig.check()


def test_unconsumed_messages_are_kept_if_so_set() -> None:
    rig = rig_with(keep_unconsumed=True)
    rig.append([rig.batch("orders", 1, rig.messages(3)), rig.settle("g", "orders", 1, 0, 2)])
    fill(rig, 3)
    rig.clock.advance(DAY)
    rig.retain()
    assert rig.store.queries.start == 0
    rig.append([rig.settle("g", "orders", 1, 2, 1)])
    rig.flush()
    rig.retain()
    assert rig.store.queries.start > 0
    rig.check()


def test_unarchived_messages_are_kept_if_so_set() -> None:
    rig = rig_with(keep_unarchived=True)
    fill(rig, 3)
    rig.clock.advance(DAY)
    rig.retain()
    assert rig.store.queries.start == 0
    end = rig.store.queries.end
    rig.upkeep(lambda: rig.store.append([Archived(end)]))
    rig.flush()
    rig.retain()
    assert rig.store.queries.start > 0
    rig.check()


def test_the_journal_is_kept_to_its_size_if_so_set() -> None:
    rig = rig_with(retention_hours=None, retention_bytes=200_000)
    fill(rig, 6)
    rig.retain()
    assert 130_000 < rig.store.queries.end - rig.store.queries.start <= 200_000
    rig.check()


def test_a_checkpoint_is_taken_after_so_many_records() -> None:
    rig = rig_with(checkpoint_records=50)
    before = rig.files.read_file("checkpoint")
    rig.append([rig.batch("orders", 0, rig.messages(49))])
    rig.flush()
    assert rig.files.read_file("checkpoint") == before
    rig.append([rig.batch("orders", 0, rig.messages(1))])
    rig.flush()
    rig.append([rig.batch("orders", 0, rig.messages(1))])
    assert rig.files.read_file("checkpoint") != before
    rig.kill()
    rig.check()


def test_anonymous_producers_expire_and_named_ones_stay_recognised() -> None:
    """D-15: after their time a batch of an anonymous producer is taken for a new one."""
    rig = rig_with(producer_expiry_hours=1.0, retention_hours=None)
    anonymous = rig.batch("orders", 0, rig.messages(2), producer=5)
    named = rig.batch("orders", 0, rig.messages(2), producer=6, named=True)
    rig.append([anonymous, named])
    rig.flush()
    check_producers(rig.store, rig.model.seen)
    rig.clock.advance(2 * 3600.0)
    rig.checkpoint()
    for _ in range(2):
        assert rig.store.append([named.batch])[0].duplicate
        rig.close()
    assert not rig.append([anonymous])[0].duplicate


def test_a_checkpoint_refused_for_space_is_made_up_for_later() -> None:
    rig = rig_with()
    for _ in range(5):
        rig.append([rig.batch("orders", 1, rig.messages(30))])
        rig.files.fail("write", lambda path, seen: path.startswith(("runs/", "index/")) and seen > 1, errno.ENOSPC)
        with pytest.raises(DiskFull):
            rig.checkpoint()
        rig.files.heal()
        rig.check()
    rig.checkpoint()
    rig.check()
    rig.close()
    rig.check()


@pytest.mark.parametrize("folder", ["delay", "index"])
def test_a_damaged_file_that_a_checkpoint_meets_while_it_merges_is_built_anew(folder: str) -> None:
    """Else no checkpoint would ever succeed again, and the next start would read the whole journal."""
    rig = rig_with()
    met = 0
    for number in range(24):
        rig.append([rig.delayed(0, rig.messages(3), [1 << 42] * 3, "orders"), rig.batch("orders", 0, rig.messages(3))])
        rig.flush()
        plan = rig.store.begin_checkpoint()
        rig.upkeep(lambda: None)
        assert plan is not None
        rig.append([rig.delayed(1, rig.messages(2), [1 << 41] * 2, "orders")])
        problem: BaseException | None = None
        try:
            plan.write()
        except DerivedDamaged as error:
            problem = error
            met += 1
        rig.upkeep(lambda plan=plan, problem=problem: rig.store.finish_checkpoint(plan, problem))  # type: ignore[misc]
        rig.flush()
        if number == 1:
            path = f"{folder}/{rig.files.listdir(folder)[0]}"
            rig.files.flip_bit(path, rig.files.size(path) - 1)
    assert met == 1
    rig.check()  # not before: a reader finds the damage as well
