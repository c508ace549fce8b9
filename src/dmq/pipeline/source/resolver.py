"""Which messages a read means: from the user's options to offsets of queues, and to ranges of the journal.

What always holds: offsets that do not exist, or not any more, are an error that says which do; with `failOnDataLoss`
false they are a warning, and what exists is read. Offsets are never read from another incarnation of their topic.
Asking changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from dmq.errors import Damaged, DMQError, InvalidSettings, OffsetGone, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, place_of, place_shard
from dmq.pipeline.decode.cluster_reader import LONE, ClusterReader
from dmq.pipeline.source.filters import FilterBounds
from dmq.pipeline.source.offsets import (
    EARLIEST,
    LATEST,
    Incarnations,
    PartitionOffsets,
    StreamOffsets,
    TopicPartition,
    TopicShard,
    renumbered,
)
from dmq.pipeline.source.options import SourceOptions, check_partitions
from dmq.pipeline.source.partition_plan import Piece, QueueRange, Wanted, plan
from dmq.protocol.admin import TopicInfo
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.read import QueueOffsets
from dmq.records.layout import JOURNAL_OFFSET_AT, U64

__all__ = ["Resolver"]

log = EventLog(__name__)

_NAMED: Final = 20  # topics in an error message

Topic: TypeAlias = dict[int, TopicInfo]
"""A topic: what each shard has of it, by the shard's number."""


class _Queues(NamedTuple):
    """What exists of the queues that are read, and of which incarnations they are."""

    queues: dict[TopicPartition, QueueOffsets]
    incarnations: Incarnations

    def at(self, places: PartitionOffsets) -> StreamOffsets:
        """Offsets of these queues."""
        return StreamOffsets(places, self.incarnations)


