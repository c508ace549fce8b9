"""Members of a shard in one process and in virtual time, with a network that carries everything at once.

`tests/fault/shard` has the unkind one.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from dmq.errors import NotConnected
from dmq.model import Durability, Message, TopicConfig
from dmq.protocol.cluster.replication import (
    Confirm,
    Follow,
    FollowReply,
    Handover,
    Journal,
    Repair,
    RepairReply,
    Standing,
    StandingReply,
)
from dmq.records import encode_batch
from dmq.registry.memory import MemoryRegistry
from dmq.settings import StoreSettings
from dmq.shard.member import Directory, Member, MemberSettings, Place, Role
from dmq.shard.service import Leadership
from dmq.storage.files import Buffer
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import FlushTicket, MessageStore
from dmq.testing import MemoryFiles

SETTINGS = StoreSettings(segment_bytes=256 << 10, unit_bytes_max=256 << 10, body_bytes_max=128 << 10, ballast_bytes=0)

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Time passes while nothing is to be done."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits for something that will not come")
        if timeout > 0:
            self.passed += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def time(self) -> float:
        return 1000.0 + self._own.passed


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(asyncio.wait_for(work, 3600))
    finally:
        loop.close()


class LoopClock:
    def now_ms(self) -> int:
        return 1_700_000_000_000 + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    boottime = monotonic


class Pipe:
    """A connection of a follower (`Following`) to its leader (`Seat`)."""

    def __init__(self, net: Net, ends: tuple[str, str], leader: Member) -> None:
        self._net = net
        self.ends = ends
        self._leader = leader
        self._frames: asyncio.Queue[tuple[Journal | Handover, Buffer] | None] = asyncio.Queue()
        self.is_closed = False
        self.reply: FollowReply = FollowReply(0, None, 0, 0)

    @property
    def has_next(self) -> bool:
        return not self._frames.empty()

    async def next(self) -> tuple[Journal | Handover, Buffer]:
        found = await self._frames.get()
        if found is None or self.is_closed:
            raise NotConnected("closed")
        return found

    def confirm(self, confirm: Confirm) -> None:
        if not self.is_closed and not self._net.is_cut(*self.ends):
            asyncio.get_running_loop().call_soon(self._confirmed, confirm)

    def _confirmed(self, confirm: Confirm) -> None:
        if not self.is_closed:
            self._leader.confirmed(self, confirm)

    @property
    def is_writable(self) -> bool:
        return True

    def send(self, frame: Journal | Handover, body: Buffer = b"") -> None:
        if not self.is_closed and not self._net.is_cut(*self.ends):
            self._frames.put_nowait((frame, bytes(body)))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._frames.put_nowait(None)
            asyncio.get_running_loop().call_soon(self._leader.left, self)


class Net:
    """Everybody reaches everybody, but for those that are cut off."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.cut: set[str] = set()
        self.pipes: list[Pipe] = []

    def is_cut(self, one: str, other: str) -> bool:
        return one in self.cut or other in self.cut


