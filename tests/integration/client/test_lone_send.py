"""Lone sends, which are written and read in the caller's own thread: what happens when something comes in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

import dmq
import dmq.aio
from dmq.client.aio import producer as aio_producer
from dmq.client.aio.producer import AioProducer
from dmq.client.connection import socket as sockets
from dmq.client.producer.accumulator import CROWD_MIN, SendBatch
from dmq.client.producer.producer import Producer
from dmq.protocol import Command, Flag, Frame, Header, decode_request, error_frame, one_way_head, response_head
from dmq.protocol.produce import Produce
from dmq.protocol.session import ServerHealth
from tests.integration.client.servers import Peer, usual
from tests.patience import PATIENCE_S, eventually


class Slow(Peer):
    """A peer that answers a PRODUCE only when the test says so, once `is_slow`."""

    def __init__(self) -> None:
        self.is_slow = False
        self.held: list[Frame] = []
        super().__init__(self._decide)

    def _decide(self, peer: Peer, frame: Frame) -> Header | None:
        if frame.command == Command.PRODUCE and self.is_slow:
            self.held.append(frame)
            return None
        return usual(frame)

    def answer(self, frame: Frame) -> bytes:
        return response_head(frame.command, usual(frame), frame.correlation)

    def release(self, *frames: Frame) -> None:
        for frame in frames:
            self.send(self.sockets[-1], self.answer(frame))

    def holds(self, count: int) -> None:
        eventually(lambda: len(self.held) >= count)


@pytest.fixture
def peer() -> Iterator[Slow]:
    with Slow() as peer:
        yield peer


@pytest.fixture
def client(peer: Slow) -> Iterator[dmq.Client]:
    with dmq.connect(peer.url, app="shop") as client:
        yield client


def warm(peer: Slow, client: dmq.Client, **options: object) -> Producer:
    """A producer that has sent before, so that the next send goes straight, to a peer that is slow from now on."""
    producer = client.producer(**options)  # type: ignore[arg-type]
    peer.is_slow = False
    producer.send("t", b"first")
    peer.is_slow = True
    return producer


class Sending(threading.Thread):
    """One send in a thread of its own."""

    def __init__(self, producer: Producer, body: bytes = b"x") -> None:
        super().__init__(daemon=True)
        self._producer, self._body = producer, body
        self.result: dmq.Receipt | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._producer.send("t", self._body)
        except Exception as error:
            self.result = error

    def receipt(self) -> dmq.Receipt:
        self.join(PATIENCE_S)
        assert isinstance(self.result, dmq.Receipt), self.result
        return self.result


def numbers(frame: Frame) -> tuple[int, int, int, int]:
    header: Produce = decode_request(frame)
    return header.producer_id, header.first_sequence, header.count, header.queue


def test_lone_sends_go_straight_and_count_on(peer: Slow, client: dmq.Client) -> None:
    producer = client.producer()
    receipts = [producer.send("t", b"%d" % number, key=f"k{number}") for number in range(20)]
    assert [receipt.id.sequence for receipt in receipts] == [*range(20)]
    assert len({receipt.id.producer_id for receipt in receipts}) == 1
    assert [numbers(frame)[1] for frame in peer.produced()] == [*range(20)]
    assert not any(thread.name == f"dmq-127.0.0.1:{peer.port}" for thread in threading.enumerate())


def test_an_answer_that_comes_late_but_in_time_is_the_answer(peer: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LONE_SECONDS", 0.02)
    with dmq.connect(peer.url, app="shop") as client:
        producer = warm(peer, client)
        sending = Sending(producer)
        peer.holds(1)
        eventually(lambda: producer.straight.late == 1)
        assert sending.result is None
        peer.release(*peer.held)
        assert sending.receipt().id.sequence == 1
        assert len(peer.produced()) == 2, "nothing was sent twice"


def test_a_send_that_times_out_is_seen_through_when_its_answer_comes(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    with pytest.raises(dmq.TimedOut):
        producer.send("t", b"x", timeout=0.2)
    with pytest.raises(dmq.TimedOut):
        producer.flush(0.05)
    peer.release(*peer.held)
    producer.flush(PATIENCE_S)
    peer.is_slow = False
    assert producer.send("t", b"y").id.sequence == 2


def test_a_connection_that_breaks_in_between_has_it_sent_again_as_the_same(peer: Slow, client: dmq.Client) -> None:
    sending = Sending(warm(peer, client))
    peer.holds(1)
    peer.cut()
    peer.holds(2)
    first, second = peer.held
    assert second.flags & Flag.RESEND
    assert not first.flags & Flag.RESEND
    assert numbers(first) == numbers(second)
    assert bytes(first.body) == bytes(second.body)
    peer.release(second)
    assert sending.receipt().id.sequence == 1


def test_a_refusal_is_tried_again(peer: Slow, client: dmq.Client) -> None:
    sending = Sending(warm(peer, client))
    peer.holds(1)
    peer.send(
        peer.sockets[-1], error_frame(dmq.Busy("full", retry_after_ms=10), Command.PRODUCE, peer.held[0].correlation)
    )
    peer.holds(2)
    assert numbers(peer.held[0]) == numbers(peer.held[1])
    peer.release(peer.held[1])
    assert sending.receipt().id.sequence == 1


def test_what_cannot_succeed_raises_at_once_and_harms_nothing(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    sending = Sending(producer)
    peer.holds(1)
    peer.send(peer.sockets[-1], error_frame(dmq.InvalidRequest("no"), Command.PRODUCE, peer.held[0].correlation))
    sending.join(PATIENCE_S)
    assert isinstance(sending.result, dmq.InvalidRequest)
    peer.is_slow = False
    assert producer.send("t", b"y").id.sequence == 2


def test_a_second_thread_gets_its_answer_from_the_first_that_reads(peer: Slow, client: dmq.Client) -> None:
    one, two = warm(peer, client), warm(peer, client)
    first = Sending(one, b"one")
    peer.holds(1)
    second = Sending(two, b"two")
    peer.holds(2)
    peer.release(peer.held[1])
    second.receipt()
    assert first.is_alive()
    peer.release(peer.held[0])
    first.receipt()


def test_the_first_hands_the_reading_on_when_it_has_its_answer(peer: Slow, client: dmq.Client) -> None:
    one, two = warm(peer, client), warm(peer, client)
    first = Sending(one)
    peer.holds(1)
    second = Sending(two)
    peer.holds(2)
    peer.release(peer.held[0])
    first.receipt()
    peer.release(peer.held[1])
    second.receipt()


def test_threads_of_one_producer_share_the_batch_that_waits(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    first = Sending(producer)
    peer.holds(1)
    others = [Sending(producer) for _ in range(3)]
    eventually(lambda: producer._core.accumulator.messages == 4)
    peer.release(peer.held[0])
    peer.holds(2)
    assert decode_request(peer.held[1]).count == 3
    peer.release(peer.held[1])
    assert {thread.receipt().id.sequence for thread in [first, *others]} == {1, 2, 3, 4}


def crowd(peer: Slow, producer: Producer) -> list[Sending]:
    """So many threads that the next ones join them; the peer holds two requests, the last one of all but the first."""
    first = Sending(producer)
    peer.holds(1)
    others = [Sending(producer) for _ in range(CROWD_MIN)]
    eventually(lambda: producer._core.accumulator.messages == 1 + CROWD_MIN)
    peer.release(peer.held[0])
    peer.holds(2)
    return [first, *others]


def gathers(producer: Producer, count: int) -> SendBatch:
    """The batch that gathers, once it has so many messages."""
    lane = producer._core.plain_lane("t", "flushed")
    assert lane is not None
    eventually(lambda: lane.gathering is not None and lane.gathering.count == count)
    assert lane.gathering is not None
    return lane.gathering


def test_many_threads_share_batches_that_none_of_them_reads_for(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    threads = crowd(peer, producer)
    threads += [Sending(producer, b"%d" % number) for number in range(3)]
    assert gathers(producer, 3).is_attended
    peer.release(peer.held[1])
    peer.holds(3)
    peer.release(peer.held[2])
    assert {thread.receipt().id.sequence for thread in threads} == {*range(1, CROWD_MIN + 5)}
    peer.is_slow = False
    assert producer.send("t", b"z").id.sequence == CROWD_MIN + 5
    taken = producer.straight.taken
    producer.send("t", b"z")
    assert producer.straight.taken == taken + 1, "alone again, it goes straight"


def test_a_send_among_many_ends_in_its_time_and_is_stored_later(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    threads = crowd(peer, producer)
    threads.append(Sending(producer))
    gathers(producer, 1)
    with pytest.raises(dmq.TimedOut):
        producer.send("t", b"late", timeout=0.05)
    peer.release(peer.held[1])
    peer.holds(3)
    assert decode_request(peer.held[2]).count == 2
    peer.release(peer.held[2])
    for thread in threads:
        thread.receipt()


def test_a_send_among_many_fails_with_the_producer_that_is_closed(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    crowd(peer, producer)
    late = Sending(producer)
    gathers(producer, 1)
    producer.close(timeout=0.05)
    late.join(PATIENCE_S)
    assert isinstance(late.result, dmq.NotConnected)


def test_many_tasks_share_a_batch_and_each_has_its_own_time(peer: Slow) -> None:
    async def main() -> None:
        async with dmq.aio.connect(peer.url, app="shop") as client:
            producer = client.producer()
            await producer.send("t", b"first")
            peer.is_slow = True
            first = asyncio.create_task(producer.send("t", b"x"))
            await asyncio.to_thread(peer.holds, 1)
            others = [asyncio.create_task(producer.send("t", b"x")) for _ in range(CROWD_MIN)]
            await asyncio.sleep(0)
            peer.release(peer.held[0])
            await asyncio.to_thread(peer.holds, 2)
            last = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(dmq.TimedOut):
                await producer.send("t", b"late", timeout=0.05)
            peer.release(peer.held[1])
            await asyncio.to_thread(peer.holds, 3)
            assert [decode_request(frame).count for frame in peer.held] == [1, CROWD_MIN, 3]
            peer.release(peer.held[2])
            receipts = await asyncio.gather(first, *others, *last)
            assert [receipt.id.sequence for receipt in receipts] == [*range(1, CROWD_MIN + 4)]
            peer.is_slow = False

    asyncio.run(main())


def test_asynchronous_sends_in_between_call_back_meanwhile(peer: Slow, client: dmq.Client) -> None:
    one, two = warm(peer, client), warm(peer, client)
    first = Sending(one)
    peer.holds(1)
    told: list[dmq.Receipt | None] = []
    future = two.send_async("t", b"y", on_delivery=lambda receipt, error: told.append(receipt))
    peer.holds(2)
    peer.release(peer.held[1])
    assert future.result(PATIENCE_S).id == future.id
    eventually(lambda: told)
    assert first.is_alive()
    peer.release(peer.held[0])
    first.receipt()
    peer.is_slow = False
    assert two.send("t", b"z").id.sequence == 2, "and the straight way is open again"


def test_pushes_and_pieces_before_the_answer_change_nothing(peer: Slow, client: dmq.Client) -> None:
    sending = Sending(warm(peer, client))
    peer.holds(1)
    sock = peer.sockets[-1]
    push = one_way_head(Command.SERVER_HEALTH, ServerHealth("other", "x" * 3000))
    stranger = response_head(Command.PRODUCE, usual(peer.held[0]), 4_000_000)  # an answer somebody has given up on
    answer = peer.answer(peer.held[0])
    data = b"".join(peer.seal(sock, frame) for frame in (*[push] * 5, stranger, answer, push))
    for at in range(0, len(data), 1000):
        sock.sendall(data[at : at + 1000])
        time.sleep(0.001)
    sending.receipt()
    peer.is_slow = False


def test_closing_the_producer_ends_a_send_that_waits(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client)
    sending = Sending(producer)
    peer.holds(1)
    producer.close(timeout=0.05)
    peer.release(*peer.held)
    sending.join(PATIENCE_S)
    assert isinstance(sending.result, dmq.NotConnected), sending.result


def test_a_closed_client_ends_a_send_that_waits(peer: Slow, client: dmq.Client) -> None:
    sending = Sending(warm(peer, client))
    peer.holds(1)
    client.close()
    sending.join(PATIENCE_S)
    assert isinstance(sending.result, dmq.DMQError), sending.result


def test_a_full_window_blocks_a_lone_send_too(peer: Slow, client: dmq.Client) -> None:
    producer = warm(peer, client, window_bytes=1000, on_full="raise")
    future = producer.send_async("t", bytes(900))
    with pytest.raises(dmq.Busy):
        producer.send("t", bytes(900))
    peer.holds(1)
    peer.release(*peer.held)
    future.result(PATIENCE_S)


def test_what_cannot_be_sent_raises_at_its_send(peer: Slow, client: dmq.Client) -> None:
    producer = client.producer()
    producer.send("t", b"first")
    for wrong in (
        {"tag": 5},
        {"priority": 10},
        {"key": "\ud800"},
        {"properties": {"": "x"}},
        {"business_id": "b" * 300},
    ):
        with pytest.raises(dmq.InvalidMessage):
            producer.send("t", b"x", **wrong)
    assert producer.send("t", b"x", tag="paid", properties={"a": "b"}, business_id="u-1").id.sequence == 1


# --- on an event loop ------------------------------------------------------------------------------------------------


def aio_run(peer: Slow, act: Callable[[AioProducer], Awaitable[None]]) -> None:
    """Have something done with a producer that has sent before, to a peer that is slow from now on."""

    async def run() -> None:
        async with await dmq.aio.connect(peer.url, app="shop") as client:
            producer = client.producer()
            await producer.send("t", b"first")
            peer.is_slow = True
            await act(producer)

    asyncio.run(run())


async def held(peer: Slow, count: int) -> None:
    while len(peer.held) < count:
        await asyncio.sleep(0.005)


def test_a_task_that_is_cancelled_leaves_its_message_on_its_way(peer: Slow) -> None:
    async def act(producer: AioProducer) -> None:
        task = asyncio.create_task(producer.send("t", b"x"))
        await held(peer, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(dmq.TimedOut):
            await producer.flush(0.05)
        peer.release(*peer.held)
        await producer.flush(PATIENCE_S)
        peer.is_slow = False
        assert (await producer.send("t", b"y")).id.sequence == 2
        assert (producer.straight.taken, producer.straight.late) == (1, 1)

    aio_run(peer, act)


def test_an_answer_on_the_loop_that_comes_late_is_the_answer(peer: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_producer, "LONE_SECONDS", 0.02)

    async def act(producer: AioProducer) -> None:
        task = asyncio.create_task(producer.send("t", b"x"))
        while not producer.straight.late:
            await asyncio.sleep(0.005)
        await held(peer, 1)
        peer.release(*peer.held)
        assert (await task).id.sequence == 1
        assert len(peer.produced()) == 2, "nothing was sent twice"

    aio_run(peer, act)


def test_what_gathers_behind_a_lone_send_on_the_loop_follows_it(peer: Slow) -> None:
    async def act(producer: AioProducer) -> None:
        tasks = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(20)]
        flush = asyncio.create_task(producer.flush(PATIENCE_S))
        await held(peer, 1)
        peer.is_slow = False
        peer.release(*peer.held)
        receipts = await asyncio.gather(*tasks)
        await flush
        assert sorted(receipt.id.sequence for receipt in receipts) == [*range(1, 21)]

    aio_run(peer, act)
