"""A lone send gives the same on the straight path and on the general way: requests, receipts, errors, what is left."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import dmq
import dmq.aio
from dmq.client.connection.connection import Connection
from dmq.client.producer.accumulator import Accumulator
from dmq.errors import Busy, DiskFull, NotAllowed
from dmq.model import DurabilityName
from dmq.protocol import Command, Frame, Header, decode_request, one_way_head, response_head
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import ServerHealth
from dmq.records import RecordView
from tests.integration.client.servers import Peer, usual
from tests.patience import eventually

SEND_TIME: Final = slice(39, 47)  # of a record, and its checksum
HEAD_CRC: Final = slice(55, 59)


class Send(NamedTuple):
    """One send, and how it is answered the first time; from then on as usual."""

    body: Any = b"body"  # a number is so many zeros
    key: str | None = None
    tag: str | None = None
    durability: DurabilityName = "stored"
    answer: str = "usual"


ANSWERS: Final = (
    "usual", "duplicate", "longer", "halves", "push", "followed", "torn", "busy", "refused", "full", "cut", "wrong",
)  # fmt: skip
SENDS = st.builds(
    Send,
    body=st.sampled_from([b"", b"body", "text", {"a": 1}, 9000, 5000]),
    key=st.sampled_from([None, "k-1", "", "schlüssel", "k" * 300]),
    tag=st.sampled_from([None, None, "red"]),
    durability=st.sampled_from(["stored", "stored", "flushed", "replicated"]),
    answer=st.sampled_from(["usual", "usual", *ANSWERS]),
)


class Scripted(Peer):
    """A peer that answers each message the first time as the test says, and counts offsets."""

    def __init__(self) -> None:
        self.script: list[str] = []
        self.requests: list[tuple[Any, ...]] = []
        self._offsets: Iterator[int] = itertools.count()
        super().__init__(self._decide)

    def begin(self, sends: list[Send]) -> None:
        self.script = [send.answer for send in sends]
        self.requests = []
        self._offsets = itertools.count()

    def _decide(self, peer: Peer, frame: Frame) -> Header | Exception | None:
        if frame.command != Command.PRODUCE:
            return usual(frame)
        asked: Produce = decode_request(frame)
        self.requests.append(seen(frame, asked))
        sock, how = self.sockets[-1], self.script.pop(0) if self.script else "usual"
        errors = {"busy": Busy("later", retry_after_ms=1), "refused": NotAllowed("no"), "full": DiskFull("full")}
        if how in errors:
            return errors[how]
        if how == "cut":
            self.cut()
            return None
        reply = ProduceReply(asked.queue, next(self._offsets), 7, asked.durability, how == "duplicate")
        if how in ("usual", "duplicate"):
            return reply
        if how == "longer":
            return ProduceReply(asked.queue, reply.first_offset, 7, asked.durability, False, 1, 2)
        whole = self.seal(sock, response_head(Command.PRODUCE, reply, frame.correlation))
        pushed = self.seal(sock, one_way_head(Command.SERVER_HEALTH, ServerHealth("other")))
        if how == "push":
            whole = pushed + whole
        elif how in ("followed", "torn"):
            whole += pushed
        elif how == "wrong":
            whole = whole[:-1] + bytes((whole[-1] ^ 1,))
        half = {"halves": len(whole) // 2, "torn": len(whole) - 7}.get(how, len(whole))
        sock.sendall(whole[:half])
        if half < len(whole):
            sock.sendall(whole[half:])
        return None


def seen(frame: Frame, asked: Produce) -> tuple[Any, ...]:
    """What a request says, without the times, the producer's id and the queue that chance has chosen first."""
    body = bytes(frame.body)
    lengths = struct.unpack_from(f">{asked.count}I", body)
    records = body[4 * asked.count + 12 * asked.keys :]
    view = RecordView(records, 0)
    timeless = b""
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        record = bytearray(records[end - length : end])
        record[SEND_TIME] = bytes(8)
        record[HEAD_CRC] = bytes(4)
        timeless += record
    return (
        frame.flags,
        asked.first_sequence,
        asked.count,
        asked.durability,
        view.key,
        lengths,
        timeless,
    )


def made(body: Any) -> Any:
    return bytes(body) if isinstance(body, int) else body


def told(outcome: dmq.Receipt | dmq.DMQError) -> tuple[Any, ...]:
    if isinstance(outcome, dmq.Receipt):
        return outcome.id.sequence, outcome.topic, outcome.offset, outcome.durability
    return type(outcome), outcome.message


def left(accumulator: Accumulator) -> tuple[Any, ...]:
    """What a producer keeps; nothing is under way."""
    lanes = sorted((lane.key, lane.under_way, lane.lone, lane.stand_in) for lane in accumulator._lanes.values())
    streams = [(stream.next_sequence, stream.under_way) for stream in accumulator.streams.values()]
    return accumulator.bytes, accumulator.messages, [*accumulator.unsettled()], lanes, streams


@pytest.fixture(scope="module")
def peer() -> Iterator[Scripted]:
    with Scripted() as peer:
        yield peer


def while_another_reads(peer: Scripted, sends: list[Send], *, straight: bool) -> tuple[Any, ...]:
    return blocking(peer, sends, straight=straight, is_read=True)


def asynchronously(peer: Scripted, sends: list[Send], *, straight: bool) -> tuple[Any, ...]:
    return blocking(peer, sends, straight=straight, is_async=True)


def in_batches(peer: Scripted, sends: list[Send], *, straight: bool) -> tuple[Any, ...]:
    return blocking(peer, sends, straight=straight, is_many=True)