class DirectPeers:
    """The `Peers` of one member."""

    def __init__(self, net: Net, own: str) -> None:
        self._net = net
        self._own = own

    def _reach(self, address: str) -> Member:
        if address not in self._net.members or self._net.is_cut(self._own, address):
            raise NotConnected(f"{address} is not reached")
        return self._net.members[address]

    async def follow(self, address: str, request: Follow) -> Pipe:
        await asyncio.sleep(0.001)
        member = self._reach(address)
        pipe = Pipe(self._net, (self._own, address), member)
        pipe.reply = member.follow(request, pipe)
        self._net.pipes.append(pipe)
        return pipe

    async def standing(self, address: str, asked: Standing, seconds: float) -> StandingReply:
        await asyncio.sleep(0.001)
        return self._reach(address).standing(asked)

    async def repair(self, address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        await asyncio.sleep(0.001)
        return await self._reach(address).repair(asked)


class Shop:
    """A `Service` that writes what it is told to."""

    def __init__(self) -> None:
        self.store: MessageStore | None = None
        self.leadership: Leadership | None = None
        self.begun = self.dropped = self.commits = 0
        self.is_held = False

    async def begin(self, store: MessageStore, leadership: Leadership) -> None:
        self.store, self.leadership = store, leadership
        self.begun += 1

    def committed(self) -> None:
        self.commits += 1

    async def hold(self) -> None:
        self.is_held = True

    def resume(self) -> None:
        self.is_held = False

    async def drop(self) -> None:
        self.dropped += 1
        self.store = self.leadership = None
        self.is_held = False

    def write(self, count: int = 1, size: int = 100, *, first: int = 0) -> int:
        """Write messages, and flush them here; returns where they end."""
        store, leadership = self.store, self.leadership
        assert store is not None
        assert leadership is not None
        leadership.check_writable()
        for number in range(first, first + count):
            encoded = encode_batch("t", "app", [Message(bytes(size))], sent_at_ms=1)
            batch = Batch(
                topic="t", queue=0, data=encoded.data, lengths=encoded.lengths, producer_id=5, first_sequence=number
            )
            store.append([batch], Durability.FLUSHED)
        self._flush()
        return store.queries.end

    def create(self) -> None:
        """Create the topic."""
        assert self.store is not None
        self.store.append([self.store.creation("t", TopicConfig(queues=1))])
        self._flush()

    def _flush(self) -> None:
        assert self.store is not None
        assert self.leadership is not None
        self.leadership.wrote()
        self.store.flush()
        self.leadership.flushed()

    @property
    def messages(self) -> int:
        assert self.store is not None
        return self.store.queries.bounds("t", 0)[1]


class Machine:
    """One member, that can be started again on its directory."""

    def __init__(self, shard: Shard, name: str, shard_name: str = "s") -> None:
        self.shard = shard
        self.name = name
        self.address = f"{name}:9613"
        self.is_stuck = False
        self.files = MemoryFiles(rng=random.Random(name))
        self.place = Place(broker=name, shard=shard_name, address=f"{name}:9600", replication_address=self.address)
        self.registry = shard.registry.connect()
        self.shop = Shop()
        self.member: Member = self._made()
        self.task: asyncio.Task[None] | None = None

    def _made(self) -> Member:
        rng = self.shard.rng
        self.shop = Shop()
        return Member(
            Directory(
                self.files, self.shard.store_settings, self.shard.clock, self.on_disk, draw=lambda: rng.getrandbits(64)
            ),
            self.place,
            self.registry,
            DirectPeers(self.shard.net, self.address),
            self.shop,
            self.shard.settings,
        )

    async def on_disk(self, work: Callable[[], T], /) -> T:
        """Its disk; one that is stuck does not flush."""
        await asyncio.sleep(0.001)
        while self.is_stuck and getattr(work, "__self__", None).__class__ is FlushTicket:
            await asyncio.sleep(0.05)
        return work()

    def start(self, *, is_connected: bool = False) -> Machine:
        if self.task is not None:
            if not is_connected:
                self.registry = self.shard.registry.connect()
            self.member = self._made()
        self.shard.net.members[self.address] = self.member
        self.task = asyncio.ensure_future(self.member.run())
        return self

    async def kill(self, *, power: bool = False) -> None:
        """The process is gone, and its session ends in its time."""
        assert self.task is not None
        del self.shard.net.members[self.address]
        self.files = self.files.crash(self.shard.rng) if power else self.files.kill()
        for pipe in self.shard.net.pipes:
            if self.address in pipe.ends:
                pipe.close()
        self.registry.cut()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self, *, hand_over: bool = True) -> None:
        assert self.task is not None
        await self.member.stop(hand_over=hand_over)
        await self.task
        await self.registry.close()

    @property
    def role(self) -> Role:
        return self.member.role

    @property
    def serves(self) -> bool:
        return self.shop.leadership is not None and self.shop.leadership.may_serve()

    def journal(self) -> dict[str, bytes]:
        return {path: self.files.read_file(path) for path in self.files.paths() if path.startswith("journal/")}


class Shard:
    """Some machines, not started, with a registry and a network."""

    def __init__(
        self, count: int = 3, *, settings: MemberSettings | None = None, store: StoreSettings = SETTINGS
    ) -> None:
        self.store_settings = store
        self.rng = random.Random(1)
        self.clock = LoopClock()
        self.net = Net()
        self.settings = settings or MemberSettings()
        self.registry = MemoryRegistry(self.clock)
        self.machines = [Machine(self, name) for name in "abcdefg"[:count]]

    @property
    def leader(self) -> Machine:
        (found,) = [one for one in self.machines if one.serves]
        return found

    @property
    def followers(self) -> list[Machine]:
        return [one for one in self.machines if one.role is Role.FOLLOWING]

    async def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> float:
        """Wait until something holds; returns how long that took."""
        began = self.clock.monotonic()
        while not holds():
            for one in self.machines:
                if one.task is not None and one.task.done() and not one.task.cancelled():
                    one.task.result()
            await asyncio.sleep(0.01)
            assert self.clock.monotonic() - began < seconds, [one.member.report() for one in self.machines]
        return self.clock.monotonic() - began

    async def start(self) -> Machine:
        """Start all of them, the first first; returns the leader, with all others in sync."""
        for one in self.machines:
            one.start()
            await self.until(lambda one=one: one.role not in (Role.STARTING,))  # type: ignore[misc]
        count = len(self.machines)
        await self.until(lambda: any(one.serves for one in self.machines))
        await self.until(lambda: len(self.leader.member.report().in_sync) == count)
        return self.leader

    async def start_with_topic(self) -> Machine:
        leader = await self.start()
        leader.shop.create()
        await self.level(leader)
        return leader

    async def level(self, leader: Machine) -> None:
        """Wait until everything is committed."""
        await self.until(lambda: leader.member.report().committed == leader.member.report().end)

    async def stop(self) -> None:
        for one in self.machines:
            if one.task is not None and not one.task.done():
                await one.stop(hand_over=False)
        for client in [*self.registry._clients]:
            await client.close()
        await asyncio.sleep(0)


def in_shard(
    work: Callable[[Shard], Awaitable[None]],
    count: int = 3,
    *,
    settings: MemberSettings | None = None,
    store: StoreSettings = SETTINGS,
) -> None:
    """Run a test with a shard, and stop it afterwards."""

    async def test() -> None:
        shard = Shard(count, settings=settings, store=store)
        try:
            await work(shard)
        finally:
            await shard.stop()

    run(test())
