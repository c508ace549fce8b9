"""What one task of a read does: fetch a piece and give it out as Arrow batches.

What always holds: of a piece exactly the wanted offsets are given, each once. What is gone or damaged ends the task,
or, where the user does not mind (`failOnDataLoss` false), is passed over with a warning. Memory is bound by two answers
of the broker and what they expand to, in steps of `BATCH_BYTES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dmq.errors import Damaged, DMQError, OffsetGone, UnknownTopic
from dmq.event_log import EventLog
from dmq.pipeline.decode.bodies import raw_sizes
from dmq.pipeline.decode.cluster_reader import shard_reader
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.pipeline.decode.units import UnitRows, decode_fetched, decode_peeked
from dmq.pipeline.source.columns import record_batch, table_columns
from dmq.pipeline.source.options import SourceOptions
from dmq.pipeline.source.partition_plan import JournalPiece, Piece, QueueRange
from dmq.protocol.read import TOPICS_MAX

__all__ = ["read_piece"]

log = EventLog(__name__)

BATCH_BYTES: Final = 64 << 20
PEEK_MESSAGES: Final = 32_768
_OFFSET_MAX: Final = np.iinfo(np.int64).max
_BODIES: Final = frozenset(("body", "body_crc"))


def read_piece(options: SourceOptions, piece: Piece, schema: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, with the columns of an Arrow schema."""
    columns = table_columns(schema.names)
    with shard_reader(options.servers, piece.shard, timeout=options.patience) as reader:
        if isinstance(piece, JournalPiece):
            found = _of_journal(reader, piece, columns, options.fail_on_data_loss)
        else:
            found = _of_queue(reader, piece.range, columns, options.fail_on_data_loss)
        for rows in found:
            for part in _in_steps(rows):
                yield record_batch(part, schema, piece.shard)


def _in_steps(rows: UnitRows) -> Iterator[UnitRows]:
    """The rows, in parts whose bodies do not grow beyond all bounds when they are expanded."""
    if not len(rows):
        return
    if not rows.columns & _BODIES or (len(rows.buffer) <= BATCH_BYTES and not rows.is_compressed().any()):
        yield rows
        return
    ends = np.cumsum(raw_sizes(rows))
    if int(ends[-1]) <= BATCH_BYTES:
        yield rows
        return
    step = (ends - 1) // BATCH_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(rows)]
    for first, last in itertools.pairwise(cuts):
        yield rows.select(slice(first, last))


# --- ranges of the journal --------------------------------------------------------------------------------------------


def _of_journal(
    reader: JournalReader, piece: JournalPiece, columns: frozenset[str], strict: bool
) -> Iterator[UnitRows]:
    def leave_out(error: Damaged) -> None:
        if strict:
            raise error
        log.warning("data was lost", reason=error.message)

    screen = _Screen(piece)
    # Of more topics than a request can name everything is fetched.
    asked = screen.topic_ids if len(screen.topic_ids) <= TOPICS_MAX else []
    at = piece.start
    while at < piece.end:
        try:
            for fetched in reader.units(at, piece.end, with_first=True, topic_ids=asked):
                again = partial(reader.fetch_checked, topic_ids=asked)
                for rows in decode_fetched(fetched, leave_out, again=again, wanted=screen.topic_ids, columns=columns):
                    yield screen.wanted(rows)
                at = fetched.end
            return
        except OffsetGone as error:
            at = _read_on(error, error.detail.get("first", 0), at, strict)
        except Damaged as error:
            at = _read_on(error, error.detail.get("end", 0), at, strict)


def _read_on(error: DMQError, following: int, at: int, strict: bool) -> int:
    """Where to read on after data was lost.

    Raises:
        DMQError: it may not be lost, or nothing says where to read on.
    """
    if strict or following <= at:
        raise type(error)(
            f"{error.message}: set failOnDataLoss to false to read what is left", **error.detail
        ) from error
    log.warning("data was lost", reason=error.message)
    return following


class _Screen:
    """Which rows of a journal are wanted: by their place in it, and by topic, queue and offset."""

    def __init__(self, piece: JournalPiece) -> None:
        self._piece = piece
        whole = piece.whole_keys()
        keys = np.concatenate((whole, np.array([part.key for part in piece.ranges], np.int64)))
        first = np.array([0] * len(whole) + [part.start for part in piece.ranges], np.int64)
        last = np.array([_OFFSET_MAX] * len(whole) + [part.end for part in piece.ranges], np.int64)
        order = np.argsort(keys)
        self._keys, self._from, self._until = keys[order], first[order], last[order]
        self.topic_ids: list[int] = np.unique(keys >> 8).tolist()

    def wanted(self, rows: UnitRows) -> UnitRows:
        """Those rows that are wanted."""
        batches = rows.batches
        keys = batches.topic_id.astype(np.int64) << 8 | batches.queue
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_read = self._keys[place] == keys
        low = np.where(is_read, self._from[place], 0)[rows.batch]
        high = np.where(is_read, self._until[place], 0)[rows.batch]
        offset, at = rows.queue_offset(), rows.journal_offset()
        mask = (offset >= low) & (offset < high) & (at >= self._piece.start) & (at < self._piece.end)
        return rows if mask.all() else rows.select(mask)


# --- one queue --------------------------------------------------------------------------------------------------------


def _of_queue(reader: JournalReader, part: QueueRange, columns: frozenset[str], strict: bool) -> Iterator[UnitRows]:
    at = part.start
    while at < part.end:
        try:
            peeked = reader.peek(part.topic, part.queue, at, min(PEEK_MESSAGES, part.end - at))
            peeked.check_incarnation(part.topic, part.topic_id)
        except UnknownTopic as error:  # deleted since the piece was planned
            at = _read_on(error, part.end, at, strict)
        except OffsetGone as error:
            # Without a first offset nothing of this incarnation is left.
            at = _read_on(error, error.detail.get("first", part.end), at, strict)
        except Damaged as error:
            at = _read_on(error, error.detail.get("next", 0), at, strict)
        else:
            if peeked.end_offset <= at:
                raise OffsetGone(f"queue {part.queue} of {part.topic} ends at {at}, before {part.end}", next=at)
            yield decode_peeked(peeked, part.topic_id, part.queue, columns)
            at = peeked.end_offset
