"""A bit that turned in a segment that nobody reads is found by the broker itself, while it runs. (J-03)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dmq
from dmq.testing.processes import BrokerProcess
from tests.patience import eventually

SMALL = ("store.segment_bytes=64KiB", "store.unit_bytes_max=32KiB", "store.body_bytes_max=16KiB")


def arguments(*settings: str) -> list[str]:
    return [argument for setting in (*SMALL, *settings) for argument in ("--set", setting)]


def fill(url: str) -> None:
    with dmq.connect(url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        producer = client.producer(compression="none")
        for number in range(60):
            producer.send("orders", b"order %02d " % number + bytes(range(256)) * 20)


def turn_bit(folder: Path, body: bytes) -> tuple[Path, int]:
    """Turn a bit of a message in a cold segment; returns where."""
    segment = next(path for path in sorted((folder / "journal").glob("*.journal"))[:-1] if body in path.read_bytes())
    at = segment.read_bytes().index(body)
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes([body[0] ^ 4]))
    return segment, int(segment.stem) + at


def test_a_broker_finds_it_without_anybody_reading_it_and_says_what_to_do(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", arguments("store.scrub_hours=0.0004")).start()
    try:
        fill(broker.url)
        segment, offset = turn_bit(broker.folder, b"order 07")
        with dmq.connect(broker.url) as client:
            eventually(lambda: client.admin.stats()["store_damage"] == 1)
            stats = client.admin.stats()
            assert stats["scrub_found"] == 1
            assert stats["scrub_bytes"] > 0
            eventually(lambda: client.admin.stats()["scrub_rounds"] > stats["scrub_rounds"] + 1)
            assert client.admin.stats()["scrub_found"] == 1
            assert client.admin.stats()["scrub_ended"] > 1_700_000_000
        line = next(line for line in broker.log.splitlines() if "the scrub found damage" in line)
        facts = dict(re.findall(r"(\w+)=(\S+)", line))
        assert " ERROR " in line
        assert "put the segment back from a backup" in line
        assert facts["segment"] == str(segment)
        assert int(facts["start"]) <= offset < int(facts["end"])
        assert facts["topics"] == "orders"
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_a_broker_that_is_told_to_stop_does_not_wait_for_it(tmp_path: Path) -> None:
    broker = BrokerProcess(
        tmp_path / "data", arguments("store.scrub_hours=0.00001", "store.scrub_bytes_per_second=64KiB")
    ).start()
    try:
        fill(broker.url)
        with dmq.connect(broker.url) as client:
            eventually(lambda: client.admin.stats()["scrub_bytes"] > 0)
        assert broker.stop() == 0
        assert "cannot go on" not in broker.log
    finally:
        broker.kill()


@pytest.mark.parametrize("hours", ["0", "168.0"])
def test_what_is_found_is_whole_in_the_end(tmp_path: Path, hours: str) -> None:
    """A directory opens as ever, whether the scrub is on or off, and whatever a run before has left of its place."""
    folder = tmp_path / "data"
    broker = BrokerProcess(folder, arguments(f"store.scrub_hours={hours}")).start()
    try:
        fill(broker.url)
        assert broker.stop() == 0
        (folder / "scrub").write_bytes(b"no place")
        (folder / "scrub.tmp").write_bytes(b"")
        broker.start()
        with dmq.connect(broker.url) as client:
            assert client.admin.stats()["store_damage"] == 0
        assert broker.stop() == 0
    finally:
        broker.kill()
