"""What a leader sends to one follower: from memory while it can, else from the disk, ahead of need and at a pace."""

from __future__ import annotations

import pytest

from dmq.errors import Damaged
from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX
from dmq.shard.feed import AHEAD_BYTES, READ_BYTES, WINDOW_BYTES, Feed, Pace, Standpoint, Tail, read_last
from dmq.storage.journal.unit import read_header, split_units
from dmq.storage.store import MessageStore
from tests.unit.shard.test_replication import Member, write

HUGE = float("inf")


@pytest.fixture
def store() -> MessageStore:
    leader = Member().lead(1)
    write(leader, 900, 20_000)  # 18 MB in segments of 256 KiB
    return leader._store


def standpoint(store: MessageStore) -> Standpoint:
    queries = store.queries
    return Standpoint(1, queries.end, queries.visible, queries.start)


def feed_of(store: MessageStore, start: int = 0, pace: Pace | None = None) -> Feed:
    return Feed(store, start, None, pace=pace or Pace(), reads_ahead=True)


def journal(store: MessageStore) -> bytes:
    return b"".join(store._journal.read_available(one.start, one.size) for one in store._journal.segments)


def forget(store: MessageStore) -> None:
    """Nothing is in memory any more."""
    store._reader.cache.clear()


def test_what_is_in_memory_needs_no_disk(store: MessageStore) -> None:
    start = max(segment.start for segment in store._journal.segments)
    start += read_header(store._journal.read(start, 72)).length  # type: ignore[union-attr]
    feed = feed_of(store, start)
    store._pool.read = None  # type: ignore[method-assign, assignment]
    assert feed.reading(standpoint(store), 1.0) is None
    sent = b"".join(bytes(body) for _, body in feed.frames(standpoint(store), 1.0))
    assert sent == b"".join(map(bytes, store.units_in_memory(start, 1 << 30)))
    assert feed.next_offset == store.queries.end


def test_followers_that_are_level_get_the_same_frame_which_is_made_once(store: MessageStore) -> None:
    start, tail = store.queries.end, Tail(store)
    feeds = [Feed(store, start, None, pace=Pace(), tail=tail) for _ in range(2)]
    for number in range(3):
        store.append([store.creation(f"u{number}")])
    sent = [[*feed.frames(standpoint(store), 1.0)] for feed in feeds]
    ((one, body),), ((other, same),) = sent
    assert one == other
    assert body is same
    assert bytes(body) == bytes(store._journal.read(start, store.queries.end - start))
    tail.forget()
    forget(store)
    late = Feed(store, start, None, pace=Pace(), tail=tail, reads_ahead=True)
    assert [*late.frames(standpoint(store), 0.0)] == [late.sign(standpoint(store), 0.0)], "it is to be read"


def test_a_follower_that_is_level_gets_all_that_is_left_as_one_frame(store: MessageStore) -> None:
    start, tail = store.queries.end, Tail(store)
    level, same, behind = (Feed(store, at, None, pace=Pace(), tail=tail, reads_ahead=True) for at in (start, start, 0))
    assert level.last_frame(standpoint(store), 1.0) is None, "there is nothing"
    for number in range(3):
        store.append([store.creation(f"u{number}")])
    last = level.last_frame(standpoint(store), 1.0)
    assert [last] == [*same.frames(standpoint(store), 1.0)]
    assert level.next_offset == same.next_offset == store.queries.end
    assert behind.last_frame(standpoint(store), 1.0) is None, "it is to be read"
    level.next_offset = start + WINDOW_BYTES
    store.append([store.creation("v")])
    assert level.last_frame(Standpoint(1, start + WINDOW_BYTES + 1, 0, 0), 1.0) is None, "the window is full"


def test_what_is_not_in_memory_is_read_ahead_and_sent_in_order(store: MessageStore) -> None:
    forget(store)
    feed, sent, readings = feed_of(store), b"", 0
    at = standpoint(store)
    while feed.next_offset < at.end:
        for frame, body in feed.frames(at, 1.0):
            assert frame.start == len(sent)
            assert len(body) <= JOURNAL_BYTES_MAX
            sent += bytes(body)
        feed.confirmed(len(sent))
        found = feed.reading(at, 1.0)
        if found is not None:
            assert feed.reading(at, 1.0) is None, "one at a time"
            readings += 1
            feed.was_read(found[0].run())
    assert sent == journal(store)
    assert readings >= 5


def test_what_comes_into_memory_while_it_is_read_is_not_sent_twice(store: MessageStore) -> None:
    """A consumer that is as far behind as the follower reads the same units."""
    forget(store)
    feed, at = feed_of(store), standpoint(store)
    found = feed.reading(at, 1.0)
    assert found is not None
    whole = journal(store)
    first = read_header(whole)
    assert first is not None
    store._reader.cache.put(0, whole[: first.length])
    assert store.units_in_memory(0, 1)
    assert [body for _, body in feed.frames(at, 1.0)] == [b""], "the sign of an idle leader"
    assert feed.last_frame(at._replace(end=first.length), 1.0) is None
    feed.was_read(found[0].run())
    sent = b"".join(bytes(body) for _, body in feed.frames(at, 1.0))
    assert sent == whole[: len(sent)]
    assert feed.next_offset == len(sent) > first.length


