"""A disk that is full, its ballast used up: acks wait in memory, and are written when there is space."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from dmq.errors import DiskFull
from dmq.protocol.consume import Outcome
from dmq.storage.disk_space import BALLAST
from dmq.storage.state.events import PositionSet
from dmq.testing import MemoryFiles
from tests.integration.broker_door.doors import Door, opened

MIB = 1 << 20


def fill(door: Door, files: MemoryFiles) -> None:
    """Leave no room, not even the ballast's."""
    used = files.disk_usage()
    files.write_file("lost+found", bytes(used.total - used.used))
    store = door.broker.store
    topic = store.queries.topics()[0].id
    with contextlib.suppress(DiskFull):
        for number in range(100_000):
            store.append([PositionSet(f"{'g' * 200}{number}", topic, 0, 0)])
        raise AssertionError("the disk takes everything")
    assert not files.exists(BALLAST)


def test_acks_wait_in_memory_and_outlive_the_broker_once_they_are_written(caplog: pytest.LogCaptureFixture) -> None:
    files = MemoryFiles(capacity_bytes=4 * MIB)

    async def run() -> None:
        async with opened(files) as door:
            client = door.client("c")
            await door.publish(b"a", b"b", b"c")
            handed = await door.pull(client, max_messages=3)
            assert handed is not None
            fill(door, files)
            door.settle(client, handed, Outcome.ACK)
            await door.until(lambda: "settles wait in memory" in caplog.text)
            assert await door.pull(client, wait_ms=0) is None, "what was acked is not handed out again"
            with pytest.raises(DiskFull):
                await door.publish(b"d")
            assert (
                position := door.broker.store.queries.position("billing", "orders", 0)
            ) is None or not position.floor
            files.unlink("lost+found")
            door.clock.advance(2.0)
            await door.until(lambda: "settles that waited are written" in caplog.text)
            await door.publish(b"e")
        async with opened(files.kill()) as door:
            handed = await door.pull(door.client("c"), max_messages=3)
            assert handed is not None
            assert handed.lease.start == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
