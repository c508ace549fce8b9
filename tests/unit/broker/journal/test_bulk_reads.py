"""Readers of megabytes, however many and however greedy, leave the loop to producers between any two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dmq.broker.journal.disk import BULK_MAX
from dmq.protocol import Command, Status, decode_response, request_head
from dmq.protocol.read import Fetch, FetchReply, Peek, PeekReply
from tests.unit.broker.turns import Peer, Rig, running

READERS = 40
TURNS_MAX = 10_000


def in_a_broker(test: Callable[[Rig, list[Peer]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running() as rig:
            peers = await rig.connect(READERS + 1)
            await fill(rig, peers[-1])
            await test(rig, peers)

    asyncio.run(run())


async def fill(rig: Rig, peer: Peer) -> None:
    for number in range(20):
        peer.send([b"x" * 1000] * 20, producer=9, sequence=20 * number)
        await rig.turn()
        peer.reply()


def test_a_producer_waits_for_a_few_readers_at_most() -> None:
    async def run(rig: Rig, peers: list[Peer]) -> None:
        readers, producer = peers[:-1], peers[-1]
        for number, reader in enumerate(readers):
            if number % 2:
                reader.feed(request_head(Command.FETCH, Fetch(0, 8 << 20), 7))
            else:
                reader.feed(request_head(Command.PEEK, Peek("orders", 0, max_messages=400), 7))
        producer.send([b"mine"], producer=9, sequence=400)
        answered, before = 0, None
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            now = sum(bool(reader.wire.frames) for reader in readers)
            assert now - answered <= BULK_MAX, "in one turn of the loop"
            answered = now
            if producer.wire.frames and before is None:
                before = answered
            if answered == READERS:
                break
        assert before is not None
        assert before <= 3 * BULK_MAX, "it did not wait for them all"
        assert answered == READERS
        for reader in readers:
            (frame,) = reader.wire.frames
            assert frame.status == Status.OK
            reply = decode_response(frame)
            assert isinstance(reply, FetchReply | PeekReply)
            assert len(frame.body) > 100_000

    in_a_broker(run)


def test_a_reader_that_takes_no_answer_keeps_no_other_waiting() -> None:
    async def run(rig: Rig, peers: list[Peer]) -> None:
        stalled, fine = peers[: BULK_MAX + 1], peers[-2]
        for reader in stalled:
            reader._connection.pause_writing()
            reader.feed(request_head(Command.FETCH, Fetch(0), 7))
        fine.feed(request_head(Command.FETCH, Fetch(0), 7))
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if fine.wire.frames:
                break
        assert fine.wire.frames
        assert not any(reader.wire.frames for reader in stalled)

    in_a_broker(run)


def test_an_answer_has_no_more_than_four_mebibytes_and_only_so_many_units() -> None:
    async def run(rig: Rig, peers: list[Peer]) -> None:
        for number in range(40):
            peers[-1].send([b"y" * 200_000], producer=9, sequence=400 + number)
            await rig.turn()
            peers[-1].reply()
        peers[0].feed(request_head(Command.FETCH, Fetch(0, 100 << 20), 7))
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if peers[0].wire.frames:
                break
        (frame,) = peers[0].wire.frames
        assert 3 << 20 < len(frame.body) <= 4 << 20

    in_a_broker(run)
