"""Reading without consuming: offsets, messages by place, by key or by id, and whole units for the archive.

What always holds: reading changes nothing of any group; large answers of one client come one after the other, and each
is given to `answer` before the next is looked up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.group import hashes_of, normalised
from dmq.broker.journal.disk import Asker
from dmq.broker.journal.journal import Journal
from dmq.broker.journal.unit_fetch import TopicFetch
from dmq.errors import InvalidRequest, OffsetGone, UnknownTopic, Unsupported
from dmq.model import MessageId
from dmq.protocol import read as headers
from dmq.records import placeholder
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import has_blocks
from dmq.storage.read.reader import Found, Slice, TagFilter
from dmq.storage.read.record_origin import IdRun, OriginRun
from dmq.storage.state import events
from dmq.storage.state.state import Topic

__all__ = ["Read", "Reader"]

_BYTES: Final = 4 << 20
_BYTES_MAX: Final = 15 << 20  # a frame has room for it
_MESSAGES_MAX: Final = 32_768  # a header has room for as many ids
_ORIGINS_MAX: Final = 16_384  # and for as many ids with origins
_BREATH: Final = 64
_LOCATED_QUEUES: Final = 2048  # from so many on an answer is full; a header has room for two topics more
_LOCATED_TOPICS: Final = 1024
_LOCATED_AT_ONCE: Final = 32


UnitsAnswer = Callable[[headers.FetchReply, list[Buffer]], None]


class Read(NamedTuple):
    """The bytes of records, and the length of each."""

    lengths: list[int]
    pieces: list[memoryview]


class Reader:
    """Reads from the store of one broker."""

    def __init__(self, journal: Journal, channels: Channels) -> None:
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._arrivals = journal.arrivals
        self._units = TopicFetch(journal.queries, journal.reads)
        self._channels = channels
        self._runtime = channels.runtime

    async def offsets(self, asked: headers.Offsets, asker: Asker) -> headers.OffsetsReply:
        """The bounds of queues, and the offset that a point means."""
        topic = self._queries.topic(asked.topic)

        def look() -> list[headers.QueueOffsets]:
            return [
                headers.QueueOffsets(
                    queue,
                    *self._queries.bounds(topic.name, queue),
                    self._channels.offset_of(topic, queue, asked.at),
                )
                for queue in _queues(topic, asked.queue)
            ]

        async with self._reads.turn(asker):
            rows = await self._reads.ask(look)
        self._check_incarnation(topic)
        return headers.OffsetsReply(rows, self._queries.start, self._queries.visible, topic.id)

    async def locate(self, asked: headers.Locate, asker: Asker) -> headers.LocateReply:
        """Where points of many queues lie in the journal; of as many topics as one answer has room for."""
        found: list[headers.TopicLocations] = []
        rows = 0
        async with self._reads.turn(asker):
            for wanted in asked.topics[:_LOCATED_TOPICS]:
                located = await self._located(wanted)
                rows += len(located.queues)
                found.append(located)
                if rows >= _LOCATED_QUEUES:
                    break
        return headers.LocateReply(found, self._queries.start, self._queries.visible)

    async def _located(self, asked: headers.TopicPoints) -> headers.TopicLocations:
        """The points of one topic, with those queues together that can wait for the disk together."""
        topic = self._queries.find_topic(asked.topic)
        if topic is None:
            return headers.TopicLocations(asked.topic)
        own = {row.queue: row.points for row in asked.queues}

        def look(queue: int) -> headers.QueueLocations:
            offsets = [self._channels.offset_of(topic, queue, point) for point in own.get(queue, asked.points)]
            return headers.QueueLocations(
                queue,
                *self._queries.bounds(topic.name, queue),
                [headers.Location(offset, *self._queries.located(topic, queue, offset)) for offset in offsets],
            )

        rows: list[headers.QueueLocations] = []
        queues = range(topic.config.queues)
        try:
            for first in range(0, len(queues), _LOCATED_AT_ONCE):
                some = queues[first : first + _LOCATED_AT_ONCE]
                rows += await self._reads.ask_many([partial(look, queue) for queue in some])
                await asyncio.sleep(0)  # others want to be served, too
            self._check_incarnation(topic)
        except UnknownTopic:  # deleted meanwhile, and perhaps created again
            return await self._located(asked)
        return headers.TopicLocations(topic.name, topic.id, rows)

    async def peek(self, asked: headers.Peek, asker: Asker, answer: Callable[[headers.PeekReply, Read], None]) -> None:
        """Messages from a point on, queue by queue."""
        topic = self._queries.topic(asked.topic)
        hashes = hashes_of(normalised(asked.tags))
        tags = None if hashes is None else TagFilter(hashes)
        messages = min(asked.max_messages, _ORIGINS_MAX if asked.with_origins else _MESSAGES_MAX)
        size = min(asked.max_bytes or _BYTES, _BYTES_MAX)
        spans: list[headers.Span] = []
        read = Read([], [])

        def look(queue: int, messages: int, size: int) -> tuple[int, Slice, list[IdRun], list[OriginRun]]:
            queries = self._queries
            start = self._channels.offset_of(topic, queue, asked.at)
            found = queries.read(topic.name, queue, start, messages, max_bytes=size, tags=tags)
            ids = queries.id_runs(topic, queue, found.offsets.tolist(), found.pieces)
            origins = queries.origins(topic, queue, found.offsets, found.pieces) if asked.with_origins else []
            return start, found.shown(), ids, origins

        async with self._reads.turn(asker), self._reads.bulk():
            for queue in _queues(topic, asked.queue):
                if messages <= 0 or size <= 0:
                    break
                start, found, ids, origins = await self._reads.ask(partial(look, queue, messages, size))
                mine = found.lengths.tolist()
                spans.append(headers.Span(queue, start, found.next_offset, len(mine), ids=ids, origins=origins))
                read.lengths.extend(mine)
                read.pieces.extend(found.pieces)
                messages -= len(mine)
                size -= sum(mine)
            self._check_incarnation(topic)
            answer(headers.PeekReply(spans, topic.id), read)

    def _check_incarnation(self, topic: Topic) -> None:
        """Queues are looked up by name, one after another: what was found is of one topic only if it is still this one.

        Raises:
            UnknownTopic: the topic was deleted meanwhile, and perhaps created again.
        """
        if self._queries.topic(topic.name).id != topic.id:
            raise UnknownTopic(f"topic {topic.name!r} was deleted and created again: ask again", topic=topic.name)

    async def find(self, asked: headers.Find, asker: Asker, answer: Callable[[headers.FindReply, Read], None]) -> None:
        """Messages by key or by id.

        Raises:
            InvalidRequest: neither is given, or both.
            UnknownTopic: there is no such topic.
        """
        if (asked.key is None) == (asked.message_id is None):
            raise InvalidRequest("look up by a key or by an id: exactly one of them")
        queries = self._queries
        if asked.topic:
            queries.topic(asked.topic)
        message_id = None if asked.message_id is None else MessageId.from_bytes(asked.message_id)

        def is_meant(found: Found) -> bool:
            return asked.topic in ("", found.topic) and (
                found.record.key == asked.key if message_id is None else found.message_id == message_id
            )

        def look(place: int) -> tuple[Found, memoryview] | None:
            # What retention took since the places were looked up is not there any more.
            found = queries.record_at(place) if place >= queries.start else None
            if found is None or not is_meant(found):
                return None
            if found.corrupt:
                return found, memoryview(placeholder(bytes(found.record.buffer), found.corrupt))
            return found, queries.raw_record(found)

        rows: list[headers.Found] = []
        read = Read([], [])
        size = 0
        is_complete = True
        async with self._reads.turn(asker):
            places = await self._reads.ask(lambda: queries.places(key=asked.key, message_id=message_id))
            for number, place in enumerate(places):
                hit = await self._reads.ask(partial(look, place))
                if number % _BREATH == _BREATH - 1:
                    await asyncio.sleep(0)  # others want to be served, too
                if hit is None:
                    continue
                found, piece = hit
                if len(rows) >= asked.max_messages or (rows and size + len(piece) > _BYTES_MAX):
                    is_complete = False
                    break
                size += len(piece)
                read.lengths.append(len(piece))
                read.pieces.append(piece)
                rows.append(_row(found))
            answer(headers.FindReply(rows, is_complete), read)

    async def fetch(
        self,
        asked: headers.Fetch,
        asker: Asker,
        answer: UnitsAnswer,
        *,
        takes_blocks: bool = True,
    ) -> None:
        """Whole visible units, or what of them concerns some topics; waits for some if asked to.

        Parameters:
            takes_blocks: whether the asker reads units that have body blocks.

        Raises:
            OffsetGone: the journal does not have the offset.
            Unsupported: a unit has blocks, which the asker does not read.
        """
        deadline_ms = self._runtime.clock.now_ms + asked.wait_ms
        if not takes_blocks:
            answer = partial(_answer_without_blocks, answer)
        if await self._fetched(asked, asker, deadline_ms, answer):
            return
        with self._arrivals.waits():
            while not await self._fetched(asked, asker, deadline_ms, answer):
                await self._arrivals.more()

    async def _fetched(
        self,
        asked: headers.Fetch,
        asker: Asker,
        deadline_ms: int,
        answer: UnitsAnswer,
    ) -> bool:
        """Answer if there is something, or nothing more to wait for."""
        queries = self._queries
        size = min(asked.max_bytes or _BYTES, _BYTES, self._channels.settings.frame_bytes_max // 2)
        async with self._reads.turn(asker), self._reads.bulk():
            if not queries.start <= asked.journal_offset <= queries.visible:
                raise OffsetGone(
                    f"the journal has offsets {queries.start} to {queries.visible}, not {asked.journal_offset}",
                    first=queries.start,
                    next=queries.visible,
                )
            at = asked.journal_offset if asked.is_checked else asked.end
            while at < asked.end:
                at = await self._reads.ask(partial(queries.check_units, at, asked.end))
            found = await self._units.fetch(asked, size)
            may_wait = asker.is_open and not self._runtime.readiness.is_stopping
            if found.end <= asked.journal_offset and may_wait and self._runtime.clock.now_ms < deadline_ms:
                return False
            reply = headers.FetchReply(
                found.start,
                found.end,
                queries.start,
                queries.visible,
                epoch=queries.epoch,
                journal_id=queries.journal_id,
            )
            answer(reply, found.pieces)
            return True

    def archived(self, asked: headers.Archived) -> Coroutine[Any, Any, headers.ArchivedReply] | headers.ArchivedReply:
        """The archive has taken the journal up to an offset, so that retention need not wait for it any longer.

        It never goes back. Returns work where something has to be written.

        Raises:
            InvalidRequest: it was another journal.
            OffsetGone: the journal does not have the offset.
        """
        queries = self._queries
        if asked.journal_offset and asked.journal_id != queries.journal_id:
            raise InvalidRequest(
                f"this broker has journal {queries.journal_id:016x}, not {asked.journal_id:016x}: "
                "tell the one it was read from"
            )
        if asked.journal_offset > queries.visible:
            raise OffsetGone(
                f"the journal has offsets {queries.start} to {queries.visible}: nobody can have archived it up to "
                f"{asked.journal_offset}",
                first=queries.start,
                next=queries.visible,
            )

        def reply() -> headers.ArchivedReply:
            durable = min(queries.flushed, queries.visible)
            return headers.ArchivedReply(
                queries.journal_id, queries.archived_to, queries.start, durable, visible=queries.visible
            )

        async def keep() -> headers.ArchivedReply:
            await self._writer.write([events.Archived(asked.journal_offset)])
            return reply()

        return keep() if asked.journal_offset > queries.archived_to else reply()


def _answer_without_blocks(answer: UnitsAnswer, reply: headers.FetchReply, pieces: list[Buffer]) -> None:
    refuse_blocks(reply, pieces)
    answer(reply, pieces)


def refuse_blocks(reply: headers.FetchReply, pieces: Iterable[Buffer]) -> None:
    """For a reader that does not know body blocks.

    Raises:
        Unsupported: the units have some.
    """
    if any(map(has_blocks, pieces)):
        raise Unsupported(
            f"the journal has body blocks from about offset {reply.start} on, and this reader does not know them: "
            "upgrade the reader, or set store.unit_version to 1 before they are written"
        )


def _row(found: Found) -> headers.Found:
    record = found.record
    return headers.Found(
        found.topic, record.queue, record.queue_offset, found.journal_offset, message_id=found.message_id.to_bytes()
    )


def _queues(topic: Topic, queue: int) -> list[int]:
    return list(range(topic.config.queues)) if queue == ANY_QUEUE else [queue]
