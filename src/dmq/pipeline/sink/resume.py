"""Resuming a write: what of a partition's rows a queue has from an attempt before.

For each place (a queue of a topic) a partition has a producer id of its own, made of its name, and numbers the rows
that go there. The broker knows the last number, so an attempt that begins again skips as many rows. It may do so only
if they are the same rows. The last record of each batch carries a mark, a `Digest` of all rows of the place until then;
rows that would be skipped are held until it has been compared. If it differs they are sent after all, under another
producer id: then some rows are there twice, and none is missing.

What always holds: a row is skipped only if the same row is stored; a place's numbers rise, and have no gaps within a
micro-batch. The same rows in the same order give the same digest, in however many pieces they come; a row more, less,
other or elsewhere gives another one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from dmq.errors import LimitReached
from dmq.event_log import EventLog
from dmq.pipeline.sink.encoder import Place, divide
from dmq.protocol.produce import ProducerState

__all__ = [
    "BATCH_ROWS_MAX",
    "HELD_BYTES_MAX",
    "BrokerMemory",
    "Course",
    "Digest",
    "NumberedRows",
    "Writer",
    "courses",
    "producer_id",
]

log = EventLog(__name__)


class Digest:
    """Over all rows so far: a CRC for each part of each column, since such a one just goes on with more bytes."""

    def __init__(self) -> None:
        self._crcs: dict[str, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Go on with more rows, of the same columns."""
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            for part, raw in _parts(column):
                key = f"{name} {part}"
                self._crcs[key] = crc32c(raw, self._crcs.get(key, 0))

    @property
    def value(self) -> int:
        """64 bits for all of it."""
        text = b"".join(key.encode() + struct.pack(">I", crc) for key, crc in sorted(self._crcs.items()))
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _parts(column: pa.Array) -> Iterator[tuple[str, Any]]:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
        sizes = np.diff(bounds)
        if column.null_count:
            sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
        yield "sizes", sizes.data
        if data is not None:
            yield "data", memoryview(data)[bounds[0] : bounds[-1]]
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield "data", np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).data
    else:  # headers, which are few where they are
        yield "text", "".join(map(repr, column.to_pylist())).encode(errors="surrogatepass")


BATCH_ROWS_MAX: Final = 1 << 32
"""Rows that a micro-batch may have for one place and partition: the numbers of the next one begin there."""
HELD_BYTES_MAX: Final = 512 << 20
_ASKED_MAX: Final = 1024
_GENERATIONS: Final = 4  # asked for at once: there hardly ever is a second


class Writer(NamedTuple):
    """Who writes: the same again when the same rows come again."""

    name: str
    partition: int
    base: int  # the number of its first row in each place
    is_named: bool  # remembered by the broker for ever


class BrokerMemory(Protocol):
    """What a broker remembers of earlier attempts."""

    def states(self, topic: str, producer_ids: list[int], is_delayed: bool) -> list[ProducerState]: ...

    def mark(self, place: Place, producer_id: int, sequence: int) -> int | None:
        """The mark of a stored message; None if it is gone or has none."""
        ...


class NumberedRows(NamedTuple):
    """Rows to send under these numbers."""

    producer_id: int
    epoch: int
    first_sequence: int
    rows: pa.RecordBatch
    mark: int


