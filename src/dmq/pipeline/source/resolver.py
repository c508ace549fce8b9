"""Which messages a read means: from the user's options to offsets of queues, and to ranges of the journal.

What always holds: offsets that do not exist, or not any more, are an error that says which do; with `failOnDataLoss`
false they are a warning, and what exists is read. Offsets are never read from another incarnation of their topic.
Asking changes nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.errors import InvalidSettings, OffsetGone, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, place_of, place_queue, place_shard
from dmq.pipeline.decode.journal_reader import LONE, ClusterReader, JournalReader
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
from dmq.pipeline.source.options import SourceOptions, StoreTimes, check_partitions
from dmq.pipeline.source.partition_plan import Piece, QueueRange, Wanted, plan
from dmq.protocol.admin import TopicInfo
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.read import Location, QueueLocations, QueuePoints, TopicLocations, TopicPoints

__all__ = ["Resolver"]

log = EventLog(__name__)

_NAMED: Final = 20  # topics in an error message

Topic: TypeAlias = dict[int, TopicInfo]
"""A topic: what each shard has of it, by the shard's number."""
Chosen: TypeAlias = int | StreamOffsets | StoreTimes
"""What a user chose: earliest, latest, offsets or times."""


class _Queues(NamedTuple):
    """What exists of the queues that are read, where points lie in them, and of which incarnations they are."""

    queues: dict[TopicPartition, QueueLocations]
    incarnations: Incarnations

    @property
    def topics(self) -> set[str]:
        """The topics that exist."""
        return {part.topic for part in self.incarnations}

    def at(self, places: PartitionOffsets) -> StreamOffsets:
        """Offsets of these queues."""
        return StreamOffsets(places, self.incarnations)


class _Points(NamedTuple):
    """A place in every queue that is read: the same in all, but for those that have their own."""

    everywhere: Point
    places: dict[TopicPartition, Point] = {}


_WORDS: Final = {EARLIEST: Point(PointKind.EARLIEST), LATEST: Point(PointKind.LATEST)}


def _points(chosen: Chosen) -> _Points:
    """What a user chose, as a broker is asked for it."""
    if isinstance(chosen, StoreTimes):
        at_ms = {place: Point(PointKind.TIME, time_ms) for place, time_ms in chosen.places.items()}
        return _Points(Point(PointKind.TIME, chosen.everywhere_ms or 0), at_ms)
    if isinstance(chosen, StreamOffsets):
        return _Points(
            _WORDS[EARLIEST],
            {place: _WORDS.get(offset) or Point(PointKind.OFFSET, offset) for place, offset in chosen.places.items()},
        )
    return _Points(_WORDS[chosen])


