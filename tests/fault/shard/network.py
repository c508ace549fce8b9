"""The simulated network between members: it delays, cuts one way or both, and ends connections.

What always holds: what `dmq.shard.peers` says of connections, which are TCP's: order within one direction of one
connection, and nothing after its end; beyond that, none. What is sent into a cut waits for its end or for that of the
connection, which each side learns at its own time, or never until it sends.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from dmq.errors import DMQError, NotConnected, TimedOut
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
from dmq.shard.peers import Hearing
from dmq.storage.files import Buffer
from tests.fault.shard.loop import Schedule, VirtualLoop

__all__ = ["Host", "Network", "Wire"]

_WINDOW_BYTES = 96 << 10  # sent and not taken, before a connection is not writable
_CONNECT_SECONDS = 2.0


class Host:
    """One address; the process behind it changes.

    Attributes:
        loop: of the process that runs there; None if none does.
        is_silent: the machine is off or unreachable: nobody refuses, either.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop: VirtualLoop | None = None
        self.hearing: Hearing | None = None
        self.is_silent = False


class Wire:
    """One direction between two hosts."""

    def __init__(self) -> None:
        self.is_cut = False
        self.cuts = 0
        self.delay = (0.0002, 0.002)


class Network:
    def __init__(self, schedule: Schedule, rng: random.Random) -> None:
        self.schedule = schedule
        self.rng = rng
        self.hosts: dict[str, Host] = {}
        self._wires: dict[tuple[str, str], Wire] = {}
        self.connections: list[Connection] = []

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def wire(self, source: str, target: str) -> Wire:
        return self._wires.setdefault((source, target), Wire())

    def delay(self, source: str, target: str) -> float:
        low, high = self.wire(source, target).delay
        return self.rng.uniform(low, high)

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Nothing comes through one way; connections end after a while, if it lasts."""
        wire = self.wire(source, target)
        wire.is_cut = True
        wire.cuts += 1
        cut = wire.cuts
        for connection in self.connections:
            if {connection.near.host.name, connection.far.host.name} == {source, target}:
                self._break_later(connection, lambda: wire.is_cut and wire.cuts == cut)

    def _break_later(self, connection: Connection, is_still_so: Callable[[], bool]) -> None:
        def broken() -> None:
            if is_still_so():
                connection.near.over_after(self.rng.uniform(0, 5))
                connection.far.over_after(self.rng.uniform(0, 5))

        self.schedule.after(self.rng.uniform(1, 15), broken)

    def mend(self, source: str, target: str) -> None:
        self.wire(source, target).is_cut = False

    def mend_all(self) -> None:
        for wire in self._wires.values():
            wire.is_cut = False
            wire.delay = (0.0002, 0.002)

    def reset(self, connection: Connection) -> None:
        """A connection ends, and what is under way is lost."""
        connection.near.over_after(0.0)
        connection.far.over_after(0.0)

    def died(self, host: Host, *, is_silent: bool) -> None:
        """The process behind a host is gone; the kernel says so, unless that is gone, too."""
        host.loop = host.hearing = None
        host.is_silent = is_silent
        for connection in self.connections[:]:
            for end in (connection.near, connection.far):
                if end.host is host and not end.is_over:
                    end.is_over = True
                    if is_silent:
                        end.other.over_after(self.rng.uniform(0.5, 12))
                    else:
                        end.say_over()

    def forget_ended(self) -> None:
        """Some end is over."""
        self.connections = [one for one in self.connections if not (one.near.is_over and one.far.is_over)]

    # --- carrying ---------------------------------------------------------------------------------------------------

    def call(self, source: Host, target: Host, action: Callable[[Hearing, VirtualLoop], None]) -> None:
        """Carry a lone request to the process that is there when it arrives; lost in a cut."""

        def arrive() -> None:
            if self.wire(source.name, target.name).is_cut or target.loop is None or target.hearing is None:
                return
            target.loop.call_soon(action, target.hearing, target.loop)

        self.schedule.after(self.delay(source.name, target.name), arrive)

    def answer(self, source: Host, target: Host, loop: VirtualLoop, action: Callable[[], None]) -> None:
        """Carry an answer back to the loop that asked."""

        def arrive() -> None:
            if not self.wire(source.name, target.name).is_cut and target.loop is loop:
                loop.call_soon(action)

        self.schedule.after(self.delay(source.name, target.name), arrive)


class End:
    """One end of a connection, and the direction towards the other one."""

    def __init__(self, network: Network, host: Host, on_over: Callable[[], None]) -> None:
        self.network = network
        self.host = host
        self.loop = host.loop
        self.other: End = self
        self.is_over = False
        self._on_over = on_over
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_pumping = False

    @property
    def is_alive(self) -> bool:
        return not self.is_over and self.loop is not None and self.host.loop is self.loop

    def send(self, action: Callable[[], None]) -> None:
        """Let something happen on the other end's loop, after what was sent before."""
        if not self.is_alive:
            return
        at = self.network.schedule.now + self.network.delay(self.host.name, self.other.host.name)
        self._queue.append((max(at, self._queue[-1][0] if self._queue else 0.0), action))
        if not self._is_pumping:
            self._is_pumping = True
            self._pump_at(at)

    def _pump_at(self, at: float) -> None:
        self.network.schedule.after(max(0.0, at - self.network.schedule.now), self._pump)

    def _pump(self) -> None:
        other = self.other
        if not other.is_alive:
            self._queue.clear()
            self._is_pumping = False
            return
        if self.network.wire(self.host.name, other.host.name).is_cut:
            self._pump_at(self.network.schedule.now + self.network.rng.uniform(0.05, 0.4))  # it is sent again
            return
        while self._queue and self._queue[0][0] <= self.network.schedule.now:
            assert other.loop is not None
            other.loop.call_soon(other.deliver, self._queue.popleft()[1])
        if self._queue:
            self._pump_at(self._queue[0][0])
        else:
            self._is_pumping = False

    def deliver(self, action: Callable[[], None]) -> None:
        if self.is_alive:
            action()

    def close(self) -> None:
        """This side ends the connection."""
        if not self.is_over:
            self.say_over()
            self.is_over = True
            self.network.forget_ended()

    def say_over(self) -> None:
        at = self.network.delay(self.host.name, self.other.host.name)
        if self._queue:
            at = max(at, self._queue[-1][0] - self.network.schedule.now)
        other = self.other
        wire = self.network.wire(self.host.name, other.host.name)
        other.over_after(self.network.rng.uniform(2, 15) if wire.is_cut else at)

    def over_after(self, seconds: float) -> None:
        """This side learns that the connection has ended."""

        def arrive() -> None:
            if self.is_alive:
                assert self.loop is not None
                self.loop.call_soon(self._over)

        self.network.schedule.after(seconds, arrive)

    def _over(self) -> None:
        if self.is_alive:
            self.is_over = True
            self.other.over_after(0.01)  # it learns when it sends
            self._on_over()
            self.network.forget_ended()


