"""What survives when another member of the shard leads, as far as it is the broker's affair."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dmq.deadletters.letter import LetterFilter
from dmq.errors import DatabaseDown, LeaseLost
from dmq.model import Durability
from dmq.protocol import Command, Kind, Status, decode_request, decode_response, one_way_head, request_head
from dmq.protocol.consume import (
    LeaseRef,
    Outcome,
    Pull,
    PullReply,
    Push,
    Settle,
    Settlement,
    Subscribe,
    SubscribeFlag,
    SubscriptionEnded,
)
from dmq.protocol.produce import ProduceReply
from dmq.protocol.session import Heartbeat
from dmq.testing import FakeClock
from tests.unit.broker.leading import LeadingRig, leading, on_a_loop
from tests.unit.broker.turns import Peer

FLUSHED = Durability.FLUSHED
GRACE_MS = 10_000


def ask(peer: Peer, command: Command, header: Any, correlation: int = 900) -> None:
    peer.feed(peer.seal(request_head(command, header, correlation)))


async def subscribe(rig: LeadingRig, peer: Peer, *holding: LeaseRef, member: str, ordered: bool = False) -> None:
    flags = SubscribeFlag.ORDERED if ordered else 0
    asked = Subscribe(1, "orders", "billing", member=member, flags=int(flags), holding=[*holding], prefetch_messages=10)
    ask(peer, Command.SUBSCRIBE, asked)
    await rig.until(lambda: any(frame.command == Command.SUBSCRIBE for frame in peer.wire.frames))
    peer.wire.frames = [frame for frame in peer.wire.frames if frame.command != Command.SUBSCRIBE]


def pushed(peer: Peer) -> list[Push]:
    return [decode_request(frame) for frame in peer.wire.frames if frame.command == Command.CONSUMER_PUSH]


async def send(rig: LeadingRig, peer: Peer, body: bytes, **how: Any) -> ProduceReply:
    peer.send([body], durability=FLUSHED, **how)
    await rig.until(lambda: any(frame.command == Command.PRODUCE for frame in peer.wire.frames))
    (found,) = (frame for frame in peer.wire.frames if frame.command == Command.PRODUCE)
    peer.wire.frames.remove(found)
    reply = decode_response(found)
    assert isinstance(reply, ProduceReply)
    return reply


def clock_of(rig: LeadingRig) -> FakeClock:
    clock = rig.dispatcher.clock
    assert isinstance(clock, FakeClock)
    return clock


@on_a_loop
async def test_acks_of_an_earlier_leaders_leases_count() -> None:
    async with leading(offline_delay_ms=0) as rig:
        (peer,) = await rig.connect(1)
        await subscribe(rig, peer, member="m")
        await send(rig, peer, b"one")
        await rig.until(lambda: pushed(peer))
        (lease,) = pushed(peer)[0].leases
        await rig.fail_over()
        peer.wire.frames.clear()
        said = Settlement(lease.queue, lease.epoch, lease.lease, Outcome.ACK, [(lease.first_offset, 1)])
        ask(peer, Command.SETTLE, Settle("orders", "billing", [said], member="m"))
        await rig.until(lambda: peer.wire.frames)
        assert decode_response(peer.wire.frames[0]).refused == []
        position = rig.store.queries.position
        await rig.until(lambda: (found := position("billing", "orders", 0)) is not None and found.floor == 1)


@pytest.mark.parametrize("is_over", [False, True], ids=["unsure", "ceased"])
@on_a_loop
async def test_an_ack_that_a_member_may_not_take_ends_the_connection_before_anything_else_is_answered(
    is_over: bool,
) -> None:
    async with leading(offline_delay_ms=0) as rig:
        worker, sender = await rig.connect(2)
        await subscribe(rig, worker, member="m")
        await send(rig, sender, b"one")
        await rig.until(lambda: pushed(worker))
        (lease,) = pushed(worker)[0].leases
        rig.leadership.serves = False
        if is_over:
            await rig.service.drop()
        worker.wire.frames.clear()
        said = Settlement(lease.queue, lease.epoch, lease.lease, Outcome.ACK, [(lease.first_offset, 1)])
        ack = one_way_head(Command.SETTLE, Settle("orders", "billing", [said], member="m"))
        worker.feed(worker.seal(ack) + worker.seal(request_head(Command.HEARTBEAT, Heartbeat(0), 901)))
        assert worker.wire.is_closed
        assert not worker.wire.frames, "an answer would say that the ack was heard"


@on_a_loop
async def test_an_ordered_queue_goes_to_who_has_its_messages_and_to_others_after_the_grace() -> None:
    async with leading(offline_delay_ms=0, grace_seconds=GRACE_MS / 1000) as rig:
        worker, sender = await rig.connect(2)
        await subscribe(rig, worker, member="worker", ordered=True)
        await send(rig, sender, b"one")
        await send(rig, sender, b"two", queue=1, sequence=1)
        await rig.until(lambda: len(pushed(worker)) == 2)
        held = next(lease for push in pushed(worker) for lease in push.leases if lease.queue == 0)
        await rig.fail_over()
        other, worker = await rig.connect(2)
        await subscribe(rig, other, member="other", ordered=True)
        await rig.turn()
        await asyncio.sleep(0.1)
        assert not pushed(other), "somebody may still work on it"
        ref = LeaseRef("orders", held.queue, held.epoch, held.lease)
        await subscribe(rig, worker, ref, member="worker", ordered=True)
        await rig.until(lambda: pushed(worker))
        assert [lease.queue for push in pushed(worker) for lease in push.leases] == [0]
        assert not pushed(other)
        clock_of(rig).advance(GRACE_MS / 1000)
        await rig.until(lambda: pushed(other) or len(pushed(worker)) > 1)


@on_a_loop
async def test_an_ordered_queue_that_nobody_can_have_messages_of_is_handed_out_at_once() -> None:
    async with leading(offline_delay_ms=0) as rig:
        await rig.fail_over()
        peer, sender = await rig.connect(2)
        await subscribe(rig, peer, member="m", ordered=True)
        await rig.turn()
        await asyncio.sleep(0.06)
        await send(rig, sender, b"one")
        await rig.until(lambda: pushed(peer))


@on_a_loop
async def test_a_repeat_is_answered_when_its_first_copy_is_committed() -> None:
    async with leading() as rig:
        rig.leadership.follows = False
        first, again = await rig.connect(2)
        first.send([b"one"], durability=FLUSHED)
        await rig.turn()
        again.send([b"one"], durability=FLUSHED)
        await rig.turn()
        await rig.flushed()
        assert again.answers() == []
        rig.commit()
        await rig.turn()
        assert again.reply().is_duplicate
        assert not first.reply().is_duplicate
        assert rig.bodies() == [b"one"]


@on_a_loop
async def test_what_was_not_answered_is_not_stored_again_by_the_next_leader() -> None:
    async with leading() as rig:
        rig.leadership.follows = False
        (peer,) = await rig.connect(1)
        peer.send([b"one"], durability=FLUSHED)
        await rig.turn()
        await rig.flushed()
        await rig.fail_over()
        assert (peer.answers(), peer.wire.is_closed) == ([], True)
        (peer,) = await rig.connect(1)
        assert (await send(rig, peer, b"one")).is_duplicate
        assert rig.bodies() == [b"one"]


@on_a_loop
async def test_what_waits_for_messages_is_told_and_stays_connected() -> None:
    async with leading(offline_delay_ms=0) as rig:
        pulling, subscribed = await rig.connect(2)
        await subscribe(rig, subscribed, member="m")
        ask(pulling, Command.PULL, Pull("orders", "billing", max_messages=1, wait_ms=60_000))
        await rig.turn()
        await rig.service.drop()
        (answer,) = pulling.answers()
        assert isinstance(answer, PullReply)
        assert not answer.leases
        (ended,) = (decode_request(frame) for frame in subscribed.wire.frames if frame.kind == Kind.ONE_WAY)
        assert isinstance(ended, SubscriptionEnded)
        assert ended.status == Status.NOT_LEADER
        assert not pulling.wire.is_closed
        assert not subscribed.wire.is_closed


@on_a_loop
async def test_nothing_is_handed_out_without_the_right_to_serve() -> None:
    async with leading(offline_delay_ms=0) as rig:
        peer, sender = await rig.connect(2)
        await subscribe(rig, peer, member="m")
        rig.leadership.follows = False
        sender.send([b"one"], durability=FLUSHED)
        await rig.turn()
        await rig.flushed()
        rig.leadership.serves = False
        rig.commit()
        await asyncio.sleep(0.1)
        assert not pushed(peer)
        assert sender.answers() == []
        ask(peer, Command.PULL, Pull("orders", "billing", max_messages=1))
        await rig.turn()
        assert peer.answers() == [Status.NOT_LEADER]
        rig.leadership.serves = True
        await rig.until(lambda: pushed(peer) and sender.wire.frames)


@on_a_loop
async def test_a_lease_of_an_earlier_leader_that_is_not_acked_is_lost() -> None:
    async with leading(offline_delay_ms=0) as rig:
        (peer,) = await rig.connect(1)
        await subscribe(rig, peer, member="m")
        await send(rig, peer, b"one")
        await rig.until(lambda: pushed(peer))
        (lease,) = pushed(peer)[0].leases
        await rig.fail_over()
        peer.wire.frames.clear()
        said = Settlement(lease.queue, lease.epoch, lease.lease, Outcome.EXTEND)
        ask(peer, Command.SETTLE, Settle("orders", "billing", [said], member="m"))
        await rig.until(lambda: peer.wire.frames)
        (refusal,) = decode_response(peer.wire.frames[0]).refused
        assert refusal.status == Status[LeaseLost.code]


@on_a_loop
async def test_dead_letters_wait_in_the_journal_without_a_database_that_every_member_reaches() -> None:
    async with leading() as rig:
        with pytest.raises(DatabaseDown, match=r"wait in its journal .* broker\.dead_letters_url"):
            await rig.broker.dead_letters.page(LetterFilter(), 0, 10, with_bodies=False)


@on_a_loop
async def test_clients_of_a_leader_that_cannot_tell_whether_it_leads_are_sent_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut off from the others it may wait for ever, and with it who waits for an answer."""
    monkeypatch.setattr("dmq.broker.broker._UNSURE_SECONDS", 0.2)
    async with leading(offline_delay_ms=0) as rig:
        waiting, idle = await rig.connect(2)
        rig.leadership.follows = False
        before = rig.store.queries.end
        waiting.send([b"one"], durability=FLUSHED)
        await rig.until(lambda: rig.store.queries.end > before)
        await rig.flushed()
        rig.leadership.serves = False
        await rig.until(lambda: waiting.wire.is_closed and idle.wire.is_closed)
        assert not waiting.wire.frames, "nothing is answered"
        rig.leadership.serves = rig.leadership.follows = True
        rig.commit()
        (other,) = await rig.connect(1)
        await send(rig, other, b"one")  # with the same numbers
        stored = sum(rig.store.queries.bounds("orders", queue)[1] for queue in range(4))
        assert stored == 1, "what was written is committed when the others have it, and is not stored again"
