"""The straight path of a lone `send`: encode, write, read and answer in the caller's own thread.

It makes none of what many sends need: no batch, no exchange, no pending request, no header struct, no frame. It takes
its queue's turn and its number as every batch does, so that it can fall back on the general way at any moment. A lone
`send_async` leaves by it as well, as a batch: its future needs one; and so does a `send_many` of one batch.

What always holds: it chooses and never decides. Nothing was done for what it does not take. Once its request may have
gone out, its message is settled, or a batch in the sender's care with its numbers and its bytes: an answer that is not
the plain one, or does not come soon, is waited for and judged by the general way. `taken`, `left` and `late` count
sends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from crc32c import crc32c

from dmq.client.connection.connection import Connection
from dmq.client.connection.link import Link
from dmq.client.connection.route_book import ANY
from dmq.client.connection.router import AnyRouter
from dmq.client.connection.session import OnAnswer, Pending
from dmq.client.connection.socket import LONE_SECONDS
from dmq.client.connection.threads import Waiter
from dmq.client.producer.accumulator import MESSAGE_BYTES, Lane, Lone, SendBatch
from dmq.client.producer.core import Core, simple_size
from dmq.client.producer.encoder import header_of
from dmq.client.producer.message import TEXT_MAX, check_message
from dmq.client.producer.outcome import DURABILITY_NAMES
from dmq.client.producer.routes import FRESH_SECONDS
from dmq.compiled import find, quickened
from dmq.errors import DMQError, NotConnected
from dmq.model import DEFAULT_PRIORITY, Durability, DurabilityName, Message, MessageId, Receipt, place_shard
from dmq.protocol.commands import Command, request_head
from dmq.protocol.frame import (
    CRC_BYTES,
    HEAD,
    HEAD_BYTES,
    LENGTH_BYTES,
    REST_BYTES,
    WIRE_FORMAT,
    Buffer,
    Frame,
    Kind,
    seal_frame,
)
from dmq.protocol.header import UNREADABLE, encode_header
from dmq.protocol.produce import ProduceReply
from dmq.records.encoder import PlainColumns, Shape, plain_columns

__all__ = ["Groove", "LonePath", "Outgoing", "StraightPath", "plain_reply", "reply_of", "request_of"]

_BODY_BYTES_MAX: Final = 8 << 10  # a copy of so much costs less than what it saves
_PLAIN: Final = Message(b"")  # goes the way that a batch of plain messages goes
_HEADER_BYTES_MAX: Final = 4 << 10  # more than head and header of a batch take

_INTERRUPTED: Final = 0, None  # no answer is waited for: nobody knows whether the request went out

_REQUEST: Final = int(Kind.REQUEST)
_RESPONSE: Final = int(Kind.RESPONSE)
_PRODUCE: Final = int(Command.PRODUCE)
_ALONE: Final = frozenset((Durability.STORED, Durability.FLUSHED, Durability.REPLICATED))  # answered, and soon
# The header of a PRODUCE behind its topic: queue, count, keys, producer id, epoch, first sequence and durability, the
# large numbers at their full size, which MessagePack allows. The other fields have defaults, and are left out.
_REST: Final = struct.Struct(">BBBBBQBBQB")
_KEYS_AT: Final = 3
_QUEUE: Final = 0xFF  # of a place
_FIELDS: Final = 8
_pack_rest: Final = _REST.pack
_pack_head: Final = HEAD.pack
_unpack_head: Final = HEAD.unpack_from
_CRC: Final = struct.Struct(">I")
_pack_crc: Final = _CRC.pack
_unpack_crc: Final = _CRC.unpack_from
_decode_reply: Final = msgspec.msgpack.Decoder(ProduceReply).decode
_new: Final = tuple.__new__  # a call of a tuple's class costs twice as much


class Groove(NamedTuple):
    """What the lone messages of one topic and durability have in common."""

    lane: Lane
    front: bytes  # the beginning of their headers
    level: int
    header_bytes: int
    frame_bytes: int  # what a frame takes beside its body, as its length says it


# A message as it went out: its frame, its deadline, and when it went out.
Outgoing: TypeAlias = tuple[bytes, float | None, float]
# What a message gives to its request: its shape, its body, its key and the time, for the compiled loop; or no shape,
# the body of the request, no key, and how many keys that body has.
Prepared: TypeAlias = tuple[Shape | None, bytes, bytes | None, int]
# Queue, offset and durability.
Reply: TypeAlias = tuple[int, int, int]


C = TypeVar("C", bound=Link)


class LonePath(Generic[C]):
    """What the straight paths of both kinds of producers have in common.

    Attributes:
        taken: sends that took it to the end.
        left: sends that it did not take.
        late: sends that it took and gave to the general way, because something unusual happened.
    """

    def __init__(self, core: Core, router: AnyRouter[Any, C]) -> None:
        self._core = core
        self._sender = core.sender
        self.answered: Final = core.sender.answered
        self._accumulator = core.accumulator
        self._encoder = core.sender.encoder
        self._now_ms = core.clock.now_ms
        self._route_of = core.routes.get
        self._router = router
        self._is_single = router.is_single
        self._monotonic = core.clock.monotonic
        self._give_up_after = core.sender.give_up_after
        self._grooves: dict[tuple[str, str], Groove] = {}
        self.taken = self.left = self.late = 0

    @quickened("quick_find", ANY, (FRESH_SECONDS, LONE_SECONDS), (_BODY_BYTES_MAX, TEXT_MAX))
    def _find(
        self, topic: str, message: Message, durability: DurabilityName, deadline: float | None
    ) -> tuple[Groove, C, int, float] | None:
        """How a message would go: over which connection, to one of how many queues, and what time it is.

        In a cluster it has one place, of the connection's shard, and ~place stands for the number of queues. None if it
        is not for this path.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        groove, sender = self._grooves.get((topic, durability)) or self._groove(topic, durability), self._sender
        if (
            groove is None or (lane := groove[0]).under_way or lane.gathering is not None or lane.ready or lane.is_held
            or simple_size(message.body, message.key, min(sender.body_bytes_max, _BODY_BYTES_MAX), TEXT_MAX) < 0
        ):  # fmt: skip
            self.left += 1
            return None
        route, now, place = self._route_of(topic), self._monotonic(), ANY
        if not self._is_single:
            place = self._place(topic, lane)
        connection = self._router.link_for(topic, place) if place >= ANY else None
        if (
            route is None or now - route.fetched_at >= FRESH_SECONDS or route.is_priority
            or connection is None or (deadline is not None and deadline - now < LONE_SECONDS)
        ):  # fmt: skip
            self.left += 1
            return None
        if not (
            message.tag is None and message.business_id is None and message.priority == DEFAULT_PRIORITY
            and message.properties is None
        ):  # fmt: skip
            check_message(topic, message, sender.body_bytes_max)
        return groove, connection, route.queues if place < 0 else ~place, now

    def _place(self, topic: str, lane: Lane) -> int:
        """The place whose turn it is; less than ANY if there is none now."""
        route = self._route_of(topic)
        places = self._router.reachable(topic, route.queues) if route is not None else ()
        return places[lane.turn % len(places)] if places else ANY - 1

    def _groove(self, topic: str, durability: DurabilityName) -> Groove | None:
        """What the messages of a topic have in common, if the first one has been sent."""
        lane = self._core.plain_lane(topic, durability)
        if lane is None or lane.key.durability not in _ALONE:
            return None
        front = bytes((0x90 | _FIELDS,)) + encode_header(topic)
        header_bytes = len(front) + _REST.size
        frame_bytes = REST_BYTES + header_bytes + CRC_BYTES
        groove = Groove(lane, front, int(lane.key.durability), header_bytes, frame_bytes=frame_bytes)
        self._grooves[topic, durability] = groove
        return groove

    @quickened("quick_prepare")
    def _prepare(self, topic: str, message: Message) -> Prepared:
        """What a message gives to its request.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        if _lone_frame is not None:
            shaped = self._encoder.shape_lone(topic, message)
            if shaped is not None:
                return shaped[0], message.body, shaped[1], self._now_ms()
        body, keys = self._encoder.encode_lone(topic, message)
        return None, body, None, keys

    def note_answer(self, lone: Lone, began: float) -> None:
        """A message that was begun at this moment is stored, by a shard of a cluster."""
        now = self._monotonic()
        self._router.health.answered(place_shard(lone[0]), now - began, now)

    @quickened("quick_stored", Receipt, MessageId, DURABILITY_NAMES)
    def stored(self, lane: Lane, lone: Lone, reply: Reply) -> Receipt | SendBatch:
        """A message is stored: its receipt, or its batch if somebody waits for its end."""
        self.taken += 1
        queue, offset, level = reply
        with self._sender.lock:
            batch = None if self._accumulator.end_lone(lane, lone) else self._accumulator.take_stand_in(lane)
        if batch is None:
            message_id = _new(MessageId, (lane.stream.producer_id, lone[1]))
            if lone[0] > _QUEUE:
                shard = place_shard(lone[0])
                return Receipt(message_id, lane.place, queue, offset, durability=DURABILITY_NAMES[level], shard=shard)
            return Receipt(message_id, lane.place, queue, offset, durability=DURABILITY_NAMES[level])
        self._sender.stored(batch, ProduceReply(queue, offset, 0, Durability(level)))
        return batch

    def late_batch(self, groove: Groove, sent: Outgoing, connection: C) -> SendBatch:
        """The batch that a message is from now on, in the sender's care unless it has ended."""
        self.late += 1
        with self._sender.lock:
            batch = self._accumulator.take_stand_in(groove[0])
        if not batch.is_done:  # as it is if the producer was closed meanwhile
            _, batch.deadline, batch.sent_at = sent
            self._entrust(batch, groove, sent[0], connection)
        return batch

    def _entrust(self, batch: SendBatch, groove: Groove, frame: bytes, connection: C) -> None:
        """Give a batch what the sender needs to send it again, and let it look after it."""
        batch.key_count = frame[HEAD_BYTES + groove.header_bytes - _REST.size + _KEYS_AT]
        batch.body = (frame[HEAD_BYTES + groove.header_bytes : -CRC_BYTES],)
        batch.broker = connection.address
        self._sender.watch(batch, connection)


