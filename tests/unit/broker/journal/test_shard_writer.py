"""The writer of a shard's leader: what is answered when, and what is not when it may not serve or ceases to lead."""

from __future__ import annotations

import asyncio

import pytest

from dmq.errors import DMQError, NotConnected, NotLeader, StoreFailed
from dmq.model import Durability
from dmq.protocol import Status
from dmq.protocol.produce import ProduceReply
from dmq.settings import StoreSettings
from dmq.storage.state.events import KeyPut
from tests.unit.broker.leading import LeadingRig, leading, on_a_loop

STORED, FLUSHED, REPLICATED = Durability.STORED, Durability.FLUSHED, Durability.REPLICATED
BOTH_WAYS = pytest.mark.parametrize("straight", [False, True])


@BOTH_WAYS
@pytest.mark.parametrize("durability", [FLUSHED, REPLICATED])
@on_a_loop
async def test_answers_when_the_followers_have_it(straight: bool, durability: Durability) -> None:
    async with leading(straight=straight) as rig:
        rig.leadership.follows = False
        (peer,) = await rig.connect(1, has_crc=True)
        peer.send([b"one"], durability=durability)
        await rig.turn()
        await rig.flushed()
        assert peer.answers() == []
        assert rig.bodies() == []
        assert rig.leadership.writes
        rig.commit()
        await rig.turn()
        assert peer.reply().durability == durability
        assert rig.bodies() == [b"one"]
        assert rig.broker.straight.taken == straight


@BOTH_WAYS
@on_a_loop
async def test_the_followers_get_it_before_it_is_flushed_here(straight: bool) -> None:
    """Also when the disk has shown that it is quick, so that the loop itself waits for it."""
    async with leading(straight=straight) as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        unflushed = []

        def wrote() -> None:
            unflushed.append(rig.store.queries.end - rig.store.queries.flushed)

        rig.leadership.wrote = wrote  # type: ignore[method-assign]
        for number in range(60):
            peer.send([b"one"], durability=REPLICATED, sequence=number)
            await rig.until(lambda: peer.wire.frames)
            assert peer.reply().durability == REPLICATED
        assert len(unflushed) == 60
        assert all(unflushed)
        policy = rig.broker.writer._flush_policy
        assert policy.is_for_loop(0.0)


@pytest.mark.parametrize("durability", [STORED, FLUSHED, REPLICATED])
@on_a_loop
async def test_messages_that_come_one_by_one_and_have_to_be_flushed_are_written_as_they_come(
    durability: Durability,
) -> None:
    """One that need only be written has a turn: that is what answers it."""
    async with leading(straight=True) as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        at_once = 0
        for number in range(40):
            end = rig.store.queries.end
            peer.send([b"one"], durability=durability, sequence=number)
            at_once += rig.store.queries.end > end
            await rig.until(lambda: peer.wire.frames)
            assert peer.reply().durability == durability
        assert at_once >= 20 if durability > STORED else at_once == 0
        await rig.until(lambda: len(rig.bodies()) == 40)  # what is stored is answered before it is committed
        assert rig.bodies() == [b"one"] * 40


@BOTH_WAYS
@on_a_loop
async def test_answers_stored_when_it_is_written(straight: bool) -> None:
    """And consumers get it only when it is committed."""
    async with leading(straight=straight) as rig:
        rig.leadership.follows = False
        (peer,) = await rig.connect(1, has_crc=True)
        peer.send([b"one"], durability=STORED)
        peer.send([b"two"], durability=FLUSHED, producer=8)
        await rig.turn()
        await rig.turn()
        assert [reply.durability for reply in peer.answers() if isinstance(reply, ProduceReply)] == [STORED]
        assert rig.bodies() == []
        touched: list[tuple[str, int]] = []
        rig.broker.writer.on_visible = touched.extend
        await rig.flushed()
        rig.commit()
        await rig.turn()
        assert peer.reply().durability == FLUSHED
        assert {*touched} == {("orders", 0)}
        assert rig.bodies() == [b"one", b"two"]


@BOTH_WAYS
@on_a_loop
async def test_refuses_and_writes_nothing_while_too_few_are_in_sync(straight: bool) -> None:
    async with leading(straight=straight) as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        end = rig.store.queries.end
        rig.leadership.has_replicas = False
        for durability in (STORED, FLUSHED, REPLICATED):
            peer.send([b"one"], durability=durability)
        await rig.turn()
        assert peer.answers() == [Status.NOT_ENOUGH_REPLICAS] * 3
        assert rig.store.queries.end == end
        rig.leadership.has_replicas = True
        peer.send([b"one"], durability=REPLICATED)
        await rig.until(lambda: peer.wire.frames)
        assert peer.reply().durability == REPLICATED


