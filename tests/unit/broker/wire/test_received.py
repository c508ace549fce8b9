"""Batches of many connections are stored as they were sent, although they are received into buffers that are shared,
and stored from where they were received.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from dmq.model import Durability
from dmq.protocol import decode_response
from dmq.protocol.frame import CHUNK_BYTES, VIEW_BYTES_MIN
from dmq.protocol.produce import ProduceReply
from tests.sampling import SEED
from tests.unit.broker.turns import Peer, running

PEERS = 12
ROUNDS = 3
# Copied when received; views of a chunk; a chunk and more; buffers of their own, with one record and with many.
SHAPES = [
    [100],
    [VIEW_BYTES_MIN // 2] * 3,
    [VIEW_BYTES_MIN + 100],
    [700] * 60,
    [CHUNK_BYTES - 600],
    [30_000] * 6,
    [1500] * 200,
    [400_000],
]


def bodies_of(shape: list[int], rng: random.Random) -> list[bytes]:
    return [rng.randbytes(size) for size in shape]


def cut(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """As a socket gives it: a few bytes, what fits into a small buffer, or a lot."""
    at = 0
    while at < len(data):
        size = rng.choice((1, 300, 4096, 17_000, 200_000))
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("durability", [Durability.STORED, Durability.FLUSHED])
@pytest.mark.parametrize("seed", range(4))
def test_large_batches_that_arrive_in_pieces_at_once_keep_their_contents(seed: int, durability: Durability) -> None:
    async def run() -> None:
        rng = random.Random(SEED + seed)
        async with running() as rig:
            peers = await rig.connect(PEERS)
            sent: dict[int, list[bytes]] = {}  # correlation and peer as one number
            for _ in range(ROUNDS):
                streams: list[tuple[int, Peer, Iterator[bytes]]] = []
                for number, peer in enumerate(peers):
                    data = b""
                    for _ in range(rng.randrange(1, 4)):
                        bodies = bodies_of(rng.choice(SHAPES), rng)
                        data += peer.frame(
                            bodies,
                            queue=number % 4,
                            producer=1 + number,
                            sequence=1000 * peer._correlation,
                            durability=durability,
                        )
                        sent[peer._correlation * PEERS + number] = bodies
                    streams.append((number, peer, cut(data, rng)))
                # All of them at the same time, and most of it within one turn: what was received first waits while
                # buffers are filled for others.
                while streams:
                    at = rng.randrange(len(streams))
                    piece = next(streams[at][2], None)
                    if piece is None:
                        del streams[at]
                        continue
                    streams[at][1].feed(piece)
                    if rng.random() < 0.01:
                        await rig.turn()
                await rig.turn()
            await rig.settle()
            stored = {queue: rig.bodies(queue=queue) for queue in range(4)}
            rig.store._reader.cache.clear()
            assert {queue: rig.bodies(queue=queue) for queue in range(4)} == stored  # on the disk as in memory
            for number, peer in enumerate(peers):
                frames, peer.wire.frames = peer.wire.frames, []
                for frame in frames:
                    reply = decode_response(frame)
                    assert isinstance(reply, ProduceReply)
                    bodies = sent.pop(frame.correlation * PEERS + number)
                    first = reply.first_offset
                    assert stored[number % 4][first : first + len(bodies)] == bodies
            assert not sent

    asyncio.run(run())
