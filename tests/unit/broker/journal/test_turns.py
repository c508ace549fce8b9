"""Requests that arrive in one turn are written together, and answered as if each were alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dmq.model import Durability
from dmq.protocol import Status
from dmq.protocol.produce import ProduceReply
from dmq.storage.store import FlushTicket, MessageStore
from dmq.testing import FakeClock
from tests.unit.broker.turns import Rig, running


def in_a_broker(test: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with running(**settings) as rig:
            await test(rig)

    asyncio.run(run())


@pytest.mark.parametrize("count", [2, 10, 23, 24, 60])
def test_messages_of_many_connections_and_topics_share_a_unit(count: int) -> None:
    """Few are packed one by one and many as columns: the border lies between."""

    async def run(rig: Rig) -> None:
        peers = await rig.connect(count)
        units = rig.broker.writer.units
        for number, peer in enumerate(peers):
            peer.send([b"%d" % number], topic=("orders", "bills")[number % 2], queue=number % 3, producer=1 + number)
        await rig.turn()
        replies = [peer.reply() for peer in peers]
        assert rig.broker.writer.units == units + 1
        assert len({reply.journal_offset for reply in replies}) == 1
        for at, topic in enumerate(("orders", "bills")):
            for queue in range(3):
                mine = [n for n in range(count) if n % 2 == at and n % 3 == queue]
                assert rig.bodies(topic, queue) == [b"%d" % n for n in mine]
                assert [replies[n].queue for n in mine] == [queue] * len(mine)
                assert [replies[n].first_offset for n in mine] == list(range(len(mine)))

    in_a_broker(run)


@pytest.mark.parametrize("count", [3, 40])
def test_one_at_fault_harms_none_of_the_others(count: int) -> None:
    async def run(rig: Rig) -> None:
        peers = await rig.connect(count + 4)
        others, (stranger, astray, conflicting, unknown) = peers[:count], peers[count:]
        others[0].send([b"a", b"b"], producer=99, sequence=10)
        await rig.turn()
        others[0].reply()
        units = rig.broker.writer.units
        conflicting.send([b"not b"], producer=99, sequence=11)
        stranger.send([b"x"], named="bills")
        for number, peer in enumerate(others[: count // 2]):
            peer.send([b"%d" % number], producer=1 + number)
        astray.send([b"x"], queue=9, producer=500)
        unknown.send([b"x"], topic="nowhere", producer=501)
        for number, peer in enumerate(others[count // 2 :], count // 2):
            peer.send([b"%d" % number], producer=1 + number)
        await rig.turn()
        assert [peer.reply().first_offset for peer in others] == [*range(2, 2 + count)]
        assert rig.broker.writer.units == units + 1
        assert conflicting.answers() == [Status.SEQUENCE_CONFLICT]
        assert stranger.answers() == [Status.INVALID_MESSAGE]
        assert astray.answers() == [Status.UNKNOWN_TOPIC]
        assert unknown.answers() == [Status.UNKNOWN_TOPIC]
        assert rig.bodies() == [b"a", b"b", *(b"%d" % number for number in range(count))]

    in_a_broker(run)


def test_a_batch_and_its_resend_in_one_turn_are_stored_once() -> None:
    async def run(rig: Rig) -> None:
        first, second, third = await rig.connect(3)
        first.send([b"a", b"b"], producer=5, sequence=100)
        second.send([b"a", b"b"], producer=5, sequence=100)
        third.send([b"c"], producer=5, sequence=102)
        third.send([b"b"], producer=5, sequence=101)
        await rig.turn()
        one, again = first.reply(), second.reply()
        assert (one.is_duplicate, again.is_duplicate) == (False, True)
        assert (again.first_offset, again.journal_offset) == (one.first_offset, one.journal_offset)
        answers = third.answers()  # in any order
        assert [answer.first_offset for answer in answers if isinstance(answer, ProduceReply)] == [2]
        assert [answer for answer in answers if isinstance(answer, int)] == [Status.SEQUENCE_CONFLICT]
        assert rig.bodies() == [b"a", b"b", b"c"]
        second.send([b"c"], producer=5, sequence=102)
        await rig.turn()
        assert second.reply().is_duplicate
        assert rig.broker.publisher.duplicates == 2

    in_a_broker(run)


def test_what_is_refused_is_not_remembered() -> None:
    async def run(rig: Rig) -> None:
        peer, other = await rig.connect(2)
        peer.send([b"x"], producer=5, sequence=1, named="bills")
        other.send([b"x"], producer=5, sequence=1)
        await rig.turn()
        assert peer.answers() == [Status.INVALID_MESSAGE]
        assert not other.reply().is_duplicate

    in_a_broker(run)


def test_requests_of_one_connection_keep_their_order_and_go_out_with_one_write() -> None:
    async def run(rig: Rig) -> None:
        peer, other = await rig.connect(2)
        frames = [peer.frame([b"%d" % number], producer=5, sequence=number) for number in range(50)]
        peer.feed(b"".join(frames[:30]))
        other.send([b"between"], producer=6)
        peer.feed(b"".join(frames[30:]))
        await rig.turn()
        replies = peer.answers()
        assert [reply.first_offset for reply in replies if isinstance(reply, ProduceReply)] == [
            *range(30),
            *range(31, 51),
        ]
        assert other.reply().first_offset == 30
        assert (peer.wire.writes, other.wire.writes) == (1, 1)
        numbers = [b"%d" % number for number in range(50)]
        assert rig.bodies() == [*numbers[:30], b"between", *numbers[30:]]

    in_a_broker(run)


def test_stored_does_not_wait_for_flushed() -> None:
    async def run(rig: Rig) -> None:
        peers = await rig.connect(20)
        for number, peer in enumerate(peers):
            level = Durability.FLUSHED if number % 2 else Durability.STORED
            peer.send([b"%d" % number], producer=1 + number, durability=level)
        await rig.turn()
        assert {peer.reply().durability for peer in peers[::2]} == {Durability.STORED}
        assert not any(peer.answers() for peer in peers[1::2])
        assert len(rig.bodies()) == 10
        flushes = rig.broker.writer.flushes
        await rig.settle()
        assert {peer.reply().durability for peer in peers[1::2]} == {Durability.FLUSHED}
        assert rig.broker.writer.flushes == flushes == 1
        assert rig.bodies() == [*(b"%d" % n for n in range(0, 20, 2)), *(b"%d" % n for n in range(1, 20, 2))]

    in_a_broker(run)


def test_lone_flushes_on_a_quick_disk_are_answered_in_their_turn_and_are_durable() -> None:
    async def run(rig: Rig) -> None:
        peer, other = await rig.connect(2)
        at_once = 0
        for number in range(40):
            peer.send([b"%d" % number], producer=5, sequence=number, durability=Durability.FLUSHED)
            await rig.turn()
            at_once += len(peer.wire.frames)
            await rig.settle()
            assert peer.reply().first_offset == number
            assert rig.store.queries.flushed >= rig.store.queries.end
        assert at_once >= 20
        peer.send([b"x" * (1 << 18)] * 3, producer=7, durability=Durability.FLUSHED)
        await rig.turn()
        assert not peer.wire.frames, "much takes a quick disk long, too"
        await rig.settle()
        peer.answers()
        # Two that wait are no longer alone: what comes meanwhile may gather.
        peer.send([b"40"], producer=5, sequence=40, durability=Durability.FLUSHED)
        other.send([b"41"], producer=6, durability=Durability.FLUSHED)
        await rig.turn()
        assert not peer.wire.frames
        await rig.settle()
        assert [peer.reply().first_offset, other.reply().first_offset] == [43, 44]
        assert rig.broker.writer.flushes == 42

    in_a_broker(run)


def test_a_disk_that_stops_being_quick_holds_the_loop_up_once_and_then_a_thread_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(rig: Rig) -> None:
        on_loop: list[bool] = []
        seconds = 0.0
        flush = FlushTicket.run
        clock = rig.broker.clock.wall
        assert isinstance(clock, FakeClock)

        def timed(ticket: FlushTicket) -> None:
            on_loop.append(threading.current_thread() is threading.main_thread())
            clock.advance(seconds)
            flush(ticket)

        monkeypatch.setattr(FlushTicket, "run", timed)
        (peer,) = await rig.connect(1)
        for number in range(60):
            seconds = 1.0 if number == 20 else 0.0
            clock.advance(10.0 if number == 45 else 0.0)
            peer.send([b"%d" % number], producer=5, sequence=number, durability=Durability.FLUSHED)
            await rig.turn()
            await rig.settle()
            assert peer.reply().first_offset == number
        assert on_loop == [False] * 16 + [True] * 5 + [False] * 24 + [True] * 15

    in_a_broker(run)


def test_too_much_at_once_is_refused_with_busy_and_the_rest_is_stored() -> None:
    async def run(rig: Rig) -> None:
        peers = await rig.connect(12)
        for number, peer in enumerate(peers):
            peer.send([bytes([number]) * 200_000], producer=1 + number)
        await rig.turn()
        outcomes = [peer.answers()[0] for peer in peers]
        assert outcomes[-1] == Status.BUSY
        stored = [outcome for outcome in outcomes if isinstance(outcome, ProduceReply)]
        assert 4 <= len(stored) < 12
        assert len(rig.bodies()) == len(stored)
        assert rig.broker.writer.waiting_bytes == 0

    in_a_broker(run, waiting_bytes_max=1 << 20)


@pytest.mark.parametrize("size", [100, 1000, 40_000])
def test_large_batches_are_stored_as_they_came_whether_made_in_place_or_not(size: int) -> None:
    async def run(rig: Rig) -> None:
        peers = await rig.connect(3)
        sent: list[bytes] = []
        for number, peer in enumerate(peers):
            bodies = [b"%d-%d-" % (number, index) + bytes([index % 256]) * size for index in range(100)]
            peer.send(bodies, producer=1 + number)
            sent += bodies
        peers[0].send([b"small"], producer=1, sequence=100)
        await rig.turn()
        assert [peer.answers() != [] for peer in peers] == [True] * 3
        assert rig.bodies() == [*sent, b"small"]
        # And so says the disk, of which every unit is checked.
        again = MessageStore(rig.files.copy().kill(), clock=FakeClock())
        read: list[bytes] = []
        while len(read) < len(sent) + 1:
            read += [bytes(record.body) for record in again.queries.read("orders", 0, len(read), 301).records()]
        assert read == [*sent, b"small"]
        again.close()

    in_a_broker(run)