class Connection:
    """A follower's connection to its leader: `near` is the follower's end."""

    def __init__(self, network: Network, follower: Host, leader: Host) -> None:
        self.network = network
        self.following = SimulatedFollowing(self)
        self.seat = SimulatedSeat(self)
        self.near = End(network, follower, self.following.ended)
        self.far = End(network, leader, self.seat.ended)
        self.near.other, self.far.other = self.far, self.near
        self.hearing: Hearing | None = None
        network.connections.append(self)


class SimulatedFollowing:
    """See `dmq.shard.peers.Following`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.answered: asyncio.Future[FollowReply] | None = None
        self._reply: FollowReply | None = None
        self._frames: deque[tuple[Journal | Handover, bytes]] = deque()
        self._something = asyncio.Event()
        self._is_over = False

    @property
    def reply(self) -> FollowReply:
        assert self._reply is not None
        return self._reply

    def replied(self, outcome: FollowReply | DMQError) -> None:
        assert self.answered is not None
        if self.answered.done():
            return
        if isinstance(outcome, DMQError):
            self.answered.set_exception(outcome)
        else:
            self._reply = outcome
            self.answered.set_result(outcome)

    def push(self, frame: Journal | Handover, body: bytes) -> None:
        self._frames.append((frame, body))
        self._something.set()

    def ended(self) -> None:
        self._is_over = True
        self._something.set()
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(NotConnected("the connection has ended: connect again"))

    @property
    def has_next(self) -> bool:
        return bool(self._frames)

    async def next(self) -> tuple[Journal | Handover, Buffer]:
        while not self._frames:
            if self._is_over:
                raise NotConnected("the connection has ended: follow again")
            self._something.clear()
            await self._something.wait()
        frame, body = self._frames.popleft()
        seat = self._connection.seat
        self._connection.near.send(lambda: seat.taken(len(body)))
        return frame, body

    def confirm(self, confirm: Confirm) -> None:
        connection = self._connection

        def deliver() -> None:
            assert connection.hearing is not None
            connection.hearing.confirmed(connection.seat, confirm)

        connection.near.send(deliver)

    def close(self) -> None:
        self._is_over = True
        self._frames.clear()
        self._something.set()
        self._connection.near.close()


class SimulatedSeat:
    """See `dmq.shard.peers.Seat`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unread = 0
        self._was_full = False
        self._held: list[tuple[Journal | Handover, bytes]] | None = []  # until FOLLOW is answered

    @property
    def is_writable(self) -> bool:
        if self._unread >= _WINDOW_BYTES:
            self._was_full = True
            return False
        return True

    def send(self, frame: Journal | Handover, body: Buffer = b"") -> None:
        kept = bytes(body)
        self._unread += len(kept)
        if self._held is not None:
            self._held.append((frame, kept))
            return
        following = self._connection.following
        self._connection.far.send(lambda: following.push(frame, kept))

    def answered(self) -> None:
        held, self._held = self._held or [], None
        following = self._connection.following
        for frame, body in held:
            self._connection.far.send(lambda frame=frame, body=body: following.push(frame, body))  # type: ignore[misc]

    def taken(self, size: int) -> None:
        self._unread -= size
        if self._was_full and self._unread < _WINDOW_BYTES // 2:
            self._was_full = False
            assert self._connection.hearing is not None
            self._connection.hearing.writable(self)

    def ended(self) -> None:
        if self._connection.hearing is not None:  # FOLLOW has arrived
            self._connection.hearing.left(self)

    def close(self) -> None:
        self._connection.far.close()