class StraightPath(LonePath[Connection]):
    """The straight path of one producer of a blocking program."""

    def send(
        self, topic: str, message: Message, durability: DurabilityName, deadline: float
    ) -> Receipt | SendBatch | None:
        """Send a message and wait a while for its answer: its receipt, or the batch that it is after all.

        None if nothing was done.

        Parameters:
            message: one that may go to any queue at once.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        found = self._find(topic, message, durability, deadline)
        if found is None:
            return None
        groove, connection, queues, now = found
        prepared = self._prepare(topic, message)
        correlation = connection.lead()
        if not correlation:
            return self._follow(
                groove, (prepared, len(message.body) + MESSAGE_BYTES, queues), connection, (deadline, now)
            )
        lane, lone, frame = groove[0], None, b""
        reply: Reply | None = None
        try:
            with self._sender.lock:
                if self._sender.closed_by is None:
                    lone = self._accumulator.take_lone(lane, len(message.body) + MESSAGE_BYTES, queues)
            if lone is None:
                self.left += 1
                return None
            frame = request_of(groove, lone, correlation, prepared)
            data = connection.converse(frame)
            if data is not None:
                reply = _quick_reply(data, correlation) or _first_reply(data, correlation, connection)
            if reply is None:
                return self._be_late(groove, (frame, deadline, now), connection, (correlation, data))
        except BaseException:  # of a signal's handler
            if lane.lone is not None:
                frame = frame or request_of(groove, lane.lone, correlation, prepared)
                self._be_late(groove, (frame, deadline, now), connection, _INTERRUPTED)
            raise
        finally:
            connection.leave()
        if not self._is_single:
            self.note_answer(lone, now)
        return self.stored(lane, lone, reply)

    def send_batch(
        self, topic: str, messages: Sequence[Message], durability: DurabilityName, deadline: float
    ) -> SendBatch | None:
        """Send messages of `send_many` as one batch, and wait a while for its answer. None if nothing was done.

        Parameters:
            messages: no more than one batch takes.
        """
        found = self._find(topic, _PLAIN, durability, deadline)
        if found is None:
            return None
        try:
            columns = plain_columns(messages)
        except AttributeError:  # one is not a message
            return None
        if columns is None or columns[2] > self._core.many_bytes():
            self.left += 1
            return None
        groove, connection, queues, now = found
        correlation = connection.lead()
        if not correlation:
            self.left += 1
            return None
        batch, reply = SendBatch(groove[0]), None
        try:
            if not self._number_batch(batch, columns, queues):
                self.left += 1
                return None
            batch.sent_at, batch.deadline, batch.broker = now, deadline, connection.address
            data = connection.converse(*self._batch_frame(batch, correlation, now))
            if data is not None:
                reply = _quick_reply(data, correlation) or _first_reply(data, correlation, connection)
            if reply is None:
                self._leave_batch(batch, connection, (correlation, data))
        except BaseException:  # of a signal's handler
            if batch.first_sequence >= 0 and reply is None and batch.pending is None:
                self._leave_batch(batch, connection, _INTERRUPTED)
            raise
        finally:
            connection.leave()
        if reply is not None:
            self._batch_stored(batch, reply)
        return batch

    def _number_batch(self, batch: SendBatch, columns: PlainColumns, queues: int) -> bool:
        """Encode a batch and give it its place; False if it is not for this path."""
        sender = self._sender
        self._core.fill_columns(batch, columns)
        batch.is_kept = True
        try:
            sender.encode(batch)
        except DMQError:
            return False  # the general way says which message is wrong
        assert batch.body is not None
        if sum(map(len, batch.body)) > sender.frame_bytes_max - _HEADER_BYTES_MAX:
            return False
        with sender.lock:
            return sender.closed_by is None and self._accumulator.take_batch(batch, queues)

    def _batch_frame(self, batch: SendBatch, correlation: int, now: float) -> Sequence[Buffer]:
        assert batch.body is not None
        header = header_of(batch, now)
        return seal_frame(request_head(_PRODUCE, header, correlation, sum(map(len, batch.body))), *batch.body)

    def _batch_stored(self, batch: SendBatch, reply: Reply) -> None:
        self.taken += 1
        queue, offset, level = reply
        sender, answer = self._sender, ProduceReply(queue, offset, 0, Durability(level))
        with sender.lock:
            is_over = self._is_single and sender.closed_by is None and self._accumulator.end_batch(batch)
        if is_over:
            batch.body = None
            batch.end(answer, None)
        else:
            sender.stored(batch, answer)

    def begin(
        self, topic: str, message: Message, durability: DurabilityName, on_delivery: Callable[..., Any] | None = None
    ) -> SendBatch | None:
        """Have a message of `send_async` leave at once: the batch that it is. None if nothing was done.

        Parameters:
            on_delivery: called as `Outcome.tell` does once the outcome is known.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        found = self._find(topic, message, durability, None)
        if found is None:
            return None
        groove, connection, queues, now = found
        prepared, correlation, sender = self._prepare(topic, message), connection.claim(), self._sender
        lone = None
        with sender.lock:
            if correlation and sender.closed_by is None:
                lone = self._accumulator.take_lone(groove[0], len(message.body) + MESSAGE_BYTES, queues)
            if lone is None:
                self.left += 1
                return None
            batch = self._accumulator.take_stand_in(groove[0])
        if on_delivery is not None:  # before its answer can come: it is not for this thread to call
            batch.add_callback(partial(batch.tell, 0, on_delivery))
        batch.is_attended, batch.sent_at, batch.deadline = True, now, now + self._give_up_after
        try:
            frame = request_of(groove, lone, correlation, prepared)
            self._entrust(batch, groove, frame, connection)
            batch.pending = connection.ask(
                correlation, frame, lambda came: sender.answered(batch, connection, came), attended=True
            )
        except DMQError as error:  # the connection is closed
            sender.answered(batch, connection, error)
        except BaseException:  # of a signal's handler
            if batch.body is None:
                self._entrust(batch, groove, request_of(groove, lone, correlation, prepared), connection)
            sender.answered(batch, connection, NotConnected("it is not known whether the message went out"))
            raise
        self.taken += 1
        return batch

    def _follow(
        self, groove: Groove, asked: tuple[Prepared, int, int], connection: Connection, times: tuple[float, float]
    ) -> Receipt | SendBatch | None:
        """`send` while another thread reads: it hands the answer over.

        Parameters:
            asked: what the message gives to its request, its size for the window, and how many queues there are.
            times: its deadline, and when it was begun.
        """
        (prepared, size, queues), (deadline, now), lane = asked, times, groove[0]
        lone, correlation = None, connection.claim()
        if correlation:
            with self._sender.lock:
                if self._sender.closed_by is None:
                    lone = self._accumulator.take_lone(lane, size, queues)
        if lone is None:
            self.left += 1
            return None
        following = _Following(self, groove, lone, connection)
        try:
            following.sent = (request_of(groove, lone, correlation, prepared), deadline, now)
            following.pending = connection.ask(correlation, following.sent[0], following.answered)
            connection.until(following.waiter, following.has_outcome, now + LONE_SECONDS)
        except DMQError as error:  # the connection is closed
            following.answered(error)
        finally:  # also of a signal's handler
            if following.outcome is None:
                following.sent = following.sent or (request_of(groove, lone, correlation, prepared), deadline, now)
                following.give_up()
        return following.outcome

    def _be_late(
        self, groove: Groove, sent: Outgoing, connection: Connection, answer: tuple[int, bytes | None]
    ) -> SendBatch:
        """Leave a message to the general way, with whatever came instead of its answer."""
        batch = self.late_batch(groove, sent, connection)
        if not batch.is_done:
            self._hand_over(batch, connection, answer)
        return batch

    def _leave_batch(self, batch: SendBatch, connection: Connection, answer: tuple[int, bytes | None]) -> None:
        """Leave a batch that may have gone out to the general way, with whatever came instead of its answer."""
        self.late += 1
        if not batch.is_done:  # as it is if the producer was closed meanwhile
            self._sender.watch(batch, connection)
            self._hand_over(batch, connection, answer)

    def _hand_over(self, batch: SendBatch, connection: Connection, answer: tuple[int, bytes | None]) -> None:
        """Have the sender wait for the answer of a batch."""
        sender, (correlation, data) = self._sender, answer
        if not correlation:
            sender.answered(batch, connection, NotConnected("it is not known whether the message went out"))
            return
        try:
            batch.pending = connection.expect(correlation, lambda came: sender.answered(batch, connection, came))
        except DMQError as error:  # the connection is closed
            sender.answered(batch, connection, error)
            return
        if data is not None:
            connection.hear(data)