def test_no_more_than_the_window_is_under_way_and_little_waits(store: MessageStore) -> None:
    forget(store)
    feed, at = feed_of(store), standpoint(store)
    while (found := feed.reading(at, 1.0)) is not None:
        feed.was_read(found[0].run())
    assert feed._ahead_bytes < AHEAD_BYTES + READ_BYTES
    for _ in range(100):
        list(feed.frames(at, 1.0))
        if (found := feed.reading(at, 1.0)) is not None:
            feed.was_read(found[0].run())
    assert WINDOW_BYTES <= feed.next_offset < WINDOW_BYTES + JOURNAL_BYTES_MAX


def test_frames_end_with_units_and_tell_of_the_unit_before(store: MessageStore) -> None:
    forget(store)
    feed, at = feed_of(store), standpoint(store)
    last = None
    for _ in range(4):
        found = feed.reading(at, 1.0)
        if found is not None:
            feed.was_read(found[0].run())
        for frame, body in feed.frames(at, 1.0):
            assert frame.before == (None if last is None else tuple(last))
            last = read_last(body)
            assert last is not None
    assert last is not None


def test_the_first_units_are_checked(store: MessageStore) -> None:
    forget(store)
    files = store.files
    path = store._journal.segments[2].path
    start = store._journal.segments[2].start
    files.flip_bit(path, 200)  # type: ignore[attr-defined]
    found = feed_of(store, start).reading(standpoint(store), 1.0)
    assert found is not None
    with pytest.raises(Damaged):
        found[0].run()
    store.check_unit(start)
    assert [first for first, _ in store.damage.ranges] == [start]


def test_what_retention_took_is_no_damage(store: MessageStore) -> None:
    forget(store)
    feed = feed_of(store)
    store._derived.begin_at(store._journal.segments[3].start, {})
    store._journal.drop_first(3)
    with pytest.raises(Damaged):
        feed.reading(standpoint(store), 1.0)
    derived = store._derived
    store.check_unit(0)
    assert store._derived is derived, "nothing is built anew for that"
    assert not store.damage.ranges


def test_a_leader_that_writes_nothing_holds_no_follower_back() -> None:
    pace = Pace()
    for second in range(10):
        pace.wrote(1 << 30, float(second))
        pace.spend(1 << 30, float(second))
        assert pace.delay(float(second)) == 0


def bytes_read(pace: Pace, written: int, began: float, seconds: float) -> float:
    """Bytes a second that are read for a follower while the leader writes so many."""
    now, read = began, 0
    while now < began + seconds:
        pace.wrote(int(written * now), now)
        size = pace.read_bytes
        pace.spend(size, now)
        read += size
        now += max(0.001, pace.delay(now))
    return read / (now - began)


def warm_pace(written: int) -> Pace:
    """It knows how much is written."""
    pace = Pace()
    for half in range(20):
        pace.wrote(int(written * half / 2), half / 2)
    return pace


def test_the_more_a_leader_writes_the_less_it_reads_for_followers() -> None:
    for written, least, most in ((1 << 20, 110 << 20, 140 << 20), (15 << 20, 60 << 20, 80 << 20)):
        assert least < bytes_read(warm_pace(written), written, 10.0, 30.0) < most
    for written in (26 << 20, 100 << 20, 300 << 20):
        assert 22 << 20 < bytes_read(warm_pace(written), written, 10.0, 30.0) < 26 << 20


def test_a_follower_that_is_behind_for_long_gets_more_than_the_leader_writes() -> None:
    for written in (1 << 20, 26 << 20, 200 << 20):
        pace = warm_pace(written)
        bytes_read(pace, written, 10.0, Pace.PATIENT_SECONDS + 1)
        assert bytes_read(pace, written, 11.0 + Pace.PATIENT_SECONDS, 30.0) > 1.2 * written


def test_a_follower_that_was_level_in_between_is_read_for_gently_again() -> None:
    written = 100 << 20
    pace = warm_pace(written)
    bytes_read(pace, written, 10.0, 90.0)
    assert bytes_read(pace, written, 110.0, 30.0) < 26 << 20


def test_a_follower_for_which_commits_wait_is_not_held_back(store: MessageStore) -> None:
    forget(store)
    pace = warm_pace(100 << 20)
    pace.spend(100 << 20, 10.0)
    at = standpoint(store)
    waited = feed_of(store, pace=pace).reading(at, 10.0)
    assert waited is not None
    assert waited[1] > 1.0
    awaited = feed_of(store, pace=pace).reading(at, 10.0, is_awaited=True)
    assert awaited is not None
    assert awaited[1] == 0.0


def test_soon_after_a_load_followers_are_not_held_back_any_more() -> None:
    pace = warm_pace(100 << 20)
    for half in range(20, 34):
        pace.wrote(1000 << 20, half / 2)
    pace.spend(1 << 30, 17.0)
    assert pace.delay(17.0) == 0


def test_reads_are_smaller_while_the_leader_writes() -> None:
    assert Pace().read_bytes == READ_BYTES
    assert warm_pace(1 << 20).read_bytes == READ_BYTES // 4


def test_pieces_are_whole_units(store: MessageStore) -> None:
    units = memoryview(store.journal_bytes(0, 1 << 20))
    for size in (1, 30_000, 100_000, 1 << 30):
        pieces = split_units(units, size)
        assert b"".join(bytes(piece) for piece, _ in pieces) == units
        for piece, at in pieces:
            header = read_header(piece, at)
            assert header is not None
            assert at + header.length == len(piece)
            assert len(piece) <= size or at == 0