def producer_id(writer: Writer, place: Place, generation: int) -> int:
    """The id under which a partition writes to a place; another generation where one could not be gone on with."""
    text = "\0".join(map(str, (writer.name, writer.partition, *place, generation)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1


def courses(writer: Writer, places: list[Place], memory: BrokerMemory) -> dict[Place, Course]:
    """What a partition writes to these places of one topic, with what attempts before have stored.

    Raises:
        UnknownTopic: the topic is not there.
    """
    newest: dict[Place, tuple[int, ProducerState]] = {}
    left, generation = places, 0
    at_once = max(1, min(_GENERATIONS, _ASKED_MAX // len(places)))
    while left:
        asked = {
            producer_id(writer, place, number): (place, number)
            for number in range(generation, generation + at_once)
            for place in left
        }
        for state in memory.states(places[0].topic, [*asked], places[0].is_delayed):
            place, number = asked[state.producer_id]
            newest[place] = number, state
        generation += at_once
        left = [place for place in left if newest.get(place, (0,))[0] == generation - 1]
    return {place: Course(writer, place, *newest.get(place, (0, None)), memory=memory) for place in places}


class Course:
    """One place as one partition writes to it.

    Parameters:
        generation: of the producer id in use.
        state: what the broker remembers of it.
    """

    def __init__(
        self, writer: Writer, place: Place, generation: int, state: ProducerState | None, *, memory: BrokerMemory
    ) -> None:
        self._writer = writer
        self._place = place
        self._generation = generation
        self._epoch = 0
        self._seen = 0  # rows so far
        self._stored = 0  # rows that are stored, as far as was said
        self._mark: int | None = None  # of them
        self._digest = Digest()
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self.skipped = 0
        if state is not None:
            self._resume(state, memory)

    @property
    def producer_id(self) -> int:
        return producer_id(self._writer, self._place, self._generation)

    def _resume(self, state: ProducerState, memory: BrokerMemory) -> None:
        # Of an anonymous producer, a new epoch would begin with new numbers.
        self._epoch = state.producer_epoch + 1 if self._writer.is_named else state.producer_epoch
        base = self._writer.base
        end = max((row.next_sequence for row in state.queues), default=0)
        if end > base + BATCH_ROWS_MAX:
            self._begin_anew("a later micro-batch was written under this name: was the checkpoint removed?")
        elif end > base:
            self._stored = end - base
            self._mark = memory.mark(self._place, self.producer_id, end - 1)

    def take(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        """More rows for the place: what to send now.

        Raises:
            LimitReached: there are more rows than can be numbered, or held.
        """
        missing = self._stored - self._seen
        if missing > 0:
            before, rows = rows.slice(0, missing), rows.slice(missing)
            yield from self._compare(before)
        if rows.num_rows:
            yield from self._number(rows)

    def ended(self) -> Iterator[NumberedRows]:
        """There are no more rows: what to send after all."""
        if self._seen < self._stored:  # there were more the last time
            yield from self._send_all()

    def _compare(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes > HELD_BYTES_MAX:
            raise LimitReached(
                f"an attempt before stored over {HELD_BYTES_MAX >> 20} MiB of a partition in one queue, which is more "
                "than can be compared with its rows: write more and smaller partitions, or another 'dmq.producer.id'",
                limit=HELD_BYTES_MAX,
            )
        self._digest.add(rows)
        self._seen += rows.num_rows
        if self._seen == self._stored:
            if self._digest.value == self._mark:
                self.skipped = self._stored
                self._held, self._held_bytes = [], 0
            else:
                yield from self._send_all()

    def _send_all(self) -> Iterator[NumberedRows]:
        self._begin_anew("its rows came in another order than before, or are others")
        held, self._held, self._held_bytes = self._held, [], 0
        for rows in held:
            yield from self._number(rows)

    def _begin_anew(self, why: str) -> None:
        log.warning(
            "rows are sent again, and may be there twice",
            reason=why,
            topic=self._place.topic,
            partition=self._writer.partition,
            producer=self._writer.name,
        )
        self._generation += 1
        self._epoch = self._seen = self._stored = 0
        self._digest = Digest()

    def _number(self, rows: pa.RecordBatch) -> Iterator[NumberedRows]:
        if self._seen + rows.num_rows > BATCH_ROWS_MAX:
            raise LimitReached(f"a partition has over {BATCH_ROWS_MAX} rows for one queue: write more partitions")
        for piece in divide(rows):
            self._digest.add(piece)
            first = self._writer.base + self._seen
            self._seen += piece.num_rows
            yield NumberedRows(self.producer_id, self._epoch, first, piece, mark=self._digest.value)
