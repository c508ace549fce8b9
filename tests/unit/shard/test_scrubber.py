"""The scrubber: damage that nobody reads is found in time, by a broker alone, a leader and a follower; and mended."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest

from dmq.settings import StoreSettings
from dmq.shard.member import Role
from dmq.shard.repair.scrubber import ScrubbedJournal, Scrubber, ScrubWays
from dmq.storage.upkeep.scrub import PIECE_BYTES, ScrubPlace
from tests.unit.shard.member_rig import SETTINGS as MEMBER_SETTINGS
from tests.unit.shard.member_rig import Machine, Shard, in_shard
from tests.unit.shard.test_repair import filled, turn_bits
from tests.unit.storage.upkeep.test_retention import Kept

T = TypeVar("T")

DAY = 86_400.0
SETTINGS = StoreSettings(scrub_hours=240.0)
QUICK = msgspec.structs.replace(MEMBER_SETTINGS, scrub_hours=0.01)


class Lone(Kept):
    """A broker's store with more in it than a piece takes, and its scrubber, whose time is held still."""

    def __init__(self, settings: StoreSettings = SETTINGS) -> None:
        super().__init__()
        self.fill(14)
        assert self.store.queries.end > 3 * PIECE_BYTES
        self.is_there = True
        self.finds = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.begin(settings)

    def begin(self, settings: StoreSettings = SETTINGS) -> None:
        """As a start does."""
        ways = ScrubWays(self.files, settings, self.clock, self.on_disk)
        self.scrubber = Scrubber(ways, self.journal, remedy="mend it", on_found=self.count)

    def count(self) -> bool:
        self.finds += 1
        return True

    async def on_disk(self, work: Callable[[], T], /) -> T:
        done = work()
        self.meanwhile()
        return done

    def journal(self) -> ScrubbedJournal | None:
        queries = self.store.queries
        return ScrubbedJournal(self.store.damage, queries.start, queries.flushed) if self.is_there else None

    def run(self, seconds: float) -> int:
        """Let time pass; returns how often it had to be woken."""
        steps, end = 0, self.clock.monotonic() + seconds
        while True:
            wait = asyncio.run(self.scrubber.step())
            steps += 1
            if self.clock.monotonic() + wait > end:
                self.clock.advance(end - self.clock.monotonic())
                return steps
            self.clock.advance(wait)

    def spoil(self, share: float) -> tuple[str, int]:
        """Turn a bit in the journal; returns where."""
        paths = [path for path in self.files.paths() if path.startswith("journal/")]
        path = paths[int(share * len(paths))]
        place = self.files.paths()[path] // 2
        self.files.flip_bit(path, place)
        return path, int(path[-28:-8]) + place


def test_a_bit_that_turned_is_found_within_a_round_and_told(caplog: pytest.LogCaptureFixture) -> None:
    lone = Lone()
    path, offset = lone.spoil(0.5)
    lone.run(4 * DAY)
    assert not lone.store.damage.ranges, "it is not its turn yet"
    lone.run(6.1 * DAY)
    ((start, end),) = lone.store.damage.ranges
    assert start <= offset < end
    assert (lone.scrubber.rounds, lone.scrubber.found, lone.finds) == (1, 1, 2)
    (line,) = [one for one in caplog.records if "scrub found damage" in one.message]
    assert line.levelno == logging.ERROR
    assert "mend it" in line.message
    facts = line.__dict__
    assert (facts["start"], facts["end"], facts["topics"]) == (start, end, "orders")
    assert facts["segment"].endswith(path)


def test_what_is_known_is_not_counted_again_and_told_once_a_round() -> None:
    lone = Lone()
    lone.spoil(0.5)
    lone.run(31 * DAY)
    assert (lone.scrubber.rounds, lone.scrubber.found, len(lone.store.damage.ranges)) == (3, 1, 1)
    assert lone.finds == 4, "found once, and at the end of each round it is tried again to mend it"


def test_it_is_woken_when_a_piece_is_due_and_now_and_then_to_see_whether_the_journal_has_grown() -> None:
    lone = Lone()
    pieces = lone.store.stats()["segments"] + lone.store.queries.end // PIECE_BYTES
    assert lone.run(10 * DAY) <= 10 * DAY / 600 + 4 * pieces
    assert lone.scrubber.size == lone.store.queries.end


def test_bytes_a_second_are_bounded_where_it_is_late() -> None:
    lone = Lone(StoreSettings(scrub_hours=0.001, scrub_bytes_per_second=64 << 10))
    lone.run(8.0)
    assert 0 < lone.scrubber.size <= 8 * (64 << 10) + PIECE_BYTES + (16 << 10)


def test_it_goes_on_where_it_was_after_a_restart() -> None:
    lone = Lone()
    lone.run(5 * DAY)
    half = lone.scrubber.size
    assert 0.4 < half / lone.store.queries.end < 0.9
    lone.clock.advance(100 * DAY)
    lone.begin()
    lone.run(600.0)
    assert lone.scrubber.size <= PIECE_BYTES + (16 << 10), "a stop is not made up for"
    lone.run(5.2 * DAY)
    assert lone.scrubber.rounds == 1
    assert lone.scrubber.size < lone.store.queries.end - half + 2 * PIECE_BYTES


def test_what_is_written_meanwhile_belongs_to_the_round() -> None:
    lone = Lone()
    lone.run(5 * DAY)
    lone.fill(14)
    lone.run(5.2 * DAY)
    assert lone.scrubber.rounds == 1
    assert lone.scrubber.size >= lone.store.queries.end - PIECE_BYTES


