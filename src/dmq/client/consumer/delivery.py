"""A delivery: one lease with its messages, and what was said of each.

Messages are made by the million, so a message is only (delivery, index), and everything about it is looked up when
asked for: in the record's bytes, or in columns that many messages share.

What always holds: a message waits, is taken, or is settled, and only goes forwards; it is settled once, by the first
call; ranges that are reported name exactly the offsets that were settled, since an ack that comes too late counts for
all that it names. State is changed under the lock of its consumer only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dmq.client.consumer.options import ConsumerOptions
from dmq.client.producer.encoder import decode_body
from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import MessageId
from dmq.offset_runs import offset_runs
from dmq.protocol import Buffer
from dmq.protocol.batch import FEW
from dmq.protocol.consume import Lease, Outcome
from dmq.records import RecordView
from dmq.records.block import BodyBlocks
from dmq.records.check import checked_bodies, many_bodies
from dmq.records.columns import NO_SPAN, NOTHING, Spans, find_spans, have_bodies, key_in_place, open_push, open_records
from dmq.records.layout import (
    BLOCK,
    BODY_AT,
    COMPRESSED,
    FLAGS_AT,
    MOVED,
    PRIORITY_AT,
    QUEUE_OFFSET_AT,
    REPLAYED,
    U32,
    U64,
)

__all__ = [
    "SETTLED",
    "TAKEN",
    "WAITING",
    "Bounds",
    "Delivery",
    "Holder",
    "LeaseKey",
    "is_all",
    "is_one_run",
    "packed_flags",
    "plain_delivery",
]

Bounds: TypeAlias = list[int] | npt.NDArray[np.int64]
LeaseKey: TypeAlias = tuple[int, str, int, int, int]  # broker, topic, queue, epoch, number

WAITING: Final = 0
TAKEN: Final = 1
SETTLED: Final = 2

_NOTHING: Final[Mapping[int, str]] = MappingProxyType({})

# From this many records on, finding all spans at once is cheaper than looking at one record after another.
_MANY: Final = 16
_SMALL_BYTES: Final = 4096  # of a record, on average
_MISSING: Final = object()


class Holder(Protocol):
    """What a delivery and its messages ask of the consumer that has them in hand."""

    @property
    def options(self) -> ConsumerOptions: ...

    @property
    def extend(self) -> Callable[[Delivery, float], object]: ...

    def is_settled(self, delivery: Delivery, index: int) -> bool: ...

    def ack(self, delivery: Delivery, index: int) -> None: ...

    def settle(
        self, delivery: Delivery, index: int, outcome: Outcome, delay_ms: int = ..., reason: str = ...
    ) -> None: ...

    def settle_many(
        self, delivery: Delivery, indexes: Sequence[int], outcome: Outcome, delay_ms: int = ..., reason: str = ...
    ) -> None: ...


class Delivery:
    """One lease. Made when its frame arrives; kept alive by its messages.

    Parameters:
        core: whose it is, told when a message is settled.
        broker: the number of the broker it came from, within the consumer.
        lease: as the broker said it.
        buffer: all records of the frame.
        bounds: where the records of this lease begin in it, and where the last one ends; an array if they are many.
    """

    __slots__ = (
        "_decoded",
        "_offsets",
        "_records",
        "_run_ends",
        "acks",
        "attempt",
        "blocks",
        "bodies",
        "bounds",
        "broker",
        "buffer",
        "core",
        "corrupt",
        "count",
        "deadline",
        "failed",
        "is_dirty",
        "is_packed",
        "is_pulled",
        "is_unopened",
        "keys",
        "lease",
        "left",
        "others",
        "shard",
        "spans",
        "starts",
        "states",
        "waiting",
    )

    deadline: float
    """When the lease is over, by the client's monotonic clock."""

    def __init__(self, core: Holder, broker: int, lease: Lease, buffer: bytes, bounds: Bounds) -> None:
        self.core = core
        self.broker = broker
        self.shard = 0  # the number of the broker's shard
        self.lease = lease
        self.buffer = buffer
        self.bounds = bounds
        self.starts: list[int] = bounds.tolist() if isinstance(bounds, np.ndarray) else bounds
        self.count = count = len(bounds) - 1
        self.attempt = lease.attempt
        self.states = bytearray(count)
        self.left = count  # not settled
        self.waiting = count
        self.acks: list[int] = []  # settled, and not reported yet
        self.others: list[tuple[int, int, int, str]] = []  # the same for all but acks: index, outcome, delay, reason
        self.failed: set[int] = set()  # of an ordered group, given back: nothing behind them may be handled
        self.is_dirty = False
        self.is_pulled = False
        self.corrupt: Mapping[int, str] = _NOTHING  # those that cannot be read, by index, and why: not for a user
        self.is_packed = True  # a body may be compressed, until the flags of the records were looked at
        self.blocks: BodyBlocks | None = None  # if bodies stand in some
        self.is_unopened = False  # bodies stand in blocks, all can be taken out, and are when somebody wants one
        self.bodies: list[Any] | None = None  # if they are at hand as they were sent
        self.keys: list[str | None] | None = None  # the same
        self._decoded: dict[int, Any] = {}
        self._records: list[RecordView | None] | None = None
        self.spans: Spans | None = None  # of bodies and keys, once somebody looks at one and there are many
        self._offsets: list[int] | None = None
        self._run_ends: list[int] | None = None

    @property
    def key(self) -> LeaseKey:
        """What names the lease."""
        lease = self.lease
        return self.broker, lease.topic, lease.queue, lease.epoch, lease.lease

    @property
    def place(self) -> tuple[int, str, int]:
        """The queue that it is of."""
        return self.broker, self.lease.topic, self.lease.queue

    # --- the records ------------------------------------------------------------------------------------------------

    def record(self, index: int) -> RecordView:
        """The record of a message, made once.

        Raises:
            RecordCorrupt: the bytes are not a record.
        """
        records = self._records
        if records is None:
            records = self._records = [None] * self.count
        record = records[index]
        if record is None:
            starts = self.starts
            record = records[index] = RecordView(self.buffer, starts[index], starts[index + 1])
        return record

    def body(self, index: int) -> Any:
        """A message's body, as it was sent or as an object of the consumer's type."""
        type_ = self.core.options.type
        if type_ is not None:
            decoded = self._decoded.pop(index, _MISSING)
            return decode_body(type_, self.raw_body(index)) if decoded is _MISSING else decoded
        if self.is_unopened and self._open_now():
            assert self.bodies is not None
            return self.bodies[index]
        self._look_at_many()
        return self.raw_body(index)

    def check_bodies(self) -> bool:
        """Whether all bodies match their checksums. Small ones are kept then, and those out of blocks: they had to be
        taken out for that."""
        is_plain = self.core.options.type is None and not self.is_packed
        is_kept = is_plain and (self.blocks is not None or len(self.buffer) <= self.count * _SMALL_BYTES)
        if is_kept and self._open_all(is_checked=True):
            return True
        bodies = checked_bodies(self.buffer, self.bounds, self.blocks)
        if bodies is None:
            return False
        if is_kept:
            self.bodies = bodies
        return True

    def open_blocks(self) -> bool:
        """See that all bodies can be taken out of their blocks, whose checksums stand for theirs; False if a block
        cannot be read. It is expanded then; bodies are taken out when they are wanted, which a program that pulls does
        while the broker gathers the next batch."""
        is_plain = self.core.options.type is None and not self.is_packed
        if is_plain and have_bodies is not None and self.blocks is not None:
            self.is_unopened = have_bodies(self.buffer, self.starts, self.blocks.expanded)
            if self.is_unopened:
                return True
        if not isinstance(self.bounds, np.ndarray):
            return self.check_bodies()
        bodies = many_bodies(self.buffer, self.bounds[:-1], self.blocks)
        if bodies is None:
            return False
        if is_plain:
            self.bodies = bodies
        return True

    def why_unreadable(self, index: int) -> str:
        """Why a body does not expand, or is not of the consumer's type; "" if it is as it should be.

        What was made of it is kept: the object for the first who asks for it, and what was expanded with its record.
        """
        type_ = self.core.options.type
        try:
            if type_ is not None:
                self._decoded[index] = decode_body(type_, self.raw_body(index))
            elif self.buffer[self.starts[index] + FLAGS_AT] & COMPRESSED:
                self.raw_body(index)
        except (InvalidMessage, RecordCorrupt) as error:
            return error.message
        except Exception:
            pass  # the mistake is not in the body; the caller that asks for the attribute learns of it
        return ""

    def _look_at_many(self) -> None:
        """Find all spans at once; not where bodies are typed, since what has a span is taken for the body itself."""
        if self.spans is None and self.count >= _MANY and self.core.options.type is None:
            self.spans = find_spans(self.buffer, self.bounds)

    def _open_all(self, *, is_checked: bool) -> bool:
        """Take all bodies and keys out by a compiled loop; False if there is none, or it cannot."""
        opened = self._opened(0, self.count, is_checked=is_checked)
        if opened is None:
            return False
        self.bodies, self.keys = opened
        return True

    def _open_now(self) -> bool:
        """Take all bodies and keys out of their blocks, since one is wanted by itself; tried once."""
        self.is_unopened = False
        return self._open_all(is_checked=False)

    def _opened(self, first: int, stop: int, *, is_checked: bool) -> tuple[list[bytes], list[str | None]] | None:
        if open_records is None:
            return None
        expand = None if self.blocks is None else self.blocks.expanded
        return open_records(self.buffer, self.starts, first, stop, expand=expand, is_checked=is_checked)

    def columns(self, block: range) -> tuple[list[bytes], Iterable[str | None]] | None:
        """Bodies and keys of messages that follow each other; None if they are to be read one by one."""
        first, stop = block.start, block.stop
        if self.bodies is not None and self.keys is not None:
            return self.bodies[first:stop], self.keys[first:stop]
        if self.bodies is None and not self.is_packed and self.core.options.type is None:
            opened = self._opened(first, stop, is_checked=False)
            if opened is not None:
                return opened
        self._look_at_many()
        if self.spans is None or (self.bodies is None and not self.spans.has_bodies):
            return None
        ends, key_starts, key_ends, _ = self.spans
        buffer, key_stops = self.buffer, key_ends[first:stop]
        keys: Iterable[str | None]
        if NO_SPAN not in key_stops:
            try:
                keys = [buffer[at:end].decode() for at, end in zip(key_starts[first:stop], key_stops, strict=True)]
            except UnicodeDecodeError:
                return None  # told when somebody asks for that one
        elif key_starts[first:stop].count(NOTHING) == len(block):
            keys = repeat(None)
        else:
            return None
        if self.bodies is not None:
            return self.bodies[first:stop], keys
        # A body begins behind the fixed part of its record.
        starts = self.starts[first:stop]
        return [buffer[at + BODY_AT : end] for at, end in zip(starts, ends[first:stop], strict=True)], keys

    def raw_body(self, index: int) -> bytes:
        """A message's body, as it was sent."""
        buffer, start = self.buffer, self.starts[index]
        at = start + BODY_AT
        end: int = at + U32.unpack_from(buffer, at - 4)[0]
        flags = buffer[start + FLAGS_AT]
        if flags & BLOCK and self.blocks is not None:
            return self.blocks.body(start)
        if flags & COMPRESSED or end >= self.starts[index + 1]:
            return self.record(index).body
        return buffer[at:end]

    def key_of(self, index: int) -> str | None:
        """A message's key."""
        if self.is_unopened and self._open_now():
            assert self.keys is not None
            return self.keys[index]
        if self.count >= _MANY:
            self._look_at_many()
        if self.spans is not None and self.spans.key_starts[index] == NOTHING:
            return None
        start, stop = self.starts[index], self.starts[index + 1]
        return key_in_place(self.buffer, start, stop) or self.record(index).key

    def priority(self, index: int) -> int:
        return self.buffer[self.starts[index] + PRIORITY_AT]

    def priorities(self) -> bytes:
        """The priorities of all messages."""
        buffer, bounds = self.buffer, self.bounds
        if isinstance(bounds, np.ndarray):
            return np.frombuffer(buffer, np.uint8)[bounds[:-1] + PRIORITY_AT].tobytes()
        if self.count == 1:
            at = bounds[0] + PRIORITY_AT
            return buffer[at : at + 1]
        return bytes([buffer[start + PRIORITY_AT] for start in bounds[:-1]])

    def offset(self, index: int) -> int:
        """A message's queue offset, where it stands now."""
        lease = self.lease
        if lease.end_offset - lease.first_offset == self.count:
            return lease.first_offset + index
        return self.offsets()[index]

    def offsets(self) -> Sequence[int]:
        """The queue offsets of all messages."""
        lease = self.lease
        if lease.end_offset - lease.first_offset == self.count:
            return range(lease.first_offset, lease.end_offset)
        if self._offsets is None:
            unpack, buffer = U64.unpack_from, self.buffer
            self._offsets = [unpack(buffer, start + QUEUE_OFFSET_AT)[0] for start in self.starts[:-1]]
        return self._offsets

    # --- ids --------------------------------------------------------------------------------------------------------

    def is_moved(self, index: int) -> bool:
        """Whether the message was moved: its record then says what it was before."""
        return bool(self.buffer[self.starts[index] + FLAGS_AT] & MOVED)

    def message_id(self, index: int) -> MessageId | None:
        """A message's id; None if the broker is too old to tell."""
        if self.is_moved(index):
            return self.record(index).message_id
        ids = self.lease.ids
        ends = self._run_ends
        if ends is None:
            ends = self._run_ends = list(accumulate(run[0] for run in ids))
        at = bisect_right(ends, index)
        if at >= len(ends):
            return None
        count, producer, first = ids[at]
        return MessageId(producer, first + index - (ends[at] - count)) if producer else None

    def attempt_of(self, index: int) -> int:
        """Which attempt this is; what was tried before a move counts too, and before it was a dead letter."""
        if self.lease.topic and self.is_moved(index):
            said = self.record(index).attributes
            return self.attempt + (said.attempt or 0) + (said.attempts_before or 0)
        return self.attempt

    def replay_of(self, index: int) -> str | None:
        """The replay that brought a message back; None if none did."""
        if self.buffer[self.starts[index] + FLAGS_AT] & REPLAYED:
            return self.record(index).attributes.replay
        return None

    def _turn_of(self, index: int) -> int:
        """The attempt, as far as duplicates go: one of a replay is another than the same one before it."""
        replay = self.replay_of(index)
        attempt = self.attempt_of(index)
        return attempt if replay is None else attempt | (crc32(replay.encode()) + 1) << 32

    def id_runs(self, indexes: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
        """The ids of some messages, rising, as runs of (producer, attempt, first sequence, one past the last)."""
        first = 0
        for count, producer, sequence in self.lease.ids:
            last = first + count
            if producer:
                shift = sequence - first
                if len(indexes) == self.count:
                    yield producer, self.attempt, sequence, sequence + count
                else:
                    mine = indexes[bisect_left(indexes, first) : bisect_left(indexes, last)]
                    for start, stop in offset_runs(mine):
                        yield producer, self.attempt, start + shift, stop + shift
            else:
                for index in indexes[bisect_left(indexes, first) : bisect_left(indexes, last)]:
                    found = None if index in self.corrupt else self.message_id(index)
                    if found is not None:
                        yield found.producer_id, self._turn_of(index), found.sequence, found.sequence + 1
            first = last

    def ranges(self, indexes: Sequence[int]) -> list[tuple[int, int]]:
        """The offsets of some messages, rising, as runs of (first, count)."""
        lease = self.lease
        if lease.end_offset - lease.first_offset == self.count:
            return [(lease.first_offset + start, stop - start) for start, stop in offset_runs(indexes)]
        offsets = self.offsets()
        return [(start, stop - start) for start, stop in offset_runs([offsets[index] for index in indexes])]

    def __repr__(self) -> str:
        lease = self.lease
        return f"<Delivery {lease.epoch}/{lease.lease} of queue {lease.queue}, {self.left} of {self.count} left>"


def is_one_run(lease: Lease) -> bool:
    """Whether the messages of a lease follow each other, in the queue and in what one producer sent."""
    count, ids = lease.count, lease.ids
    return lease.end_offset - lease.first_offset == count and len(ids) == 1 and ids[0][0] == count and ids[0][1] != 0


def plain_delivery(core: Holder, broker: int, lease: Lease, body: Buffer) -> Delivery | None:
    """The only lease of a frame, with bodies and keys taken out and checked, where that takes no more than one look at
    each record: they are few and small, and stand as they were sent. None where it has to be looked at more closely.
    """
    count = lease.count
    if open_push is None or type(body) is not bytes or count >= FEW or len(body) > count * _SMALL_BYTES:
        return None
    opened = open_push(body, count)
    if opened is None:
        return None
    buffer, bounds, bodies, keys = opened
    delivery = Delivery(core, broker, lease, buffer, bounds=bounds)
    delivery.is_packed = False
    delivery.bodies, delivery.keys = bodies, keys
    return delivery


def packed_flags(buffer: bytes, bounds: Bounds) -> int:
    """Which flags of packed bodies any record has: `COMPRESSED` and `BLOCK`."""
    if isinstance(bounds, np.ndarray):
        flags = np.frombuffer(buffer, np.uint8).take(bounds[:-1] + FLAGS_AT, mode="clip")
        return int(np.bitwise_or.reduce(flags)) & (COMPRESSED | BLOCK)
    found = 0
    for start in bounds[:-1]:
        found |= buffer[start + FLAGS_AT]
    return found & (COMPRESSED | BLOCK)


def is_all(states: bytearray, state: int, indexes: Sequence[int]) -> bool:
    """Whether messages that follow each other are all in one state; False if they do not."""
    return isinstance(indexes, range) and states.count(state, indexes.start, indexes.stop) == len(indexes)
