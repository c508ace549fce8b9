"""The simulation's own parts: time, network, registry and checker, with a trivial member."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from dmq.errors import NotConnected, NotLeader, RegistryDown, TimedOut, WriteUnknown
from dmq.protocol.cluster.replication import Confirm, Follow, FollowReply, Journal, Standing, StandingReply
from dmq.registry.memory import Fate, MemoryRegistry
from dmq.registry.registry import Create, Put
from tests.fault.shard.checker import Checker
from tests.fault.shard.clock import ClockMode, MachineClock
from tests.fault.shard.loop import Schedule, VirtualLoop
from tests.fault.shard.network import Network, SimulatedPeers, SimulatedSeat
from tests.fault.shard.registry import Line, SimulatedRegistry

FOLLOW = Follow(cluster="c", shard="s", journal_id=1, replica=2, epoch=3, end=0)


def frame(number: int) -> Journal:
    return Journal(epoch=3, start=number, committed=0, first=0, sent=0.0)


class TrivialMember:
    """Pushes numbered frames to whom follows it, and remembers what it hears."""

    def __init__(self, frames: int = 0) -> None:
        self.heard: list[Any] = []
        self.seats: list[SimulatedSeat] = []
        self._frames = frames

    def follow(self, request: Follow, seat: Any) -> FollowReply:
        if request.epoch != 3:
            raise NotLeader("of another epoch")
        self.seats.append(seat)
        for number in range(self._frames):
            seat.send(frame(number), b"x" * 1000)
        return FollowReply(epoch=3, common=0, first=0, committed=0)

    def confirmed(self, seat: Any, confirm: Confirm) -> None:
        self.heard.append(confirm.end)

    def writable(self, seat: Any) -> None:
        self.heard.append("writable")

    def left(self, seat: Any) -> None:
        self.heard.append("left")

    def standing(self, asked: Standing) -> StandingReply:
        return StandingReply(replica=9, last_epoch=1, end=2, now_ms=3)

    async def repair(self, asked: Any) -> Any:
        raise NotImplementedError


class Pair:
    """Two hosts, of which `b` leads."""

    def __init__(self, seed: int = 1, frames: int = 0) -> None:
        rng = random.Random(seed)
        self.schedule = Schedule(random.Random(rng.random()))
        self.network = Network(self.schedule, rng)
        self.loops = [self.run_host(name) for name in "ab"]
        self.member = TrivialMember(frames)
        self.network.host("b").hearing = self.member
        self.peers = SimulatedPeers(self.network, self.network.host("a"))
        self.log: list[Any] = []

    def run_host(self, name: str) -> VirtualLoop:
        loop = VirtualLoop(MachineClock(self.schedule.time, self.network.rng))
        self.network.host(name).loop = loop
        self.schedule.loops.append(loop)
        return loop

    async def take(self) -> None:
        try:
            following = await self.peers.follow("b:9613", FOLLOW)
            self.log.append("follows")
            while True:
                got, _ = await following.next()
                assert isinstance(got, Journal)
                self.log.append(got.start)
                following.confirm(Confirm(3, 0, got.start, 0.0))
        except (NotConnected, TimedOut, NotLeader) as error:
            self.log.append(type(error).__name__)

    def run(self, seconds: float) -> None:
        self.schedule.run(self.schedule.now + seconds)

    def close(self) -> None:
        for loop in self.loops:
            for task in loop.bury():
                task.get_coro().close()
            loop.close()


def test_frames_arrive_in_their_order_and_runs_are_the_same() -> None:
    logs = []
    for _ in range(2):
        pair = Pair(frames=200)
        pair.loops[0].create_task(pair.take())
        pair.run(5)
        assert pair.log == ["follows", *range(200)]
        assert [one for one in pair.member.heard if one != "writable"] == [*range(200)]
        logs.append((pair.schedule.turns, pair.schedule.now, pair.member.heard))
        pair.close()
    assert logs[0] == logs[1]
    assert "writable" not in logs[0][2], "nobody asked whether it is"


def test_a_cut_one_way_holds_what_is_sent_and_ends_the_connection_in_the_end() -> None:
    pair = Pair(frames=1)
    pair.loops[0].create_task(pair.take())
    pair.run(1)
    pair.network.cut("b", "a")
    seat = pair.member.seats[0]
    seat.send(frame(1), b"")
    pair.run(0.5)
    assert pair.log == ["follows", 0]
    pair.network.mend("b", "a")
    pair.run(1)
    assert pair.log == ["follows", 0, 1]
    pair.network.cut("a", "b")
    pair.run(40)
    assert pair.log[-1] == "NotConnected"
    assert pair.member.heard[-1] == "left"
    seat.send(frame(2), b"")
    pair.network.mend("a", "b")
    pair.run(5)
    assert pair.log[-1] == "NotConnected", "nothing comes after the end"
    pair.close()


@pytest.mark.parametrize(("is_silent", "expected"), [(False, "NotConnected"), (True, "TimedOut")])
def test_who_is_dead_refuses_or_is_silent(is_silent: bool, expected: str) -> None:
    pair = Pair()
    pair.network.died(pair.network.host("b"), is_silent=is_silent)
    pair.loops[0].create_task(pair.take())
    pair.run(10)
    assert pair.log == [expected]
    pair.close()


def test_a_full_connection_is_not_writable_until_it_is_read() -> None:
    pair = Pair()
    pair.loops[0].create_task(pair.take())
    pair.run(1)
    pair.loops[0].is_paused = True
    seat = pair.member.seats[0]
    sent = 0
    while seat.is_writable:
        seat.send(frame(sent), b"x" * 1000)
        sent += 1
    pair.run(3)
    assert not seat.is_writable
    assert "writable" not in pair.member.heard
    pair.loops[0].is_paused = False
    pair.run(3)
    assert "writable" in pair.member.heard
    pair.close()


def test_a_process_that_dies_says_nothing() -> None:
    pair = Pair()
    said: list[str] = []

    async def speak() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            said.append("last words")

    pair.loops[0].create_task(speak())
    pair.run(1)
    tasks = pair.loops[0].bury()
    pair.run(2000)
    assert said == []
    for task in tasks:
        task.get_coro().close()
    pair.close()


def test_clocks_stand_still_each_in_its_way() -> None:
    schedule = Schedule(random.Random(1))
    clock = MachineClock(schedule.time, random.Random(2))
    start = clock.monotonic(), clock.boottime()

    def passed() -> tuple[float, float]:
        return clock.monotonic() - start[0], clock.boottime() - start[1]

    schedule.run(schedule.now + 10)
    assert passed() == pytest.approx((10, 10), rel=0.021)
    clock.set_mode(ClockMode.SUSPENDED)
    schedule.run(schedule.now + 10)
    assert passed() == pytest.approx((10, 20), rel=0.021)
    clock.set_mode(ClockMode.FROZEN)
    schedule.run(schedule.now + 10)
    assert passed() == pytest.approx((10, 20), rel=0.021)


def test_the_registry_answers_late_or_never_and_keeps_its_contract() -> None:
    pair = Pair()
    clock = MachineClock(pair.schedule.time, random.Random(3))
    registry = MemoryRegistry(clock)
    line = Line()
    client = SimulatedRegistry(registry, line, schedule=pair.schedule, loop=pair.loops[0], clock=clock)
    log: list[Any] = []

    async def use() -> None:
        await client.write([Create("/a", b"0", ephemeral=True)])
        log.append(clock.boottime() < client.deadline <= clock.boottime() + 3)
        registry.chances = {Fate.UNANSWERED: 1.0}
        began = clock.boottime()
        with pytest.raises(WriteUnknown):
            await client.write([Put("/a", b"1", 0)])
        log.append(clock.boottime() - began)
        registry.chances = {}
        log.append(await client.write([Put("/a", b"2", 1)]))
        line.loses_requests = True
        with pytest.raises(RegistryDown):
            await client.read("/a")
        await asyncio.sleep(10)
        line.mend()
        log.append(await client.read("/a"))

    task = pair.loops[0].create_task(use())
    pair.run(40)
    assert task.done()
    task.result()
    assert log == [True, pytest.approx(3, rel=0.1), (2,), None], "without a sign for longer, the session is over"
    pair.close()


def test_a_session_that_ends_before_its_time_takes_the_deadline_with_it() -> None:
    pair = Pair()
    clock = MachineClock(pair.schedule.time, random.Random(3))
    registry, line = MemoryRegistry(clock), Line()
    client = SimulatedRegistry(registry, line, schedule=pair.schedule, loop=pair.loops[0], clock=clock)
    log: list[Any] = []

    async def use() -> None:
        await client.write([Create("/a", b"0", ephemeral=True)])
        line.loses_answers = True
        client.lose_session()
        log.append(client.deadline > clock.boottime())
        await asyncio.sleep(10)
        line.mend()
        await asyncio.sleep(2)
        log.append(await client.read("/a"))
        await client.write([Create("/a", b"1", ephemeral=True)])
        log.append(client.deadline > clock.boottime())

    task = pair.loops[0].create_task(use())
    pair.run(20)
    task.result()
    assert log == [False, None, True], "until its deadline a session lives; another one begins once it is heard again"
    pair.close()


def test_the_checker_tells_what_is_wrong() -> None:
    checker = Checker(lambda offset: 2, 2)
    checker.served("a", 1, is_excepted=False)
    checker.served("b", 2, is_excepted=False)
    checker.served("a", 1, is_excepted=True)
    assert checker.violations == []
    checker.served("a", 1, is_excepted=False)
    checker.served("a", 2, is_excepted=False)
    checker._message(0, 0, b"7 1 x")
    checker._message(0, 1, b"7 0 x")
    checker._message(1, 0, b"7 1 x")
    checker.handed_out("a", 0, 0, b"7 2 x")
    checker.confirmed("a", 0, b"7 9 x")
    checker.journal, checker.committed = bytearray(b"abcd"), 4
    checker.member_has("a", 0, b"abXd")
    checker.member_has("a", 0, b"abc")
    checker.member_has("a", 2, b"cde")
    assert [violation.split()[1] for violation in checker.violations] == [
        "serves", "and", "b'7", "b'7", "hands", "answered", "has", "ends",
    ]  # fmt: skip
