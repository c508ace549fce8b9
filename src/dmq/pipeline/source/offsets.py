"""Offsets of topics and partitions as Spark keeps them: Kafka's JSON, `{"orders": {"0": 23, "1": -2}}`.

What always holds: JSON that we write has topics by name and partitions by number, so that equal offsets are equal
texts: Spark compares the texts, and another order would never end a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from dmq.errors import InvalidSettings

__all__ = [
    "EARLIEST",
    "LATEST",
    "PartitionOffsets",
    "TopicPartition",
    "offsets_dict",
    "parse_offsets",
    "partition_of",
    "queue_of",
]

EARLIEST: Final = -2
LATEST: Final = -1

_QUEUES: Final = 256  # of a shard; queue ids are below it
SHARD: Final = 0  # until brokers form shards, every queue is of this one


class TopicPartition(NamedTuple):
    """A queue, under the number that Spark has for it."""

    topic: str
    partition: int


PartitionOffsets: TypeAlias = dict[TopicPartition, int]


def partition_of(queue: int, shard: int = SHARD) -> int:
    """The one number that stands for a queue of a shard."""
    return shard * _QUEUES + queue


def queue_of(partition: int) -> int:
    """The queue a number stands for."""
    return partition % _QUEUES


def offsets_dict(places: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Places as Kafka's JSON has them, in their one order."""
    found: dict[str, dict[str, int]] = {}
    for place in sorted(places):
        found.setdefault(place.topic, {})[str(place.partition)] = places[place]
    return found


def parse_offsets(raw: Any, option: str) -> PartitionOffsets:
    """Places out of Kafka's JSON, as a text or already parsed.

    Raises:
        InvalidSettings: it is none.
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
    found: PartitionOffsets = {}
    for topic, queues in raw.items():
        for name, offset in queues.items():
            is_number = isinstance(offset, int) and not isinstance(offset, bool)
            if not (str(name).isascii() and str(name).isdigit()) or not is_number or offset < EARLIEST:
                raise InvalidSettings(f"{expected}; {name!r}: {offset!r} of topic {topic!r} is not an offset")
            found[TopicPartition(topic, int(name))] = offset
    return found
