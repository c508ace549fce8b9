"""The options of a read with `format("dmq")`: Kafka's names, checked before a broker is asked.

What always holds: options that contradict each other are an error, not a choice of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dmq.errors import InvalidSettings
from dmq.pipeline.decode.journal_reader import PATIENCE, Patience
from dmq.pipeline.source.offsets import EARLIEST, LATEST, PartitionOffsets, StreamOffsets, TopicPartition, parse_offsets
from dmq.pipeline.spark_options import (
    ANSWER_OPTION,
    RETRIES_OPTION,
    SERVERS,
    TIMEOUT_OPTION,
    flag,
    known_options,
    patience_option,
    seconds_option,
    servers,
)

__all__ = ["SourceOptions", "StoreTimes", "check_partitions", "source_options", "with_headers"]

_NAMES: Final = (
    SERVERS, "subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "failOnDataLoss",
    "includeHeaders", TIMEOUT_OPTION, ANSWER_OPTION, RETRIES_OPTION,
)  # fmt: skip
_STRATEGY: Final = "startingOffsetsByTimestampStrategy"
TRIGGER_DELAY: Final = 900.0  # seconds, as Kafka's connector has it
_OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})


@dataclass(frozen=True)
class StoreTimes:
    """Times in ms since 1970: one for all queues, or one for each."""

    everywhere_ms: int | None = None
    places: PartitionOffsets = field(default_factory=dict)


@dataclass(frozen=True)
class SourceOptions:
    """The options of one read. Places are -2 (earliest), -1 (latest), one offset for each queue, or times."""

    servers: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: dict[str, tuple[int, ...]] | None = None
    starting: int | StreamOffsets | StoreTimes = EARLIEST
    ending: int | StreamOffsets | StoreTimes = LATEST
    needs_start: bool = False  # a queue without a message of the starting time or later is an error
    offsets_per_trigger: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay: float = TRIGGER_DELAY  # seconds until a batch may have less than the minimum
    partitions_min: int = 1
    fail_on_data_loss: bool = True
    patience: Patience = PATIENCE


def source_options(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Read the options.

    Raises:
        InvalidSettings: one is missing, unknown, makes no sense, or contradicts another.
    """
    given = known_options(options, _NAMES, _OF_SPARK, "reading from")
    address = servers(given)
    topics, pattern, assigned = _which(given)
    _check_kind(given, is_stream=is_stream)
    most, least = (_number(name, given, 1) for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"))
    if most is not None and least is not None and least > most:
        raise InvalidSettings(f"minOffsetsPerTrigger {least} is more than maxOffsetsPerTrigger {most}: make it less")
    return SourceOptions(
        address,
        topics,
        pattern,
        assigned,
        starting=_times("starting", given)
        or _offsets("startingOffsets", given, is_stream, LATEST if is_stream else EARLIEST),
        ending=_times("ending", given) or _offsets("endingOffsets", given, is_stream, LATEST),
        needs_start=_word(_STRATEGY, given, ("latest", "error")) == "error",
        offsets_per_trigger=most,
        offsets_per_trigger_min=least,
        trigger_delay=seconds_option("maxTriggerDelay", given, TRIGGER_DELAY),
        partitions_min=_number("minPartitions", given, 1) or 1,
        fail_on_data_loss=flag("failOnDataLoss", given, default=True),
        patience=patience_option(given, PATIENCE),
    )


def with_headers(options: Mapping[str, str]) -> bool:
    """Whether `includeHeaders` asks for the column."""
    return flag("includeHeaders", {name.lower(): value for name, value in options.items()}, default=False)


def _which(given: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, dict[str, tuple[int, ...]] | None]:
    """The topics that are wanted: by name, by a pattern, or queue by queue."""
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in given]
    if len(ways) != 1:
        told = f"{' and '.join(ways)} are given" if ways else "none is given"
        raise InvalidSettings(f"give one of the options subscribe, subscribePattern and assign: {told}")
    value = given[ways[0].lower()].strip()
    if ways[0] == "subscribe":
        topics = tuple(dict.fromkeys(name for part in value.split(",") if (name := part.strip())))
        if not topics:
            raise InvalidSettings("subscribe is empty: give topics by name, separated by commas")
        return topics, None, None
    if ways[0] == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise InvalidSettings(f"subscribePattern {value!r} is not a regular expression: {error}") from None
        return (), value, None
    expected = 'assign is JSON such as {"orders": [0, 1]}, with the partitions of each topic'
    try:
        assigned = json.loads(value)
    except ValueError as error:
        raise InvalidSettings(f"{expected}; this is not: {error}") from None
    if not isinstance(assigned, dict) or not assigned:
        raise InvalidSettings(f"{expected}; it has another shape")
    for topic, partitions in assigned.items():
        is_list = isinstance(partitions, list) and partitions
        if not is_list or not all(isinstance(number, int) and number >= 0 for number in partitions):
            raise InvalidSettings(f"{expected}; {partitions!r} of topic {topic!r} are not partitions")
    return (), None, {topic: tuple(sorted(set(partitions))) for topic, partitions in assigned.items()}


