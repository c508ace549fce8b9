"""Directories and machines that are not as they should be: a clear error or a safe course, nothing half-written."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from dmq.errors import (
    DirectoryInUse,
    DiskFull,
    DMQError,
    ForeignFile,
    NoPermission,
    OffsetGone,
    StorageError,
    StoreFailed,
    WrongFormat,
)
from dmq.settings import StoreSettings
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from dmq.storage.visibility import Durability
from dmq.testing import FakeClock, MemoryFiles
from tests.integration.directories import SETTINGS, batch, bodies, content, fill, make, open_again, run


def refused(directory: Path, error: type[DMQError], *words: str) -> None:
    """Opening is refused with this error and these words, and leaves everything as it was."""
    before = content(directory)
    with pytest.raises(error) as caught:
        MessageStore(OsFiles(directory), SETTINGS)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert content(directory) == before


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "journal").iterdir())


# --- another version --------------------------------------------------------------------------------------------------


def test_a_directory_of_another_format_is_left_alone(tmp_path: Path) -> None:
    sent = make(tmp_path)
    identity = tmp_path / "STORE"
    ours = identity.read_bytes()
    identity.write_text('{"format": 2, "journal_id": "00000000000000ff", "more": []}')
    refused(tmp_path, WrongFormat, "format version 2", "use the DMQ that wrote it")
    identity.write_bytes(ours)
    assert open_again(OsFiles(tmp_path)) == sent


def of_version_2(unit: bytes) -> bytes:
    changed = bytearray(unit)
    changed[8:10] = (2).to_bytes(2, "big")
    changed[4:8] = crc32c(bytes(changed[8:])).to_bytes(4, "big")
    return bytes(changed)


def test_a_segment_of_another_format_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    path = segments(tmp_path)[-1]
    raw = path.read_bytes()
    length = int.from_bytes(raw[24:28], "big")
    path.write_bytes(of_version_2(raw[:length]) + raw[length:])
    refused(tmp_path, WrongFormat, "version 2", "use the DMQ that wrote it")


def test_a_unit_of_another_format_is_not_taken_for_a_torn_tail(tmp_path: Path) -> None:
    make(tmp_path)
    path = segments(tmp_path)[-1]
    raw = path.read_bytes()
    at = int.from_bytes(raw[24:28], "big")
    while at + (length := int.from_bytes(raw[at + 24 : at + 28], "big")) < len(raw):
        at += length
    path.write_bytes(raw[:at] + of_version_2(raw[at:]))
    shutil.rmtree(tmp_path / "runs")  # so that the journal is read
    with pytest.raises(WrongFormat, match="use the DMQ that wrote it"):
        MessageStore(OsFiles(tmp_path), SETTINGS)
    assert path.read_bytes() == raw[:at] + of_version_2(raw[at:])
    assert not (tmp_path / "salvage").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    refused(tmp_path, WrongFormat, "thesis.tex", "choose an empty one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "thesis.tex"]


def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    for create in (True, False):
        with pytest.raises(StorageError, match="is not a directory: name one"):
            OsFiles(path, create=create)
    assert path.read_text() == "text"


# --- foreign files ----------------------------------------------------------------------------------------------------


def wrong_name(directory: Path, other: Path) -> Path:
    path = directory / "journal" / "notes.txt"
    path.write_text("mine")
    return path


def folder(directory: Path, other: Path) -> Path:
    path = directory / "journal" / "00000000000099999999.journal"
    path.mkdir()
    return path


def of_another_store(directory: Path, other: Path) -> Path:
    last = segments(directory)[-1]
    path = directory / "journal" / f"{int(last.stem) + last.stat().st_size:020d}.journal"
    shutil.copy(segments(other)[0], path)
    return path


def first_of_another_store(directory: Path, other: Path) -> Path:
    path = directory / "journal" / f"{0:020d}.journal"
    path.rename(directory.parent / "moved away")
    shutil.copy(segments(other)[0], path)
    return path


def overlapping(directory: Path, other: Path) -> Path:
    first = segments(directory)[0]
    path = directory / "journal" / f"{first.stat().st_size - 100:020d}.journal"
    shutil.copy(segments(other)[0], path)
    return path


@pytest.mark.parametrize("intrude", [wrong_name, folder, of_another_store, first_of_another_store, overlapping])
def test_a_foreign_file_among_the_segments_is_named_and_left_alone(
    tmp_path: Path, intrude: Callable[[Path, Path], Path]
) -> None:
    directory, other = tmp_path / "data", tmp_path / "other"
    sent = make(directory)
    make(other)
    stranger = intrude(directory, other)
    refused(directory, ForeignFile, str(stranger), "move it elsewhere and start again")
    shutil.move(stranger, tmp_path / "elsewhere")
    if intrude is first_of_another_store:
        (tmp_path / "moved away").rename(stranger)
    assert open_again(OsFiles(directory)) == sent


def test_a_journal_nobody_can_tell_the_owner_of_is_not_cut(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "STORE").unlink()
    for path in segments(tmp_path):
        raw = bytearray(path.read_bytes())
        raw[100] ^= 1
        path.write_bytes(raw)
    refused(tmp_path, WrongFormat, "STORE is lost", "restore")


def test_a_lost_identity_file_is_taken_from_the_journal(tmp_path: Path) -> None:
    sent = make(tmp_path)
    ours = (tmp_path / "STORE").read_bytes()
    (tmp_path / "STORE").unlink()
    assert open_again(OsFiles(tmp_path)) == sent
    assert (tmp_path / "STORE").read_bytes() == ours


# --- two processes ----------------------------------------------------------------------------------------------------

HOLD = """
import sys
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
store = MessageStore(OsFiles(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_directory_another_process_has_open_is_refused_until_that_one_is_gone(tmp_path: Path) -> None:
    sent = make(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        refused(tmp_path, DirectoryInUse, f"pid {holder.pid}", "stop that one, or choose another directory")
    finally:
        holder.kill()
        holder.communicate()
    assert open_again(OsFiles(tmp_path)) == sent


# --- permission -------------------------------------------------------------------------------------------------------

# Root may do everything, so the child becomes nobody, once all it needs is imported.
AS_NOBODY = """
import os, sys
from dmq.errors import NoPermission
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.integration import directories
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    MessageStore(OsFiles(sys.argv[1]), directories.SETTINGS)
except NoPermission as error:
    print(error)
else:
    print("opened")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory everybody can reach, unlike those pytest makes."""
    path = Path(tempfile.mkdtemp(prefix="dmq-test-"))
    path.chmod(0o755)
    yield path / "data"
    for found in (path, *path.rglob("*")):
        found.chmod(0o755)
    shutil.rmtree(path)


def everybody_may(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o777)


def test_a_directory_that_may_only_be_read_is_refused(shared: Path) -> None:
    make(shared)
    everybody_may(shared)
    shared.chmod(0o555)
    (shared / "LOCK").chmod(0o444)
    before = content(shared)
    said = run(AS_NOBODY, shared)
    assert said == f"not allowed to open {shared}/LOCK: give this user read and write permission there"
    assert content(shared) == before


def test_a_directory_that_may_not_be_made_is_refused(shared: Path) -> None:
    assert run(AS_NOBODY, shared).startswith(f"not allowed to create {shared}: give this user")
    assert not shared.exists()


def test_a_directory_that_may_not_be_listed_is_refused(shared: Path) -> None:
    make(shared)
    everybody_may(shared)
    (shared / "journal").chmod(0)
    assert run(AS_NOBODY, shared).startswith(f"not allowed to list {shared}/journal: give this user")


def test_a_segment_that_may_not_be_read_is_refused_and_not_taken_for_damage(shared: Path) -> None:
    sent = make(shared)
    everybody_may(shared)
    path = segments(shared)[1]
    path.chmod(0)
    before = content(shared)
    assert run(AS_NOBODY, shared).startswith(f"not allowed to open {path}: give this user")
    assert content(shared) == before
    path.chmod(0o644)
    assert open_again(OsFiles(shared)) == sent


def open_and_write(files: MemoryFiles) -> None:
    store = MessageStore(files, SETTINGS)
    store.append([batch(b"more")])
    store.checkpoint()


@pytest.mark.parametrize("kind", ["create", "write", "rename"])
def test_a_file_system_that_turned_read_only_is_named(kind: str) -> None:
    files = MemoryFiles()
    with MessageStore(files, SETTINGS) as store:
        fill(store)
        sent = bodies(store)
    fault = files.fail(kind, lambda path, number: True, errno.EROFS)  # type: ignore[arg-type]
    with pytest.raises(NoPermission, match="read-only; mount it for writing"):
        open_and_write(files)
    files.heal(fault)
    assert open_again(files.kill())[: len(sent)] == sent


# --- a full disk ------------------------------------------------------------------------------------------------------

# A small file system of its own where mounting is allowed (as root, unseen by others), one in memory where it is not.
FULL = """
import ctypes, os, sys
from pathlib import Path
from tests.integration.test_bad_directory import fill_up_and_free
from dmq.storage.files import OsFiles
from dmq.testing import MemoryFiles

def small(target):
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_namespace = 1 << 18 | 1 << 14, 0x20000
    return (
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", target.encode(), b"tmpfs", 0, b"size=1m") == 0
    )

target = sys.argv[1]
if small(target):
    ballast = Path(target) / "lost+found"
    def free():
        ballast.unlink()
    ballast.write_bytes(bytes(700_000))
    fill_up_and_free(OsFiles(target), free)
    print("mounted")
else:
    files = MemoryFiles(capacity_bytes=400_000)
    def free():
        files.capacity_bytes = None
    fill_up_and_free(files, free)
    print("in memory")
"""

ROOMY = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=16 << 10,
    body_bytes_max=4 << 10,
    checkpoint_bytes=64 << 10,
    disk_clean=1.0,
    disk_force=1.0,
    disk_refuse=1.0,
)


def fill_up(store: MessageStore, sent: list[bytes]) -> None:
    for number in range(1000):
        body = b"%d " % number + bytes(number % 4000)
        store.append([batch(body)])
        store.flush()
        sent.append(body)


def fill_up_and_free(files: OsFiles | MemoryFiles, free: Callable[[], object]) -> None:
    """Write until the disk is full, go on when there is space; nothing is lost, nothing is half there."""
    sent: list[bytes] = []
    with MessageStore(files, ROOMY) as store:
        store.create_topic("orders")
        with pytest.raises(DiskFull, match="free some space on that disk or shorten the retention"):
            fill_up(store, sent)
        for _ in range(3):  # it stays full, and says so each time
            with pytest.raises(DiskFull):
                store.append([batch(bytes(4000)) for _ in range(20)], atomic=True)
        store.flush()
        assert bodies(store)[: len(sent)] == sent
        known = len(bodies(store))
        free()
        store.append([batch(b"after")])
        store.flush()
        sent = bodies(store)
        assert len(sent) == known + 1
        assert sent[-1] == b"after"
    with MessageStore(files, ROOMY) as store:
        assert bodies(store) == sent
        assert store.damage == []
        assert not store.recovered.cut_bytes


def test_a_full_disk_refuses_writes_and_loses_nothing(tmp_path: Path) -> None:
    assert run(FULL, tmp_path) in ("mounted", "in memory")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_start_still_lets_messages_be_read() -> None:
    files = MemoryFiles()
    store = MessageStore(files, ROOMY)
    fill(store)
    sent = bodies(store)
    files = files.kill()  # so that opening has something to write
    files.capacity_bytes = sum(files.paths().values())
    store = MessageStore(files, ROOMY)
    assert bodies(store) == sent
    with pytest.raises(DiskFull, match="free some space"):
        store.append([batch(b"x")])
    files.capacity_bytes = None
    store.append([batch(b"x")])
    store.close()
    assert open_again(files) == [*sent, b"x"]


def test_writes_are_refused_from_a_share_of_the_disk_on_and_go_on_by_themselves() -> None:
    files = MemoryFiles(capacity_bytes=1 << 20)
    store = MessageStore(files)  # one segment, so that there is nothing retention could drop
    fill(store)
    sent = bodies(store)
    files.capacity_bytes = int(sum(files.paths().values()) / 0.95)
    store.tick()
    assert store.stats()["refusing"]
    before = store.end
    with pytest.raises(DiskFull, match=r"over 90% full.*writing goes on by itself"):
        store.append([batch(b"x")])
    assert store.end == before
    assert bodies(store) == sent, "what is there can be read"
    files.capacity_bytes = 1 << 20
    store.append([batch(b"x")])
    store.flush()
    assert bodies(store) == [*sent, b"x"]
    store.close()


# --- what is derived, clocks, descriptors -----------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [b"", b"garbage", b"DMQC" + bytes(100)])
def test_a_damaged_checkpoint_is_harmless(tmp_path: Path, harm: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sent = make(tmp_path)
    (tmp_path / "checkpoint").write_bytes(harm)
    assert open_again(OsFiles(tmp_path)) == sent
    assert "checkpoint damaged" in caplog.messages
    caplog.clear()
    assert open_again(OsFiles(tmp_path)) == sent
    assert "checkpoint damaged" not in caplog.messages


def test_a_clock_that_went_backwards_does_not_turn_the_journal_back() -> None:
    start_ms, hour_ms = 1_700_000_000_000, 3_600_000
    files, clock = MemoryFiles(), FakeClock(start_ms)
    settings = StoreSettings(
        segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, retention_hours=10.0
    )
    store = MessageStore(files, settings, clock)
    fill(store, 20)
    clock.set_wall_ms(start_ms - 100 * hour_ms)
    for _ in range(20):
        store.append([batch(bytes(2000), count=3)])
    store.close()
    clock.set_wall_ms(start_ms - 200 * hour_ms)
    store = MessageStore(files, settings, clock)
    store.append([batch(b"later")])
    store.flush()
    found = store.record_at(int(next(store.read("orders", 0, 120).records()).journal_offset))
    assert found is not None
    assert found.stored_at_ms == start_ms, "the store's time stands still until the clock has caught up"
    assert store.offset_since("orders", 0, start_ms) == 0
    assert store.offset_since("orders", 0, start_ms + 1) == 121
    assert store.retain() == 0, "nothing is old yet"
    clock.set_wall_ms(start_ms + 5 * hour_ms)
    store.append([batch(b"5 h later")])
    store.flush()
    assert store.offset_since("orders", 0, start_ms + 1) == 121
    assert store.retain() == 0
    clock.set_wall_ms(start_ms + 11 * hour_ms)
    assert store.retain() > 0
    first = store.bounds("orders", 0)[0]
    assert first > 0
    with pytest.raises(OffsetGone):
        store.read("orders", 0, 0)
    assert [record.body for record in store.read("orders", 0, 120).records()] == [b"later", b"5 h later"]
    store.close()


FEW_DESCRIPTORS = """
import resource, sys
from dmq.model import TopicConfig
from dmq.storage import queues
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.integration.directories import SETTINGS, batch
queues.DRAIN_MIN = 10  # each queue gets a file of its own, which takes thousands of messages otherwise
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 4096))
store = MessageStore(OsFiles(sys.argv[1]), SETTINGS)
for number in range(8):
    store.create_topic(f"t{number}", TopicConfig(queues=250))
places = [(f"t{topic}", queue) for topic in range(8) for queue in range(250)]
for turn in range(12):
    for at in range(0, 2000, 100):
        items = [batch(b"%s/%d %d" % (t.encode(), q, turn), topic=t, queue=q) for t, q in places[at : at + 100]]
        store.append(items)
    store.checkpoint()
for topic, queue in places:
    expected = [b"%s/%d %d" % (topic.encode(), queue, turn) for turn in range(12)]
    assert [record.body for record in store.read(topic, queue, 0).records()] == expected
store.close()
with MessageStore(OsFiles(sys.argv[1]), SETTINGS) as store:
    for topic, queue in places:
        assert len(store.read(topic, queue, 0)) == 12
"""


def test_few_file_descriptors_are_enough_for_thousands_of_queues(tmp_path: Path) -> None:
    run(FEW_DESCRIPTORS, tmp_path, 40)
    assert len(list(tmp_path.glob("queue/*/*/*.queue"))) == 2000
    assert len(segments(tmp_path)) > 40


TOO_FEW = """
import resource, sys
from dmq.errors import TooManyFiles
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.integration.directories import SETTINGS, bodies
held = [open("/dev/null") for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 2, 4096))
try:
    MessageStore(OsFiles(sys.argv[1]), SETTINGS)
except TooManyFiles as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
with MessageStore(OsFiles(sys.argv[1]), SETTINGS) as store:
    print(len(bodies(store)))
"""


def test_too_few_file_descriptors_are_named(tmp_path: Path) -> None:
    sent = make(tmp_path)
    said, count = run(TOO_FEW, tmp_path).splitlines()
    assert said.startswith("out of file descriptors while trying to ")
    assert said.endswith("raise the limit (ulimit -n)")
    assert int(count) == len(sent)


def test_a_failed_flush_stops_the_store_and_the_next_start_has_what_was_acknowledged() -> None:
    files = MemoryFiles()
    store = MessageStore(files, SETTINGS)
    fill(store)
    sent = bodies(store)
    files.fail("sync", 1, errno.EIO)
    store.append([batch(b"lost?")])
    with pytest.raises(StoreFailed, match="check the disk, then start again; what was acknowledged is safe"):
        store.flush()
    with pytest.raises(StoreFailed):
        store.append([batch(b"no")], Durability.STORED)
    assert bodies(store) == sent
    store.close()
    assert open_again(files.kill())[: len(sent)] == sent