@BOTH_WAYS
@on_a_loop
async def test_refuses_without_the_right_to_serve(straight: bool) -> None:
    async with leading(straight=straight) as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        end = rig.store.queries.end
        rig.leadership.serves = False
        peer.send([b"one"], durability=STORED)
        await rig.turn()
        assert peer.answers() == [Status.NOT_LEADER]
        assert rig.store.queries.end == end


@BOTH_WAYS
@on_a_loop
async def test_a_turn_that_loses_its_right_is_not_written(straight: bool) -> None:
    """The request was taken with the right to serve, and that ended within the turn."""
    async with leading(straight=straight) as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        end = rig.store.queries.end
        peer.send([b"one"], durability=FLUSHED)
        rig.leadership.serves = False
        await rig.turn()
        assert peer.answers() == [Status.NOT_LEADER]
        assert rig.store.queries.end == end


@BOTH_WAYS
@on_a_loop
async def test_what_is_committed_waits_for_the_right_to_answer(straight: bool) -> None:
    async with leading(straight=straight) as rig:
        rig.leadership.follows = False
        (peer,) = await rig.connect(1, has_crc=True)
        peer.send([b"one"], durability=FLUSHED)
        await rig.turn()
        await rig.flushed()
        rig.leadership.serves = False
        rig.commit()
        await rig.turn()
        assert peer.answers() == []
        rig.leadership.serves = True
        await rig.until(lambda: peer.wire.frames)  # a tick asks again
        assert peer.reply().durability == FLUSHED


@BOTH_WAYS
@on_a_loop
async def test_a_drop_answers_nothing_that_is_not_committed(straight: bool) -> None:
    """Its connection ends; one whose request was not written is told who leads, and stays."""
    async with leading(straight=straight) as rig:
        rig.leadership.follows = False
        written, idle, late = await rig.connect(3, has_crc=True)
        written.send([b"one"], durability=FLUSHED)
        await rig.turn()
        late.send([b"two"], durability=FLUSHED)  # not written before the end of the turn
        await rig.service.drop()
        assert (written.answers(), written.wire.is_closed) == ([], True)
        assert (late.answers(), late.wire.is_closed) == ([Status.NOT_LEADER], False)
        assert (idle.answers(), idle.wire.is_closed) == ([], False)
        idle.send([b"three"])
        await rig.turn()
        assert idle.answers() == [Status.NOT_LEADER]


@BOTH_WAYS
@on_a_loop
async def test_a_store_that_fails_answers_nothing(straight: bool) -> None:
    """The next leader has it, or takes it: to raise `StoreFailed` would leave the sender in doubt."""
    async with leading(straight=straight) as rig:
        rig.leadership.follows = False
        written, late = await rig.connect(2, has_crc=True)
        written.send([b"one"], durability=FLUSHED)
        await rig.turn()
        failure = StoreFailed("the journal was removed or moved while it was in use")
        rig.store._journal.failure = failure
        rig.broker.writer._give_up(failure)
        await rig.turn()
        assert (written.answers(), written.wire.is_closed) == ([], True)
        late.send([b"two"], durability=FLUSHED)
        await rig.turn()
        assert Status.STORE_FAILED not in late.answers()


@on_a_loop
async def test_a_drop_leaves_the_store_alone() -> None:
    """Also by a flush that ends afterwards."""
    async with leading() as rig:
        rig.leadership.follows = False
        (peer,) = await rig.connect(1)
        peer.send([b"one"], durability=FLUSHED)
        await rig.turn()
        flushes, visible = rig.leadership.flushes, rig.store.queries.visible
        await rig.service.drop()
        await asyncio.sleep(0.05)
        assert (rig.leadership.flushes, rig.store.queries.visible) == (flushes, visible)
        rig.store.flush()  # still open, and whole
        await rig.service.begin(rig.store, rig.leadership)
        (peer,) = await rig.connect(1)
        peer.send([b"two"], durability=FLUSHED, sequence=1)
        await rig.turn()
        await rig.flushed()
        rig.commit()
        await rig.turn()
        assert isinstance(peer.reply(), ProduceReply)
        assert rig.bodies() == [b"one", b"two"]


@on_a_loop
async def test_a_change_that_is_not_committed_is_not_answered() -> None:
    async with leading() as rig:
        rig.leadership.follows = False
        writing = asyncio.create_task(rig.broker.writer.write([KeyPut("n", "k", b"v")]))
        await rig.turn()
        await rig.flushed()
        await rig.service.drop()
        with pytest.raises(NotConnected):
            await writing


@on_a_loop
async def test_events_that_nobody_waits_for_are_kept_while_too_few_are_in_sync() -> None:
    async with leading() as rig:
        end = rig.store.queries.end
        rig.leadership.has_replicas = False
        rig.broker.writer.write_soon([KeyPut("n", "first", b"v")])
        await rig.turn()
        assert rig.store.queries.end == end
        rig.leadership.has_replicas = True
        rig.broker.writer.write_soon([KeyPut("n", "second", b"v")])
        keys = rig.store.queries.keys
        await rig.until(lambda: keys.get("n", "second"))
        assert keys.get("n", "first")