class Resolver:
    """Answers for one read, over one connection to each shard. All shards are asked at once.

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
        for shard, infos in self._reader.ask_all(lambda _, reader: reader.topics(system=system)).items():
            for info in infos:
                found.setdefault(info.topic, {})[shard] = info
        return found

    def _names(self) -> list[str]:
        """The topics that are read, whether they exist or not."""
        options = self._options
        if options.pattern is None:
            return [*(options.topics or options.assigned or ())]
        matches = re.compile(options.pattern).fullmatch
        return [*filter(matches, self._present(system=options.pattern.startswith(SYSTEM_PREFIX)))]

    def _queues(self, points: Sequence[_Points] = (), *, may_lack: bool = False) -> _Queues:
        """What each queue that is read has, and where points lie in it.

        Parameters:
            may_lack: whether a named topic that does not exist is only a warning.

        Raises:
            UnknownTopic: one that was named does not exist, or an assigned partition.
        """
        names = self._names()
        found = self._locate(names, points)
        if self._options.pattern is not None:
            return found
        for name in names:
            if name not in found.topics and may_lack:
                log.warning("data was lost", reason="the topic does not exist", topic=name)
            elif name not in found.topics:
                there = ", ".join(sorted(self._present(system=name.startswith(SYSTEM_PREFIX)))[:_NAMED]) or "none"
                raise UnknownTopic(f"topic {name!r} does not exist: there are {there}", topic=name)
        if self._options.assigned is None:
            return found
        return found._replace(queues=_assigned(found, self._options.assigned))

    def _locate(self, names: Sequence[str], points: Sequence[_Points]) -> _Queues:
        """Ask all shards for points in all queues of some topics."""
        own = {place for part in points for place in part.places}
        found = _Queues({}, {})
        if not names:
            return found

        def ask(shard: int, reader: JournalReader) -> list[TopicLocations]:
            mine: dict[str, list[QueuePoints]] = {}
            for place in own:
                if place_shard(place.partition) == shard:
                    each = [part.places.get(place, part.everywhere) for part in points]
                    mine.setdefault(place.topic, []).append(QueuePoints(place_queue(place.partition), each))
            shared = [part.everywhere for part in points]
            return reader.locate([TopicPoints(name, shared, mine.get(name, [])) for name in names])

        for shard, topics in self._reader.ask_all(ask).items():
            for topic in topics:
                if topic.topic_id:
                    found.incarnations[TopicShard(topic.topic, shard)] = topic.topic_id
                for queue in topic.queues:
                    found.queues[TopicPartition(topic.topic, place_of(queue.queue, shard))] = queue
        return found

    def ends(self) -> StreamOffsets:
        """How far each queue goes now, also in shards that are new."""
        self._reader.refresh()
        found = self._queues(may_lack=not self._options.fail_on_data_loss)
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
        chosen = self._options.starting
        return self._chosen("starting", chosen, self._queues([_points(chosen)]), 0)

    def _chosen(self, side: str, chosen: Chosen, present: _Queues, point: int) -> StreamOffsets:
        """The offsets that the user means.

        Parameters:
            side: of the read: `starting` or `ending`.
            point: which of the points of each queue the chosen one is.
        """
        found = present.at({})
        if isinstance(chosen, StoreTimes):
            if chosen.places:
                check_partitions(chosen.places, set(present.queues), f"{side}OffsetsByTimestamp")
            for place, queue in present.queues.items():
                found.places[place] = queue.locations[point].offset
                if self._options.needs_start and side == "starting" and found.places[place] == queue.next_offset:
                    raise OffsetGone(
                        f"partition {place.partition} of topic {place.topic!r} has no message of the starting time or "
                        "later: set startingOffsetsByTimestampStrategy to latest to read what comes",
                        next=queue.next_offset,
                    )
            return found
        name = f"{side}Offsets"
        if isinstance(chosen, StreamOffsets):
            check_partitions(chosen.places, set(present.queues), name)
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
        points = [_points(options.starting), _points(options.ending)]
        points += [_Points(Point(PointKind.TIME, at_ms)) for at_ms in (bounds.from_ms, bounds.until_ms) if at_ms]
        found = self._queues(points)
        start = self._chosen("starting", options.starting, found, 0)
        end = self._chosen("ending", options.ending, found, 1)
        if isinstance(options.starting, StoreTimes) or isinstance(options.ending, StoreTimes):
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
        return self._planned(found, start, end, bounds)

    def pieces(self, start: StreamOffsets, end: StreamOffsets) -> list[Piece]:
        """The pieces between places; a queue that has no start in its incarnation is read from its beginning.

        Raises:
            OffsetGone: some of it does not exist (any more), and the user minds.
        """
        names = sorted({place.topic for place in end.places})
        found = self._locate(names, [_points(start), _points(end)])
        for name in names:
            if name not in found.topics:
                self._lost(f"topic {name!r} is gone")
        return self._planned(found, start, end, FilterBounds())

    def _planned(self, found: _Queues, start: StreamOffsets, end: StreamOffsets, bounds: FilterBounds) -> list[Piece]:
        present = found.at({})
        ranges: list[QueueRange] = []
        for place in sorted(end.places):
            queue = found.queues.get(place)
            if not (bounds.has_topic(place.topic) and bounds.has_partition(place.partition)):
                continue
            if queue is None:
                if place.topic in found.topics:
                    self._lost(f"partition {place.partition} of topic {place.topic!r} is gone")
                continue
            if present.is_anew(place, end):
                self._lost(f"topic {place.topic!r} was deleted and created again since this batch was planned")
                continue
            begun = 0 if end.is_anew(place, start) else start.places.get(place, 0)
            first, last = self._existing(place, queue, begun, end.places[place])
            first, last = _bounded(queue, first, last, bounds)
            if first < last:
                shard = place_shard(place.partition)
                topic_id = found.incarnations[TopicShard(place.topic, shard)]
                ranges.append(QueueRange(place.topic, topic_id, queue.queue, first, end=last, shard=shard))
        return plan(self._wanted(ranges, found), self._options.partitions_min)

    def _existing(self, place: TopicPartition, queue: QueueLocations, start: int, end: int) -> tuple[int, int]:
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

    # --- the journal ------------------------------------------------------------------------------------------------

    def _wanted(self, ranges: Sequence[QueueRange], found: _Queues) -> list[Wanted]:
        """Ranges with their places in the journal. Those that filters moved have to be asked for once more."""
        known = {place: _by_offset(queue) for place, queue in found.queues.items()}
        moved = [part for part in ranges if not {part.start, part.end} <= known[part.place].keys()]
        if moved:
            firsts, lasts = (
                _Points(_WORDS[EARLIEST], {part.place: Point(PointKind.OFFSET, getattr(part, side)) for part in moved})
                for side in ("start", "end")
            )
            again = self._locate(sorted({part.topic for part in moved}), [firsts, lasts])
            for part in moved:
                is_same = again.incarnations.get(TopicShard(part.topic, part.shard)) == part.topic_id
                known[part.place] = _by_offset(again.queues[part.place]) if is_same else {}
        wanted: list[Wanted] = []
        for part in ranges:
            first, last = known[part.place].get(part.start), known[part.place].get(part.end)
            if first is None or last is None:  # retention went on since the first question
                self._lost(f"offsets {part.start} to {part.end} of topic {part.topic!r}, queue {part.queue}, are gone")
                continue
            # Of these two alone, which are the same whenever the batch is planned: others may come or go meanwhile.
            mean = max(1.0, (first.start_bytes + last.before_bytes) / 2)
            wanted.append(Wanted(part, first.start, last.before + max(1, last.before_bytes), mean))
        return wanted


def _assigned(found: _Queues, assigned: Mapping[str, tuple[int, ...]]) -> dict[TopicPartition, QueueLocations]:
    """The queues that the user assigned.

    Raises:
        UnknownTopic: one does not exist.
    """
    chosen: dict[TopicPartition, QueueLocations] = {}
    for topic, partitions in assigned.items():
        known = sorted(place.partition for place in found.queues if place.topic == topic)
        for partition in partitions if known else ():
            place = TopicPartition(topic, partition)
            if place not in found.queues:
                there = ", ".join(
                    f"{shard[0]} to {shard[-1]}"
                    for _, group in itertools.groupby(known, place_shard)
                    if (shard := [*group])
                )
                raise UnknownTopic(f"topic {topic!r} has partitions {there}, not {partition}", topic=topic)
            chosen[place] = found.queues[place]
    return chosen


def _bounded(queue: QueueLocations, first: int, last: int, bounds: FilterBounds) -> tuple[int, int]:
    """A range without the offsets that filters leave out, by number and by time.

    The points of the times stand behind those of start and end.
    """
    at = 2
    if bounds.from_ms:
        first, at = max(first, queue.locations[at].offset), at + 1
    if bounds.until_ms:
        last = min(last, queue.locations[at].offset)
    elif bounds.until_ms == 0:
        last = first
    return max(first, bounds.from_offset), min(last, bounds.until_offset)


def _by_offset(queue: QueueLocations) -> dict[int, Location]:
    return {location.offset: location for location in queue.locations}