def blocking(
    peer: Scripted,
    sends: list[Send],
    *,
    straight: bool,
    is_read: bool = False,
    is_async: bool = False,
    is_many: bool = False,
) -> tuple[Any, ...]:
    peer.begin([Send(), *sends])
    outcomes: list[dmq.Receipt | dmq.DMQError] = []
    with dmq.connect(peer.url, app="shop") as client:
        producer = client.producer(retries=0, straight=straight)
        connection = client._router.home.current()
        if is_read and connection is not None:
            connection.hold()  # until it is cut, a thread of its own reads
        for body, key, tag, durability, _ in [Send(), *sends]:
            try:
                if is_many:
                    several = [dmq.Message(made(body), key, tag), dmq.Message(b"other")]
                    outcomes += producer.send_many("t", several, durability=durability)
                elif is_async:
                    future = producer.send_async("t", made(body), key=key, tag=tag, durability=durability)
                    outcomes.append(future.result(30))
                else:
                    outcomes.append(producer.send("t", made(body), key=key, tag=tag, durability=durability))
            except dmq.DMQError as error:
                outcomes.append(error)
        producer.flush(30)
        accumulator = producer._core.accumulator
        eventually(lambda: not accumulator.charged)  # the thread that reads settles a batch after its end is told
        kept = left(accumulator)
    return [told(outcome) for outcome in outcomes], [*peer.requests], kept


def on_a_loop(peer: Scripted, sends: list[Send], *, straight: bool) -> tuple[Any, ...]:
    async def run() -> tuple[Any, ...]:
        outcomes: list[dmq.Receipt | dmq.DMQError] = []
        async with await dmq.aio.connect(peer.url, app="shop") as client:
            producer = client.producer(retries=0, straight=straight)
            for body, key, tag, durability, _ in [Send(), *sends]:
                try:
                    outcomes.append(await producer.send("t", made(body), key=key, tag=tag, durability=durability))
                except dmq.DMQError as error:
                    outcomes.append(error)
            await producer.flush(30)
            kept = left(producer._core.accumulator)
        return [told(outcome) for outcome in outcomes], [*peer.requests], kept

    peer.begin([Send(), *sends])
    return asyncio.run(run())


@settings(
    max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.lists(SENDS, max_size=6))
@example([Send(answer=answer) for answer in ANSWERS])
@example([Send(key="k", durability="flushed", answer=answer) for answer in ANSWERS])
def test_both_ways_give_the_same(peer: Scripted, sends: list[Send]) -> None:
    for run in (blocking, while_another_reads, asynchronously, in_batches, on_a_loop):
        straight, general = run(peer, sends, straight=True), run(peer, sends, straight=False)
        assert straight[0] == general[0], "receipts and errors"
        assert straight[1] == general[1], "requests"
        assert straight[2] == general[2], "what is left"


@pytest.mark.parametrize("is_read", [False, True])
def test_the_straight_path_is_taken(peer: Scripted, is_read: bool) -> None:
    peer.begin([])
    with dmq.connect(peer.url, app="shop") as client:
        producer = client.producer()
        connection = client._router.home.current()
        assert connection is not None
        if is_read:
            connection.hold()
            eventually(lambda: connection.turns.is_taken)
        for _ in range(5):
            producer.send("t", b"body", durability="stored")
        assert (producer.straight.taken, producer.straight.late) == (4, 0)
        for size in (1, 2, 1999):
            receipts = producer.send_many("t", [dmq.Message(b"body", "k")] * size, durability="stored")
            assert len({receipt.id for receipt in receipts}) == size
        assert is_read or (producer.straight.taken, producer.straight.late) == (7, 0)


def test_tasks_whose_messages_shared_a_batch_share_the_next_one_too(peer: Scripted) -> None:
    async def run() -> None:
        async with await dmq.aio.connect(peer.url, app="shop") as client:
            producer = client.producer()

            async def send(times: int) -> None:
                for _ in range(times):
                    await producer.send("t", b"body", durability="stored")

            await send(2)
            peer.begin([])
            await asyncio.gather(*(send(20) for _ in range(10)))
            counts = [request[2] for request in peer.requests]
            assert sum(counts) == 200
            assert counts[2:-2] == [10] * (len(counts) - 4), "the first goes alone, and the others catch up with it"
            peer.begin([])
            await send(5)
            assert [request[2] for request in peer.requests] == [1] * 5
            assert producer.straight.taken == 1 + 1 + 4, "after the others, one that is alone waits for them once"

    asyncio.run(run())


@pytest.mark.parametrize("how", ["followed", "torn"])
@pytest.mark.parametrize("is_many", [False, True])
def test_what_comes_behind_the_answer_is_heard_and_holds_nobody_up(
    peer: Scripted, monkeypatch: pytest.MonkeyPatch, how: str, is_many: bool
) -> None:
    heard: list[bytes] = []
    hear = Connection.hear

    def listen(connection: Connection, data: bytes) -> None:
        heard.append(data)
        hear(connection, data)

    monkeypatch.setattr(Connection, "hear", listen)
    peer.begin([])
    with dmq.connect(peer.url, app="shop") as client:
        producer, connection = client.producer(), client._router.home.current()
        producer.send("t", b"body", durability="stored")
        for sent in (1, 2, 3):
            peer.script = [how]
            if is_many:
                producer.send_many("t", [dmq.Message(b"body")] * 2, durability="stored")
            else:
                producer.send("t", b"body", durability="stored")
            assert (producer.straight.taken, producer.straight.late) == (sent, 0)
            client.admin.topic("t")  # what was cut is read to its end
        assert len(heard) == 3
        assert client._router.home.current() is connection
