"""The straight path of a lone `send` in a blocking program: encode, write, read and answer in the caller's own thread.

It makes none of what many sends need: no exchange, no pending request, no header struct, no frame. It takes its queue's
turn and its number as every batch does, so that it can fall back on the general way at any moment.

What always holds: it chooses and never decides. Nothing was done for what it does not take. Once its request may have
gone out, its batch is settled, or in the sender's care with its numbers and its bytes: an answer that is not the plain
one, or does not come soon, is waited for and judged by the general way. `taken`, `left` and `late` count sends.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from crc32c import crc32c

from dmq.client.connection.connection import Connection
from dmq.client.connection.router import Router
from dmq.client.producer.accumulator import MESSAGE_BYTES, SendBatch
from dmq.client.producer.core import Core
from dmq.client.producer.routes import FRESH_SECONDS
from dmq.errors import DMQError
from dmq.model import Durability, DurabilityName, Message
from dmq.protocol.commands import Command
from dmq.protocol.frame import CRC_BYTES, HEAD, HEAD_BYTES, LENGTH_BYTES, REST_BYTES, WIRE_FORMAT, Kind
from dmq.protocol.header import UNREADABLE, encode_header
from dmq.protocol.produce import ProduceReply

__all__ = ["LONE_SECONDS", "StraightPath"]

LONE_SECONDS: Final = 1.0
"""How long a lone send waits for its answer in its own way. It must end before anything is sent again."""
_BODY_BYTES_MAX: Final = 8 << 10  # a copy of so much costs less than what it saves

_REQUEST: Final = int(Kind.REQUEST)
_RESPONSE: Final = int(Kind.RESPONSE)
_PRODUCE: Final = int(Command.PRODUCE)
_ALONE: Final = frozenset((Durability.STORED, Durability.FLUSHED, Durability.REPLICATED))  # answered, and soon
# The header of a PRODUCE behind its topic: queue, count, keys, producer id, epoch, first sequence and durability, the
# large numbers at their full size, which MessagePack allows. The other fields have defaults, and are left out.
_REST: Final = struct.Struct(">BBBBBQBBQB")
_FIELDS: Final = 8
_pack_rest: Final = _REST.pack
_pack_head: Final = HEAD.pack
_unpack_head: Final = HEAD.unpack_from
_CRC: Final = struct.Struct(">I")
_pack_crc: Final = _CRC.pack
_unpack_crc: Final = _CRC.unpack_from
_decode_reply: Final = msgspec.msgpack.Decoder(ProduceReply).decode


class StraightPath:
    """The straight path of one producer.

    Attributes:
        taken: sends that took it to the end.
        left: sends that it did not take.
        late: sends that it took and gave to the general way, because something unusual happened.
    """

    def __init__(self, core: Core, router: Router) -> None:
        self._core = core
        self._sender = core.sender
        self._router = router
        self._clock = core.clock
        self._topics: dict[str, bytes] = {}  # the beginning of a header
        self.taken = self.left = self.late = 0

    def send(self, topic: str, message: Message, durability: DurabilityName, deadline: float) -> SendBatch | None:
        """Send a message and wait a while for its answer: its batch, settled or not; None if nothing was done.

        Parameters:
            message: one that may go to any queue at once.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        core, sender, router = self._core, self._sender, self._router
        lane = core.plain_lane(topic, durability, message.body, message.key)
        if lane is None or lane.under_way or lane.gathering is not None or lane.ready:
            return self._leave()
        now, route = self._clock.monotonic(), core.routes.get(topic)
        if (
            route is None or now - route.fetched_at >= FRESH_SECONDS or not router.is_single
            or lane.key.durability not in _ALONE or len(message.body) > _BODY_BYTES_MAX
        ):  # fmt: skip
            return self._leave()
        connection = router.link_for(topic)
        if connection is None or not connection.is_checked:
            return self._leave()
        core.check_plain(topic, message)
        records, keys = sender.encode_lone(topic, message)
        body = records[0]
        correlation = connection.lead()
        if not correlation:
            return self._leave()
        batch: SendBatch | None = None
        reply: ProduceReply | None = None
        try:
            with sender.lock:
                if sender.closed_by is None:
                    batch = core.accumulator.take_alone(lane, len(message.body) + MESSAGE_BYTES, range(route.queues))
            if batch is None:
                return self._leave()
            batch.body, batch.key_count, batch.deadline = records, keys, deadline
            batch.sent_at, batch.broker, batch.is_tried = now, connection.address, True
            front = self._topics.get(topic) or self._front(topic)
            rest = _pack_rest(
                0xCC, batch.queue, 1, keys, 0xCF, batch.producer_id, 0, 0xCF, batch.first_sequence, lane.key.durability
            )  # fmt: skip
            header_bytes = len(front) + _REST.size
            length = REST_BYTES + header_bytes + len(body) + CRC_BYTES
            head = _pack_head(length, WIRE_FORMAT, _REQUEST, _PRODUCE, 0, 0, correlation, header_bytes)
            frame = b"".join((head, front, rest, body))
            data = connection.converse(frame + _pack_crc(crc32c(frame)), min(deadline, now + LONE_SECONDS))
            if data is not None:
                reply = _reply(data, correlation)
            if reply is None:
                self._be_late(batch, connection, correlation, data)
        except BaseException:  # of a signal's handler
            if batch is not None and batch.pending is None:
                self._be_late(batch, connection, correlation, None)
            raise
        finally:
            connection.leave()
        if reply is not None:
            self.taken += 1
            sender.stored(batch, reply)
        return batch

    def _leave(self) -> SendBatch | None:
        self.left += 1
        return None

    def _front(self, topic: str) -> bytes:
        front = self._topics[topic] = bytes((0x90 | _FIELDS,)) + encode_header(topic)
        return front

    def _be_late(self, batch: SendBatch, connection: Connection, correlation: int, data: bytes | None) -> None:
        """Leave a send to the general way, with whatever came instead of its answer."""
        self.late += 1
        sender = self._sender
        sender.watch(batch, connection)
        try:
            batch.pending = connection.expect(correlation, lambda answer: sender.answered(batch, connection, answer))
        except DMQError as error:  # the connection is closed
            sender.answered(batch, connection, error)
            return
        if data is not None:
            connection.hear(data)


def _reply(data: bytes, correlation: int) -> ProduceReply | None:
    """The answer to a request that went well, if these bytes are it and nothing else."""
    end = len(data) - CRC_BYTES
    if end < HEAD_BYTES:
        return None
    length, wire, kind, command, status, _, answered, header_bytes = _unpack_head(data)
    if (
        answered != correlation or length != len(data) - LENGTH_BYTES or status or kind != _RESPONSE
        or command != _PRODUCE or wire != WIRE_FORMAT or header_bytes > end - HEAD_BYTES
        or _unpack_crc(data, end)[0] != crc32c(data[:end])
    ):  # fmt: skip
        return None
    try:
        return _decode_reply(data[HEAD_BYTES : HEAD_BYTES + header_bytes])
    except UNREADABLE:
        return None
