"""The contract of `Files`, held by the real file system and by the one in memory alike."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dmq.errors import DirectoryInUse, DiskFull, NoPermission, StorageError, TooManyFiles
from dmq.storage.files import Buffer, Files, OsFiles, storage_error
from dmq.testing import MemoryFiles
from tests.patience import eventually


def os_files(path: Path) -> Files:
    return OsFiles(path / "data")


def memory_files(path: Path) -> Files:
    return MemoryFiles()


@pytest.fixture(params=[os_files, memory_files])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    make: Callable[[Path], Files] = request.param
    return make(tmp_path)


def put(files: Files, path: str, data: bytes = b"") -> None:
    file = files.open(path, create=True, write=True)
    file.write(0, [data])
    file.close()


def content(files: Files, path: str) -> bytes:
    file = files.open(path)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


# --- one file ---------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_back(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    file.write(0, [b"hello ", b"world"])
    assert file.read(0, 11) == b"hello world"
    assert file.read(6, 3) == b"wor"
    file.close()
    assert content(files, "a") == b"hello world"


def test_what_is_read_aside_is_what_stands_there(files: Files) -> None:
    data = bytes(range(256)) * 100
    put(files, "a", data)
    file = files.open("a")
    for position, size in ((0, 25_600), (1, 10), (4095, 4098), (25_000, 5000), (25_600, 1), (30_000, 10)):
        for _ in range(2):
            assert file.read_aside(position, size) == data[position : position + size]
    file.close()


def test_what_is_read_aside_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # where the file system has another place for it at all
    os.close(descriptor)
    file = OsFiles(tmp_path).open("a")

    def is_left(position: int, size: int) -> bool:
        before = file._cached(position, size)  # type: ignore[attr-defined]
        assert file.read_aside(position, size) == bytes(size)
        return bool(file._cached(position, size) == before)  # type: ignore[attr-defined]

    # Again and again: a page that somebody has locked for a moment looks like one that is not cached.
    for size in (4096, 1 << 18):
        eventually(partial(is_left, 1 << 19, size))

    def stays() -> bool:
        file.read(0, 1 << 18)
        return is_left(0, 1 << 18) and len(file._cached(0, 1 << 18)) == 1 << 18  # type: ignore[attr-defined]

    eventually(stays, "what others have read goes")
    file.close()


def test_a_read_is_short_only_where_the_file_ends(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a")
    assert file.read(8, 10) == b"89"
    assert file.read(10, 10) == b""
    assert file.read(50, 10) == b""
    assert file.read(3, 0) == b""
    file.close()


def test_a_write_past_the_end_leaves_zeros_before_it(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    file.write(5, [b"x"])
    assert file.read(0, 10) == bytes(5) + b"x"
    file.close()


def test_a_write_over_old_bytes_replaces_just_those(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a", write=True)
    file.write(8, [b"ab", b"cd"])
    file.write(2, [b"--"])
    file.close()
    assert content(files, "a") == b"01--4567abcd"


@pytest.mark.parametrize("count", [0, 1, 2, 1024, 1025, 5000])
def test_any_number_of_buffers_goes_in_one_write(files: Files, count: int) -> None:
    buffers = [b"%d," % i if i % 7 else b"" for i in range(count)]
    file = files.open("a", create=True, write=True)
    file.write(3, buffers)
    expected = b"".join(buffers)
    assert file.size() == (3 + len(expected) if expected else 0)
    assert file.read(3, 100_000) == expected
    file.close()


def test_buffers_of_every_kind_are_written_byte_by_byte(files: Files) -> None:
    numbers = array("I", [1, 2, 3])
    file = files.open("a", create=True, write=True)
    file.write(0, [memoryview(numbers)])
    file.write(12, [bytearray(b"ab"), memoryview(b"xcdx")[1:3], memoryview(numbers)])
    assert file.read(0, 100) == numbers.tobytes() + b"abcd" + numbers.tobytes()
    file.close()


def test_a_buffer_reused_after_the_write_does_not_change_the_file(files: Files) -> None:
    buffer = bytearray(b"before")
    file = files.open("a", create=True, write=True)
    file.write(0, [buffer])
    buffer[:] = b"after!"
    assert file.read(0, 6) == b"before"
    file.close()


def test_truncate_cuts_and_grows_with_zeros(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a", write=True)
    file.truncate(4)
    assert file.size() == 4
    file.truncate(6)
    assert file.read(0, 10) == b"0123\0\0"
    file.close()
    assert files.size("a") == 6


def test_space_that_is_reserved_changes_nothing_that_can_be_read(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    file.write(0, [b"abc"])
    file.reserve(3, 1 << 20)
    assert file.size() == 3
    assert file.read(0, 10) == b"abc"
    file.write(3, [b"def"])
    file.truncate(4)
    file.write(4, [b"gh"])
    assert (file.size(), file.read(0, 10)) == (6, b"abcdgh")
    file.close()
    assert content(files, "a") == b"abcdgh"


def test_space_that_was_reserved_and_not_used_is_given_back_when_the_file_is_closed(tmp_path: Path) -> None:
    file = OsFiles(tmp_path).open("a", create=True, write=True)
    file.write(0, [bytes(1000)])
    file.sync()
    taken = (tmp_path / "a").stat().st_blocks
    if not file.reserve(1000, 1 << 20):
        file.close()
        pytest.skip("nothing is reserved without the extension, or on this file system")
    assert (tmp_path / "a").stat().st_blocks >= (1 << 20) // 512
    file.close()
    assert (tmp_path / "a").stat().st_blocks == taken


def test_two_handles_see_the_same_bytes(files: Files) -> None:
    writer, reader = files.open("a", create=True, write=True), files.open("a")
    writer.write(0, [b"x"])
    assert reader.read(0, 10) == b"x"
    writer.close()
    assert reader.read(0, 10) == b"x"
    reader.close()


def test_sync_changes_nothing_that_can_be_read(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    file.write(0, [b"x"])
    file.sync()
    file.sync()
    assert file.read(0, 10) == b"x"
    file.close()
    files.sync_dir("")


def test_closing_twice_is_fine(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    other = files.open("a")
    file.close()
    file.close()
    assert other.size() == 0, "it closed a handle that was not its own"
    other.close()


@pytest.mark.parametrize("use", ["write", "read", "sync", "truncate", "size"])
def test_a_closed_file_refuses_everything(files: Files, use: str) -> None:
    file = files.open("a", create=True, write=True)
    file.close()
    uses: dict[str, Callable[[], object]] = {
        "write": lambda: file.write(0, [b"x"]),
        "read": lambda: file.read(0, 1),
        "sync": file.sync,
        "truncate": lambda: file.truncate(0),
        "size": file.size,
    }
    with pytest.raises(StorageError) as caught:
        uses[use]()
    assert caught.value.detail["errno"] == errno.EBADF


def test_a_file_opened_to_read_refuses_changes(files: Files) -> None:
    put(files, "a", b"x")
    file = files.open("a")
    with pytest.raises(StorageError):
        file.write(0, [b"y"])
    with pytest.raises(StorageError):
        file.truncate(0)
    file.sync()
    file.close()
    assert content(files, "a") == b"x"


def test_a_position_below_zero_is_refused(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    with pytest.raises(StorageError):
        file.write(-1, [b"x"])
    with pytest.raises(StorageError):
        file.read(-1, 1)
    file.close()


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a", "no/such/folder"])
def test_opening_a_missing_file_raises_file_not_found(files: Files, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(path)
    with pytest.raises(FileNotFoundError):
        files.open(path, write=True)
    with pytest.raises(FileNotFoundError):
        files.size(path)
    assert not files.exists(path)


def test_create_needs_the_folder(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.open("folder/a", create=True, write=True)


def test_create_keeps_what_is_there(files: Files) -> None:
    put(files, "a", b"old")
    files.open("a", create=True, write=True).close()
    assert content(files, "a") == b"old"


def test_a_folder_cannot_be_opened_to_write(files: Files) -> None:
    files.mkdir("folder")
    with pytest.raises(StorageError):
        files.open("folder", write=True)


def test_a_file_is_no_folder(files: Files) -> None:
    put(files, "a")
    for refused in (
        lambda: files.open("a/b", create=True, write=True),
        lambda: files.listdir("a"),
        lambda: files.size("a/b"),
        lambda: files.mkdir("a"),
        lambda: files.mkdir("a/b"),
        lambda: files.mkdir("a/b/c"),
        lambda: files.sync_dir("a"),
        lambda: files.rmdir("a"),
        lambda: files.unlink("a/b"),
    ):
        with pytest.raises(StorageError):
            refused()
    assert not files.is_dir("a")
    assert not files.exists("a/b")


def test_a_name_over_255_bytes_is_refused(files: Files) -> None:
    put(files, "ä" * 127)
    with pytest.raises(StorageError):
        files.open("ä" * 128, create=True, write=True)
    with pytest.raises(StorageError):
        files.mkdir("f" * 256)
    with pytest.raises(StorageError):
        files.rename("ä" * 127, "f" * 256)
    assert files.listdir("") == ["ä" * 127]


# --- folders ----------------------------------------------------------------------------------------------------------


def test_listdir_is_sorted_and_empty_for_a_missing_folder(files: Files) -> None:
    for name in ("b", "a", "c"):
        put(files, name)
    files.mkdir("aa/bb")
    assert files.listdir("") == ["a", "aa", "b", "c"]
    assert files.listdir("aa") == ["bb"]
    assert files.listdir("aa/bb") == []
    assert files.listdir("missing") == []
    assert files.listdir("missing/too") == []


def test_mkdir_makes_parents_and_may_be_repeated(files: Files) -> None:
    files.mkdir("a/b/c")
    files.mkdir("a/b/c")
    files.mkdir("")
    assert files.is_dir("a/b")
    assert files.is_dir("a/b/c")
    assert files.is_dir("")
    assert files.exists("a/b/c")
    assert not files.is_dir("a/x")


def test_rmdir_removes_an_empty_folder_only_and_may_be_repeated(files: Files) -> None:
    files.mkdir("a")
    put(files, "a/x")
    with pytest.raises(StorageError):
        files.rmdir("a")
    files.unlink("a/x")
    files.rmdir("a")
    files.rmdir("a")
    files.rmdir("b/c")
    assert not files.exists("a")


def test_sync_dir_of_a_missing_folder_raises_file_not_found(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.sync_dir("missing")


# --- names ------------------------------------------------------------------------------------------------------------


def test_rename_moves_and_replaces(files: Files) -> None:
    put(files, "a", b"new")
    put(files, "b", b"old")
    files.rename("a", "b")
    assert files.listdir("") == ["b"]
    assert content(files, "b") == b"new"
    files.rename("b", "b")
    assert content(files, "b") == b"new"


def test_rename_goes_across_folders_and_takes_folders(files: Files) -> None:
    files.mkdir("one/two")
    put(files, "one/two/a", b"x")
    files.mkdir("three")
    files.rename("one/two/a", "three/b")
    assert content(files, "three/b") == b"x"
    files.rename("three", "one/two")
    assert files.listdir("") == ["one"]
    assert content(files, "one/two/b") == b"x"


def test_rename_refuses_what_makes_no_sense(files: Files) -> None:
    put(files, "a")
    files.mkdir("folder/sub")
    with pytest.raises(FileNotFoundError):
        files.rename("missing", "b")
    with pytest.raises(FileNotFoundError):
        files.rename("a", "missing/b")
    for source, target in (("a", "folder"), ("folder", "a"), ("folder", "folder/sub/x")):
        with pytest.raises(StorageError):
            files.rename(source, target)
    files.mkdir("other")
    with pytest.raises(StorageError):
        files.rename("other", "folder")
    assert files.listdir("") == ["a", "folder", "other"]


def test_unlink_may_be_repeated_but_takes_no_folder(files: Files) -> None:
    put(files, "a")
    files.unlink("a")
    files.unlink("a")
    files.unlink("no/such")
    assert not files.exists("a")
    files.mkdir("folder")
    with pytest.raises(StorageError):
        files.unlink("folder")


def test_an_open_file_outlives_its_name(files: Files) -> None:
    file = files.open("a", create=True, write=True)
    file.write(0, [b"x"])
    files.unlink("a")
    put(files, "a", b"another")
    file.write(1, [b"y"])
    file.sync()
    assert file.read(0, 10) == b"xy"
    files.rename("a", "b")
    file.close()
    assert content(files, "b") == b"another"


# --- the directory as a whole -----------------------------------------------------------------------------------------


def test_lock_is_for_one_and_can_be_passed_on(files: Files) -> None:
    files.lock()
    with pytest.raises(DirectoryInUse):
        files.lock()
    files.unlock()
    files.unlock()
    files.lock()
    assert files.listdir("") == ["LOCK"]
    files.unlock()


def test_the_disk_has_a_size_and_free_space_within_it(files: Files) -> None:
    usage = files.disk_usage()
    assert 0 < usage.available <= usage.total
    assert 0 <= usage.share < 1


def test_describe_ends_with_the_path(files: Files) -> None:
    assert files.describe("a/b").endswith("/a/b")


def test_two_os_files_on_one_folder_exclude_each_other(tmp_path: Path) -> None:
    first, second = OsFiles(tmp_path), OsFiles(tmp_path)
    first.lock()
    with pytest.raises(DirectoryInUse) as caught:
        second.lock()
    assert caught.value.detail["pid"] == str(os.getpid())
    first.unlock()
    second.lock()
    second.unlock()


# --- refusals of the operating system ---------------------------------------------------------------------------------

REFUSALS = [
    (errno.ENOSPC, DiskFull, "no space left"),
    (errno.EDQUOT, DiskFull, "no space left"),
    (errno.EACCES, NoPermission, "not allowed"),
    (errno.EPERM, NoPermission, "not allowed"),
    (errno.EROFS, NoPermission, "not allowed"),
    (errno.EMFILE, TooManyFiles, "ulimit -n"),
    (errno.ENFILE, TooManyFiles, "ulimit -n"),
    (errno.EIO, StorageError, "could not"),
]


@pytest.mark.parametrize(("code", "expected", "words"), REFUSALS)
def test_a_refusal_is_told_by_its_own_error(code: int, expected: type[StorageError], words: str) -> None:
    error = storage_error(OSError(code, os.strerror(code)), "write", "/data/a")
    assert type(error) is expected
    assert words in str(error)
    assert "/data/a" in str(error)
    assert error.detail["path"] == "/data/a"


@pytest.mark.parametrize(("code", "expected", "words"), REFUSALS)
def test_memory_files_fail_with_the_same_errors(code: int, expected: type[StorageError], words: str) -> None:
    files = MemoryFiles()
    fault = files.fail("open", 1, code)
    with pytest.raises(StorageError, match=words) as caught:
        files.open("a", create=True)
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, OSError)
    assert fault.hits == 1
    assert files.listdir("") == []


def test_os_files_raise_their_errors_through_the_mapping(tmp_path: Path) -> None:
    files = OsFiles(tmp_path)
    with pytest.raises(StorageError) as caught:
        files.open("f" * 256, create=True)
    assert caught.value.detail["errno"] == errno.ENAMETOOLONG
    full = OsFiles("/dev").open("full", write=True)
    with pytest.raises(DiskFull):
        full.write(0, [b"x"])
    with pytest.raises(DiskFull):
        full.write(0, [b"x", b"y"])
    full.close()


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "view", "numbers"])
def test_what_the_system_takes_in_two_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As many bytes as the buffer has items, so that counting the wrong ones would look like all of it."""
    numbers = array("I", range(100))
    plain = numbers.tobytes()
    views: dict[str, Buffer] = {"view": memoryview(plain), "numbers": memoryview(numbers)}
    buffers: dict[str, Buffer] = {"bytes": plain, "bytearray": bytearray(plain), **views}
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data).cast("B")[:100], at))
    file = OsFiles(tmp_path).open("a", create=True, write=True)
    file.write(5, [buffers[kind]])
    monkeypatch.undo()
    assert file.read(5, 1000) == plain
    file.close()