@on_a_loop
async def test_a_hold_writes_what_came_before_it_and_nothing_after() -> None:
    async with leading() as rig:
        rig.leadership.follows = False
        before, after = await rig.connect(2)
        before.send([b"one"], durability=FLUSHED)
        await rig.service.hold()
        queries = rig.store.queries
        assert queries.flushed == queries.end
        end = queries.end
        after.send([b"two"], durability=FLUSHED, producer=8)
        await rig.turn()
        await rig.turn()
        assert queries.end == end
        rig.commit()
        await rig.turn()
        assert isinstance(before.reply(), ProduceReply)
        rig.leadership.follows = True
        rig.service.resume()
        await rig.until(lambda: after.wire.frames)
        assert isinstance(after.reply(), ProduceReply)


@on_a_loop
async def test_who_came_during_a_hold_is_told_that_nothing_was_written() -> None:
    async with leading() as rig:
        (peer,) = await rig.connect(1)
        await rig.service.hold()
        peer.send([b"one"], durability=FLUSHED)
        await rig.turn()
        await rig.service.drop()
        assert (peer.answers(), peer.wire.is_closed) == ([Status.NOT_LEADER], False)


SMALL = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=32 << 10,
    body_bytes_max=16 << 10,
    checkpoint_bytes=64 << 10,
    ballast_bytes=0,
)


async def lag_behind(rig: LeadingRig) -> None:
    """A follower that is always a moment late: something is always uncommitted while there is load."""
    while True:
        await asyncio.sleep(0.003)
        rig.commit()


@BOTH_WAYS
@on_a_loop
async def test_segments_end_and_checkpoints_are_written_under_constant_load(straight: bool) -> None:
    async with leading(SMALL, straight=straight) as rig:
        rig.leadership.follows = False
        follower = asyncio.create_task(lag_behind(rig))
        peers = await rig.connect(6, has_crc=True)
        body = bytes(4000)
        sent = 0
        queries = rig.store.queries

        def keeps_up() -> bool:
            in_force = rig.store._checkpointer.in_force
            return sent >= 360 and in_force is not None and in_force.offset > queries.end // 2

        async def load(number: int) -> None:
            nonlocal sent
            for sequence in range(1000):
                if keeps_up():  # a busy machine may be behind for a moment
                    return
                peers[number].send([body], durability=FLUSHED, producer=number + 10, sequence=sequence)
                await asyncio.sleep(0.002)
                sent += 1

        await asyncio.gather(*map(load, range(6)))
        assert keeps_up()
        await rig.until(lambda: queries.visible == queries.end)
        await rig.until(lambda: sum(len(peer.wire.frames) for peer in peers) == sent)
        follower.cancel()
        assert not [reply for peer in peers for reply in peer.answers() if not isinstance(reply, ProduceReply)]
        sizes = [segment.size for segment in rig.store._journal.segments]
        assert len(sizes) > 10
        assert max(sizes) < 3 * SMALL.segment_bytes


@on_a_loop
async def test_says_why_nothing_was_written() -> None:
    async with leading() as rig:
        rig.leadership.serves = False
        with pytest.raises(NotLeader) as refused:
            await rig.broker.writer.write([KeyPut("n", "k", b"v")])
        assert isinstance(refused.value, DMQError)
        assert refused.value.detail["leader"] == "127.0.0.1:1"


@on_a_loop
async def test_settles_alone_go_to_the_followers_at_once_and_are_flushed_in_a_while() -> None:
    async with leading() as rig:
        (peer,) = await rig.connect(1, has_crc=True)
        queries, writer = rig.store.queries, rig.broker.writer
        await rig.until(lambda: queries.flushed == queries.end)
        flushes, sent = writer.flushes, rig.leadership.writes
        writer.write_lazily([KeyPut("n", "k", b"1", 0)])
        await rig.until(lambda: rig.leadership.writes > sent)
        assert (writer.flushes, queries.flushed < queries.end) == (flushes, True)
        await rig.until(lambda: queries.flushed == queries.end)
        assert writer.flushes == flushes + 1
        # Who waits for something has all of it flushed at once.
        writer.write_lazily([KeyPut("n", "k", b"2", 0)])
        peer.send([b"one"], durability=FLUSHED)
        await rig.until(lambda: peer.wire.frames)
        assert queries.flushed == queries.end
        writer.write_lazily([KeyPut("n", "k", b"3", 0)])
        flushes = writer.flushes
        writer.hurry()
        await rig.turn()
        assert writer.flushes == flushes + 1
