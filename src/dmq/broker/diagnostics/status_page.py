"""One plain page for a person: topics, groups, lag, rates, counters. Read only.

What always holds: it remembers a bounded number of samples, however often somebody looks, and shows at most
`broker.metrics_series_max` topics and groups: it costs the same with a hundred and with a hundred thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.metrics import numbers, shown_pairs, shown_topics

__all__ = ["StatusPage"]

WINDOW_SECONDS: Final = 5.0  # that rates are taken over, if somebody looked that long ago
APART_SECONDS: Final = 0.5  # samples are at least so far apart
_RATES: Final = {
    "messages in": "broker_messages_in",
    "bytes in": "broker_bytes_in",
    "messages delivered": "broker_delivered",
    "messages acked": "broker_acked",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1c2024; background: #fff; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #d9dee3; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) { body { color: #e6e9ec; background: #14171a; } th, td { border-color: #333a41; } }
"""


class Sample(NamedTuple):
    """What was counted at some time."""

    at: float
    totals: dict[str, float]
    ever: dict[str, int]  # messages of each topic
    consumed: dict[tuple[str, str], int]  # of each topic by each group


class StatusPage:
    """The page, made anew for each look. Rates are those of the last seconds, as far as somebody looked."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._samples: deque[Sample] = deque()

    def __call__(self) -> str:
        """The whole page."""
        broker = self._broker()
        table = broker.queries.lags
        shown, pairs = shown_topics(broker), shown_pairs(broker)
        amounts = {topic.name: broker.catalog.amounts(topic) for topic in shown}
        values = numbers(broker.audience, broker)
        ever = {name: stored for name, (_, stored) in amounts.items()}
        done = {key: table.stored_in(topic.id) - lag for key, (topic, lag) in pairs.items()}
        now = Sample(broker.clock.wall.monotonic(), values, ever, done)
        before = self._before(now)
        rate = partial(_rate, max(now.at - before.at, 0.0))
        topics = [
            (
                topic.name,
                topic.config.queues,
                *amounts[topic.name],
                rate(before.ever.get(topic.name), ever[topic.name]),
                table.groups_in(topic.id),
            )
            for topic in shown
        ]
        groups = []
        for (name, group), (_, lag) in sorted(pairs.items()):
            live = broker.channels.open.get((name, group))
            members = 0 if live is None else len(live.group.members)
            out = 0 if live is None else live.out
            speed = rate(before.consumed.get((name, group)), done.get((name, group), 0))
            groups.append((group, name, members, out, speed, lag))
        rates = [(what, rate(before.totals.get(name), values[name])) for what, name in _RATES.items()]
        return (
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
            f"<title>DMQ {escape(broker.settings.name)}</title><style>{_STYLE}</style>"
            f"<h1>DMQ broker {escape(broker.settings.name)}</h1>"
            f"<p>{escape(broker.audience.address)}, epoch {broker.queries.epoch}, {len(broker.audience)} clients</p>"
            + _table("Rates", ("what", "per second"), rates)
            + _table("Topics", ("topic", "queues", "messages kept", "messages ever", "in per second", "groups"), topics)
            + _rest(broker.queries.topic_count - len(topics), "topics", "with fewer messages")
            + _table("Groups", ("group", "topic", "members", "out", "consumed per second", "lag"), groups)
            + _rest(len(table) - len(groups), "groups of topics", "with smaller lags")
            + _table("Numbers", ("name", "value"), [(name, f"{value:g}") for name, value in sorted(values.items())])
        )

    def _before(self, now: Sample) -> Sample:
        """What to compare with: the youngest sample that is old enough, else the oldest there is."""
        samples = self._samples
        while len(samples) > 1 and samples[1].at <= now.at - WINDOW_SECONDS:
            samples.popleft()
        if not samples or now.at - samples[-1].at >= APART_SECONDS:
            samples.append(now)
        return samples[0]


def _rate(seconds: float, before: float | None, now: float) -> int | str:
    """So many a second; a dash where nothing is known yet."""
    if before is None or seconds < APART_SECONDS:
        return "-"
    return round(max(now - before, 0) / seconds)


def _rest(count: int, what: str, which: str) -> str:
    """That not all are shown; nothing if they are. The topics and groups of DMQ itself are counted, too."""
    return "" if count <= 0 else f"<p>{count} more {what}, {which} or of DMQ itself, are not shown</p>"


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>none yet</p>"
    head = "".join(f"<th{_kind(cell)}>{escape(name)}</th>" for name, cell in zip(heads, rows[0], strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


def _kind(cell: object) -> str:
    return " class=number" if isinstance(cell, int) or cell == "-" else ""
