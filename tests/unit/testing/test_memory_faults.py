"""What goes wrong in the memory file system on demand: crashes at an operation, errors, a full disk, bit rot."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dmq.errors import DiskFull, NoPermission, StorageError, TooManyFiles
from dmq.storage.files import Files
from dmq.testing import CrashNow, MemoryFiles
from dmq.testing.disk.faults import Kind


def publish(files: Files) -> None:
    """Seven operations that change something."""
    file = files.open("a.tmp", create=True, write=True)
    file.write(0, [b"x" * 600, b"y" * 600])
    file.truncate(1100)
    file.sync()
    file.close()
    files.rename("a.tmp", "a")
    files.sync_dir("")
    files.unlink("a")


# --- crashes at an operation -----------------------------------------------------------------------------------------


def test_operations_are_counted_and_traced() -> None:
    files = MemoryFiles(trace=100)
    publish(files)
    assert files.operations == 7
    changes = [(line.number, line.kind, line.path, line.position, line.size) for line in files.trace]
    assert changes[1:4] == [
        (1, "create", "a.tmp", 0, 0),
        (2, "write", "a.tmp", 0, 1200),
        (3, "truncate", "a.tmp", 0, 0),
    ]
    kinds = [kind for _, kind, *_ in changes]
    assert kinds == ["open", "create", "write", "truncate", "sync", "rename", "sync_dir", "unlink"]


def test_the_trace_is_bounded_and_off_unless_asked_for() -> None:
    files, silent = MemoryFiles(trace=3), MemoryFiles()
    publish(files)
    publish(silent)
    assert [line.kind for line in files.trace] == ["rename", "sync_dir", "unlink"]
    assert not silent.trace


@pytest.mark.parametrize("number", range(1, 8))
def test_a_crash_can_come_in_any_operation(number: int) -> None:
    sizes = set()
    for seed in range(40):
        files = MemoryFiles(rng=random.Random(seed))
        files.crash_at = number
        with pytest.raises(CrashNow):
            publish(files)
        assert files.operations == number
        with pytest.raises(CrashNow):
            files.exists("a")
        sizes.add(tuple(files.kill().paths().items()))
    # Before it and after it, and for the write also within.
    assert len(sizes) == {2: len(sizes), 4: 1, 6: 1}.get(number, 2)
    if number == 2:
        found = {size for ((_, size),) in sizes}
        assert {0, 1200} < found


def test_a_run_shorter_than_the_crash_point_goes_through() -> None:
    files = MemoryFiles()
    files.crash_at = 8
    publish(files)
    with pytest.raises(CrashNow):
        files.mkdir("b")


# --- faults ----------------------------------------------------------------------------------------------------------


def test_the_chosen_operation_fails_once() -> None:
    files = MemoryFiles()
    file = files.open("a", create=True, write=True)
    fault = files.fail("write", 2)
    file.write(0, [b"1"])
    with pytest.raises(StorageError, match="could not write memory:/a"):
        file.write(1, [b"2"])
    file.write(1, [b"3"])
    assert fault.hits == 1
    assert file.read(0, 10) == b"13"


def test_a_predicate_picks_by_path_and_number_until_healed() -> None:
    files = MemoryFiles()
    a, b = (files.open(name, create=True, write=True) for name in "ab")
    fault = files.fail("sync", lambda path, number: path == "b" and number > 1, errno.ENOSPC)
    a.sync()
    a.sync()
    for _ in range(2):
        with pytest.raises(DiskFull):
            b.sync()
    assert fault.hits == 2
    files.heal(fault)
    b.sync()


def test_a_short_write_leaves_a_part() -> None:
    files = MemoryFiles()
    file = files.open("a", create=True, write=True)
    files.fail("write", 1, errno.ENOSPC, written=0.5)
    with pytest.raises(DiskFull):
        file.write(0, [b"12", b"3456"])
    assert file.read(0, 10) == b"123"


@pytest.mark.parametrize("kind", ["create", "write", "truncate", "sync", "rename", "sync_dir", "unlink"])
def test_any_kind_can_fail_and_changes_nothing_then(kind: Kind) -> None:
    files = MemoryFiles()
    files.write_file("a.tmp" if kind != "create" else "z", b"zzz")
    kinds: dict[str, Callable[[], object]] = {
        "create": lambda: files.open("a.tmp", create=True),
        "write": lambda: files.open("a.tmp", write=True).write(0, [b"x"]),
        "truncate": lambda: files.open("a.tmp", write=True).truncate(0),
        "sync": lambda: files.open("a.tmp", write=True).sync(),
        "rename": lambda: files.rename("a.tmp", "a"),
        "sync_dir": lambda: files.sync_dir(""),
        "unlink": lambda: files.unlink("a.tmp"),
    }
    before = {path: files.read_file(path) for path in files.paths()}
    files.fail(kind, 1, errno.EACCES)
    with pytest.raises(NoPermission):
        kinds[kind]()
    assert {path: files.read_file(path) for path in files.paths()} == before
    kinds[kind]()


def test_reads_fail_and_opens_run_out_of_descriptors() -> None:
    files = MemoryFiles()
    files.write_file("a", b"x")
    file = files.open("a")
    files.fail("read")
    with pytest.raises(StorageError):
        file.read(0, 1)
    assert file.read(0, 1) == b"x"
    files.fail("open", lambda path, number: files.handles >= 2, errno.EMFILE)
    second = files.open("a")
    with pytest.raises(TooManyFiles):
        files.open("a")
    second.close()
    files.open("a").close()


def test_the_lock_file_may_be_forbidden() -> None:
    files = MemoryFiles()
    files.fail("open", 1, errno.EACCES)
    with pytest.raises(NoPermission):
        files.lock()
    files.lock()


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_what_fits_and_works_again_with_space() -> None:
    files = MemoryFiles(capacity_bytes=1000)
    files.write_file("old", bytes(600))
    file = files.open("a", create=True, write=True)
    file.write(0, [b"x" * 300])
    assert files.disk_usage() == (900, 100)
    with pytest.raises(DiskFull):
        file.write(200, [b"y" * 300])
    assert file.size() == 400
    assert file.read(200, 300) == b"y" * 200
    assert files.disk_usage().available == 0
    file.write(0, [b"z" * 400])
    with pytest.raises(DiskFull):
        file.write(500, [b"beyond"])
    with pytest.raises(DiskFull):
        file.truncate(401)
    assert file.size() == 400
    files.unlink("old")
    file.write(400, [b"w" * 600])
    files.capacity_bytes = 2000
    assert files.disk_usage() == (1000, 1000)
    assert files.crash(random.Random(1)).capacity_bytes == 2000


def test_a_removed_file_takes_space_until_it_is_closed() -> None:
    files = MemoryFiles(capacity_bytes=1000)
    file = files.open("a", create=True, write=True)
    file.write(0, [bytes(700)])
    files.unlink("a")
    assert files.disk_usage().available == 300
    file.close()
    assert files.disk_usage().available == 1000


def test_a_replaced_and_a_cut_file_give_their_space_back() -> None:
    files = MemoryFiles(capacity_bytes=1000)
    files.write_file("a", bytes(300))
    files.write_file("b/c", bytes(400))
    files.rename("a", "b/c")
    assert files.disk_usage().available == 700
    files.cut("b/c", 100)
    files.write_file("d", bytes(50))
    assert files.disk_usage().available == 850
    files.remove("b")
    assert files.disk_usage().available == 950


# --- behind the store's back -----------------------------------------------------------------------------------------


def test_bit_rot_and_cuts_are_durable() -> None:
    files = MemoryFiles()
    files.write_file("a", bytes(10))
    files.flip_bit("a", 3, 7)
    files.cut("a", 5)
    assert files.read_file("a") == b"\0\0\0\x80\0"
    assert files.crash(random.Random(1), "nothing").read_file("a") == b"\0\0\0\x80\0"


def test_open_handles_see_bit_rot() -> None:
    files = MemoryFiles()
    files.write_file("a", b"a")
    file = files.open("a")
    files.flip_bit("a", 0, 1)
    assert file.read(0, 1) == b"c"


def test_files_put_there_and_removed_need_no_sync() -> None:
    files = MemoryFiles()
    files.mkdir("one/two")
    files.write_file("one/two/a", b"x")
    files.write_file("b/c/d", b"y")
    files.remove("b")
    files.remove("b")
    after = files.crash(random.Random(1), "nothing")
    assert after.paths() == {"one/two/a": 1}
    assert not after.exists("b")
    with pytest.raises(FileNotFoundError):
        after.read_file("b/c/d")


def test_a_copy_goes_its_own_way() -> None:
    files = MemoryFiles()
    files.write_file("a", b"x")
    file = files.open("a", write=True)
    file.write(0, [b"y"])
    twin = files.copy()
    file.write(0, [b"z"])
    twin.open("a", write=True).write(1, [b"!"])
    assert (files.read_file("a"), twin.read_file("a")) == (b"z", b"y!")
    assert twin.crash(random.Random(1), "nothing").read_file("a") == b"x"


def test_a_directory_goes_out_and_comes_back(tmp_path: Path) -> None:
    files = MemoryFiles()
    files.write_file("one/two/a", b"x")
    files.mkdir("empty")
    files.dump(tmp_path / "out")
    assert (tmp_path / "out/one/two/a").read_bytes() == b"x"
    back = MemoryFiles.load(tmp_path / "out")
    assert back.paths() == files.paths()
    assert back.crash(random.Random(1), "nothing").listdir("") == ["empty", "one"]