def _check_kind(given: Mapping[str, str], *, is_stream: bool) -> None:
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if is_stream and name.lower() in given:
            raise InvalidSettings(f"a stream has no end, so {name} is for batch reads: leave it out")


def _offsets(name: str, given: Mapping[str, str], is_stream: bool, default: int) -> int | StreamOffsets:
    value = given.get(name.lower())
    if value is None:
        return default
    words = {"earliest": EARLIEST, "latest": LATEST}
    word = words.get(value.strip().lower())
    found: int | StreamOffsets = parse_offsets(value, name) if word is None else word
    # A batch that begins at the end, or ends at the beginning, is empty: nobody means that.
    senseless = LATEST if name == "startingOffsets" else EARLIEST
    if not is_stream and (
        found == senseless or (isinstance(found, StreamOffsets) and senseless in found.places.values())
    ):
        what = "latest" if senseless == LATEST else "earliest"
        raise InvalidSettings(f"{name} cannot be {what} in a batch read, which would be empty: give other offsets")
    return found


def _times(side: str, given: Mapping[str, str]) -> StoreTimes | None:
    """Where a read begins or ends by store time: one for all queues goes before one for each."""
    everywhere_ms = _number(f"{side}Timestamp", given, 0)
    name = f"{side}OffsetsByTimestamp"
    value = given.get(name.lower())
    if everywhere_ms is not None or value is None:
        return None if everywhere_ms is None else StoreTimes(everywhere_ms)
    expected = f'{name} is JSON such as {{"orders": {{"0": 1767225600000}}}}, with ms since 1970 for each partition'
    try:
        raw = json.loads(value)
    except ValueError as error:
        raise InvalidSettings(f"{expected}; this is not: {error}") from None
    found: PartitionOffsets = {}
    if not isinstance(raw, dict) or not all(isinstance(queues, dict) for queues in raw.values()):
        raise InvalidSettings(f"{expected}; it has another shape")
    for topic, queues in raw.items():
        for partition, at_ms in queues.items():
            is_time = isinstance(at_ms, int) and not isinstance(at_ms, bool) and 0 <= at_ms < 1 << 62
            if not (partition.isascii() and partition.isdigit() and is_time):
                raise InvalidSettings(f"{expected}; {partition!r}: {at_ms!r} of topic {topic!r} is not a time")
            found[TopicPartition(topic, int(partition))] = at_ms
    return StoreTimes(None, found)


def _word(name: str, given: Mapping[str, str], words: tuple[str, ...]) -> str:
    """One of some words; the first of them if none is given."""
    value = given.get(name.lower(), words[0]).strip().lower()
    if value not in words:
        raise InvalidSettings(f"{name} is {' or '.join(words)}, not {value!r}")
    return value


def _number(name: str, given: Mapping[str, str], lowest: int) -> int | None:
    value = given.get(name.lower())
    if value is None:
        return None
    text = value.strip()
    if not (text.isascii() and text.isdigit()) or not lowest <= int(text) < 1 << 62:
        unit = ", in ms since 1970" if name.endswith("Timestamp") else ""
        raise InvalidSettings(f"{name} is a whole number from {lowest} on{unit}, not {value!r}")
    return int(text)


def check_partitions(places: PartitionOffsets, present: set[TopicPartition], name: str) -> None:
    """Check that offsets which a user gave are for exactly the queues that are read.

    Raises:
        InvalidSettings: some are missing, or for queues that are not read.
    """
    for what, found in (("has no offset for", present - set(places)), ("is not read", set(places) - present)):
        if found:
            names = ", ".join(f"{place.topic} {place.partition}" for place in sorted(found)[:10])
            verb = f"{name} {what}" if what.startswith("has") else f"{name} names what {what}:"
            raise InvalidSettings(f"{verb} {names}; give one offset for each topic and partition")