class _Following:
    """One message that is under way while another thread reads.

    Attributes:
        outcome: its receipt, or the batch that it is after all; None as long as neither is known.
    """

    __slots__ = ("_connection", "_groove", "_lone", "_path", "outcome", "pending", "sent", "waiter")

    def __init__(self, path: StraightPath, groove: Groove, lone: Lone, connection: Connection) -> None:
        self._path = path
        self._groove = groove
        self._lone = lone
        self._connection = connection
        self.sent: Outgoing | None = None
        self.pending: Pending | None = None
        self.outcome: Receipt | SendBatch | None = None
        self.waiter: Final = Waiter()

    def has_outcome(self) -> bool:
        return self.outcome is not None

    def answered(self, came: Frame | DMQError) -> None:
        """Its answer, or what broke the connection; called by the thread that reads."""
        if self.outcome is not None:
            return  # it was given up before we knew how to tell its answer to anybody: it goes out again
        reply = plain_reply(came) if type(came) is Frame else None
        if reply is not None:
            self.outcome = self._path.stored(self._groove.lane, self._lone, reply)
        else:
            self._be_late()(came)
        self.waiter.wake()

    def give_up(self) -> None:
        """Leave it to the general way, unless its answer is being handed over: then that is waited for."""
        if self.pending is None:
            self._be_late()(NotConnected("it is not known whether the message went out"))
        elif not self._connection.redirect(self.pending, self._be_late):
            while self.outcome is None:
                self.waiter.wait(LONE_SECONDS)

    def _be_late(self) -> OnAnswer:
        """Make it a batch: what is then done with its answer."""
        assert self.sent is not None
        connection, answered = self._connection, self._path.answered
        self.outcome = batch = self._path.late_batch(self._groove, self.sent, connection)
        batch.pending = self.pending
        return lambda came: None if batch.is_done else answered(batch, connection, came)


