"""The straight path of a plain PRODUCE: from the frame's bytes to the unit's, and to those of the answer.

A message that is sent by itself spends most of its time between steps, not in them. Here the steps follow each other,
without the objects that the general way (`publisher`, `writer`) makes. What comes in one turn of the loop, over all
connections, is one unit here as well. While turns have one message each, most messages are written as they come. Such
a message is answered once it is in the journal, and then applied to what is derived: its sender does not wait for that.

What always holds: it chooses and never decides. `Publisher.admit` says for both ways whether a producer may send; what
it refuses, and all that is unusual, takes the general way. A turn takes one way as a whole. It ends when the unit is
written: what is waited for after that is a matter of the writer's one completion queue. Every request is counted, in
`taken`, or in `left` with its reason; STATS has them as `broker_straight` and `broker_straight_left_<reason>`.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from dmq.broker.catalog.changes import Changes, Later
from dmq.broker.journal.writer import JournalWriter, Submission
from dmq.broker.publish.publisher import BATCH_BYTES, Publisher, PublishRequest
from dmq.compiled import find
from dmq.errors import DMQError, InvalidRequest, StorageError
from dmq.model import Durability
from dmq.net.connection import Connection
from dmq.protocol.batch import LONE_KEY, unpack_batch
from dmq.protocol.commands import Command, sealed_produce_answer
from dmq.protocol.frame import CRC_BYTES, HEAD_BYTES, Frame, Kind, Whole
from dmq.protocol.header import UNREADABLE
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.records.attributes import ANY_QUEUE
from dmq.records.check import are_right, check_batch
from dmq.records.layout import RECORD_BYTES_MIN
from dmq.storage.journal.unit import Unit
from dmq.storage.journal.unit_draft import Batch, Placement, sender_of
from dmq.storage.journal.unit_writer import Lone, Sender, Unusual
from dmq.storage.store import MessageStore

__all__ = ["REASONS", "Caller", "StraightPath", "sender_at"]

# Why a request took the general way; docs/guide/monitoring.md explains each.
REASONS: Final = (
    "header", "batch", "special", "order", "durability", "change", "refused", "limits", "content", "busy", "mixed",
    "topic", "resend", "disk", "segment", "size",
)  # fmt: skip

_PRODUCE: Final = int(Command.PRODUCE)
_REQUEST: Final = int(Kind.REQUEST)
_STORED: Final = Durability.STORED
_FLUSHED: Final = Durability.FLUSHED
_REPLICATED: Final = Durability.REPLICATED
_BLOCKS: Final = int(ProduceFlag.BLOCKS)
# The first byte of a header with all fields that are known here, and no more; arrays of 16 and more begin otherwise.
_FIELDS: Final = 0x90 | len(Produce.__struct_fields__)
_decode: Final = msgspec.msgpack.Decoder(Produce).decode
_unpack_length: Final = struct.Struct(">I").unpack_from
_unpack_key: Final = LONE_KEY.unpack_from


class Caller(Protocol):
    """The session of a producer."""

    connection: Connection
    counters: dict[str, int]
    sender: Sender

    @staticmethod
    def published(request: PublishRequest, placement: Placement | None, error: DMQError | None) -> None:
        """Answer a request of the general way, whose context is the session and the frame."""


# A request that was taken: who asked, what, and the correlation of its frame.
_Asked = tuple[Caller, Produce, int]


def sender_at(address: bytes, port: int) -> Sender:
    """Where a producer is, from its address as units keep it."""
    return Sender(address, port, *sender_of(address, port))


class StraightPath:
    """The straight path of one broker.

    Parameters:
        is_on: whether any request takes it.

    Attributes:
        taken: requests that took it to the end.
        left: those that did not, by reason.
    """

    def __init__(
        self, store: MessageStore, writer: JournalWriter, publisher: Publisher, changes: Changes, *, is_on: bool
    ) -> None:
        self.is_on = is_on
        self._store = store
        self._writer = writer
        self._publisher = publisher
        self._changes = changes
        self._lones: list[Lone] = []  # of this turn
        self._asked: list[_Asked] = []
        self._size = 0
        self.taken = 0
        self.left = dict.fromkeys(REASONS, 0)
        writer.straight = self

    # --- in -----------------------------------------------------------------------------------------------------------

    def take(self, session: Caller, frame: Whole) -> bool:
        """Take a PRODUCE whose frame is whole and right; False if the general way is to be taken, and nothing is done.

        Parameters:
            session: that of a connection with checksums.
        """
        whole, _, correlation, body_at = frame
        parsed = None if _lone_request is None else _lone_request(whole, body_at)
        if parsed is None:
            found = parse_plain(whole, body_at)
            if isinstance(found, str):
                return found != "many" and self._leave(found)
            asked, data, key_hash = found
        else:
            fields, data, key_hash = parsed
            asked = Produce(*fields)
        topic, durability, size = asked.topic, asked.durability, len(data)
        publisher, writer = self._publisher, self._writer
        if self._changes.under_way:
            return self._leave("change")
        try:
            place, rules = publisher.admit_plain(asked)
        except (DMQError, Later):
            return self._leave("refused")
        if rules is None:
            return self._leave("limits")
        if not are_right(data, (size,), rules):
            return self._leave("content")
        queue = asked.queue
        if queue == ANY_QUEUE and place.config.priority:
            return self._leave("special")
        is_now = writer.is_now(durability)
        if not is_now and not writer.put_lone(size + BATCH_BYTES):
            return self._leave("mixed" if writer.has_submissions else "busy")
        if queue == ANY_QUEUE:
            queue = publisher.choose_queue(place)
        session.counters["requests"] += 1
        lone: Lone = (
            topic, queue, data, key_hash, asked.producer_id, asked.producer_epoch, asked.first_sequence,
            publisher.wall_ms(), session.sender,
        )  # fmt: skip
        if is_now and durability <= _STORED:
            self._write_now(lone, (session, asked, correlation))
        else:
            self._add(lone, (session, asked, correlation))
            if is_now:
                writer.turn_now(size + BATCH_BYTES)
        return True

    def take_batch(self, session: Caller, frame: Frame) -> bool:
        """`take` for a PRODUCE with several messages that need only be stored, while requests come one by one.

        It is written as it comes, as a unit of its own, and made where it was received if there is room.
        """
        if frame.kind != _REQUEST:
            return False
        try:
            asked = _decode(frame.header)
        except UNREADABLE:
            return False  # the general way counts it as an error
        count, flags, publisher, writer = asked.count, asked.flags, self._publisher, self._writer
        if frame.header[0] > _FIELDS or count < 2 or frame.flags:
            return count > 1 and self._leave("header")
        if flags & ~_BLOCKS or (flags and not publisher.takes_blocks):
            return self._leave("special")
        if asked.durability > _STORED:
            return self._leave("durability")
        if self._changes.under_way:
            return self._leave("change")
        topic, queue = asked.topic, asked.queue
        try:
            place, rules = publisher.admit_plain(asked)
        except (DMQError, Later):
            return self._leave("refused")
        if rules is None:
            return self._leave("limits")
        if queue == ANY_QUEUE and place.config.priority:
            return self._leave("special")
        try:
            packed = unpack_batch(frame.body, count, asked.keys, blocks=flags != 0)
            check_batch(packed.data, packed.lengths, rules, packed.block_bytes)
        except DMQError as error:
            return self._leave("batch" if isinstance(error, InvalidRequest) else "content")
        if not writer.is_now(asked.durability):
            return self._leave("mixed" if writer.has_submissions else "busy")
        sender = session.sender
        batch = Batch(
            topic=topic,
            queue=publisher.choose_queue(place) if queue == ANY_QUEUE else queue,
            data=packed.data,
            lengths=packed.lengths,
            hash_index=packed.hash_index,
            hashes=packed.hashes,
            producer_id=asked.producer_id,
            producer_epoch=asked.producer_epoch,
            first_sequence=asked.first_sequence,
            previous_sequence=asked.previous_sequence,
            address=sender.address,
            port=sender.port,
            received_at_ms=publisher.wall_ms(),
            block_bytes=packed.block_bytes,
            room=frame.room,
        )
        session.counters["requests"] += 1
        try:
            self._store.append_batch(batch, _STORED, partial(self._answer_now, session, asked, frame.correlation))
        except (Unusual, DMQError) as unusual:
            self._submit(
                publisher.late_batch(asked, packed, batch, session.published, context=(session, frame)), unusual
            )
            return True
        self.taken += 1
        writer.units += 1
        publisher.count(topic, count, len(packed.data))
        writer.end_now()
        return True

    def _submit(self, request: PublishRequest, unusual: Exception) -> None:
        """Have a batch that could not be written as it came take the general way; it may have been changed in place."""
        if isinstance(unusual, StorageError):
            self.left["disk"] += 1
            self._writer.put_lone(request.size)
            self._writer.not_written([request], _STORED, unusual)
        else:
            self.left[unusual.reason if isinstance(unusual, Unusual) else "resend"] += 1
            self._writer.put(request)

    def _add(self, lone: Lone, asked: _Asked) -> None:
        self._size += len(lone[2]) + BATCH_BYTES
        self._lones.append(lone)
        self._asked.append(asked)

    def _leave(self, reason: str) -> bool:
        self.left[reason] += 1
        return False

    # --- through ------------------------------------------------------------------------------------------------------

    def _write_now(self, lone: Lone, asked: _Asked) -> None:
        """Write a message as it comes, and answer; if it is unusual, it has a turn like others."""
        writer, data, (session, request, correlation) = self._writer, lone[2], asked
        try:
            self._store.append_lone([lone], _STORED, partial(self._answer_now, session, request, correlation))
        except (Unusual, DMQError) as unusual:
            writer.put_lone(len(data) + BATCH_BYTES)
            if isinstance(unusual, StorageError):
                self.left["disk"] += 1
                writer.not_written(self._requests([lone], [asked]), _STORED, unusual)
            else:
                self._add(lone, asked)
            return
        self.taken += 1
        writer.units += 1
        self._publisher.count(lone[0], 1, len(data))
        writer.end_now()

    def _answer_now(self, session: Caller, asked: Produce, correlation: int, unit: Unit) -> None:
        """Answer a request as soon as it is stored: what is derived from it is not waited for."""
        row = unit.rows[0]
        answer = sealed_produce_answer(correlation, row[5], row[8], unit.start, durability=asked.durability)
        self._writer.answer_now(session.connection, answer, (asked.topic, row[5]))

    def write(self) -> int:
        """Write what was taken in this turn: what need not be flushed first, as the general way does.

        Returns how many messages that is.
        """
        lones, asked, size = self._lones, self._asked, self._size
        self._lones, self._asked, self._size = [], [], 0
        if not lones:
            return 0
        is_flushed = [asking[1].durability >= _FLUSHED for asking in asked]
        if not any(is_flushed):
            self._write(lones, asked, size, _STORED)
        elif all(is_flushed):
            self._write(lones, asked, size, _FLUSHED)
        else:
            for durability in (_STORED, _FLUSHED):
                chosen = [at for at, flushed in enumerate(is_flushed) if flushed == (durability is _FLUSHED)]
                size = sum(len(lones[at][2]) + BATCH_BYTES for at in chosen)
                chosen_lones, chosen_asked = [lones[at] for at in chosen], [asked[at] for at in chosen]
                self._write(chosen_lones, chosen_asked, size, durability)
        return len(lones)

    def _write(self, lones: list[Lone], asked: list[_Asked], size: int, durability: Durability) -> None:
        writer = self._writer
        try:
            unit = self._store.append_lone(lones, durability)
        except StorageError as error:
            self.left["disk"] += len(lones)
            writer.not_written(self._requests(lones, asked), durability, error)
        except (Unusual, DMQError) as unusual:
            self.left[unusual.reason if isinstance(unusual, Unusual) else "resend"] += len(lones)
            writer.write_each(self._requests(lones, asked), durability)
        else:
            self.taken += len(lones)
            writer.wait_for(unit.end, _StraightUnit(self, lones, asked, unit, size=size))

    def submissions(self) -> list[Submission]:
        """What was taken in this turn, for the general way; nothing is left."""
        requests = self._requests(self._lones, self._asked)
        self.left["mixed"] += len(requests)
        self._lones, self._asked, self._size = [], [], 0
        return [*requests]

    def _requests(self, lones: list[Lone], asked: list[_Asked]) -> list[PublishRequest]:
        """The same for the general way, built late."""
        requests = []
        for lone, (session, produce, correlation) in zip(lones, asked, strict=True):
            frame = Frame(_REQUEST, _PRODUCE, 0, 0, correlation=correlation, header=b"", body=b"")
            requests.append(self._publisher.late(produce, lone, session.published, (session, frame)))
        return requests

    # --- out ----------------------------------------------------------------------------------------------------------

    def answer(self, lones: list[Lone], asked: list[_Asked], unit: Unit) -> None:
        """The unit is as safe as was asked: count its messages, and answer."""
        start, count = unit.start, self._publisher.count
        for lone, (session, request, correlation), row in zip(lones, asked, unit.rows, strict=True):
            count(lone[0], 1, len(lone[2]))
            session.connection.send_sealed(
                sealed_produce_answer(correlation, row[5], row[8], start, durability=request.durability)
            )


class _StraightUnit(Submission):
    """A unit that is written, and the producers that wait for it."""

    __slots__ = ("_asked", "_lones", "_path", "_unit", "is_lone", "touched")

    def __init__(self, path: StraightPath, lones: list[Lone], asked: list[_Asked], unit: Unit, size: int) -> None:
        self.size = size
        self.is_lone = len(lones) == 1
        self.touched = {(lone[0], lone[1]) for lone in lones}
        self._path = path
        self._lones = lones
        self._asked = asked
        self._unit = unit

    @property
    def is_early(self) -> bool:  # type: ignore[override]
        return self._asked[0][1].durability < _FLUSHED

    def done(self, placements: list[Placement], error: DMQError | None) -> None:
        if error is None:
            self._path.answer(self._lones, self._asked, self._unit)
            return
        for request in self._path._requests(self._lones, self._asked):
            request.done([], error)


def parse_plain(whole: bytes, body_at: int) -> tuple[Produce, bytes, int] | str:
    """What a PRODUCE asks, its record and the hash of its key, if it has one message; else why it is not for `take`.

    "many" is one with another number of messages, which `take_batch` looks at.

    Parameters:
        whole: a request with its checksum, which is right.
        body_at: where its body begins.
    """
    try:
        asked = _decode(whole[HEAD_BYTES:body_at])
    except UNREADABLE:
        return "header"
    if whole[HEAD_BYTES] > _FIELDS:
        return "header"
    if asked.count != 1 or asked.flags or asked.previous_sequence is not None or asked.durability > _REPLICATED:
        return _why(asked)
    try:
        if asked.keys:
            size, index, key_hash = _unpack_key(whole, body_at)
            data = whole[body_at + LONE_KEY.size : -CRC_BYTES]
        else:
            (size,) = _unpack_length(whole, body_at)
            data, index, key_hash = whole[body_at + 4 : -CRC_BYTES], 0, 0
    except struct.error:
        return "batch"
    if asked.keys > 1 or index or len(data) != size or (asked.keys and not key_hash) or size < RECORD_BYTES_MIN:
        return "batch"
    return asked, data, key_hash


_lone_request: Final = find("lone_request")


def _why(asked: Any) -> str:
    """Why a request is not one for the straight path."""
    if asked.count != 1:
        return "many"
    if asked.flags:
        return "special"
    return "order" if asked.previous_sequence is not None else "durability"
