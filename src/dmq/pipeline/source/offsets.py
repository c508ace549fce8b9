"""Offsets of topics and partitions as Spark keeps them: Kafka's JSON, `{"orders": {"0": 23, "1": -2}}`.

A topic that is deleted and created again is another topic, whose offsets begin at 0 again. So the offsets that we write
name the incarnation of each topic, too, by shard: `{"orders": {"0": 23, "incarnation": {"0": 7}}}`. Offsets without it,
of a user or of an older checkpoint, hold for any incarnation.

What always holds: JSON that we write has topics by name and partitions by number, so that equal offsets are equal
texts: Spark compares the texts, and another order would never end a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from dmq.errors import InvalidSettings
from dmq.model import place_of, place_queue, place_shard

__all__ = [
    "EARLIEST",
    "LATEST",
    "Incarnations",
    "PartitionOffsets",
    "StreamOffsets",
    "TopicPartition",
    "TopicShard",
    "offsets_dict",
    "parse_offsets",
    "renumbered",
]

EARLIEST: Final = -2
LATEST: Final = -1

_INCARNATION: Final = "incarnation"


class TopicPartition(NamedTuple):
    """A queue, under the number that Spark has for it."""

    topic: str
    partition: int


class TopicShard(NamedTuple):
    """The part of a topic that one shard holds."""

    topic: str
    shard: int


PartitionOffsets: TypeAlias = dict[TopicPartition, int]
Incarnations: TypeAlias = dict[TopicShard, int]


class StreamOffsets(NamedTuple):
    """Offsets, and the incarnations of the topics that they are of, as far as they are known."""

    places: PartitionOffsets
    incarnations: Incarnations

    def incarnation_of(self, place: TopicPartition) -> int | None:
        """The incarnation that a place is of; None if it is not known."""
        return self.incarnations.get(TopicShard(place.topic, place_shard(place.partition)))

    def is_anew(self, place: TopicPartition, since: StreamOffsets) -> bool:
        """Whether the topic was deleted and created again between earlier offsets and these."""
        mine, before = self.incarnation_of(place), since.incarnation_of(place)
        return mine is not None and before is not None and mine != before


def renumbered(offsets: StreamOffsets, numbers: Mapping[str, int]) -> StreamOffsets:
    """Offsets of a lone broker, as those of the shard that it became.

    Parameters:
        numbers: of that shard, by topic; a topic that is not named has no such offsets any more.
    """
    found = StreamOffsets({}, {})
    for place, offset in offsets.places.items():
        shard = place_shard(place.partition)
        number = numbers.get(place.topic, shard) if shard == 0 else shard
        found.places[TopicPartition(place.topic, place_of(place_queue(place.partition), number))] = offset
    for part, incarnation in offsets.incarnations.items():
        number = numbers.get(part.topic, part.shard) if part.shard == 0 else part.shard
        found.incarnations[TopicShard(part.topic, number)] = incarnation
    return found


def offsets_dict(offsets: StreamOffsets) -> dict[str, dict[str, Any]]:
    """Offsets as Kafka's JSON has them, in their one order."""
    found: dict[str, dict[str, Any]] = {}
    for place in sorted(offsets.places):
        found.setdefault(place.topic, {})[str(place.partition)] = offsets.places[place]
    for part in sorted(offsets.incarnations):
        if part.topic in found:
            found[part.topic].setdefault(_INCARNATION, {})[str(part.shard)] = offsets.incarnations[part]
    return found


def parse_offsets(raw: Any, option: str) -> StreamOffsets:
    """Offsets out of Kafka's JSON, as a text or already parsed.

    Raises:
        InvalidSettings: it is not one.
    """
    expected = (
        f'{option} is JSON such as {{"orders": {{"0": 23, "1": -2}}}}, with -2 for the earliest, -1 for the latest'
    )
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError as error:
            raise InvalidSettings(f"{expected}; this is not: {error}") from None
    if not isinstance(raw, dict) or not all(isinstance(queues, dict) for queues in raw.values()):
        raise InvalidSettings(f"{expected}; it has another shape")
    found = StreamOffsets({}, {})
    for topic, queues in raw.items():
        for name, offset in queues.items():
            if name == _INCARNATION and isinstance(offset, dict):
                for shard, incarnation in offset.items():
                    if not _is_number(shard, incarnation, 0):
                        raise InvalidSettings(f"{expected}; {offset!r} of topic {topic!r} names no incarnation")
                    found.incarnations[TopicShard(topic, int(shard))] = incarnation
            elif _is_number(name, offset, EARLIEST):
                found.places[TopicPartition(topic, int(name))] = offset
            else:
                raise InvalidSettings(f"{expected}; {name!r}: {offset!r} of topic {topic!r} is not an offset")
    return found


def _is_number(name: object, value: object, lowest: int) -> bool:
    """Whether a name is a number in digits, and its value a number that is not too low."""
    is_digits = str(name).isascii() and str(name).isdigit()
    return is_digits and isinstance(value, int) and not isinstance(value, bool) and value >= lowest
