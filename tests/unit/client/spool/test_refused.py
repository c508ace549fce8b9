"""Batches that were set aside, on disks that are full, cut or foreign."""

from __future__ import annotations

import random

import pytest

from dmq.client.spool.parcel import Head, Kept
from dmq.client.spool.spool import RefusedFolder
from dmq.errors import LimitReached, NotAllowed, RecordCorrupt, WrongFormat
from dmq.testing import MemoryFiles

HEAD = Head("orders", 3, 2, 1, 2)
ERROR = NotAllowed("not you")


def kept(offset: int, size: int = 10) -> Kept:
    return Kept(offset, HEAD, (b"x" * size,), size)


def test_what_is_set_aside_can_be_read_and_dropped() -> None:
    folder = RefusedFolder(MemoryFiles(), 10_000)
    assert folder.numbers() == []
    for offset in (7, 5, 7):
        folder.add(kept(offset), ERROR, 1234)
    assert folder.numbers() == [5, 7]
    batch = folder.read(5)
    assert (batch.number, batch.refusal.code, batch.refusal.message, batch.refusal.at_ms) == (
        5,
        "NOT_ALLOWED",
        "not you",
        1234,
    )
    assert (batch.kept.head, bytes(batch.kept.body[0])) == (HEAD, b"x" * 10)
    folder.drop(5)
    assert [batch.number for batch in folder] == [7]
    with pytest.raises(FileNotFoundError):
        folder.read(5)


def test_a_power_cut_takes_nothing_that_was_set_aside() -> None:
    for seed in range(20):
        files = MemoryFiles()
        RefusedFolder(files, 10_000).add(kept(1), ERROR, 1)
        after = files.crash(random.Random(seed))
        assert [batch.number for batch in RefusedFolder(after, 10_000)] == [1]


def test_what_is_kept_is_bounded() -> None:
    folder = RefusedFolder(MemoryFiles(), 1000)
    folder.add(kept(1, 800), ERROR, 1)
    with pytest.raises(LimitReached, match="dmq spool"):
        folder.add(kept(2, 800), ERROR, 1)
    folder.add(kept(1, 900), ERROR, 1)
    assert folder.numbers() == [1]


@pytest.mark.parametrize(
    ("raw", "error"), [(b"", RecordCorrupt), (b"\x01\xff\xff", RecordCorrupt), (b"\x02" * 9, WrongFormat)]
)
def test_what_is_no_batch_is_told(raw: bytes, error: type[Exception]) -> None:
    files = MemoryFiles()
    folder = RefusedFolder(files, 10_000)
    folder.add(kept(1), ERROR, 1)
    file = files.open("refused/00000000000000000001.batch", write=True)
    file.truncate(0)
    file.write(0, (raw,))
    file.close()
    with pytest.raises(error):
        folder.read(1)
