"""A piece of the disk that is lost takes many units with it: they are found together, and nothing else is given up."""

from __future__ import annotations

import pytest

from dmq.errors import Damaged
from dmq.settings import StoreSettings
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.storage.read.test_raw_units import filled, starts_of

UNITS = 2000
SETTINGS = StoreSettings(segment_bytes=4 << 20, unit_bytes_max=1 << 20, body_bytes_max=1 << 18)


def reopened() -> tuple[MessageStore, MemoryFiles]:
    """A store of many small units, of which nothing is in memory."""
    files = MemoryFiles()
    with MessageStore(files, clock=FakeClock(), settings=SETTINGS) as store:
        store.create_topic("orders")
        filled(store, UNITS, b"x")
    return MessageStore(files, clock=FakeClock(), settings=SETTINGS), files


def wipe(files: MemoryFiles, start: int, end: int) -> None:
    (path,) = [path for path in files.paths() if path.startswith("journal/")]
    file = files.open(path, write=True)
    file.write(start, [bytes(end - start)])
    file.close()


def read_all(store: MessageStore) -> tuple[set[int], int]:
    """The offsets that can be read, and how often a read met damage."""
    found: set[int] = set()
    at, met = 0, 0
    while at < 3 * UNITS:
        try:
            part = store.queries.read("orders", 0, at, max_messages=500)
        except Damaged as error:
            met += 1
            at = error.detail["next"]
        else:
            found |= {int(offset) for offset in part.offsets}
            at = part.next_offset
    return found, met


def test_units_of_a_lost_piece_are_found_together_and_those_around_it_are_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, files = reopened()
    starts = starts_of(store)
    assert not store.queries.damage
    first, behind = len(starts) // 4, 3 * len(starts) // 4
    store.close()
    store = MessageStore(files, clock=FakeClock(), settings=SETTINGS)
    wipe(files, starts[first] + 10, starts[behind] - 10)
    found, met = read_all(store)
    assert len(found) == 3 * UNITS - 3 * (behind - first)
    assert store.queries.damage[0][0] == starts[first]
    assert store.queries.damage[-1][1] == starts[behind]
    assert met <= len(store.queries.damage) <= 20
    assert sum(record.message.startswith("journal damaged") for record in caplog.records) <= 20
    store.close()
