"""Figures: what a broker counts and measures, for STATS, for the metrics and for the status page.

What always holds: what counts up never falls while the broker runs.
"""

from __future__ import annotations

from dmq.broker.broker import Broker

__all__ = ["lags", "numbers"]


def numbers(broker: Broker) -> dict[str, float]:
    """Counters and gauges by name."""
    values: dict[str, float] = {f"broker_{name}": value for name, value in broker.counters.items()}
    values |= {f"store_{name}": float(value) for name, value in broker.store.stats().items()}
    values["broker_sessions"] = len(broker.sessions)
    values["broker_waiting_bytes"] = broker.writer.waiting_bytes
    values["broker_flushes"] = broker.writer.flushes
    values["broker_units"] = broker.writer.units
    live = broker.consumptions.values()
    for name in ("delivered", "acked", "dead"):
        values[f"broker_{name}"] = broker.ended[name] + sum(consumption.counts[name] for consumption in live)
    values |= {f"broker_{name}": value for name, value in broker.dead_letters.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.delays.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.transactions.figures().items()}
    values["broker_out"] = sum(cursor.out for consumption in live for cursor in consumption.cursors.values())
    return values


def lags(broker: Broker) -> dict[tuple[str, str], int]:
    """How much each group has not settled, by topic and group, whether its consumers are there or not."""
    store = broker.store
    names = {topic.id: topic.name for topic in store.topics()}
    found: dict[tuple[str, str], int] = {}
    for group in store.groups():
        for (topic_id, queue), position in store.positions_of(group).items():
            if topic_id in names:
                first, following = store.bounds(names[topic_id], queue)
                settled = sum(end - max(start, first) for start, end in position.ranges if end > first)
                key = (names[topic_id], group)
                found[key] = found.get(key, 0) + max(following - max(position.floor, first) - settled, 0)
    return found | {key: consumption.lag() for key, consumption in broker.consumptions.items()}
