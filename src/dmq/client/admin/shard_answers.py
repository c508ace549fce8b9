"""What the shards of a cluster answered to one question, and how that becomes one answer. Pure.

What always holds: a row names the shard it came from; a shard that did not answer is named, and nothing is made up for
it; what no shard knows raises as a lone broker does. With a lone broker there is one answer, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, Final, Generic, TypeVar

from dmq.client.admin.reports import GroupReport, Lag, StoredMessage, Topic, TraceReport, WhyReport
from dmq.errors import (
    BrokerStopping,
    Busy,
    DMQError,
    NotConnected,
    NotEnoughReplicas,
    NotLeader,
    TimedOut,
    UnknownGroup,
    UnknownMessage,
    UnknownTopic,
)

__all__ = [
    "ShardAnswers",
    "ShardRows",
    "chosen_why",
    "interleaved",
    "joined_group",
    "joined_groups",
    "joined_lag",
    "joined_topic",
    "joined_topics",
    "joined_trace",
]

T = TypeVar("T")

_UNKNOWN: Final = (UnknownTopic, UnknownGroup, UnknownMessage)
_AWAY: Final = (NotConnected, TimedOut, NotLeader, NotEnoughReplicas, BrokerStopping, Busy)


class ShardRows(list[T], Generic[T]):
    """Rows of all shards.

    Attributes:
        missing: the names of shards that did not answer: their rows are not here.
    """

    def __init__(self, rows: Iterable[T] = (), missing: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.missing: tuple[str, ...] = tuple(missing)


class ShardAnswers(Generic[T]):
    """The answers of some shards to one question.

    Parameters:
        is_change: a shard that did not answer may have done what it was asked for.

    Attributes:
        found: the answers with the numbers of their shards.
        missing: the names of shards that did not answer.
    """

    def __init__(self, *, is_change: bool = False) -> None:
        self._is_change = is_change
        self.found: list[tuple[int, T]] = []
        self.missing: list[str] = []
        self._unknown: DMQError | None = None
        self._away: DMQError | None = None

    def failed(self, shard: str, error: DMQError) -> None:
        """A shard answered with an error, or did not answer.

        Raises:
            DMQError: it is one that every shard would give.
        """
        if isinstance(error, _UNKNOWN):
            self._unknown = error
        elif isinstance(error, _AWAY):
            self._away = error
            self.missing.append(shard)
        else:
            raise error

    def check(self) -> None:
        """Raise what all shards together say, if none has an answer."""
        if self.found:
            return
        error = self._away if self._is_change and self._away is not None else self._unknown or self._away
        assert error is not None, "somebody was asked"
        if error is self._unknown and self.missing:
            away = f"shard {', '.join(self.missing)} did not answer, and may know more: try again later"
            raise type(error)(f"{error.message}; {away}", **error.detail)
        raise error

    def rows(
        self: ShardAnswers[list[Any]], key: Callable[[Any], Any] | None = None, limit: int | None = None
    ) -> ShardRows[Any]:
        """The rows of all, each with its shard: one shard after the other, or sorted."""
        named = [[replace(row, shard=shard) if shard else row for row in rows] for shard, rows in self.found]
        rows = [*chain.from_iterable(named)]
        return ShardRows((rows if key is None or len(named) == 1 else sorted(rows, key=key))[:limit], self.missing)


def interleaved(answers: ShardAnswers[list[StoredMessage]], limit: int) -> ShardRows[StoredMessage]:
    """So many messages, of each shard as many as of the others if it has them; one shard after the other."""
    each = [[replace(row, shard=shard) if shard else row for row in rows] for shard, rows in answers.found]
    dealt = [pair for turn in zip_longest(*map(_numbered, range(len(each)), each)) for pair in turn if pair is not None]
    chosen = sorted(dealt[:limit], key=lambda pair: pair[0])
    return ShardRows([row for _, row in chosen], answers.missing)


def _numbered(at: int, rows: list[StoredMessage]) -> list[tuple[int, StoredMessage]]:
    return [(at, row) for row in rows]


def joined_topics(answers: ShardAnswers[list[Topic]]) -> ShardRows[Topic]:
    """Topics by name, with what all shards keep of them."""
    found: dict[str, list[Topic]] = {}
    for _, rows in answers.found:
        for row in rows:
            found.setdefault(row.name, []).append(row)
    return ShardRows((joined_topic(rows) for _, rows in sorted(found.items())), answers.missing)


def joined_topic(rows: Sequence[Topic]) -> Topic:
    """One topic, with what all shards keep of it; the newest slots are the ones that hold."""
    if len(rows) == 1:
        return rows[0]
    groups = None if any(row.groups is None for row in rows) else sorted({g for row in rows for g in row.groups or ()})
    return replace(
        max(rows, key=lambda row: row.slots_version),
        messages=sum(row.messages for row in rows),
        bytes=sum(row.bytes for row in rows),
        stored=sum(row.stored for row in rows),
        groups=None if groups is None else tuple(groups),
    )


def joined_lag(answers: ShardAnswers[Lag]) -> Lag:
    """How far a group is in all shards."""
    queues = [replace(row, shard=shard) if shard else row for shard, lag in answers.found for row in lag.queues]
    queues.sort(key=lambda row: (row.topic, row.shard, row.queue))
    lags = [lag for _, lag in answers.found]
    return Lag(
        lags[0].group,
        sum(lag.total for lag in lags),
        tuple(queues),
        sum(lag.retrying for lag in lags),
        missing=tuple(answers.missing),
    )


def joined_group(reports: Iterable[GroupReport], missing: Iterable[str] = ()) -> GroupReport:
    """One group in all shards; its members are the same ones at each of them."""
    found = [*reports]
    return GroupReport(
        found[0].name,
        tuple(sorted({topic for one in found for topic in one.topics})),
        sum(one.lag for one in found),
        max(one.members for one in found),
        details=tuple(member for one in found for member in one.details),
        retrying=sum(one.retrying for one in found),
        missing=tuple(missing),
    )


def joined_groups(answers: ShardAnswers[list[GroupReport]]) -> ShardRows[GroupReport]:
    """All groups, each with what all shards say of it."""
    by_name: dict[str, list[GroupReport]] = {}
    for _, reports in answers.found:
        for report in reports:
            by_name.setdefault(report.name, []).append(report)
    return ShardRows((joined_group(by_name[name]) for name in sorted(by_name)), answers.missing)


def joined_trace(answers: ShardAnswers[TraceReport]) -> TraceReport:
    """The history of a message; nearly always one shard knows all of it."""
    reports = [report for _, report in answers.found]
    steps = sorted((step for report in reports for step in report.steps), key=lambda step: step.at_ms)
    notes = tuple(dict.fromkeys(note for report in reports for note in report.notes))
    return TraceReport(
        reports[0].id,
        tuple(steps) if len(reports) > 1 else reports[0].steps,
        notes,
        all(report.is_complete for report in reports) and not answers.missing,
        missing=tuple(answers.missing),
    )


def chosen_why(answers: ShardAnswers[WhyReport]) -> WhyReport:
    """What the shard says that stores the message."""
    reports = [report for _, report in answers.found]
    best = max(reports, key=lambda report: len(report.groups))
    return replace(best, is_complete=best.is_complete and not answers.missing, missing=tuple(answers.missing))
