"""The broker's numbers in Prometheus' text format."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.figures import lags, numbers

__all__ = ["exposition"]

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
)


def exposition(broker: Broker) -> str:
    """Everything `numbers` has, and the lag of every group, whether its consumers are there or not."""
    lines: list[str] = []
    for name, value in sorted(numbers(broker).items()):
        is_counter = name in _COUNTERS
        full = f"dmq_{name}_total" if is_counter else f"dmq_{name}"
        lines += [f"# TYPE {full} {'counter' if is_counter else 'gauge'}", f"{full} {_number(value)}"]
    lines.append("# TYPE dmq_group_lag gauge")
    for (topic, group), lag in sorted(lags(broker).items()):
        labels = f'topic="{_escaped(topic)}",group="{_escaped(group)}"'
        lines.append(f"dmq_group_lag{{{labels}}} {lag}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
