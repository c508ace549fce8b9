"""The straight way: one message, sent and answered in the caller's own thread while nothing else is under way.

A lone `send` needs none of what makes many sends fast: no batch that gathers, no callback, no other thread. It takes
the queue's turn and its number as every batch does, so that it can fall back on the general way at any moment: if
another thread reads the connection, if the broker refuses, if the connection breaks, or if the answer takes long.

What always holds: a message that set out this way is a batch like any other, in the window, with its numbers and its
bytes kept until it is settled; whatever happens, it is in the sender's care or it is settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmq.client.accumulator import Batch
from dmq.client.connection import Connection
from dmq.client.producing import Core
from dmq.client.transport import Transport
from dmq.clock import Clock
from dmq.errors import DMQError
from dmq.protocol import Command

__all__ = ["Straight"]

STRAIGHT_SECONDS: Final = 1.0
"""How long an answer is waited for this way. It must end before anything is sent again."""


class Straight:
    """See the module. For producers without a spool."""

    def __init__(self, core: Core, transport: Transport, clock: Clock) -> None:
        self._core = core
        self._sender = core.sender
        self._transport = transport
        self._clock = clock

    def send(
        self,
        topic: str,
        body: object,
        key: str | None,
        tag: str | None,
        business_id: str | None,
        priority: int,
        properties: Mapping[str, str] | None,
        durability: str,
        deadline: float,
    ) -> Batch | None:
        """Send a message and wait a while for its answer: its batch, settled or not.

        None if it is not a case for this way; then nothing was done.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        connection = self._transport.current()
        if connection is None:
            return None
        now = self._clock.monotonic()
        batch = self._core.alone(topic, body, key, tag, business_id, priority, properties, durability, deadline, now)
        if batch is not None:
            try:
                self._exchange(batch, connection, now, deadline)
            except DMQError as error:
                self._sender.unsent(batch, error)
        return batch

    def _exchange(self, batch: Batch, connection: Connection, now: float, deadline: float) -> None:
        sender = self._sender
        assert batch.body is not None
        sender.note_sending(batch, connection, now)
        exchange = connection.exchange(
            Command.PRODUCE, sender.header(batch, now), batch.body, min(deadline, now + STRAIGHT_SECONDS)
        )
        if exchange is None:  # another thread reads
            sender.dispatch(batch, connection)
            return
        answer = exchange.answer
        if answer is None:
            assert exchange.pending is not None
            batch.is_attended = True
            batch.pending = exchange.pending
            sender.watch(batch, connection)
            if exchange.hand_over(lambda answer: sender.answered(batch, connection, answer)):
                connection.attend(exchange.pending)
                return
            answer = exchange.answer
            assert answer is not None
        sender.answered(batch, connection, answer)