class Resolver:
    """Answers for one read, over one connection to each shard.

    Parameters:
        reader: the connections.
        options: what the user chose.
    """

    def __init__(self, reader: ClusterReader, options: SourceOptions) -> None:
        self._reader = reader
        self._options = options

    # --- topics -----------------------------------------------------------------------------------------------------

    def _present(self, *, system: bool) -> dict[str, Topic]:
        """All topics by name, with what each shard has of them."""
        found: dict[str, Topic] = {}
        for shard in sorted(self._reader.shards):
            for info in self._reader.of(shard).topics(system=system):
                found.setdefault(info.topic, {})[shard] = info
        return found

    def topics(self, *, may_lack: bool = False) -> dict[str, Topic]:
        """The topics that are read, by name.

        Parameters:
            may_lack: whether a named topic that does not exist is only a warning.

        Raises:
            UnknownTopic: one that was named does not exist, or an assigned partition.
        """
        options = self._options
        names = options.topics or tuple(options.assigned or ())
        is_ours = any(name.startswith(SYSTEM_PREFIX) for name in (*names, options.pattern or ""))
        present = self._present(system=is_ours)
        if options.pattern is not None:
            matches = re.compile(options.pattern).fullmatch
            return {name: parts for name, parts in present.items() if matches(name)}
        for name in names:
            if name not in present and may_lack:
                log.warning("data was lost", reason="the topic does not exist", topic=name)
            elif name not in present:
                there = ", ".join(sorted(present)[:_NAMED]) or "none"
                raise UnknownTopic(f"topic {name!r} does not exist: there are {there}", topic=name)
        found = {name: present[name] for name in names if name in present}
        for name, partitions in (options.assigned or {}).items():
            if name not in found:
                continue
            counts = {shard: info.config.queues for shard, info in found[name].items()}
            there = ", ".join(f"{place_of(0, shard)} to {place_of(n - 1, shard)}" for shard, n in counts.items())
            known = {place_of(queue, shard) for shard, count in counts.items() for queue in range(count)}
            for partition in partitions:
                if partition not in known:
                    raise UnknownTopic(f"topic {name!r} has partitions {there}, not {partition}", topic=name)
        return found

    def _queues(self, topics: Mapping[str, Topic], at: Point | None = None) -> _Queues:
        """What each queue that is read has, and where a point lies in it."""
        found = _Queues({}, {})
        parts = [(topic, shard, info) for topic, infos in topics.items() for shard, info in infos.items()]
        for topic, shard, info in parts:
            assigned = None if self._options.assigned is None else self._options.assigned.get(topic, ())
            try:
                reply = self._reader.of(shard).offsets(topic, at)
            except UnknownTopic:
                if self._options.pattern is None and self._options.fail_on_data_loss:
                    raise
                continue  # deleted since it was listed
            # A broker that does not say of which incarnation the queues are had only this one a moment ago.
            found.incarnations[TopicShard(topic, shard)] = reply.topic_id or info.topic_id
            for queue in reply.queues:
                partition = place_of(queue.queue, shard)
                if assigned is None or partition in assigned:
                    found.queues[TopicPartition(topic, partition)] = queue
        return found

    def ends(self) -> StreamOffsets:
        """How far each queue goes now, also in shards that are new."""
        self._reader.refresh()
        found = self._queues(self.topics(may_lack=not self._options.fail_on_data_loss))
        return found.at({place: queue.next_offset for place, queue in found.queues.items()})

    def adopted(self, offsets: StreamOffsets) -> StreamOffsets:
        """Offsets of a checkpoint that was begun with a lone broker, which is a shard of a cluster now."""
        if LONE in self._reader.shards or all(place_shard(place.partition) for place in offsets.places):
            return offsets
        numbers: dict[str, int] = {}
        for topic, parts in self._present(system=True).items():
            known = offsets.incarnations.get(TopicShard(topic, LONE))
            same = [shard for shard, info in parts.items() if info.topic_id == known]
            numbers[topic] = min(same or parts)
        return renumbered(offsets, numbers)

    def existing_starts(self, begun: StreamOffsets, ends: StreamOffsets) -> PartitionOffsets:
        """Where the next batch begins: without the offsets of queues that exist no more.

        Raises:
            OffsetGone: some do not exist any more, and the user minds.
        """
        found = dict(begun.places)
        anew: set[str] = set()
        for place in sorted(begun.places):
            end = ends.places.get(place)
            if end is None:
                self._lost(f"partition {place.partition} of topic {place.topic!r} is gone")
            elif ends.is_anew(place, begun):
                if place.topic not in anew:
                    self._lost(f"topic {place.topic!r} was deleted and created again since it was read")
                anew.add(place.topic)
            elif begun.places[place] > end:
                self._lost(
                    f"topic {place.topic!r}, partition {place.partition}, was to be read from offset "
                    f"{begun.places[place]} on, and ends at {end}",
                    next=end,
                )
            else:
                continue
            del found[place]
        return found

    # --- offsets ----------------------------------------------------------------------------------------------------

    def starts(self) -> StreamOffsets:
        """Where the user wants to begin."""
        options = self._options
        return self._chosen("startingOffsets", options.starting, options.starting_ms)

    def _chosen(self, name: str, chosen: int | StreamOffsets, at_ms: int | None) -> StreamOffsets:
        present = self._queues(self.topics(), None if at_ms is None else Point(PointKind.TIME, at_ms))
        if at_ms is not None:
            return present.at({place: queue.at for place, queue in present.queues.items()})
        if isinstance(chosen, StreamOffsets):
            check_partitions(chosen.places, set(present.queues), name)
        found = present.at({})
        for place, queue in present.queues.items():
            offset = chosen.places[place] if isinstance(chosen, StreamOffsets) else chosen
            if isinstance(chosen, StreamOffsets) and found.is_anew(place, chosen):
                self._lost(f"{name} are of topic {place.topic!r} before it was deleted and created again")
                offset = EARLIEST
            found.places[place] = {EARLIEST: queue.first_offset, LATEST: queue.next_offset}.get(offset, offset)
        return found

    def batch(self, bounds: FilterBounds) -> list[Piece]:
        """The pieces of a batch read, without what filters leave out anyway."""
        options = self._options
        start = self.starts()
        end = self._chosen("endingOffsets", options.ending, options.ending_ms)
        if options.starting_ms is not None or options.ending_ms is not None:
            # Nothing of a queue may be of that time.
            later = {place: max(offset, start.places.get(place, 0)) for place, offset in end.places.items()}
            end = end._replace(places=later)
        elif isinstance(options.starting, StreamOffsets) and isinstance(options.ending, StreamOffsets):
            for place, offset in options.starting.places.items():
                last = options.ending.places[place]
                if 0 <= last < offset:
                    raise InvalidSettings(
                        f"startingOffsets of topic {place.topic!r}, partition {place.partition}, are {offset}, after "
                        f"its endingOffsets {last}"
                    )
        return self.pieces(start, end, bounds)

    def pieces(self, start: StreamOffsets, end: StreamOffsets, bounds: FilterBounds | None = None) -> list[Piece]:
        """The pieces between places; a queue that has no start in its incarnation is read from its beginning.

        Raises:
            OffsetGone: some of it does not exist (any more), and the user minds.
        """
        named = self.topics_of(end.places)
        topics = {name: info for name, info in named.items() if bounds is None or bounds.has_topic(name)}
        queues, incarnations = found = self._queues(topics)
        present = found.at({})
        ranges: list[QueueRange] = []
        for place in sorted(end.places):
            queue = queues.get(place)
            if place.topic not in topics or (bounds is not None and not bounds.has_partition(place.partition)):
                continue
            if queue is None:
                self._lost(f"partition {place.partition} of topic {place.topic!r} is gone")
                continue
            if present.is_anew(place, end):
                self._lost(f"topic {place.topic!r} was deleted and created again since this batch was planned")
                continue
            begun = 0 if end.is_anew(place, start) else start.places.get(place, 0)
            first, last = self._existing(place, queue, begun, end.places[place])
            if first < last:
                shard = place_shard(place.partition)
                topic_id = incarnations[TopicShard(place.topic, shard)]
                ranges.append(QueueRange(place.topic, topic_id, queue.queue, first, end=last, shard=shard))
        if bounds is not None:
            ranges = self._bounded(ranges, topics, bounds)
        return plan([wanted for part in ranges if (wanted := self._placed(part))], self._options.partitions_min)

    def topics_of(self, places: Iterable[TopicPartition]) -> dict[str, Topic]:
        """The topics of some places that exist; those that do not are lost."""
        names = {place.topic for place in places}
        is_ours = any(name.startswith(SYSTEM_PREFIX) for name in names)
        present = self._present(system=is_ours) if names else {}
        for name in sorted(names - set(present)):
            self._lost(f"topic {name!r} is gone")
        return {name: present[name] for name in sorted(names & set(present))}

    def _existing(self, place: TopicPartition, queue: QueueOffsets, start: int, end: int) -> tuple[int, int]:
        """What of a range exists."""
        first, following = queue.first_offset, queue.next_offset
        if start > end:
            self._lost(
                f"topic {place.topic!r}, partition {place.partition}, was to be read from offset {start} on, "
                f"and has {first} to {following}",
                first=first,
                next=following,
            )
            start = first
        if start < end and (start < first or end > following):
            self._lost(
                f"offsets {start} to {end} of topic {place.topic!r}, partition {place.partition}, were asked for; "
                f"it has {first} to {following}",
                first=first,
                next=following,
            )
        return max(start, first), min(end, following)

    def _lost(self, what: str, **detail: int) -> None:
        if self._options.fail_on_data_loss:
            raise OffsetGone(
                f"{what}: read from what exists, or set failOnDataLoss to false to go on without the rest", **detail
            )
        log.warning("data was lost", reason=what)

    def _bounded(self, ranges: list[QueueRange], topics: Mapping[str, Topic], bounds: FilterBounds) -> list[QueueRange]:
        """Ranges without the offsets that filters leave out, by number and by time."""
        low: dict[TopicPartition, QueueOffsets] = {}
        high: dict[TopicPartition, QueueOffsets] = {}
        wanted = {part.topic: topics[part.topic] for part in ranges}
        if bounds.from_ms is not None:
            low = self._queues(wanted, Point(PointKind.TIME, bounds.from_ms)).queues
        if bounds.until_ms is not None:
            high = self._queues(wanted, Point(PointKind.TIME, bounds.until_ms)).queues
        found: list[QueueRange] = []
        for part in ranges:
            place = TopicPartition(part.topic, place_of(part.queue, part.shard))
            start = max(part.start, bounds.from_offset, low[place].at if place in low else 0)
            end = min(part.end, bounds.until_offset, high[place].at if place in high else part.end)
            if start < end:
                found.append(part._replace(start=start, end=end))
        return found

    # --- the journal ------------------------------------------------------------------------------------------------

    def _placed(self, part: QueueRange) -> Wanted | None:
        """Where a range lies in the journal; None if nothing of it is left."""
        try:
            first_at, first_size = self._record_at(part, part.start)
            last_at, last_size = self._record_at(part, part.end - 1)
        except (OffsetGone, UnknownTopic) as error:  # since the offsets were asked for
            first = error.detail.get("first", 0)
            self._lost(error.message, first=first)
            if not part.start < first < part.end:
                return None
            return self._placed(part._replace(start=first))
        return Wanted(part, first_at, last_at + last_size, max(1.0, (first_size + last_size) / 2))

    def _record_at(self, part: QueueRange, offset: int) -> tuple[int, int]:
        """Where a message stands in the journal, and its size."""
        try:
            peeked = self._reader.of(part.shard).peek(part.topic, part.queue, offset, 1, max_bytes=1)
            peeked.check_incarnation(part.topic, part.topic_id)
        except Damaged as error:
            # The reader of the piece decides what to do about it.
            return _damaged_range(error)
        return U64.unpack_from(peeked.body, JOURNAL_OFFSET_AT)[0], peeked.lengths[0]


def _damaged_range(error: DMQError) -> tuple[int, int]:
    start, end = error.detail.get("start"), error.detail.get("end")
    if start is None or end is None:
        raise error
    return start, end - start
