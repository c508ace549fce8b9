"""What earlier versions wrote and said is understood: a folder here for each format, made by `recorder.py`.

A version that changes the wire or the files adds a folder, recorded with its own code, and keeps the others:
`python tests/compat/recorder.py tests/compat/format-4`, from a checkout of that version. Format 2 has checksums of
frames, format 3 body blocks.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dmq
from dmq.pipeline.decode.units import decode_units
from dmq.protocol import Command, Frame, FrameParser, Kind, decode_request, decode_response, unpack_records
from dmq.records import RecordView
from dmq.records.check import find_corrupt
from dmq.storage.files import OsFiles
from dmq.testing.clock import ClientClock, RunningClock
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of
from tests.patience import eventually

FORMATS = sorted(Path(__file__).parent.glob("format-*"))
assert FORMATS
# What the two sides of a recording had agreed on.
FEATURES: dict[str, set[str]] = {
    "format-1": set(),
    "format-2": {"frame-crc"},
    "format-3": {"frame-crc", "overlap", "blocks"},
}
DAY = 86_400.0


class Recording:
    """One folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
        self.lines: list[tuple[int, bool, bytes]] = []
        """Connection, whether it went to the broker, and the frame; in the order in which they passed."""
        for line in (folder / "frames.txt").read_text().splitlines():
            number, way, raw = line.split()
            self.lines.append((int(number), way == ">", bytes.fromhex(raw)))

    def frames(self, *, to_broker: bool) -> Iterator[tuple[int, Frame, bytes]]:
        """Connection, frame and its bytes."""
        parsers: dict[int, FrameParser] = {}
        for number, is_to_broker, raw in self.lines:
            if is_to_broker == to_broker:
                (frame,) = parsers.setdefault(number, FrameParser(16 << 20)).feed(raw)
                yield number, frame, raw


@pytest.fixture(scope="module", params=FORMATS, ids=lambda folder: folder.name)
def recording(request: pytest.FixtureRequest) -> Recording:
    return Recording(request.param)


