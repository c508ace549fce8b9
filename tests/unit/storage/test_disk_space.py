"""The disk's marks and the ballast, on a disk in memory: who is refused, who goes on, and when it ends. (J-03)"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from dmq.errors import DiskFull
from dmq.model import Durability
from dmq.settings import StoreSettings
from dmq.storage.disk_space import BALLAST
from dmq.storage.files import DiskUsage, OsFiles
from dmq.storage.journal.unit_draft import Placement
from dmq.storage.state.events import PositionSet
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.integration.broker.directories import batch

MIB = 1 << 20
SETTINGS = StoreSettings(segment_bytes=MIB, unit_bytes_max=64 << 10, body_bytes_max=16 << 10)
NO_MARKS = StoreSettings(
    segment_bytes=MIB, unit_bytes_max=64 << 10, body_bytes_max=16 << 10, disk_clean=1.0, disk_refuse=1.0
)


def opened(settings: StoreSettings = SETTINGS, files: MemoryFiles | None = None) -> tuple[MessageStore, MemoryFiles]:
    files = files or MemoryFiles(capacity_bytes=4 * MIB)
    store = MessageStore(files, settings, FakeClock())
    if "orders" not in {topic.name for topic in store.queries.topics()}:
        store.create_topic("orders")
    return store, files


def another_fills(files: MemoryFiles, share: float) -> None:
    used = files.disk_usage()
    files.write_file("lost+found", bytes(max(0, int(share * used.total) - used.used)))


def position(group: str) -> PositionSet:
    return PositionSet(group, 16, 0, 0)


def test_reserved_blocks_are_not_in_use() -> None:
    s = os.statvfs("/")
    usage = DiskUsage.at("/")
    assert usage.used == (s.f_blocks - s.f_bfree) * s.f_frsize
    assert usage.available == s.f_bavail * s.f_frsize
    assert DiskUsage(0, 0).share == 1.0


def test_a_disk_that_another_program_fills_is_noticed_without_a_write_and_so_is_its_end() -> None:
    store, files = opened()
    another_fills(files, 0.92)
    seen = [store.space.is_refusing]
    store.space.look()
    seen.append(store.space.is_refusing)
    files.unlink("lost+found")
    store.space.look()
    assert [*seen, store.space.is_refusing] == [False, True, False]
    store.close()


def test_a_disk_that_is_over_its_mark_at_start_takes_no_message() -> None:
    store, files = opened()
    store.close()
    another_fills(files, 0.95)
    store, _ = opened(files=files)
    assert store.space.is_refusing
    with pytest.raises(DiskFull, match="over 90%"):
        store.append([batch(b"x")])


def test_over_the_mark_messages_of_a_turn_are_refused_and_its_events_are_written() -> None:
    store, files = opened()
    another_fills(files, 0.92)
    store.space.look()
    outcomes = store.append_each([batch(b"x"), position("g"), batch(b"y")], Durability.STORED)
    assert [isinstance(outcome, DiskFull) for outcome in outcomes] == [True, False, True]
    assert store.queries.position("g", "orders", 0) is not None
    assert store.queries.bounds("orders", 0) == (0, 0)


@pytest.mark.parametrize("settings", [SETTINGS, NO_MARKS])
def test_a_resend_of_what_is_stored_is_answered_by_a_disk_that_takes_no_message(settings: StoreSettings) -> None:
    store, files = opened(settings)
    first, second = (
        msgspec.structs.replace(batch(body), producer_id=7, producer_epoch=1, first_sequence=number)
        for number, body in enumerate((b"x", b"y"))
    )
    (placed,) = store.append([first])
    another_fills(files, 0.92 if settings is SETTINGS else 1.0)
    store.space.look()
    if settings is NO_MARKS:
        store.space.ran_out()
    assert store.space.is_refusing
    again, refused = store.append_each([first, second], Durability.FLUSHED)
    assert isinstance(again, Placement)
    assert (again.duplicate, again.first_offset) == (True, placed.first_offset)
    assert isinstance(refused, DiskFull)
    assert [one.duplicate for one in store.append([first])] == [True]
    with pytest.raises(DiskFull):
        store.append([second])
    store.close()


def test_a_full_disk_has_room_for_events_and_none_for_messages_until_there_is_space() -> None:
    store, files = opened(NO_MARKS)
    ballast = files.size(BALLAST)
    assert ballast == 4 * MIB // 20 // 4096 * 4096
    another_fills(files, 1.0)
    with pytest.raises(DiskFull, match="no space left"):
        store.append([batch(bytes(5000))])
    for number in range(100):
        store.append([position(f"g{number}")])
    with pytest.raises(DiskFull, match="no space is left"):
        store.append([batch(b"x")])
    assert store.space.is_refusing
    assert not files.exists(BALLAST)
    files.write_file("lost+found", bytes(files.size("lost+found") - ballast))
    store.space.look()
    assert store.space.is_refusing, "what is free is little more than the ballast gave up"
    files.unlink("lost+found")
    store.append([batch(b"x")])
    assert files.size(BALLAST) == ballast
    store.close()


def test_the_first_event_on_a_full_disk_gives_the_ballast_up() -> None:
    store, files = opened(NO_MARKS)
    another_fills(files, 1.0)
    store.append([position("g")])
    assert not files.exists(BALLAST)
    store.flush()
    again, _ = opened(NO_MARKS, files.kill())
    assert again.queries.position("g", "orders", 0) is not None


def test_a_ballast_that_is_used_up_ends_in_an_error_and_harms_nothing() -> None:
    store, files = opened(NO_MARKS)
    another_fills(files, 1.0)
    for number in range(10):
        store.append([PositionSet("g" * 200 + str(number), 16, 0, 0)])
    with pytest.raises(DiskFull, match="no space left"):
        store.append([PositionSet("g" * 200, 16, 0, 0) for _ in range(2000)])
    store.flush()
    again, _ = opened(NO_MARKS, files.kill())
    assert again.queries.position("g" * 200 + "0", "orders", 0) is not None


def test_a_torn_tail_on_a_full_disk_is_salvaged_in_the_room_of_the_ballast() -> None:
    store, files = opened(NO_MARKS)
    store.append([batch(b"kept")])
    store.flush()
    files = files.kill()
    name = files.listdir("journal")[0]
    raw = files.read_file(f"journal/{name}")
    files.write_file(f"journal/{name}", raw + os.urandom(9000))
    another_fills(files, 1.0)
    store, _ = opened(NO_MARKS, files)
    assert store.recovered.cut_bytes == 9000
    assert store.queries.bounds("orders", 0) == (0, 1)
    assert not files.exists(BALLAST)


def test_without_a_ballast_a_full_disk_refuses_everything_and_goes_on_with_space() -> None:
    settings = StoreSettings(
        segment_bytes=MIB,
        unit_bytes_max=64 << 10,
        body_bytes_max=16 << 10,
        disk_clean=1.0,
        disk_refuse=1.0,
        ballast_bytes=0,
    )
    store, files = opened(settings)
    assert not files.exists(BALLAST)
    another_fills(files, 1.0)
    with pytest.raises(DiskFull):
        store.append([position("g")])
    files.unlink("lost+found")
    store.append([position("g"), batch(b"x")])


def test_a_checkpoint_that_a_full_disk_refuses_leaves_no_part_of_it() -> None:
    store, files = opened(NO_MARKS)
    store.append([batch(bytes(10_000)) for _ in range(20)])
    store.flush()
    before = {path for path in files.paths() if not path.startswith("journal/")}
    fault = files.fail("write", lambda path, _: path.startswith("index/"), errno.ENOSPC)
    with pytest.raises(DiskFull):
        store.checkpoint()
    assert fault.hits
    assert {path for path in files.paths() if not path.startswith("journal/")} == before
    files.heal()
    store.close()


def test_a_store_that_cannot_write_its_last_checkpoint_closes_and_loses_nothing() -> None:
    store, files = opened(NO_MARKS)
    store.append([batch(b"x")])
    another_fills(files, 1.0)
    files.fail("write", lambda path, _: not path.startswith("journal/"), errno.ENOSPC)
    store.close()
    files.heal()
    store, _ = opened(NO_MARKS, files)
    assert store.queries.bounds("orders", 0) == (0, 1)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_store_whose_last_checkpoint_fails_tells_it_in_a_line_and_closes(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, files = opened(NO_MARKS)
    store.append([batch(b"x")])
    fault = files.fail("create", lambda path, _: path.startswith(("index/", "runs/")), number)
    store.close()
    assert fault.hits
    (line,) = caplog.records
    assert line.message.startswith("the last checkpoint could not be written")
    assert line.exc_info is None
    files.heal()
    store, _ = opened(NO_MARKS, files)
    assert store.queries.bounds("orders", 0) == (0, 1)


def test_the_blocks_of_a_ballast_exist(tmp_path: Path) -> None:
    file = OsFiles(tmp_path).open(BALLAST, create=True, write=True)
    file.allocate(1 << 20)
    file.close()
    assert (tmp_path / BALLAST).stat().st_blocks * 512 >= 1 << 20


def test_a_file_system_that_allocates_nothing_gets_real_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", nothing)
    file = OsFiles(tmp_path).open(BALLAST, create=True, write=True)
    file.allocate(3 << 20)
    file.close()
    assert (tmp_path / BALLAST).stat().st_size == 3 << 20
    assert (tmp_path / BALLAST).stat().st_blocks * 512 >= 3 << 20