class SimulatedPeers:
    """See `dmq.shard.peers.Peers`; of one process."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network = network
        self._host = host

    async def follow(self, address: str, request: Follow) -> SimulatedFollowing:
        loop = self._host.loop
        assert loop is not None
        target = await self._reach(address, _CONNECT_SECONDS)
        connection = Connection(self._network, self._host, target)
        following = connection.following
        following.answered = loop.create_future()

        def ask() -> None:
            assert connection.far.loop is not None
            hearing = connection.hearing = target.hearing
            assert hearing is not None
            try:
                outcome: FollowReply | DMQError = hearing.follow(request, connection.seat)
            except DMQError as error:
                outcome = error
            connection.far.send(lambda: following.replied(outcome))
            connection.seat.answered()
            if isinstance(outcome, DMQError):
                connection.far.close()

        connection.near.send(ask)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await following.answered
        except TimeoutError:
            following.close()
            raise TimedOut(f"{address} did not answer within {_CONNECT_SECONDS} s") from None
        except BaseException:
            following.close()
            raise
        return following

    async def standing(self, address: str, asked: Standing, seconds: float) -> StandingReply:
        def ask(hearing: Hearing, loop: VirtualLoop, answer: Callable[[Any], None]) -> None:
            answer(hearing.standing(asked))

        reply: StandingReply = await self._request(address, ask, seconds)
        return reply

    async def repair(self, address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        def ask(hearing: Hearing, loop: VirtualLoop, answer: Callable[[Any], None]) -> None:
            async def run() -> None:
                try:
                    reply, body = await hearing.repair(asked)
                    answer((reply, bytes(body)))
                except DMQError as error:
                    answer(error)

            loop.create_task(run())

        reply: tuple[RepairReply, Buffer] = await self._request(address, ask, 5.0)
        return reply

    async def _request(
        self, address: str, ask: Callable[[Hearing, VirtualLoop, Callable[[Any], None]], None], seconds: float
    ) -> Any:
        loop, network = self._host.loop, self._network
        assert loop is not None
        answered: asyncio.Future[Any] = loop.create_future()

        def settle(outcome: Any) -> None:
            if answered.done():
                return
            if isinstance(outcome, DMQError):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        def arrived(hearing: Hearing, its_loop: VirtualLoop) -> None:
            def answer(outcome: Any) -> None:
                network.answer(target, self._host, loop, lambda: settle(outcome))

            try:
                ask(hearing, its_loop, answer)
            except DMQError as error:
                answer(error)

        try:
            async with asyncio.timeout(seconds):
                target = await self._reach(address, seconds)
                network.call(self._host, target, arrived)
                return await answered
        except TimeoutError:
            raise TimedOut(f"{address} did not answer within {seconds} s") from None

    async def _reach(self, address: str, seconds: float) -> Host:
        """Connect.

        Raises:
            NotConnected: nobody listens there.
            TimedOut: nothing came back.
        """
        network = self._network
        target = network.hosts.get(address.partition(":")[0])
        own = self._host.name
        is_cut = target is not None and (
            network.wire(own, target.name).is_cut or network.wire(target.name, own).is_cut or target.is_silent
        )
        if target is None or (is_cut and target is not self._host):
            await asyncio.sleep(seconds)
            raise TimedOut(f"{address} did not answer within {seconds} s")
        await asyncio.sleep(network.delay(own, target.name) + network.delay(target.name, own))
        if target.loop is None or target.hearing is None:
            raise NotConnected(f"nobody listens at {address}")
        return target
