"""Headers of reading without consuming: OFFSETS, LOCATE, PEEK, FIND and FETCH, and ARCHIVED for who has read it all.

What always holds: nothing here leases, settles or moves anything, and nothing beyond the visible offset is ever shown.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.consume import IdRun, Point
from dmq.protocol.header import LIST_MAX, U32, Amount, Header, Name, OptionalName, Queue, Text

__all__ = [
    "TOPICS_MAX",
    "Archived",
    "ArchivedReply",
    "Fetch",
    "FetchReply",
    "Find",
    "FindReply",
    "Found",
    "Locate",
    "LocateReply",
    "Location",
    "Offsets",
    "OffsetsReply",
    "Peek",
    "PeekReply",
    "QueueLocations",
    "QueueOffsets",
    "QueuePoints",
    "Span",
    "TopicLocations",
    "TopicPoints",
]


# Count, store time in ms, and the sender's address (IPv6 or IPv4-mapped) and port.
Origin = tuple[Annotated[int, Meta(ge=1, le=LIST_MAX)], Amount, Annotated[bytes, Meta(min_length=18, max_length=18)]]


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
    """One entry a queue, the journal's visible range at that moment, and the incarnation of the topic."""

    queues: Annotated[list[QueueOffsets], Meta(max_length=255)]
    first_journal_offset: Amount = 0
    visible_journal_offset: Amount = 0
    topic_id: U32 = 0


POINTS_MAX: Final = 4  # of one queue
TOPICS_MAX: Final = 4096  # in one request
Points = Annotated[list[Point], Meta(max_length=POINTS_MAX)]


class QueuePoints(Header, frozen=True):
    """Points of one queue."""

    queue: Queue
    points: Points


class TopicPoints(Header, frozen=True):
    """Points to locate in every queue of a topic, but for those queues that have points of their own."""

    topic: Name
    points: Points = []
    queues: Annotated[list[QueuePoints], Meta(max_length=255)] = []


class Locate(Header, frozen=True):
    """Ask where points of many queues lie in the journal."""

    topics: Annotated[list[TopicPoints], Meta(max_length=TOPICS_MAX)]


class Location(Header, frozen=True):
    """Where a point lies.

    `offset` is the queue's. Its message begins at `start` in the journal, the one before it at `before`; each has its
    size, which is 0 where there is none: then `start` is the visible offset. One that was lost has a place and no size.
    """

    offset: Amount
    start: Amount
    start_bytes: U32 = 0
    before: Amount = 0
    before_bytes: U32 = 0


class QueueLocations(Header, frozen=True):
    """What a queue keeps, and a location for each of its points."""

    queue: Queue
    first_offset: Amount
    next_offset: Amount
    locations: Annotated[list[Location], Meta(max_length=POINTS_MAX)] = []


class TopicLocations(Header, frozen=True):
    """The queues of a topic, and its incarnation: 0 if there is no such topic."""

    topic: Name
    topic_id: U32 = 0
    queues: Annotated[list[QueueLocations], Meta(max_length=255)] = []


class LocateReply(Header, frozen=True):
    """The first so many of the topics that were asked for, as one answer has room for: ask again for the others."""

    topics: Annotated[list[TopicLocations], Meta(max_length=TOPICS_MAX)] = []
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
    with_origins: bool = False


class Span(Header, frozen=True):
    """Messages of one queue; peek from `end_offset` on for more."""

    queue: Queue
    first_offset: Amount
    end_offset: Amount
    count: U32
    ids: Annotated[list[IdRun], Meta(max_length=LIST_MAX)] = []  # as in a lease
    origins: Annotated[list[Origin], Meta(max_length=LIST_MAX)] = []  # if they were asked for


class PeekReply(Header, frozen=True):
    """Body: the records of all spans in order, see `dmq.protocol.batch.pack_records`. `topic_id` is the incarnation."""

    spans: Annotated[list[Span], Meta(max_length=255)] = []
    topic_id: U32 = 0


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
    """Read the journal itself: whole units, from the one that holds an offset on, as the archive and Spark do."""

    journal_offset: Amount
    max_bytes: U32 = 0  # 0 is the broker's default; one unit always comes, however large
    wait_ms: U32 = 0  # for something to become visible
    end: Amount = 0  # only what starts before it is wanted; 0 means no end
    topic_ids: Annotated[list[U32], Meta(max_length=TOPICS_MAX)] = []  # only what concerns these; none is everything
    is_checked: bool = False  # look for damage first, up to `end`, and mend it from another member before the answer


class FetchReply(Header, frozen=True):
    """Body: units, verbatim, from `start`, which may be before what was asked, to `end`. Fetch from `end` for more.

    With `topic_ids`, units that do not concern these are left out, and of others that are large, the batches that do
    not: see `dmq.broker.journal.unit_fetch`.
    """

    start: Amount
    end: Amount
    first: Amount  # the oldest offset kept
    visible: Amount  # how far one may read now
    epoch: U32 = 0
    journal_id: Annotated[int, Meta(ge=0)] = 0


class Archived(Header, frozen=True):
    """The archive has everything of a journal below an offset; with 0 and 0 it only asks how far it is."""

    journal_id: Annotated[int, Meta(ge=0)] = 0
    journal_offset: Amount = 0


class ArchivedReply(Header, frozen=True):
    """How far the archive is, and what the journal has: the visible part below `flushed` outlives a power loss."""

    journal_id: Annotated[int, Meta(ge=0)]
    archived: Amount
    first: Amount
    flushed: Amount
    visible: Amount
