"""LOCATE for brokers of earlier versions, which do not know it: out of OFFSETS and PEEK, two requests for each point.

What always holds: the answer is of one incarnation of the topic, and of offsets that there were when it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from dmq.errors import Damaged, OffsetGone, UnknownTopic
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.read import Location, OffsetsReply, QueueLocations, QueueOffsets, TopicLocations, TopicPoints
from dmq.records.layout import JOURNAL_OFFSET_AT, U64

if TYPE_CHECKING:
    from dmq.client.admin.calls import When

__all__ = ["OlderBroker"]

_TRIES: Final = 5


class _Peeked(Protocol):
    @property
    def lengths(self) -> list[int]: ...

    @property
    def body(self) -> memoryview: ...

    def check_incarnation(self, topic: str, topic_id: int) -> None: ...


class _Reader(Protocol):
    def offsets(self, topic: str, at: When | None = None) -> OffsetsReply: ...

    def peek(self, topic: str, queue: int, offset: int, max_messages: int, max_bytes: int = ...) -> _Peeked: ...


class OlderBroker:
    """A broker that is asked the long way."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def locate(self, asked: TopicPoints) -> TopicLocations:
        """The locations of one topic.

        Raises:
            OffsetGone: offsets went as fast as they were asked for.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self._locate(asked)
            except OffsetGone:  # retention went on, or the topic was created again
                if not left:
                    raise
            except UnknownTopic:
                break
        return TopicLocations(asked.topic)

    def _locate(self, asked: TopicPoints) -> TopicLocations:
        reply = self._reader.offsets(asked.topic)
        own = {row.queue: row.points for row in asked.queues}
        times: dict[Point, OffsetsReply] = {}
        rows = []
        for row in reply.queues:
            offsets = [self._offset(asked.topic, row, point, times) for point in own.get(row.queue, asked.points)]
            found = [self._location(asked.topic, row, offset, reply) for offset in offsets]
            rows.append(QueueLocations(row.queue, row.first_offset, row.next_offset, found))
        return TopicLocations(asked.topic, reply.topic_id, rows)

    def _offset(self, topic: str, row: QueueOffsets, point: Point, times: dict[Point, OffsetsReply]) -> int:
        known = {PointKind.EARLIEST: row.first_offset, PointKind.LATEST: row.next_offset, PointKind.OFFSET: point.value}
        offset = known.get(point.kind)
        if offset is None:
            if point not in times:
                times[point] = self._reader.offsets(topic, point)
            offset = next((queue.at for queue in times[point].queues if queue.queue == row.queue), row.next_offset)
        return min(max(offset, row.first_offset), row.next_offset)

    def _location(self, topic: str, row: QueueOffsets, offset: int, reply: OffsetsReply) -> Location:
        start, start_bytes = reply.visible_journal_offset, 0
        before, before_bytes = 0, 0
        if offset < row.next_offset:
            start, start_bytes = self._record(topic, row.queue, offset, reply.topic_id)
        if offset > row.first_offset:
            before, before_bytes = self._record(topic, row.queue, offset - 1, reply.topic_id)
        return Location(offset, start, start_bytes, before, before_bytes=before_bytes)

    def _record(self, topic: str, queue: int, offset: int, topic_id: int) -> tuple[int, int]:
        """Where a message stands in the journal, and its size; of a damaged one, the range that is."""
        try:
            peeked = self._reader.peek(topic, queue, offset, 1, max_bytes=1)
            peeked.check_incarnation(topic, topic_id)
        except Damaged as error:
            start, end = error.detail.get("start"), error.detail.get("end")
            if start is None or end is None:
                raise
            return start, end - start
        return U64.unpack_from(peeked.body, JOURNAL_OFFSET_AT)[0], peeked.lengths[0]
