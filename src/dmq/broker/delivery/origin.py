"""Origins: records that are read where they stand, with their ids, to be moved or to be recognised, and those of them
that are doomed: they were read to be handed out, and must not be, since they expired, had all their attempts, or were
stored as something that nobody can read.

A message that kills its consumer is never nacked: only here is noticed that it was handed out often enough. Expiry is
looked at here too, where a message would go out: messages that no consumer asks for need not be looked for.

What always holds: what is read is read once, in as few pieces as it stands in. For a record that cannot be read there
is an origin as well, of its stand-in: it can be moved, and says what is wrong. Doomed messages are some of those that
were read, in order; an attempt that would be the last one allowed is not doomed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from dmq.broker.delivery.lease import Ranges
from dmq.errors import Damaged, OffsetGone
from dmq.records import RecordView, layout, stand_in
from dmq.records.copy import Failed, read_failed
from dmq.storage.queries import Queries
from dmq.storage.read.reader import Slice
from dmq.storage.read.record_origin import IdRun
from dmq.storage.state.state import Topic

__all__ = ["Doomed", "Origin", "Terms", "corrupt_origin", "find_doomed", "is_exhausted", "origins_of", "read_origins"]

_ID: Final = struct.Struct(">QQ")
_EVERYTHING: Final = 1 << 40


class Origin(NamedTuple):
    """A record where it stands now."""

    offset: int
    failed: Failed
    message_id: bytes
    corrupt: str = ""  # why it cannot be read

    @property
    def first_offset(self) -> int:
        """Where it stood in its topic before it came into the retry topic; its own offset if it was never moved."""
        found = RecordView(self.failed.raw).attributes.original_queue_offset
        return self.offset if found is None else found

    @property
    def stored_at_ms(self) -> int:
        raw = self.failed.raw
        sent = int.from_bytes(raw[layout.SEND_TIME_AT : layout.SEND_TIME_AT + 8], "big")
        return sent + int.from_bytes(raw[layout.STORE_TIME_AT : layout.STORE_TIME_AT + 4], "big")


def read_origins(
    queries: Queries, topic: Topic, queue: int, ranges: Ranges, *, is_retry: bool
) -> tuple[list[Origin], list[tuple[int, int]]]:
    """The records of some ranges, and the ranges of those that cannot be read."""
    origins: list[Origin] = []
    missing: list[tuple[int, int]] = []
    for start, stop in ranges:
        at = start
        while at < stop:
            try:
                found = queries.read(topic.name, queue, at, stop - at, max_bytes=_EVERYTHING, tags=None)
            except OffsetGone as error:
                resume = min(stop, max(at + 1, int(error.detail["first"])))
            except Damaged as error:
                resume = min(stop, max(at + 1, int(error.detail["next"])))
            else:
                offsets = found.offsets.tolist()
                ids = queries.id_runs(topic, queue, offsets, found.pieces)
                origins += origins_of(found, offsets, ids, is_retry=is_retry)
                if found.next_offset > at:
                    at = found.next_offset
                    continue
                resume = at + 1
            missing.append((at, resume))
            at = resume
    return origins, missing


def origins_of(found: Slice, offsets: Sequence[int], ids: Sequence[IdRun], *, is_retry: bool) -> list[Origin]:
    """Records that were read, with their ids."""
    named: list[bytes] = []
    pack = _ID.pack
    for count, producer, first in ids:
        named += [pack(producer, first + at) for at in range(count)] if producer else [b""] * count
    origins: list[Origin] = []
    corrupt = found.corrupt
    lengths = iter(found.lengths.tolist())
    index = 0
    for piece in found.pieces:
        data = bytes(piece)
        at, end = 0, len(data)
        while at < end:
            stop = at + next(lengths)
            offset = offsets[index]
            if offset in corrupt:
                origins.append(corrupt_origin(offset, data[at:stop], named[index], corrupt[offset], is_retry=is_retry))
            else:
                failed = read_failed(data[at:stop], is_retry=is_retry)
                origins.append(Origin(offset, failed, failed.message_id or named[index]))
            index += 1
            at = stop
    return origins


def corrupt_origin(offset: int, raw: bytes, message_id: bytes, why: str, *, is_retry: bool) -> Origin:
    """The origin of a record that cannot be read; one that lost its id is known by its place in the journal."""
    failed = read_failed(stand_in(raw), is_retry=is_retry)
    place = _ID.pack(0, layout.U64.unpack_from(failed.raw, layout.JOURNAL_OFFSET_AT)[0])
    return Origin(offset, failed, failed.message_id or message_id or place, why)


class Doomed(NamedTuple):
    """Messages for the dead letters."""

    expired: list[Origin]
    exhausted: list[Origin]
    corrupt: list[Origin]

    @property
    def offsets(self) -> set[int]:
        return {origin.offset for origins in self for origin in origins}


class Terms(NamedTuple):
    """What a message has to keep to be handed out.

    Attributes:
        attempt: which hand-out from this queue it would be.
        attempts_max: as of `is_exhausted`.
        ttl_ms: how long messages of this topic live after they were stored; None where each says so itself, as a
            retry does.
    """

    attempt: int
    attempts_max: int
    now_ms: int
    ttl_ms: int | None


def is_exhausted(attempts: int, attempts_max: int) -> bool:
    """Whether so many attempts that failed are all a message gets; 0 allows any number."""
    return 0 < attempts_max <= attempts


def find_doomed(origins: Iterable[Origin], terms: Terms) -> Doomed | None:
    """What of the messages that were read must not go out; None if all may."""
    attempt, attempts_max, now_ms, ttl_ms = terms
    expired: list[Origin] = []
    exhausted: list[Origin] = []
    corrupt: list[Origin] = []
    for origin in origins:
        if origin.corrupt:
            corrupt.append(origin)
            continue
        expires_at_ms = origin.failed.expires_at_ms
        if ttl_ms is not None:
            at_ms = origin.stored_at_ms + ttl_ms
            expires_at_ms = at_ms if expires_at_ms is None else min(at_ms, expires_at_ms)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            expired.append(origin)
        elif is_exhausted(origin.failed.attempts + attempt - 1, attempts_max):
            exhausted.append(origin)
    return Doomed(expired, exhausted, corrupt) if expired or exhausted or corrupt else None
