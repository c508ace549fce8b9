"""What a broker counts and measures, for STATS and the status page, and in Prometheus' text format.

What always holds: what counts up never falls while the broker runs.
"""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.disk_report import disk_figures, dropped_by_group
from dmq.broker.maintenance import Audience

__all__ = ["exposition", "lags", "numbers"]


def numbers(audience: Audience, broker: Broker | None) -> dict[str, float]:
    """Counters and gauges by name; without a Broker those of its clients."""
    values: dict[str, float] = {f"broker_{name}": value for name, value in audience.counters.items()}
    values["broker_sessions"] = len(audience)
    if broker is None:
        return values
    publisher, writer, channels = broker.publisher, broker.writer, broker.channels
    values |= {
        "broker_messages_in": publisher.messages_in,
        "broker_bytes_in": publisher.bytes_in,
        "broker_duplicates": publisher.duplicates,
        "broker_limited": broker.limits.limited,
        "broker_waiting_bytes": writer.waiting_bytes,
        "broker_flushes": writer.flushes,
        "broker_units": writer.units,
        "broker_out": channels.out,
        "broker_members_silent": len(channels.silent),
    }
    values |= {f"store_{name}": float(value) for name, value in broker.store.stats().items()}
    values |= disk_figures(broker)
    for name in ("delivered", "acked", "dead"):
        values[f"broker_{name}"] = channels.ended[name] + sum(one.counts[name] for one in channels.open.values())
    values |= {f"broker_{name}": value for name, value in broker.dead_letters.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.delays.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.transactions.figures().items()}
    return values


def lags(broker: Broker) -> dict[tuple[str, str], int]:
    """How much each group has not settled, by topic and group, whether its consumers are there or not."""
    queries = broker.store.queries
    names = {topic.id: topic.name for topic in queries.topics()}
    found: dict[tuple[str, str], int] = {}
    for group in queries.groups():
        for (topic_id, queue), position in queries.positions_of(group).items():
            if topic_id in names:
                first, following = queries.bounds(names[topic_id], queue)
                settled = sum(end - max(start, first) for start, end in position.ranges if end > first)
                key = (names[topic_id], group)
                found[key] = found.get(key, 0) + max(following - max(position.floor, first) - settled, 0)
    return found | {key: channel.lag() for key, channel in broker.channels.open.items()}


_COUNTERS = frozenset(
    f"broker_{name}"
    for name in (
        "connections",
        "requests",
        "errors",
        "messages_in",
        "bytes_in",
        "duplicates",
        "limited",
        "flushes",
        "units",
        "delivered",
        "acked",
        "dead",
        "delays_fired",
        "delays_cancelled",
        "delays_dead",
        "delays_unreadable",
        "transactions_committed",
        "transactions_rolled_back",
        "transactions_given_up",
        "transactions_checked",
        "dead_letters_drained",
        "dead_letters_taken",
        "dead_letters_turned_away",
        "dead_letters_resent",
        "dead_letters_deleted",
        "dead_letters_failures",
    )
) | {"retention_dropped_messages", "retention_dropped_unconsumed_messages"}


def exposition(broker: Broker) -> str:
    """Everything `numbers` has, and the lag of every group, whether its consumers are there or not."""
    lines: list[str] = []
    for name, value in sorted(numbers(broker.audience, broker).items()):
        is_counter = name in _COUNTERS
        full = f"dmq_{name}_total" if is_counter else f"dmq_{name}"
        lines += [f"# TYPE {full} {'counter' if is_counter else 'gauge'}", f"{full} {_number(value)}"]
    lines.append("# TYPE dmq_group_lag gauge")
    for (topic, group), lag in sorted(lags(broker).items()):
        labels = f'topic="{_escaped(topic)}",group="{_escaped(group)}"'
        lines.append(f"dmq_group_lag{{{labels}}} {lag}")
    lines.append("# TYPE dmq_group_dropped_messages_total counter")
    for (topic, group), count in sorted(dropped_by_group(broker).items()):
        labels = f'topic="{_escaped(topic)}",group="{_escaped(group)}"'
        lines.append(f"dmq_group_dropped_messages_total{{{labels}}} {count}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
