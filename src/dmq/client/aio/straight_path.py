"""The straight path of a lone `send` on an event loop: the twin of `dmq.client.producer.straight_path`.

What always holds: as there. A task that is cancelled while it waits leaves its message to the general way.
"""

from __future__ import annotations

import asyncio

from dmq.client.aio.connection import AioConnection
from dmq.client.aio.router import AioRouter
from dmq.client.connection.session import Pending
from dmq.client.connection.socket import LONE_SECONDS
from dmq.client.producer.accumulator import MESSAGE_BYTES, Lone, SendBatch
from dmq.client.producer.core import Core
from dmq.client.producer.straight_path import Groove, LonePath, Outgoing, plain_reply, request_of
from dmq.errors import DMQError
from dmq.model import DurabilityName, Message, Receipt
from dmq.protocol.frame import Frame

__all__ = ["AioStraightPath"]


class AioStraightPath(LonePath[AioConnection]):
    """The straight path of one producer on an event loop.

    One timer looks after all sends: one for each would cost more than the rest of the waiting.
    """

    def __init__(self, core: Core, router: AioRouter) -> None:
        super().__init__(core, router)
        self._waiting: set[_Waiting] = set()
        self._is_looking = False

    async def send(
        self, topic: str, message: Message, durability: DurabilityName, deadline: float | None
    ) -> Receipt | SendBatch | None:
        """As `StraightPath.send`."""
        found = self._find(topic, message, durability, deadline)
        if found is None:
            return None
        groove, connection, queues, now = found
        prepared = self._prepare(topic, message)
        correlation = connection.claim()
        if not correlation or self._sender.closed_by is not None:
            self.left += 1
            return None
        lane = groove[0]
        lone = self._accumulator.take_lone(lane, len(message.body) + MESSAGE_BYTES, queues)
        if lone is None:
            self.left += 1
            return None
        loop = asyncio.get_running_loop()
        frame = request_of(groove, lone, correlation, prepared)
        waiting = _Waiting(self, groove, lone, (frame, deadline, now), connection=connection)
        waiting.outcome = loop.create_future()
        waiting.pending = connection.ask(correlation, frame, waiting.answered)
        self._waiting.add(waiting)
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(LONE_SECONDS, self._look)
        try:
            return await waiting.outcome
        finally:
            self._waiting.discard(waiting)
            if lane.lone is lone:  # the task was cancelled
                self.be_late(waiting, None)

    def be_late(self, waiting: _Waiting, came: Frame | DMQError | None) -> SendBatch:
        """Leave a message to the general way, with whatever came instead of its answer."""
        sender, connection = self._sender, waiting.connection
        batch = self.late_batch(waiting.groove, waiting.sent, connection)
        if not batch.is_done:
            batch.pending = waiting.pending
            waiting.pending.on_answer = lambda late: sender.answered(batch, connection, late)
            if came is not None:
                sender.answered(batch, connection, came)
        return batch

    def _look(self) -> None:
        """Leave what has waited for long to the general way."""
        oldest = self._monotonic() - LONE_SECONDS
        for waiting in [*self._waiting]:
            if waiting.sent[2] <= oldest and waiting.groove.lane.lone is waiting.lone:
                waiting.end(self.be_late(waiting, None))
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            asyncio.get_running_loop().call_later(LONE_SECONDS, self._look)


class _Waiting:
    """One message that is under way, and the task that waits for it."""

    __slots__ = ("_path", "connection", "groove", "lone", "outcome", "pending", "sent")
    outcome: asyncio.Future[Receipt | SendBatch]
    pending: Pending

    def __init__(
        self, path: AioStraightPath, groove: Groove, lone: Lone, sent: Outgoing, connection: AioConnection
    ) -> None:
        self._path = path
        self.groove = groove
        self.lone = lone
        self.sent = sent
        self.connection = connection

    def answered(self, came: Frame | DMQError) -> None:
        reply = plain_reply(came) if type(came) is Frame else None
        path = self._path
        self.end(path.be_late(self, came) if reply is None else path.stored(self.groove.lane, self.lone, reply))

    def end(self, outcome: Receipt | SendBatch) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