def test_a_directory_of_an_earlier_version_is_served(recording: Recording, tmp_path: Path) -> None:
    with tarfile.open(recording.folder / "data.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    clock = RunningClock()
    clock.set_wall_ms(recording.facts["recorded_at_ms"] + 60_000)  # before anything of it is due or too old
    left = recording.facts["left"]
    folder = tmp_path / "data"
    with (
        ServedBroker(
            OsFiles(str(folder)), clock=clock, dead_letters_url=f"sqlite:///{folder}/deadletters/letters.db"
        ) as broker,
        dmq.connect(broker.url, app="compat", clock=ClientClock(clock)) as client,
    ):
        admin = client.admin
        together = recording.facts.get("together", 0)
        assert {topic.name: topic.queues for topic in admin.topics()} == {"orders": 2, "bills": 1, "lines": 4} | (
            {"together": 1} if together else {}
        )
        assert client.registry.get("space", "greeting") == b"hello"
        assert admin.limits("bills")[0].messages == 100_000
        assert admin.lag("orders", "billing").total == left["billing"]
        assert admin.lag("bills", "retrying").retrying == 1
        assert len(admin.delays()) == left["delays"]
        assert [found.topic for found in admin.transactions()] == ["bills"] * left["transactions"]
        letters = list(admin.dead_letters())
        assert [(letter.topic, letter.group, letter.body) for letter in letters] == [
            ("lines", "rejecting", b"line 0")
        ] * left["dead"]
        assert [str(found.id) for found in admin.find("orders", key="o-3")] == [recording.facts["ids"][3]]
        assert len(read(client, "orders", "billing", left["billing"])) == left["billing"]
        everything = read(client, "orders", "new", 40)
        assert sorted(everything) == sorted([b"order %d" % n for n in range(10)] + [b"many %d" % n for n in range(30)])
        assert read(client, "bills", "new", 2) == [b"x" * 5000, b"committed"]
        client.producer().send("orders", b"a new one")
        assert read(client, "orders", "new", 1) == [b"a new one"]
        if together:
            found = [msgspec.json.decode(body)["order"] for body in read(client, "together", "new", together)]
            assert found == [*range(together)]
            assert len(read(client, "together", "pulling", together - 150)) == together - 150
        clock.advance(2 * DAY)
        assert read(client, "bills", "retrying", 2)[-2:] == [b"committed", b"x" * 5000]
        clock.advance(700 * DAY)
        assert read(client, "bills", "new", 1) == [b"later"]


def read(client: dmq.Client, topic: str, group: str, count: int) -> list[bytes]:
    """What a group gets, at least so many; and acks."""
    found: list[bytes] = []
    with client.consumer(topic, group, start_from="earliest") as consumer:

        def is_enough() -> bool:
            batch = consumer.pull(100, wait=0.2)
            found.extend(bytes(message.body) for message in batch)
            batch.ack()
            return len(found) >= count

        eventually(is_enough, f"{group} got only {len(found)} of {topic}")
    return found


def test_what_an_earlier_client_said_gets_the_same_kind_of_answer(recording: Recording) -> None:
    answers = {
        (number, frame.command, frame.correlation): frame.status
        for number, frame, _ in recording.frames(to_broker=False)
        if frame.kind == Kind.RESPONSE
    }
    asked = 0
    with ServedBroker() as broker:
        peers: dict[int, RawClient] = {}
        for number, frame, raw in recording.frames(to_broker=True):
            if number not in peers:
                peers[number] = RawClient(port_of(broker.url), app=None)
            peers[number].send(raw)
            if frame.kind != Kind.REQUEST:
                continue
            asked += 1
            while True:
                answer = peers[number].read()
                assert answer is not None, f"the broker hung up after {Command(frame.command).name}"
                if answer.kind == Kind.RESPONSE and answer.correlation == frame.correlation:
                    break
            assert (answer.command, answer.status) == (
                frame.command,
                answers.get((number, frame.command, frame.correlation), 0),
            )
            if not answer.status:
                decode_response(answer)
        for peer in peers.values():
            peer.close()
    assert asked > 40


def test_what_an_earlier_broker_answered_and_pushed_is_understood(recording: Recording) -> None:
    seen = set()
    in_blocks = 0
    for _, frame, _ in recording.frames(to_broker=False):
        header = decode_response(frame) if frame.kind == Kind.RESPONSE else decode_request(frame)
        seen.add(frame.command)
        leases = getattr(header, "leases", None)
        if frame.command in (Command.PULL, Command.CONSUMER_PUSH) and leases:
            lengths, data = unpack_records(frame.body, sum(lease.count for lease in leases), blocks=True)
            ends = np.cumsum(lengths, dtype=np.int64)
            starts = ends - np.asarray(lengths, np.int64)
            assert find_corrupt(bytes(data), starts, np.asarray(lengths, np.int64)) == {}
            assert all(RecordView(bytes(data), start).body is not None for start in starts.tolist())
            in_blocks += len(data) > sum(map(int, lengths))
        if frame.command == Command.FETCH:
            rows = decode_units(frame.body, columns={"topic", "body", "key"})
            assert len(rows.starts) > 40
        if frame.command == Command.PRODUCE:
            assert (header.shard, header.epoch) == (0, 0)
        if frame.command == Command.HELLO and header.client_id == "compat-1":
            assert {*header.features} == FEATURES[recording.folder.name]
    assert (in_blocks > 0) is ("blocks" in FEATURES[recording.folder.name])
    assert {
        Command.HELLO, Command.PRODUCE, Command.PULL, Command.CONSUMER_PUSH, Command.SETTLE, Command.FETCH,
        Command.TRANSACTION_END, Command.PEEK, Command.FIND, Command.TRACE,
    } <= seen  # fmt: skip


def test_a_field_of_a_newer_peer_is_passed_over(recording: Recording) -> None:
    """Of every header that was recorded, in both directions: two more fields at its end change nothing."""
    for to_broker in (True, False):
        for _, frame, _ in recording.frames(to_broker=to_broker):
            if frame.status:
                continue
            decode = decode_response if frame.kind == Kind.RESPONSE else decode_request
            header = decode(frame)
            known = msgspec.msgpack.decode(msgspec.msgpack.encode(header))  # all fields, also those that came later
            longer = msgspec.msgpack.encode([*known, 7, {"new": [1]}])
            assert decode(msgspec.structs.replace(frame, header=longer)) == header
