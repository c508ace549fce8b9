"""The scrub looks at every byte of a journal and finds what cannot be read, but calls nothing damaged that is not."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from crc32c import crc32c

from dmq.errors import StorageError
from dmq.storage.files import File, OsFiles
from dmq.storage.journal.unit import HEADER, HEADER_BYTES, read_header
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.scrub import PIECE_BYTES, Range, Scrub, ScrubPlace, ScrubSchedule
from dmq.testing import MemoryFiles
from tests.sampling import SEED
from tests.unit.storage.upkeep.test_retention import HOUR, Kept

SECOND = 1000
PIECES = [500, 3000, 20_000, PIECE_BYTES]


class Filled(Kept):
    """A store with some segments, all of it durable; and where its units stand."""

    def __init__(self) -> None:
        super().__init__()
        self.fill(4)
        self.units: list[tuple[str, int, int, int]] = []  # path, position, length, journal offset
        for path in self.segments:
            raw, at = self.files.read_file(path), 0
            while (header := read_header(raw, at)) is not None:
                self.units.append((path, at, header.length, header.start))
                at += header.length

    @property
    def segments(self) -> list[str]:
        return [path for path in self.files.paths() if path.startswith("journal/")]

    @property
    def end(self) -> int:
        return self.store.queries.flushed

    def look(self, size: int = PIECE_BYTES, *, at: int = 0) -> list[Range]:
        """What a scrub finds from an offset on."""
        return look_through(self.store.damage.scrub(at), self.end, size)


def look_through(scrub: Scrub, end: int, size: int) -> list[Range]:
    found: list[Range] = []
    while (piece := scrub.next(end, size)) is not None:
        found += scrub.saw(piece, piece.run())
    assert scrub.place == end
    return found


@pytest.mark.parametrize("size", PIECES)
def test_a_journal_that_is_whole_has_nothing_to_be_found(size: int) -> None:
    assert Filled().look(size) == []


@pytest.mark.parametrize("size", PIECES)
def test_a_bit_that_turned_anywhere_is_found_with_the_unit_it_stands_in(size: int) -> None:
    filled, rng = Filled(), random.Random(SEED)
    for number in range(12):
        path, at, length, start = rng.choice(filled.units)
        place = at + (rng.randrange(HEADER_BYTES) if number % 2 else rng.randrange(length))
        bit = rng.randrange(8)
        filled.files.flip_bit(path, place, bit)
        assert filled.look(size) == [(start, start + length)], (path, place, bit)
        filled.files.flip_bit(path, place, bit)


@pytest.mark.parametrize("size", PIECES)
def test_a_range_ends_where_a_unit_can_be_read_again_or_the_segment_ends(size: int) -> None:
    filled = Filled()
    path = filled.segments[1]
    within = [unit for unit in filled.units if unit[0] == path]
    raw = bytearray(filled.files.read_file(path))
    raw[within[2][1] : within[4][1]] = bytes(within[4][1] - within[2][1])
    raw[within[-1][1] :] = bytes(within[-1][2])
    filled.files.write_file(path, bytes(raw))
    assert filled.look(size) == [(within[2][3], within[4][3]), (within[-1][3], within[-1][3] + within[-1][2])]


@pytest.mark.parametrize("size", PIECES)
def test_bytes_that_a_segment_has_lost_are_found(size: int) -> None:
    filled = Filled()
    path = filled.segments[1]
    within = [unit for unit in filled.units if unit[0] == path]
    filled.files.cut(path, within[3][1] + 10)
    assert filled.look(size) == [(within[3][3], within[-1][3] + within[-1][2])]


@pytest.mark.parametrize("size", PIECES)
def test_a_unit_of_an_older_epoch_than_the_one_before_it_is_one_that_was_not_written_over(size: int) -> None:
    filled = Filled()
    path, at, length, start = filled.units[len(filled.units) // 2]
    raw = bytearray(filled.files.read_file(path))
    header = HEADER.unpack_from(raw, at)
    HEADER.pack_into(raw, at, *header[:4], header[4] - 1, *header[5:])
    crc = crc32c(bytes(raw[at + 8 : at + length]))
    raw[at + 4 : at + 8] = crc.to_bytes(4, "big")
    filled.files.write_file(path, bytes(raw))
    assert filled.look(size) == [(start, start + length)]


@pytest.mark.parametrize("size", PIECES)
def test_what_the_disk_cannot_read_is_damage_and_the_rest_of_the_piece_is_not(size: int) -> None:
    filled = Filled()
    path, at, length, start = filled.units[len(filled.units) // 2]
    block = (at + length // 2) // 4096 * 4096
    filled.store._journal.files = BadBlock(filled.files, path, block)  # type: ignore[assignment]
    lost = [(u[3], u[3] + u[2]) for u in filled.units if u[0] == path and u[1] < block + 4096 and block < u[1] + u[2]]
    assert filled.look(size) == [(lost[0][0], lost[-1][1])], "a block is lost, and the units that stand in it"
    assert lost[0][0] <= start < lost[-1][1]


class BadBlock:
    """A disk on which one block of one file cannot be read."""

    def __init__(self, files: MemoryFiles, path: str, block: int) -> None:
        self._files = files
        self._path = path
        self._block = block

    def open(self, path: str) -> BadBlockFile:
        return BadBlockFile(self._files.open(path), self._block if path == self._path else 1 << 60)


class BadBlockFile:
    def __init__(self, file: File, block: int) -> None:
        self._file = file
        self._block = block

    def read_aside(self, position: int, size: int) -> bytes:
        if position < self._block + 4096 and self._block < position + size:
            raise StorageError("could not read it", errno=errno.EIO)
        return self._file.read_aside(position, size)

    def close(self) -> None:
        self._file.close()


def test_an_error_that_is_not_the_disks_is_no_damage() -> None:
    filled = Filled()
    filled.files.fail("read", lambda name, _: name.startswith("journal/"), errno.EACCES)
    with pytest.raises(Exception, match="not allowed"):
        filled.look()


def test_one_that_begins_where_no_unit_does_goes_back_to_where_one_surely_does() -> None:
    filled = Filled()
    path, at, length, start = filled.units[-3]
    assert filled.look(at=start + 7) == []
    filled.files.flip_bit(path, at + length - 1)
    assert filled.look(at=start + 7) == [(start, start + length)]
    assert filled.look(at=start) == [(start, start + length)], "also where the first unit is the damaged one"


def test_what_retention_takes_meanwhile_is_not_damaged() -> None:
    filled = Filled()
    scrub = filled.store.damage.scrub()
    piece = scrub.next(filled.end, 20_000)
    assert piece is not None
    scrub.saw(piece, piece.run())
    planned = scrub.next(filled.end, 20_000)
    filled.consume("billing", 0, filled.bounds[1])
    filled.clock.advance(2 * HOUR)
    assert filled.store.retain() > 0
    assert planned is not None
    assert planned.run().first_damaged is not None, "the file has gone before it was opened"
    assert look_through(scrub, filled.end, 20_000) == [], "and the next plan knows"


@pytest.mark.parametrize("size", PIECES)
def test_topics_of_a_damaged_unit_are_told_with_its_range_as_far_as_its_table_can_be_read(size: int) -> None:
    filled = Filled()
    path, at, length, _ = [unit for unit in filled.units if unit[0] == filled.segments[1]][3]
    filled.files.flip_bit(path, at + length - 1)
    scrub = filled.store.damage.scrub()
    told: list[list[str]] = []
    while (piece := scrub.next(filled.end, size)) is not None:
        seen = piece.run()
        if scrub.saw(piece, seen):
            told.append(filled.store.damage.topics([*seen.topic_ids, 77_777]))
    assert told == [["orders"]]


def test_a_piece_reads_no_more_than_its_size_and_one_unit() -> None:
    filled = Filled()
    scrub = filled.store.damage.scrub()
    longest = max(unit[2] for unit in filled.units)
    while (piece := scrub.next(filled.end, 10_000)) is not None:
        seen = piece.run()
        assert seen.size <= 10_000 + longest
        scrub.saw(piece, seen)


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_round_takes_its_time_however_large_the_journal_is() -> None:
    schedule, place = ScrubSchedule(1000.0, 1 << 20), ScrubPlace(at=0, began_ms=0)
    for end in (10, 1 << 40):
        for tenth in range(11):
            place.at = end * tenth // 10
            assert schedule.wait_seconds(place, 0, end, 0) == pytest.approx(100.0 * tenth, abs=1)
            assert schedule.wait_seconds(place, 0, end, 100 * tenth * SECOND) == pytest.approx(0, abs=1)
    assert not schedule.is_over(place, 999 * SECOND)
    assert schedule.is_over(place, 1000 * SECOND)


def test_bytes_that_retention_takes_soon_come_before_it_does() -> None:
    """A journal of 100 segments that grows by one and loses one each hour; a round takes 500 hours."""
    schedule, place = ScrubSchedule(500 * HOUR, 1 << 20), ScrubPlace()
    seen: set[int] = set()
    for hour in range(800):
        start, end = hour, hour + 100
        while not schedule.wait_seconds(place, start, end, int(hour * HOUR * SECOND)) and place.at < end:
            place.at = max(place.at, start)
            seen.add(place.at)
            place.at += 1
        if schedule.is_over(place, int(hour * HOUR * SECOND)):
            place = ScrubPlace(began_ms=int(hour * HOUR * SECOND))
    assert {*range(800)} <= seen


def test_the_time_of_a_stop_does_not_count_so_a_start_has_nothing_to_catch_up() -> None:
    schedule, place = ScrubSchedule(1000.0, 1 << 20), ScrubPlace(at=30, began_ms=0)
    schedule.resume(place, 0, 100, 900 * SECOND)
    assert place.began_ms == 600 * SECOND
    assert schedule.wait_seconds(place, 0, 100, 900 * SECOND) == 0
    place.at = 40
    assert schedule.wait_seconds(place, 0, 100, 900 * SECOND) == 100
    schedule.resume(place, 0, 100, 950 * SECOND)
    assert place.began_ms == 600 * SECOND, "one that is in time goes on as it was"


def test_a_clock_that_was_set_back_does_not_stop_it() -> None:
    schedule, place = ScrubSchedule(1000.0, 1 << 20), ScrubPlace(at=50, began_ms=10_000 * SECOND)
    schedule.resume(place, 0, 100, 5000 * SECOND)
    assert schedule.wait_seconds(place, 0, 100, 5000 * SECOND) == 0


def test_it_rests_for_as_long_as_its_bytes_may_take_and_longer_where_a_piece_took_long() -> None:
    schedule = ScrubSchedule(1000.0, 1 << 20)
    assert schedule.rest_seconds(1 << 18, 0.001) == 0.25
    assert schedule.rest_seconds(1 << 18, 1.0) == 9.0


# --- its place --------------------------------------------------------------------------------------------------------


def test_the_place_is_kept_and_one_that_cannot_be_read_is_the_beginning() -> None:
    files = MemoryFiles()
    assert ScrubPlace.read(files) == ScrubPlace()
    place = ScrubPlace(at=7, began_ms=8, ended_ms=9)
    place.write(files)
    assert ScrubPlace.read(files) == place
    for raw in (b"", b"{", b'{"at": "x"}', b"\xff" * 10_000):
        files.write_file("scrub", raw)
        assert ScrubPlace.read(files) == ScrubPlace()


def test_a_crash_while_the_place_is_written_leaves_one_that_can_be_used() -> None:
    for seed in range(SEED, SEED + 30):
        rng = random.Random(seed)
        files = MemoryFiles(rng=rng)
        before, after = ScrubPlace(at=1), ScrubPlace(at=2)
        before.write(files)
        after.write(files)
        assert ScrubPlace.read(files.crash(rng)) in (ScrubPlace(), before, after)


def test_a_store_opens_beside_it(tmp_path: Path) -> None:
    files = OsFiles(tmp_path)
    ScrubPlace(at=7).write(files)
    with MessageStore(files) as store:
        assert not store.queries.damage
    assert ScrubPlace.read(files).at == 7
