"""What Spark's filters say about where to look. Pure.

Filters are used to leave out what they would drop anyway, and given back, so that Spark applies them to the rest: a
bound here may be too wide, and never too narrow.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

__all__ = ["FilterBounds", "bounds_of"]

_OFFSET_MAX: Final = 1 << 63
_EQUAL: Final = EqualTo | EqualNullSafe | In
_ABOVE: Final = GreaterThan | GreaterThanOrEqual
_BELOW: Final = LessThan | LessThanOrEqual
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class FilterBounds:
    """What can pass the filters at most: these topics and partitions (None is all), offsets and store times."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    from_partition: int = 0
    until_partition: int = _OFFSET_MAX
    from_offset: int = 0
    until_offset: int = _OFFSET_MAX
    from_ms: int | None = None
    until_ms: int | None = None

    def has_topic(self, topic: str) -> bool:
        return self.topics is None or topic in self.topics

    def has_partition(self, partition: int) -> bool:
        is_listed = self.partitions is None or partition in self.partitions
        return is_listed and self.from_partition <= partition < self.until_partition


def bounds_of(filters: Iterable[Filter]) -> FilterBounds:
    """What passes all of the filters; those that say nothing of use change nothing."""
    bounds = FilterBounds()
    for one in filters:
        if not isinstance(one, _EQUAL | _ABOVE | _BELOW):
            continue
        name = one.attribute[0] if len(one.attribute) == 1 else ""
        values = tuple(one.value) if isinstance(one, In) else (one.value,)
        if name == "topic" and isinstance(one, _EQUAL):
            bounds = replace(bounds, topics=_both(bounds.topics, frozenset(v for v in values if isinstance(v, str))))
        elif name in ("partition", "offset") and all(isinstance(v, int) for v in values):
            bounds = _by_number(bounds, one, name, values)
        elif name in ("timestamp", "stored_at") and all(_is_moment(v) for v in values):
            bounds = _by_time(bounds, one, values)
    return bounds


def _both(before: frozenset[Any] | None, now: frozenset[Any]) -> frozenset[Any]:
    return now if before is None else before & now


def _by_number(bounds: FilterBounds, one: Filter, name: str, values: tuple[int, ...]) -> FilterBounds:
    low, high = _interval(one, values)
    first, last = f"from_{name}", f"until_{name}"
    bounds = replace(bounds, **{first: max(getattr(bounds, first), low), last: min(getattr(bounds, last), high)})
    if name == "partition" and isinstance(one, _EQUAL):
        bounds = replace(bounds, partitions=_both(bounds.partitions, frozenset(values)))
    return bounds


def _interval(one: Filter, values: tuple[int, ...]) -> tuple[int, int]:
    """The lowest number that passes, and the first above the highest."""
    if not values:
        return 0, 0
    if isinstance(one, _ABOVE):
        return values[0] + isinstance(one, GreaterThan), _OFFSET_MAX
    if isinstance(one, _BELOW):
        return 0, values[0] + isinstance(one, LessThanOrEqual)
    return min(values), max(values) + 1


def _is_moment(value: object) -> bool:
    return isinstance(value, datetime.datetime) and value.tzinfo is not None


def _by_time(bounds: FilterBounds, one: Filter, values: tuple[datetime.datetime, ...]) -> FilterBounds:
    """Store times are whole milliseconds, so what is asked for is rounded to the side that leaves nothing out."""
    whole = [(value - _EPOCH) // datetime.timedelta(milliseconds=1) for value in values]
    if not whole:
        return replace(bounds, until_offset=0)
    if not isinstance(one, _BELOW):
        bounds = replace(bounds, from_ms=max(min(whole), bounds.from_ms or 0))
    if not isinstance(one, _ABOVE):
        until_ms = max(0, max(whole) + 1)
        bounds = replace(bounds, until_ms=until_ms if bounds.until_ms is None else min(until_ms, bounds.until_ms))
    return bounds
