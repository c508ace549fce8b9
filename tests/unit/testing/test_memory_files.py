"""What a crash takes from the memory file system, and what it never takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import StorageError
from dmq.testing import CrashNow, Keep, MemoryFiles

KEEPS: list[Keep | None] = [None, *get_args(Keep)]


def crashes(files: MemoryFiles, count: int = 300) -> Iterator[MemoryFiles]:
    """Crash states by every way to choose them."""
    for seed in range(count):
        yield files.crash(random.Random(seed), KEEPS[seed % len(KEEPS)])


def with_file(path: str, data: bytes) -> MemoryFiles:
    files = MemoryFiles()
    files.write_file(path, data)
    return files


def contents(files: MemoryFiles) -> dict[str, bytes]:
    return {path: files.read_file(path) for path in files.paths()}


# --- data ------------------------------------------------------------------------------------------------------------


def test_synced_data_survives_every_crash() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    for i in range(20):
        file.write(i * 300, [bytes([i + 1]) * 300])
    file.truncate(5000)
    file.sync()
    expected = file.read(0, 10_000)
    assert all(contents(after) == {"a": expected} for after in crashes(files))


def test_unsynced_data_may_be_lost_kept_or_torn() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"x" * 2048])
    seen = {after.read_file("a") for after in crashes(files)}
    assert {b"", b"x" * 2048, bytes(2048), b"x" * 512, bytes(512) + b"x" * 1536} <= seen


def test_a_write_is_torn_only_at_sector_boundaries() -> None:
    files = with_file("a", b"o" * 3000)
    files.open("a", write=True).write(100, [b"n" * 2500])
    for after in crashes(files):
        data = after.read_file("a")
        assert len(data) == 3000
        for start in range(0, 3000, 512):
            old = b"o" * min(512, 3000 - start)
            new = bytes(b"n"[0] if 100 <= i < 2600 else b"o"[0] for i in range(start, start + len(old)))
            assert data[start : start + 512] in (old, new)


def test_a_sector_that_took_a_later_write_took_the_earlier_too() -> None:
    files = with_file("a", bytes(512))
    file = files.open("a", write=True)
    for i in range(8):
        file.write(i * 64, [bytes([i + 1]) * 64])
    states = {after.read_file("a") for after in crashes(files)}
    steps = [b"".join(bytes([i + 1]) * 64 for i in range(n)).ljust(512, b"\0") for n in range(9)]
    assert states == set(steps)


def test_writes_to_different_sectors_are_lost_independently() -> None:
    files = with_file("a", bytes(1024))
    file = files.open("a", write=True)
    file.write(0, [b"1"])
    file.write(512, [b"2"])
    states = {(after.read_file("a")[0], after.read_file("a")[512]) for after in crashes(files)}
    assert states == {(0, 0), (b"1"[0], 0), (0, b"2"[0]), (b"1"[0], b"2"[0])}


def test_a_lost_write_before_a_kept_one_reads_as_zeros() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"1" * 512])
    file.write(512, [b"2" * 512])
    assert bytes(512) + b"2" * 512 in {after.read_file("a") for after in crashes(files)}


def test_a_truncation_may_be_lost_until_synced() -> None:
    files = with_file("a", b"x" * 1000)
    file = files.open("a", write=True)
    file.truncate(10)
    assert {after.read_file("a") for after in crashes(files)} == {b"x" * 1000, b"x" * 10}
    assert files.kill().read_file("a") == b"x" * 10


def test_the_ways_to_choose_do_as_they_say() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    for i in range(4):
        file.write(i * 512, [bytes([i + 1]) * 512])
    rng = random.Random(1)
    assert files.crash(rng, "nothing").read_file("a") == b""
    assert files.crash(rng, "everything").read_file("a") == file_bytes(1, 2, 3, 4)
    assert files.crash(rng, "sizes").read_file("a") == bytes(2048)
    prefixes = {files.crash(rng, "prefix").read_file("a").rstrip(b"\0") for _ in range(100)}
    assert prefixes == {file_bytes(*range(1, n + 1)) for n in range(5)}
    gaps = {files.crash(rng, "gap").read_file("a") for _ in range(100)}
    assert {file_bytes(0, 2, 3, 4), file_bytes(1, 0, 3, 4), file_bytes(1, 2, 0, 4), file_bytes(1, 2, 3)} <= gaps
    lone = {files.crash(rng, "lone").read_file("a").rstrip(b"\0") for _ in range(100)}
    assert lone == {file_bytes(1), file_bytes(0, 2), file_bytes(0, 0, 3), file_bytes(0, 0, 0, 4)}


def file_bytes(*fills: int) -> bytes:
    return b"".join(bytes([fill]) * 512 for fill in fills)


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_new_file_may_be_missing_until_its_folder_is_synced() -> None:
    files = MemoryFiles()
    file = files.open("a", create=True, write=True)
    file.write(0, [b"x"])
    file.sync()
    live = files.copy()
    assert {tuple(contents(after).items()) for after in crashes(files)} == {(), (("a", b"x"),)}
    live.sync_dir("")
    assert all(contents(after) == {"a": b"x"} for after in crashes(live))


def test_a_rename_happened_or_not_and_loses_nothing() -> None:
    files = with_file("checkpoint", b"old")
    file = files.open("checkpoint.tmp", create=True, write=True)
    file.write(0, [b"new"])
    file.sync()
    files.sync_dir("")
    files.rename("checkpoint.tmp", "checkpoint")
    live = files.copy()
    before, after = {"checkpoint": b"old", "checkpoint.tmp": b"new"}, {"checkpoint": b"new"}
    states = [contents(state) for state in crashes(files)]
    assert before in states
    assert after in states
    assert all(state in (before, after) for state in states)
    live.sync_dir("")
    assert all(contents(state) == after for state in crashes(live))


def test_a_rename_may_survive_the_data_it_was_to_publish() -> None:
    files = with_file("checkpoint", b"old")
    file = files.open("checkpoint.tmp", create=True, write=True)
    file.write(0, [b"new"])
    files.rename("checkpoint.tmp", "checkpoint")
    assert {"checkpoint": b""} in [contents(state) for state in crashes(files)]


def test_a_move_across_folders_needs_both_synced() -> None:
    def moved() -> MemoryFiles:
        files = with_file("one/a", b"x")
        files.write_file("two/b", b"y")
        files.rename("one/a", "two/a")
        return files

    unsynced = {tuple(contents(state)) for state in crashes(moved())}
    assert unsynced == {("one/a", "two/b"), ("one/a", "two/a", "two/b"), ("two/a", "two/b")}
    target = moved()
    target.sync_dir("two")
    assert {tuple(contents(state)) for state in crashes(target)} == unsynced - {("one/a", "two/b")}
    source = moved()
    source.sync_dir("one")
    assert {tuple(contents(state)) for state in crashes(source)} == {("two/b",), ("two/a", "two/b")}
    both = moved()
    both.sync_dir("one")
    both.sync_dir("two")
    assert {tuple(contents(state)) for state in crashes(both)} == {("two/a", "two/b")}


def test_a_moved_folder_is_in_one_place() -> None:
    files = with_file("one/sub/a", b"x")
    files.write_file("two/b", b"y")
    files.rename("one/sub", "two/sub")
    files.sync_dir("two")
    assert {tuple(contents(state)) for state in crashes(files)} == {("two/b", "two/sub/a")}


def test_a_removed_file_may_be_back_with_its_content() -> None:
    files = with_file("a", b"x")
    files.unlink("a")
    live = files.copy()
    assert {tuple(contents(state).items()) for state in crashes(files)} == {(), (("a", b"x"),)}
    live.sync_dir("")
    assert not any(contents(state) for state in crashes(live))


def test_a_folder_whose_parent_was_not_synced_may_be_missing_with_all_below() -> None:
    files = MemoryFiles()
    files.mkdir("one/two")
    file = files.open("one/two/a", create=True, write=True)
    file.write(0, [b"x"])
    file.sync()
    files.sync_dir("one/two")
    files.sync_dir("one")
    live = files.copy()
    assert {tuple(contents(state)) for state in crashes(files)} == {(), ("one/two/a",)}
    live.sync_dir("")
    assert all(contents(state) == {"one/two/a": b"x"} for state in crashes(live))


def test_data_of_a_file_that_took_the_place_of_another_does_not_mix() -> None:
    files = with_file("a", b"old" * 500)
    file = files.open("a", write=True)
    file.write(0, [b"OLD" * 500])
    files.unlink("a")
    again = files.open("a", create=True, write=True)
    again.write(0, [b"new" * 500])
    for state in crashes(files):
        data = contents(state).get("a", b"")
        assert not (b"n" in data and (b"o" in data or b"O" in data))


# --- syncs that fail -------------------------------------------------------------------------------------------------


def test_what_a_failed_sync_should_have_saved_no_later_sync_saves() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"1" * 512])
    files.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    file.write(512, [b"2" * 512])
    file.sync()
    file.sync()
    assert file.read(0, 2000) == b"1" * 512 + b"2" * 512
    assert files.copy().kill().read_file("a") == b"1" * 512 + b"2" * 512
    states = {state.read_file("a") for state in crashes(files)}
    assert states == {bytes(512) + b"2" * 512, b"1" * 512 + b"2" * 512}


def test_writing_the_same_bytes_again_makes_them_savable() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"1" * 700])
    files.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    file.write(0, [b"1" * 700])
    file.sync()
    assert {state.read_file("a") for state in crashes(files)} == {b"1" * 700}


def test_a_saved_neighbour_in_the_same_sector_does_not_save_doomed_data() -> None:
    files = with_file("a", bytes(200))
    file = files.open("a", write=True)
    file.write(0, [b"1" * 100])
    files.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    file.write(100, [b"2" * 100])
    file.sync()
    assert {state.read_file("a")[:100] for state in crashes(files)} == {bytes(100), b"1" * 100}


def test_doomed_data_stays_doomed_through_a_kill() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"1"])
    files.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    killed = files.kill()
    killed.open("a").sync()
    assert {state.read_file("a") for state in crashes(killed)} >= {b"", b"1"}


def test_a_failed_sync_takes_nothing_saved_before() -> None:
    files = with_file("a", b"")
    file = files.open("a", write=True)
    file.write(0, [b"1" * 512])
    file.sync()
    file.truncate(0)
    files.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    file.write(0, [b"2"])
    file.sync()
    assert {state.read_file("a") for state in crashes(files)} == {b"2", b"2" + b"1" * 511}


def test_names_that_a_failed_sync_dir_should_have_saved_stay_unsaved() -> None:
    files = MemoryFiles()
    files.open("a", create=True).close()
    files.fail("sync_dir")
    with pytest.raises(StorageError):
        files.sync_dir("")
    files.open("b", create=True).close()
    files.sync_dir("")
    assert {tuple(state.paths()) for state in crashes(files)} == {("b",), ("a", "b")}


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_seed_gives_one_state() -> None:
    def run() -> MemoryFiles:
        files = MemoryFiles(rng=random.Random(3))
        busy(files, random.Random(4), 60)
        return files

    first, second = run(), run()
    for seed in range(50):
        one, two = first.crash(random.Random(seed)), second.crash(random.Random(seed))
        assert contents(one) == contents(two)
        assert contents(one) == contents(first.crash(random.Random(seed)))


def busy(files: MemoryFiles, rng: random.Random, steps: int) -> None:
    """Do this and that."""
    names = ["a", "b", "c/d", "c/e"]
    files.mkdir("c")
    for _ in range(steps):
        name = rng.choice(names)
        step = rng.randrange(6)
        if step == 0:
            files.sync_dir(rng.choice(["", "c"]))
        elif step == 1 and files.exists(name):
            files.rename(name, rng.choice(names))
        elif step == 2:
            files.unlink(name)
        else:
            file = files.open(name, create=True, write=True)
            file.write(rng.randrange(3000), [rng.randbytes(rng.randrange(2000))])
            if step == 3:
                file.sync()
            elif step == 4:
                file.truncate(rng.randrange(3000))
            file.close()


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_what_is_synced_entirely_comes_back_entirely(steps: int, seed: int) -> None:
    files = MemoryFiles()
    busy(files, random.Random(steps), 30)
    for path in files.paths():
        files.open(path).sync()
    files.sync_dir("c")
    files.sync_dir("")
    expected = contents(files)
    after = files.crash(random.Random(seed))
    assert contents(after) == expected
    assert contents(after.crash(random.Random(seed), "nothing")) == expected


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_kill_loses_nothing_and_a_crash_after_it_as_much_as_before(steps: int, seed: int) -> None:
    files = MemoryFiles()
    busy(files, random.Random(steps), 30)
    killed = files.copy().kill()
    assert contents(killed) == contents(files)
    assert killed.disk_usage() == files.disk_usage()
    assert contents(killed.crash(random.Random(seed))) == contents(files.crash(random.Random(seed)))


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_nothing_but_old_new_or_zero_bytes_is_in_a_sector(steps: int, seed: int) -> None:
    rng = random.Random(steps)
    old = rng.randbytes(2000)
    files = with_file("a", old)
    file = files.open("a", write=True)
    versions = [old]
    for _ in range(5):
        file.write(rng.randrange(3000), [rng.randbytes(rng.randrange(1, 1500))])
        versions.append(file.read(0, 10_000))
    data = files.crash(random.Random(seed)).read_file("a")
    assert len(old) <= len(data) <= max(map(len, versions))
    for start in range(0, len(data), 512):
        sector = data[start : start + 512]
        assert any(v[start : start + 512].ljust(512, b"\0").startswith(sector) for v in versions)


def test_a_crash_state_is_as_durable_as_it_looks_and_leaves_the_others_alone() -> None:
    files = with_file("a", b"1" * 600)
    files.open("a", write=True).write(600, [b"2" * 600])
    one, two = files.crash(random.Random(1), "everything"), files.crash(random.Random(1), "everything")
    one.open("a", write=True).write(0, [b"3"])
    assert two.read_file("a") == files.read_file("a") == b"1" * 600 + b"2" * 600
    assert one.crash(random.Random(1), "nothing").read_file("a") == b"1" * 600 + b"2" * 600


@pytest.mark.parametrize("end", ["crash", "kill"])
def test_the_old_object_is_dead_after_a_crash(end: str) -> None:
    files = with_file("a", b"x")
    files.lock()
    file = files.open("a", write=True)
    after = files.crash(random.Random(1)) if end == "crash" else files.kill()
    for use in (
        lambda: file.read(0, 1),
        lambda: file.write(0, [b"y"]),
        file.sync,
        file.size,
        lambda: files.open("a"),
        lambda: files.exists("a"),
        lambda: files.listdir(""),
        lambda: files.unlink("a"),
    ):
        with pytest.raises(CrashNow):
            use()
    file.close()
    after.lock()
    assert after.handles == 0
    assert after.operations == 0
