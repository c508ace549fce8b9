"""Members of a shard on real sockets: one that leads with a real store, and ones that follow it.

Who leads is the test's word, and the registry is not asked; the member that does that is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from dmq.clock import Clock
from dmq.errors import BrokerStopping, NotConnected, NotLeader
from dmq.model import Durability, Message, TopicConfig
from dmq.protocol.cluster.replication import (
    Confirm,
    Follow,
    FollowReply,
    Repair,
    RepairReply,
    Standing,
    StandingReply,
)
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.shard.follower import Follower
from dmq.shard.in_sync import InSyncSet
from dmq.shard.leader import Leader
from dmq.shard.network import Network
from dmq.shard.peers import Following, Seat
from dmq.shard.serving_right import Promise
from dmq.storage.files import Buffer
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.replica import Replica, join
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles

SETTINGS = StoreSettings(segment_bytes=16 << 20, ballast_bytes=0)
PATIENCE_S = 60.0


def run(main: Callable[[], Any]) -> None:
    """Run a test on an event loop, within a generous limit."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await main()

    asyncio.run(bounded())


async def eventually(holds: Callable[[], object], what: str = "it never happened") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)
    assert holds(), what


def new_replica(journal_id: int | None = None, settings: StoreSettings = SETTINGS) -> Replica:
    files = MemoryFiles(rng=random.Random(1))
    join(files, cluster="c", shard="s", journal_id=journal_id)
    return Replica(files, settings, FakeClock())


def journal_of(files: Any) -> dict[str, bytes]:
    return {path: files.read_file(path) for path in files.paths() if path.startswith("journal/")}


class Silent:
    """A member that does not lead, and hears what it is told."""

    def __init__(self) -> None:
        self.confirms: list[Confirm] = []
        self.left_seats: list[Seat] = []

    def follow(self, request: Follow, seat: Seat) -> FollowReply:
        raise NotLeader("this member follows", leader="elsewhere:9611")

    def confirmed(self, seat: Seat, confirm: Confirm) -> None:
        self.confirms.append(confirm)

    def writable(self, seat: Seat) -> None:
        pass

    def left(self, seat: Seat) -> None:
        self.left_seats.append(seat)

    def standing(self, asked: Standing) -> StandingReply:
        raise BrokerStopping("this member stops")

    async def repair(self, asked: Repair) -> tuple[RepairReply, Buffer]:
        raise BrokerStopping("this member stops")


class LeadingMember(Silent):
    """Leads epoch 1 with a store of its own; nobody else is in its set, so that everything it flushes is committed."""

    def __init__(self, settings: StoreSettings = SETTINGS) -> None:
        super().__init__()
        replica = new_replica(settings=settings)
        self.files = replica.files
        self.member = replica.membership
        self.journal_id = replica.journal_id
        self.store = MessageStore(Leading(replica, 1), settings, FakeClock(), checkpoint_inline=False)
        in_sync = InSyncSet(self.member.replica_id, [], epoch_end=self.store.queries.end, began_at=0.0, min_in_sync=1)
        self.leader = Leader(self.store, self.member, in_sync)
        self.seats: dict[Seat, int] = {}
        self._commit()
        self._append([self.store.creation("t", TopicConfig(queues=1))])
        self._sequence = 0

    def _append(self, items: list[Any]) -> None:
        self.store.append(items, Durability.FLUSHED)
        self._commit()

    def _commit(self) -> None:
        self.store.flush()
        self.leader.wrote(1.0)
        self.leader.commit()

    def write(self, count: int = 1, size: int = 100, *, seed: int = 0) -> None:
        """Append so many units of one message each, and push them."""
        rng = random.Random(seed)
        for _ in range(count):
            encoded = encode_batch("t", "app", [Message(rng.randbytes(size))], sent_at_ms=1)
            self._sequence += 1
            batch = Batch(
                topic="t",
                queue=0,
                data=encoded.data,
                lengths=encoded.lengths,
                producer_id=5,
                first_sequence=self._sequence,
            )
            self._append([batch])
        self.pump()

    # --- hearing ----------------------------------------------------------------------------------------------------

    def follow(self, request: Follow, seat: Seat) -> FollowReply:
        reply = self.leader.follow(request)
        self.seats[seat] = request.replica
        self._push(seat)
        return reply

    def confirmed(self, seat: Seat, confirm: Confirm) -> None:
        super().confirmed(seat, confirm)
        self.leader.confirmed(self.seats[seat], confirm, 1.0)
        self._push(seat)

    def writable(self, seat: Seat) -> None:
        self._push(seat)

    def left(self, seat: Seat) -> None:
        super().left(seat)
        self.leader.leave(self.seats.pop(seat))

    def standing(self, asked: Standing) -> StandingReply:
        return StandingReply(self.member.replica_id, 1, self.store.queries.end, asked.now_ms)

    async def repair(self, asked: Repair) -> tuple[RepairReply, Buffer]:
        raw = self.store.journal_bytes(asked.start, asked.end - asked.start)
        return RepairReply(asked.start, asked.start + len(raw)), raw

    def pump(self) -> None:
        for seat in [*self.seats]:
            self._push(seat)

    def _push(self, seat: Seat) -> None:
        frames = self.leader.frames(self.seats[seat], 1.0)
        while seat.is_writable and (pushed := next(frames, None)) is not None:
            seat.send(*pushed)


class FollowingMember:
    """Follows over a network until it is level, or for as long as it is let."""

    def __init__(self, journal_id: int, settings: StoreSettings = SETTINGS) -> None:
        self.replica = new_replica(journal_id, settings)
        self.promise = Promise(0.0)
        self.frames = 0

    async def follow(self, network: Network, address: str, epoch: int = 1) -> tuple[Follower, Following]:
        follower = Follower(self.replica, self.promise, epoch)
        following = await network.follow(address, follower.request())
        follower.begin(following.reply)
        return follower, following

    async def take(self, follower: Follower, following: Following) -> None:
        """Take one frame, flush and confirm."""
        frame, body = await following.next()
        self.frames += 1
        follower.take(frame, body)  # type: ignore[arg-type]
        follower.apply()
        if follower.must_flush:
            self.replica.flush()
        following.confirm(follower.confirm(1.0))

    async def follow_to(self, end: Callable[[], int], network: Network, address: str) -> int:
        """Follow, again and again, until it has everything; returns how often the connection ended."""
        ended = -1
        while self.replica.end < end():
            ended += 1
            try:
                follower, following = await self.follow(network, address)
            except NotConnected:
                continue
            try:
                while self.replica.end < end():
                    await self.take(follower, following)
            except NotConnected:
                continue
            following.close()
        return ended

    @property
    def journal(self) -> dict[str, bytes]:
        return journal_of(self.replica.files)


async def new_network(name: str, clock: Clock | None = None) -> Network:
    network = Network(name, port=0, clock=clock)
    await network.start()
    return network
