"""One plain page for a person: topics, groups, lag, counters. Read only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from dmq.broker.broker import Broker
from dmq.broker.figures import lags, numbers

__all__ = ["status_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1c2024; background: #fff; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #d9dee3; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) { body { color: #e6e9ec; background: #14171a; } th, td { border-color: #333a41; } }
"""


def status_page(broker: Broker) -> str:
    """The whole page."""
    topics = []
    groups = []
    consumed = {key: lag for key, lag in lags(broker).items() if not key[1].startswith("%")}
    counts = Counter(topic for topic, _ in consumed)
    for topic in broker.store.topics():
        if topic.name.startswith("%"):
            continue
        kept = [broker.store.bounds(topic.name, queue) for queue in range(topic.config.queues)]
        kept_now, ever = sum(n - f for f, n in kept), sum(n for _, n in kept)
        topics.append((topic.name, topic.config.queues, kept_now, ever, counts[topic.name]))
    for (name, group), lag in sorted(consumed.items()):
        live = broker.consumptions.get((name, group))
        members = 0 if live is None else len(live.group.members)
        out = 0 if live is None else sum(cursor.out for cursor in live.cursors.values())
        groups.append((group, name, members, out, lag))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
        f"<title>DMQ {escape(broker.settings.name)}</title><style>{_STYLE}</style>"
        f"<h1>DMQ broker {escape(broker.settings.name)}</h1>"
        f"<p>{escape(broker.address)}, epoch {broker.store.epoch}, {len(broker.sessions)} clients</p>"
        + _table("Topics", ("topic", "queues", "messages kept", "messages ever", "groups"), topics)
        + _table("Groups", ("group", "topic", "members", "out", "lag"), groups)
        + _table(
            "Numbers", ("name", "value"), [(name, f"{value:g}") for name, value in sorted(numbers(broker).items())]
        )
    )


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>none yet</p>"
    head = "".join(f"<th{_kind(cell)}>{escape(name)}</th>" for name, cell in zip(heads, rows[0], strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


def _kind(cell: object) -> str:
    return " class=number" if isinstance(cell, int) else ""