def test_what_somebody_writes_at_that_moment_is_not_taken_for_damage() -> None:
    lone = Lone()
    path, offset = lone.spoil(0.5)
    place = offset - int(path[-28:-8])
    spoiled = lone.files.read_file(path)

    def mended() -> None:
        if lone.files.read_file(path) == spoiled and lone.scrubber._place is not None:
            lone.files.flip_bit(path, place)

    lone.run(4 * DAY)
    lone.meanwhile = mended
    lone.run(6.2 * DAY)
    assert lone.scrubber.rounds == 1
    assert not lone.store.damage.ranges


def test_it_waits_while_there_is_no_journal_and_goes_on_with_that_of_another_role() -> None:
    lone = Lone()
    lone.run(5 * DAY)
    before = lone.scrubber.size
    lone.is_there = False
    lone.run(600.0)
    assert lone.scrubber.size == before
    lone.is_there = True
    lone.spoil(0.95)
    lone.run(6 * DAY)
    assert len(lone.store.damage.ranges) == 1


def test_a_full_disk_keeps_its_place_from_being_written_and_nothing_else() -> None:
    lone = Lone()
    lone.spoil(0.95)
    lone.files.fail("write", lambda path, _: path.startswith("scrub"), errno.ENOSPC)
    lone.run(10.1 * DAY)
    assert lone.scrubber.rounds == 1
    assert len(lone.store.damage.ranges) == 1
    assert ScrubPlace.read(lone.files) == ScrubPlace()


def test_a_disk_that_says_no_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    lone = Lone(StoreSettings(scrub_hours=0.0001))
    fault = lone.files.fail("read", lambda path, _: path.startswith("journal/"), errno.EACCES)

    async def test() -> None:
        task = asyncio.ensure_future(lone.scrubber.run())
        while not fault.hits:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(test())
    assert "the scrub cannot go on" in caplog.text


def test_it_is_off_where_the_settings_say_so() -> None:
    lone = Lone(StoreSettings(scrub_hours=0.0))

    async def test() -> None:
        task = asyncio.ensure_future(lone.scrubber.run())
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()

    asyncio.run(test())
    assert lone.scrubber.size == 0


# --- in a shard -------------------------------------------------------------------------------------------------------


def spoil(one: Machine, number: int) -> str:
    """Turn a bit in a segment that nobody reads."""
    path = sorted(one.journal())[number]
    one.files.flip_bit(path, len(one.journal()[path]) // 2)
    return path


def test_what_a_follower_and_a_leader_have_lost_is_mended_while_nobody_reads_it() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        whole = leader.journal()
        for one, number in ((shard.followers[0], 0), (shard.followers[1], 1), (leader, 0)):
            path = spoil(one, number)
            assert one.journal()[path] != whole[path]
            await shard.until(lambda one=one, path=path: one.journal()[path] == whole[path])  # type: ignore[misc]
            await shard.until(lambda one=one: not one.member.report().damaged)  # type: ignore[misc]
            assert one.member.scrubber.found >= 1
            assert one.member.report().mended >= 1
        assert leader.serves
        assert leader.member.report().epoch == 1
        await shard.until(lambda: len(shard.followers) == 2)
        leader.shop.write(1, first=80)
        await shard.level(leader)
        end = leader.member.report().end
        await shard.until(lambda: all(one.member.report().committed == end for one in shard.machines))
        assert shard.followers[0].journal() == leader.journal() == shard.followers[1].journal()

    in_shard(test, store=QUICK)


def test_a_follower_that_finds_one_after_the_other_has_all_of_it_mended() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        follower = shard.followers[0]
        turn_bits(follower)
        assert follower.journal() != leader.journal()
        await shard.until(lambda: follower.journal() == leader.journal(), 600)
        await shard.until(lambda: follower.role is Role.FOLLOWING)
        assert not follower.member.report().damaged
        assert follower.member.report().mended == follower.member.scrubber.found >= 3

    in_shard(test, store=QUICK)


def test_a_follower_with_damage_that_nobody_can_mend_follows_on() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        for one in shard.machines:
            spoil(one, 0)
        await shard.until(lambda: all(one.member.report().damaged == 1 for one in shard.machines))
        await shard.until(lambda: all(one.member.scrubber.rounds >= 3 for one in shard.machines), 600)
        leader.shop.write(1, first=80)
        await shard.level(leader)
        await shard.until(lambda: len(shard.followers) == 2)
        assert len(leader.member.report().in_sync) == 3
        assert all(one.member.report().damaged == 1 for one in shard.machines)

    in_shard(test, store=QUICK)


def test_a_member_whose_journal_is_cut_or_begun_anew_has_no_damage_by_that() -> None:
    async def test(shard: Shard) -> None:
        leader = await filled(shard)
        behind = shard.followers[0]
        await shard.until(lambda: behind.member.scrubber.size > 0)
        await behind.stop()
        for number in range(8, 30):
            leader.shop.write(10, 10_000, first=10 * number)
            await shard.level(leader)
        assert leader.shop.store is not None
        leader.shop.store.retain()
        behind.start()
        await shard.until(lambda: behind.role is Role.FOLLOWING)
        rounds = behind.member.scrubber.rounds
        await shard.until(lambda: behind.member.scrubber.rounds >= rounds + 2, 600)
        assert all(one.member.scrubber.found == 0 for one in shard.machines)

    in_shard(test, store=QUICK)
