"""Retrying: the retry topics, and how many messages wait in the schedule to come into each.

A message that failed is settled where it was and kept in the schedule until it is due in the retry topic of its group.
There is one such topic for each group and topic that ever had a failure (ADR 9).

What always holds: the counts follow from the events and batches of the journal alone. A message that is settled as
RETRIED is on its way, and one that arrives in a retry topic no longer is.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RETRY_PREFIX", "RetryCounts", "retry_topic_name", "retry_topic_parts"]

RETRY_PREFIX: Final = "%RETRY%"


def retry_topic_name(group: str, topic_id: int) -> str:
    """Where a group gets messages of a topic again. By the topic's id: one created anew is another topic."""
    return f"{RETRY_PREFIX}{group}%{topic_id}"


def retry_topic_parts(name: str) -> tuple[str, int] | None:
    """Group and topic id of such a name; None if it is another kind of name."""
    if not name.startswith(RETRY_PREFIX):
        return None
    group, _, topic_id = name[len(RETRY_PREFIX) :].rpartition("%")
    return (group, int(topic_id)) if group and topic_id.isdecimal() else None


class RetryCounts:
    """By the key of a retry topic's queue (`state.queue_key`), how many messages are on their way into it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def left(self, key: int, count: int) -> None:
        """Messages were settled, to come into this queue of a retry topic."""
        self._counts[key] = self._counts.get(key, 0) + count

    def arrived(self, key: int, count: int) -> None:
        """Messages came into a queue; of interest if it is one of a retry topic."""
        if key in self._counts:
            # What is resent from the dead letters arrives without having been on its way.
            self._counts[key] = max(0, self._counts[key] - count)

    def waiting(self, key: int) -> int:
        """How many are on their way."""
        return max(0, self._counts.get(key, 0))

    def drop(self, topic_id: int) -> None:
        """The topic is gone."""
        for key in [key for key in self._counts if key >> 8 == topic_id]:
            del self._counts[key]

    def dump(self) -> list[tuple[int, int]]:
        return sorted(self._counts.items())

    def load(self, counts: list[tuple[int, int]]) -> None:
        self._counts = dict(counts)
