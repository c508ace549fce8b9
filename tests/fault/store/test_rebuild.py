"""Everything derived can be deleted: opening builds it anew and gives the same answers. (J-03, J-10, R-05)"""

from __future__ import annotations

from typing import Any

import pytest

from dmq.model import TopicConfig
from dmq.settings import StoreSettings
from dmq.storage.store import MessageStore
from tests.fault.store.comparison import check_find, check_times, queues_of
from tests.fault.store.model import Spot
from tests.fault.store.rig import SMALL, Rig
from tests.fault.store.workload import DEAD, EVENTS, ORDERS, workload
from tests.sampling import SEED, sample_size

FOLDERS = ("queue", "runs", "offset", "index", "delay")
DERIVED = (*FOLDERS, "checkpoint")
LIVES = sample_size(share=5, whole=60)


def lived(seed: int, settings: StoreSettings = SMALL) -> Rig:
    """A store whose first segments are gone, with something of every kind in it, cleanly closed."""
    rig = Rig(seed, settings)
    rig.create("quiet", TopicConfig(queues=1))
    rig.append([rig.batch("quiet", 0, rig.messages(30), producer=70, named=True)])
    rig.append([rig.settle("idle", "quiet", 0, 0, 20), rig.settle("idle", "quiet", 0, 25, 2)])
    rig.create("gone", TopicConfig(queues=1))
    rig.append([rig.batch("gone", 0, rig.messages(30), producer=71)])
    for step in workload(rig):
        step()
    rig.delete("gone")
    rig.append([rig.batch(ORDERS, 0, rig.messages(5), producer=72)])
    rig.append([rig.half(1, rig.messages(1), ORDERS), rig.delayed(2, rig.messages(1), [1 << 42], ORDERS)])
    rig.retain()
    rig.flush()
    assert_it_has_everything(rig)
    rig.upkeep(rig.store.close)
    return rig


def assert_it_has_everything(rig: Rig) -> None:
    view, store = rig.model.seen, rig.store
    assert store.queries.start > 0
    first, following = store.queries.bounds("quiet", 0)
    assert first == following == 30, "a queue was to be emptied by retention"
    assert store.queries.position("idle", "quiet", 0) is not None
    assert "gone" not in rig.names
    assert EVENTS in rig.names or any(topic_id > 18 for topic_id in view.topics)
    assert view.delays
    assert view.transactions
    key = (rig.id_of(DEAD), 0)
    spot = view.positions.get("billing", {}).get(key, Spot())
    waiting = [offset for offset in range(len(view.queues[key])) if not spot.holds(offset)]
    assert waiting, "a dead letter was to wait for its group"
    assert store.queries.bounds(DEAD, 0)[0] > 0


def answers(store: MessageStore) -> dict[str, Any]:
    """What monitoring sees, but for what every start changes."""
    return {name: value for name, value in store.stats().items() if name != "segments"}


def check_everything(rig: Rig) -> None:
    view, store = rig.model.seen, rig.store
    rig.check(sample=10)
    check_find(store, view, rig.sample(view.messages, 40))
    for message in rig.sample(view.messages, 5):
        check_times(store, view, message.stored_at_ms)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_any_derived_files_can_be_deleted_while_the_store_is_closed(number: int) -> None:
    """All, and each alone, after retention: an idle group, an emptied queue, a deleted topic, a pending delay, an open
    transaction and dead letters that were carried answer as before."""
    rig = lived(SEED * 100 + number)
    before = answers(rig.store)
    for lost in (DERIVED, FOLDERS, *((path,) for path in DERIVED)):
        twin = rig.fork(rig.files.copy(), f"{number}/{lost}")
        for path in lost:
            twin.files.remove(path)
        twin.open(durable=twin.model.end)
        assert twin.store.queries.end == rig.store.queries.end, "a clean end needs no new epoch"
        assert answers(twin.store) == before, lost
        check_everything(twin)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_what_was_built_anew_goes_on_like_what_was_kept(number: int) -> None:
    """Both take the same messages afterwards, and part in nothing; the next retention included."""
    kept = lived(SEED * 100 + number)
    anew = kept.fork(kept.files.copy(), number)
    anew.sequences = dict(kept.sequences)
    for path in DERIVED:
        anew.files.remove(path)
    for rig in (kept, anew):
        rig.open(durable=rig.model.end)
        start = rig.store.queries.start
        go_on(rig)
        assert rig.store.queries.start > start
        check_everything(rig)
        rig.kill()
        check_everything(rig)


def go_on(rig: Rig) -> None:
    rig.append([rig.batch(DEAD, 0, rig.messages(3))])
    rig.checkpoint()
    for number in range(8):
        rig.append([rig.batch(ORDERS, number % 2, rig.messages(100, 500), producer=5, named=True)])
    rig.clock.advance(7200.0)
    rig.append([rig.batch(ORDERS, 0, rig.messages(100, 1000))])
    rig.retain()


def test_a_derived_file_that_vanishes_from_a_running_store_is_built_anew() -> None:
    """Reading heals itself: nobody who asks notices."""
    rig = lived(SEED)
    rig.open(durable=rig.model.end)
    for folder in ("runs", "index"):
        rig.append([rig.batch(ORDERS, 0, rig.messages(10), producer=73)])
        rig.checkpoint()
        for path in list(rig.files.paths()):
            if path.startswith(f"{folder}/"):
                rig.files.cut(path, 0)
        check_everything(rig)


def test_records_that_were_handed_out_stay_so_when_the_wheel_is_built_anew() -> None:
    """D-14: a rebuild in between makes no delayed message come twice, nor lets retention copy it twice."""
    rig = lived(SEED)
    rig.open(durable=rig.model.end)
    rig.checkpoint()
    taken = rig.store.take_due(1 << 50, 5)
    assert len(taken) == 5
    for path in list(rig.files.paths()):
        if path.startswith(("runs/", "index/")):
            rig.files.cut(path, 0)
    for name, (topic_id, queue) in queues_of(rig.model.seen):
        if rig.store.queries.bounds(name, queue)[0] < rig.store.queries.bounds(name, queue)[1]:
            rig.store.queries.read(name, queue, rig.model.seen.first((topic_id, queue), rig.store.queries.start))
    again = rig.store.take_due(1 << 50, 1000)
    assert {delay.offset for delay in taken}.isdisjoint(delay.offset for delay in again)
    assert len(taken) + len(again) == rig.store.queries.delays_pending
    for delay in taken[:2]:
        rig.deliver(delay)
    rig.flush()
    rig.store.release_due([delay.offset for delay in (*taken[2:], *again)])
    check_everything(rig)
    rig.kill()
    check_everything(rig)