_lone_frame: Final = find("lone_frame")
_lone_answer: Final = find("lone_answer")


@quickened("quick_request_of")
def request_of(groove: Groove, lone: Lone, correlation: int, prepared: Prepared) -> bytes:
    """The frame of a request."""
    lane, front, level, header_bytes, frame_bytes = groove
    shape, body, key, number = prepared
    producer_id = lane.stream.producer_id
    if shape is not None:
        numbers = (correlation, lone[0] & _QUEUE, producer_id, lone[1], level, number)
        return _lone_frame(front, shape, body, key, numbers=numbers)  # type: ignore[no-any-return]
    head = _pack_head(frame_bytes + len(body), WIRE_FORMAT, _REQUEST, _PRODUCE, 0, 0, correlation, header_bytes)
    rest = _pack_rest(0xCC, lone[0] & _QUEUE, 1, number, 0xCF, producer_id, 0, 0xCF, lone[1], level)
    frame = b"".join((head, front, rest, body))
    return frame + _pack_crc(crc32c(frame))


def reply_of(data: bytes, correlation: int) -> Reply | None:
    """The answer to a request that went well, if these bytes are it and nothing else."""
    if _lone_answer is not None and (answer := _lone_answer(data, correlation)) is not None:
        return answer  # type: ignore[no-any-return]
    return reply_plain(data, correlation)


def _first_reply(data: bytes, correlation: int, connection: Connection) -> Reply | None:
    """The same if more came with it, as the push of the message to a consumer of this client: that is heard then."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
    reply = reply_of(data[:end], correlation)
    if reply is not None and end < len(data):
        connection.hear(data[end:])
    return reply


def reply_plain(data: bytes, correlation: int) -> Reply | None:
    """The same in plain Python."""
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
    return _decoded(data[HEAD_BYTES : HEAD_BYTES + header_bytes])


def _decoded(header: bytes | memoryview) -> Reply | None:
    try:
        reply = _decode_reply(header)
    except UNREADABLE:
        return None
    return reply.queue, reply.first_offset, int(reply.durability)


_quick_reply: Final = reply_plain if _lone_answer is None else _lone_answer


def plain_reply(frame: Frame) -> Reply | None:
    """The same of a frame."""
    return None if frame.status or frame.command != _PRODUCE else _decoded(frame.header)
