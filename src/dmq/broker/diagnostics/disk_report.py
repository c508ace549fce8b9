"""What an operator should know of a broker's disk: in figures, in a line for probes, and in sentences.

What always holds: every figure is that of `DiskSpace` and `Retention`, so metrics, `readyz` and `dmq doctor` agree with
what the broker does; asking changes nothing.
"""

from __future__ import annotations

from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.explanation import label, moment
from dmq.settings import format_size

__all__ = ["disk_figures", "disk_refusal", "disk_warnings", "dropped_by_group", "dropped_sentence"]

_SHOWN_MAX: Final = 5


def disk_figures(broker: Broker) -> dict[str, float]:
    """Counters and gauges by name."""
    space, retention = broker.store.space, broker.store.retention
    return {
        "disk_used_ratio": space.usage.share,
        "disk_used_bytes": space.usage.used,
        "disk_available_bytes": space.usage.available,
        "disk_ballast_bytes": space.ballast.bytes,
        "disk_refusing": space.is_refusing,
        "retention_held_bytes": retention.held_bytes,
        "retention_dropped_messages": retention.dropped,
        "retention_dropped_unconsumed_messages": retention.lost,
    }


def disk_refusal(broker: Broker) -> str:
    """Why messages are refused, in a line; empty if they are not."""
    space = broker.store.space
    if not space.is_refusing:
        return ""
    why = "is full" if space.is_full else f"is over {broker.store.settings.disk_refuse:.0%}"
    return f"messages are refused: the disk {why}, {space.usage.share:.1%} of it is in use; consumers are served"


def disk_warnings(broker: Broker) -> list[str]:
    """What is not as it should be, in sentences."""
    space, retention = broker.store.space, broker.store.retention
    found = []
    if not space.ballast.bytes and (wanted := space.ballast.wanted(space.usage)):
        found.append(
            f"the ballast of {format_size(wanted)} is missing: on a full disk nothing is left for settles and admin "
            "commands; it is made anew when there is space"
        )
    if retention.holds:
        names = {topic.id: topic.name for topic in broker.store.queries.topics()}
        groups = sorted({f"{label(hold.group)} in {names.get(hold.topic_id, '?')}" for hold in retention.holds})
        found.append(
            f"{format_size(retention.held_bytes)} of the journal is past the retention and kept for groups that have "
            f"not consumed it: {_some(groups)}; let them consume it, or delete those no longer used (dmq group delete)"
        )
    if dropped := dropped_sentence(broker):
        found.append(dropped)
    return found


def dropped_by_group(broker: Broker) -> dict[tuple[str, str], int]:
    """Messages that retention dropped before a group had consumed them, by topic and group, since the start."""
    find = broker.store.queries.topic_by_id
    found: dict[tuple[str, str], int] = {}
    for hold, count in broker.store.retention.losses.items():
        topic = find(hold.topic_id)
        key = "?" if topic is None else topic.name, hold.group
        found[key] = found.get(key, 0) + count
    return found


def dropped_sentence(broker: Broker) -> str:
    """What retention dropped before groups had consumed it; empty if it dropped nothing so."""
    retention = broker.store.retention
    if not retention.lost:
        return ""
    most = sorted(dropped_by_group(broker).items(), key=lambda item: -item[1])
    pairs = [f"{count} of {topic} for {label(group)}" for (topic, group), count in most]
    return (
        f"retention dropped {retention.lost} messages that groups had not consumed, the last at "
        f"{moment(retention.lost_at_ms)}: {_some(pairs)}; store.disk_force or store.keep_unconsumed asks for it"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more
