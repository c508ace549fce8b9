"""The clients of a simulated shard: producers that send again what was not answered, and a consumer.

They reach every member, whatever the network between members does, so they would notice two that serve.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dmq.errors import DMQError
from dmq.model import Durability
from tests.fault.shard.checker import QUEUES
from tests.fault.shard.loop import Schedule, VirtualLoop
from tests.fault.shard.service import Request, SimulatedService

__all__ = ["Clients"]

Reply = Callable[[Any], None]
_ANSWER_SECONDS = 2.5


class Clients:
    """All clients, on a loop of their own.

    Parameters:
        reach: by the name of a member, its service and its loop, if a process runs there.

    Attributes:
        is_stopping: producers make no new batches.
        unanswered: batches that are under way.
    """

    def __init__(
        self,
        schedule: Schedule,
        loop: VirtualLoop,
        rng: random.Random,
        *,
        members: Sequence[str],
        reach: Callable[[str], tuple[SimulatedService, VirtualLoop] | None],
    ) -> None:
        self._schedule = schedule
        self._loop = loop
        self._rng = rng
        self._members = members
        self._reach = reach
        self._leader = members[0]
        self.is_stopping = False
        self.unanswered = 0
        self.sent = 0
        self.pause_seconds = 0.25
        self._one = asyncio.Event()
        for producer in range(3):
            durability = Durability.STORED if producer == 2 else Durability.REPLICATED
            loop.create_task(self._produce(100 + producer, durability))
        loop.create_task(self._consume())

    def _is_over(self) -> bool:
        return self.is_stopping

    def send_one(self) -> None:
        """One batch, while producers rest."""
        self._loop.call_soon(self._one.set)

    async def _produce(self, producer: int, durability: Durability) -> None:
        rng = self._rng
        sequence = 0
        while not self._is_over():
            if self.pause_seconds < 1e6:
                await asyncio.sleep(rng.expovariate(1 / self.pause_seconds))
            elif producer == 100:
                await self._one.wait()
                self._one.clear()
            else:
                await asyncio.sleep(1)
                continue
            if self._is_over():
                break
            count = rng.choice((1, 1, 1, 2, 5, 20))
            size = rng.choice((10, 100, 400, 400, 3000))
            bodies = tuple(
                b"%d %d " % (producer, sequence + n) + rng.randbytes(rng.randrange(size)) for n in range(count)
            )
            request = Request(producer, rng.randrange(QUEUES), sequence, bodies, durability)
            sequence += count
            self.unanswered += 1
            while await self._ask(partial(_produce, request)) is not True:
                await asyncio.sleep(rng.uniform(0.05, 0.4))
            self.unanswered -= 1
            self.sent += 1

    async def _consume(self) -> None:
        offsets = [0] * QUEUES
        while True:
            await asyncio.sleep(self._rng.uniform(0.05, 0.3))
            queue = self._rng.randrange(QUEUES)
            member = self._rng.choice((self._leader, *self._members))
            answer = await self._ask(partial(_consume, queue, offsets[queue]), member)
            if isinstance(answer, int):
                offsets[queue] = answer

    async def _ask(self, ask: Callable[[SimulatedService, Reply], None], member: str = "") -> Any:
        """What a member answered: a value or an error; None where its connection ended, or nothing came."""
        asked = member or self._leader
        answered: asyncio.Future[Any] = self._loop.create_future()

        def reply(outcome: Any) -> None:
            self._schedule.after(self._delay(), lambda: self._call(settle, outcome))

        def settle(outcome: Any) -> None:
            if not answered.done():
                answered.set_result(outcome)

        def arrive() -> None:
            reached = self._reach(asked)
            if reached is None:
                reply(None)
            else:
                service, loop = reached
                loop.call_soon(ask, service, reply)

        self._schedule.after(self._delay(), arrive)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                outcome = await answered
        except TimeoutError:
            outcome = None
        if not member and (outcome is None or isinstance(outcome, DMQError)):
            self._leader = self._rng.choice(self._members)
        return outcome

    def _call(self, settle: Reply, outcome: Any) -> None:
        self._loop.call_soon(settle, outcome)

    def _delay(self) -> float:
        return self._rng.uniform(0.0002, 0.003)


def _produce(request: Request, service: SimulatedService, reply: Reply) -> None:
    service.produce(request, reply)


def _consume(queue: int, offset: int, service: SimulatedService, reply: Reply) -> None:
    service.consume(queue, offset, reply)
