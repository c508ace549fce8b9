"""Headers of reading without consuming: OFFSETS, PEEK, FIND and FETCH.

What always holds: nothing here leases, settles or moves anything, and nothing beyond the visible offset is ever shown.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dmq.protocol.consuming import IdRun, Point
from dmq.protocol.header import LIST_MAX, U32, Amount, Header, Name, OptionalName, Queue, Text

__all__ = [
    "Fetch",
    "FetchReply",
    "Find",
    "FindReply",
    "Found",
    "Offsets",
    "OffsetsReply",
    "Peek",
    "PeekReply",
    "QueueOffsets",
    "Span",
]


class Offsets(Header, frozen=True):
    """Ask for the offsets of queues: what exists, and which one a point means."""

    topic: Name
    queue: Queue = 255  # ANY_QUEUE is all of them
    at: Point = Point()


class QueueOffsets(Header, frozen=True):
    """Kept are `first_offset` up to, not including, `next_offset`; `at` is where the point lies."""

    queue: Queue
    first_offset: Amount
    next_offset: Amount
    at: Amount


class OffsetsReply(Header, frozen=True):
    """One entry a queue, and the journal's visible range at that moment."""

    queues: Annotated[list[QueueOffsets], Meta(max_length=255)]
    first_journal_offset: Amount = 0
    visible_journal_offset: Amount = 0


class Peek(Header, frozen=True):
    """Read messages from a point on, without a group."""

    topic: Name
    queue: Queue = 255  # ANY_QUEUE is all of them
    at: Point = Point()
    max_messages: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100
    max_bytes: U32 = 0  # 0 is the broker's default; one message always comes, however large
    tags: Text = ""


class Span(Header, frozen=True):
    """Messages of one queue; peek from `end_offset` on for more."""

    queue: Queue
    first_offset: Amount
    end_offset: Amount
    count: U32
    ids: Annotated[list[IdRun], Meta(max_length=LIST_MAX)] = []  # as in a lease


class PeekReply(Header, frozen=True):
    """Body: the records of all spans in order, see `dmq.protocol.batch.pack_records`."""

    spans: Annotated[list[Span], Meta(max_length=255)] = []


class Find(Header, frozen=True):
    """Look up messages by key, or by id: exactly one of them is given."""

    topic: OptionalName = ""  # "" is every topic, and only for an id
    key: Annotated[str, Meta(max_length=65_535)] | None = None
    message_id: Annotated[bytes, Meta(min_length=16, max_length=16)] | None = None
    max_messages: Annotated[int, Meta(ge=1, le=10_000)] = 100


class Found(Header, frozen=True):
    """Where one message is."""

    topic: Name
    queue: Queue
    offset: Amount
    journal_offset: Amount
    message_id: Annotated[bytes, Meta(max_length=16)] = b""


class FindReply(Header, frozen=True):
    """Body: one record for each found, in order, see `dmq.protocol.batch.pack_records`."""

    found: Annotated[list[Found], Meta(max_length=10_000)] = []
    is_complete: bool = True  # False: there are more than asked for


class Fetch(Header, frozen=True):
    """Read the journal itself: whole units from an offset on, as the archive and Spark do."""

    journal_offset: Amount
    max_bytes: U32 = 0  # 0 is the broker's default; one unit always comes, however large
    wait_ms: U32 = 0  # for something to become visible


class FetchReply(Header, frozen=True):
    """Body: units, verbatim, from `start` to `end`. Fetch from `end` on for more."""

    start: Amount
    end: Amount
    first: Amount  # the oldest offset kept
    visible: Amount  # how far one may read now
    epoch: U32 = 0
    journal_id: Annotated[int, Meta(ge=0)] = 0
