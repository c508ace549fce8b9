"""Answers that have much to say fit into a frame: refusals by the thousand, and ids of messages that do not follow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import pytest

from dmq.broker.delivery.channel import HANDED_MAX
from dmq.broker.wire.session import TEXT_BYTES_MAX, RefusalTexts
from dmq.errors import LeaseLost, TransactionOver
from dmq.model import Message
from dmq.protocol import HEADER_BYTES_MAX, Command, Status, decode_response, request_head
from dmq.protocol.consume import Outcome, Pull, PullReply, Refusal, Settle, Settlement, SettleReply
from dmq.protocol.header import LIST_MAX, encode_header
from dmq.protocol.produce import TransactionEnd, TransactionEndReply, TransactionOutcome, TransactionRefusal
from dmq.records import encode_batch
from dmq.storage.journal.unit_draft import Batch
from tests.patience import PATIENCE_S
from tests.unit.broker.turns import Peer, Rig, running

MANY = 9000  # with their texts they would not fit


def in_a_broker(test: Callable[[Rig, Peer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running() as rig:
            await test(rig, (await rig.connect(1))[0])

    asyncio.run(run())


async def answered(peer: Peer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not peer.wire.frames:
        assert time.monotonic() < deadline, "it was never answered"
        await asyncio.sleep(0.001)


def test_as_many_refusals_as_a_list_may_have_fit_with_their_texts() -> None:
    texts = RefusalTexts()
    error = LeaseLost("ä" * 100)
    settled = SettleReply([Refusal(0xFFFF_FFFF, *texts.of(error)) for _ in range(LIST_MAX)])
    assert len(encode_header(settled)) <= HEADER_BYTES_MAX
    texts = RefusalTexts()
    ended = TransactionEndReply([TransactionRefusal((1 << 64) - 1, *texts.of(error)) for _ in range(LIST_MAX)])
    assert len(encode_header(ended)) <= HEADER_BYTES_MAX


def test_transactions_by_the_thousand_are_refused_in_one_answer() -> None:
    async def run(rig: Rig, peer: Peer) -> None:
        asked = TransactionEnd((1 << 64) - 1, 0, (1 << 64) - MANY, MANY, TransactionOutcome.COMMIT)
        peer.feed(request_head(Command.TRANSACTION_END, asked, 7))
        turns = 0
        while not peer.wire.frames:
            await rig.turn()
            turns += 1
        assert turns > 100, "others have their turns meanwhile"
        (frame,) = peer.wire.frames
        reply = decode_response(frame)
        assert isinstance(reply, TransactionEndReply)
        assert len(reply.refused) == MANY
        assert reply.refused[0].message
        assert not reply.refused[-1].message

    in_a_broker(run)


def test_settlements_by_the_thousand_are_refused_in_one_answer() -> None:
    async def run(rig: Rig, peer: Peer) -> None:
        peer.feed(request_head(Command.PULL, Pull("orders", "billing"), 7))
        await answered(peer)
        peer.wire.frames.clear()
        said = [Settlement(0, 1, 1000 + number, Outcome.ACK) for number in range(20_000)]
        peer.feed(request_head(Command.SETTLE, Settle("orders", "billing", said), 8))
        await answered(peer)
        (frame,) = peer.wire.frames
        reply = decode_response(frame)
        assert isinstance(reply, SettleReply)
        assert [refusal.index for refusal in reply.refused] == [*range(20_000)]
        assert reply.refused[0].message
        assert not reply.refused[-1].message

    in_a_broker(run)


def test_ids_that_do_not_follow_each_other_fit_whatever_is_asked_for() -> None:
    async def run(rig: Rig, peer: Peer) -> None:
        encoded = encode_batch("orders", "shop", [Message(b"")], sent_at_ms=1)
        high = (1 << 64) - 1_000_000
        batches = [
            Batch(
                topic="orders", queue=0, data=encoded.data, lengths=encoded.lengths,
                producer_id=high + number % 2, first_sequence=high + number,
            )
            for number in range(HANDED_MAX + 10)
        ]  # fmt: skip
        rig.store.append(batches)
        rig.store.flush()
        taken = []
        for correlation in itertools.count(7):
            asked = Pull("orders", "billing", max_messages=65_536, max_bytes=64 << 20)
            peer.feed(request_head(Command.PULL, asked, correlation))
            await answered(peer)
            (frame,) = peer.wire.frames
            reply = decode_response(frame)
            assert isinstance(reply, PullReply)
            if not reply.leases:
                break
            taken.append(reply.leases[0].count)
            assert len(reply.leases[0].ids) == reply.leases[0].count
            peer.wire.frames.clear()
        assert taken == [HANDED_MAX, 10]

    in_a_broker(run)


@pytest.mark.parametrize("size", [10, 1000, 4000])
def test_texts_are_said_while_there_is_room(size: int) -> None:
    texts = RefusalTexts()
    said = [texts.of(LeaseLost("ä" * size))[1] for _ in range(200_000 // size)]
    fitting = TEXT_BYTES_MAX // (2 * size)
    assert said[:fitting] == ["ä" * size] * fitting
    assert not any(said[fitting:])
    assert texts.of(TransactionOver("x")) == (Status.TRANSACTION_OVER, "")
