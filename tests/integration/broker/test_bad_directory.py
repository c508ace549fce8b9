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
    DMQError,
    ForeignFile,
    NoPermission,
    StorageError,
    WrongFormat,
)
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles
from tests.integration.broker.directories import SETTINGS, batch, bodies, content, fill, make, open_again, run


def check_refusal(directory: Path, error: type[DMQError], *words: str) -> None:
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
    check_refusal(tmp_path, WrongFormat, "format version 2", "use the DMQ that wrote it")
    identity.write_bytes(ours)
    assert open_again(OsFiles(tmp_path)) == sent


def of_version_9(unit: bytes) -> bytes:
    changed = bytearray(unit)
    changed[8:10] = (9).to_bytes(2, "big")
    changed[4:8] = crc32c(bytes(changed[8:])).to_bytes(4, "big")
    return bytes(changed)


def test_a_segment_of_another_format_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    path = segments(tmp_path)[-1]
    raw = path.read_bytes()
    length = int.from_bytes(raw[24:28], "big")
    path.write_bytes(of_version_9(raw[:length]) + raw[length:])
    check_refusal(tmp_path, WrongFormat, "version 9", "use the DMQ that wrote it")


def test_a_unit_of_another_format_is_not_taken_for_a_torn_tail(tmp_path: Path) -> None:
    make(tmp_path)
    path = segments(tmp_path)[-1]
    raw = path.read_bytes()
    at = int.from_bytes(raw[24:28], "big")
    while at + (length := int.from_bytes(raw[at + 24 : at + 28], "big")) < len(raw):
        at += length
    path.write_bytes(raw[:at] + of_version_9(raw[at:]))
    shutil.rmtree(tmp_path / "runs")  # so that the journal is read
    with pytest.raises(WrongFormat, match="use the DMQ that wrote it"):
        MessageStore(OsFiles(tmp_path), SETTINGS)
    assert path.read_bytes() == raw[:at] + of_version_9(raw[at:])
    assert not (tmp_path / "salvage").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    check_refusal(tmp_path, WrongFormat, "thesis.tex", "choose an empty one")
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
    check_refusal(directory, ForeignFile, str(stranger), "move it elsewhere and start again")
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
    check_refusal(tmp_path, WrongFormat, "STORE is lost", "restore")


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
        check_refusal(tmp_path, DirectoryInUse, f"pid {holder.pid}", "stop that one, or choose another directory")
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
from tests.integration.broker import directories
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
