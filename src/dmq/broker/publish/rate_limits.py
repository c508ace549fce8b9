"""Limits: how many messages and bytes a second producers may send, by topic and by app (D-16, J-11). Pure code.

Each limit has a bucket that fills with time and holds one second's worth. What is sent takes from the buckets of its
topic and of its app.

What always holds: over any time no more passes than the rate, one second's worth, and what is left of one batch, since
a batch passes whole; what does not pass takes nothing from any bucket; a limit that is changed keeps what its bucket
holds, so changing it gives nothing away. Without limits `rules` is empty, and nothing else needs to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from dmq.storage.queries import Queries
from dmq.token_bucket import TokenBucket

__all__ = ["LIMITS_MAX", "Limit", "Limits", "Over", "kept_limits"]

LIMITS_MAX: Final = 2000  # all of them fit into one answer
_ROUNDING_SECONDS: Final = 1e-6  # who comes when it was told to is not refused for the last digit of a sum


class Limit(NamedTuple):
    """How much a second a topic takes, or an app may send: the other name is empty. None is no limit."""

    topic: str = ""
    app: str = ""
    messages: int | None = None
    bytes: int | None = None
    is_dead_letter: bool = False  # what is over it becomes a dead letter; else it is refused

    def describe(self) -> str:
        """In words, for an error message."""
        amounts = [f"{n:,} {unit}" for n, unit in ((self.messages, "messages"), (self.bytes, "bytes")) if n is not None]
        whose = f"topic {self.topic!r} takes" if self.topic else f"app {self.app!r} may send"
        return f"{whose} {' and '.join(amounts)} a second"


class Over(NamedTuple):
    """What is over which limit, and when it would pass."""

    limit: Limit
    seconds: float
    is_dead_letter: bool

    @property
    def retry_after_ms(self) -> int:
        """Rounded up: who comes then is not too early."""
        return max(1, math.ceil(self.seconds * 1000))


class _Rule:
    """A limit and its buckets."""

    __slots__ = ("bytes", "limit", "messages")

    def __init__(self, limit: Limit, now: float) -> None:
        self.limit = limit
        self.messages = None if limit.messages is None else TokenBucket(limit.messages, now)
        self.bytes = None if limit.bytes is None else TokenBucket(limit.bytes, now)

    def take_over(self, before: _Rule, now: float) -> None:
        """Go on with what the buckets hold."""
        for mine, old in ((self.messages, before.messages), (self.bytes, before.bytes)):
            if mine is not None and old is not None:
                mine.take_over(old, now)

    def missing(self, count: int, size: int, now: float) -> float:
        """Seconds until so much could pass."""
        seconds = 0.0 if self.messages is None else self.messages.missing(count, now)
        return seconds if self.bytes is None else max(seconds, self.bytes.missing(size, now))

    def spend(self, count: int, size: int) -> None:
        if self.messages is not None:
            self.messages.spend(count)
        if self.bytes is not None:
            self.bytes.spend(size)


class Limits:
    """See the module."""

    def __init__(self) -> None:
        self.rules: dict[tuple[str, str], _Rule] = {}  # by topic and app, one of which is empty
        self.has_apps = False  # whether any app has a limit

    def replace(self, limits: Iterable[Limit], now: float) -> None:
        """Put these in force, and no others."""
        rules: dict[tuple[str, str], _Rule] = {}
        for limit in limits:
            rule = rules[limit.topic, limit.app] = _Rule(limit, now)
            before = self.rules.get((limit.topic, limit.app))
            if before is not None:
                rule.take_over(before, now)
        self.rules = rules
        self.has_apps = any(app for _, app in rules)

    def take(self, topic: str, app: str, count: int, size: int, now: float) -> Over | None:
        """Let messages pass, or say which limit they are over; where several are, the one that lasts longest.

        What one limit refuses does not become a dead letter because of another.
        """
        asked = [rule for key in ((topic, ""), ("", app)) if (rule := self.rules.get(key)) is not None]
        over = [(rule.missing(count, size, now), rule.limit) for rule in asked]
        over = [(seconds, limit) for seconds, limit in over if seconds > _ROUNDING_SECONDS]
        if over:
            seconds, limit = max(over, key=lambda pair: pair[0])
            return Over(limit, seconds, all(each.is_dead_letter for _, each in over))
        for rule in asked:
            rule.spend(count, size)
        return None


def kept_limits(queries: Queries) -> list[Limit]:
    """The limits that the journal has."""
    found = []
    for said in queries.limits():
        topic = queries.topic_by_id(said.topic_id) if said.topic_id else None
        if topic is not None or not said.topic_id:
            name = "" if topic is None else topic.name
            found.append(Limit(name, said.app, said.messages, said.bytes, bool(said.policy)))
    return sorted(found)
