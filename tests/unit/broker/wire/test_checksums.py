"""A frame that was damaged on its way ends the connection, and nothing in it is believed (feature `frame-crc`)."""

from __future__ import annotations

import asyncio

import pytest

from dmq.protocol import Command, Status, request_head, seal_frame
from dmq.protocol.session import FRAME_CRC, Hello
from tests.unit.broker.turns import running


def turned(frame: bytes, bit: int) -> bytes:
    data = bytearray(frame)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_peers_with_and_without_checksums_share_a_broker() -> None:
    async def run() -> None:
        async with running() as rig:
            (plain,) = await rig.connect(1)
            (checked,) = await rig.connect(1, has_crc=True)
            assert (plain.wire.is_checked, checked.wire.is_checked) == (False, True)
            plain.send([b"a"])
            checked.send([b"b"], producer=8)
            checked.send([b"c"] * 500, producer=8, sequence=1)
            await rig.settle()
            assert plain.reply().first_offset == 0
            assert len(checked.answers()) == 2
            assert rig.bodies() == [b"a", b"b", *[b"c"] * 500]
            known = [session.features for session in rig.dispatcher.sessions]
            assert sorted(known, key=len) == [frozenset(), {FRAME_CRC}]

    asyncio.run(run())


def test_a_large_frame_with_a_checksum_is_stored_as_it_was_sent() -> None:
    async def run() -> None:
        async with running() as rig:
            (peer,) = await rig.connect(1, has_crc=True)
            bodies = [bytes([number]) * 5000 for number in range(100)]
            peer.send(bodies)
            await rig.settle()
            assert peer.reply().first_offset == 0
            assert rig.bodies() == bodies

    asyncio.run(run())


def test_no_turned_bit_of_a_produce_is_stored_or_answered_with_success() -> None:
    async def run() -> None:
        async with running() as rig:
            (last,) = await rig.connect(1, has_crc=True)
            frame = last.frame([b"body"], sequence=1)
            waiting = 0
            for bit in range(0, len(frame) * 8, 5):
                (peer,) = await rig.connect(1, has_crc=True)
                peer.feed(turned(frame, bit))
                peer.feed(frame)  # may fill what waits for more
                await rig.turn()
                if peer.wire.is_closed:
                    assert peer.answers() == [Status.FRAME_CORRUPT]
                else:
                    waiting += 1
                    assert peer.answers() == []
            await rig.settle()
            assert waiting <= 16
            assert rig.bodies() == []

    asyncio.run(run())


def test_what_came_before_the_damaged_frame_is_served() -> None:
    async def run() -> None:
        async with running() as rig:
            (peer,) = await rig.connect(1, has_crc=True)
            good, bad = peer.frame([b"good"]), turned(peer.frame([b"bad"], sequence=1), 400)
            peer.feed(good + bad + peer.frame([b"late"], sequence=2))
            await rig.settle()
            assert rig.bodies() == [b"good"]
            assert peer.wire.is_closed
            assert rig.dispatcher.counters["frames_damaged"] == 1

    asyncio.run(run())


@pytest.mark.parametrize(("features", "seals"), [([FRAME_CRC], False), ([], True)])
def test_a_hello_that_contradicts_itself_is_refused(features: list[str], seals: bool) -> None:
    async def run() -> None:
        async with running() as rig:
            hello = request_head(Command.HELLO, Hello("shop", features=features), 0)
            peer = await rig.greet(b"".join(seal_frame(hello)) if seals else hello)
            assert peer.answers() == [Status.FRAME_CORRUPT]
            assert peer.wire.is_closed
            assert not rig.dispatcher.sessions

    asyncio.run(run())


def test_a_refused_hello_is_answered_with_a_checksum_too() -> None:
    async def run() -> None:
        async with running() as rig:
            hello = request_head(Command.HELLO, Hello("shop", features=[FRAME_CRC], version_min=9, version_max=9), 0)
            peer = await rig.greet(b"".join(seal_frame(hello)))
            assert peer.wire.is_checked
            assert peer.answers() == [Status.VERSION_MISMATCH]

    asyncio.run(run())
