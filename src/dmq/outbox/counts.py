"""What an outbox has done, counted, and the same as text for Prometheus.

What always holds: a count never falls; adding one is safe from every thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["SENDER_COUNTS", "Counts", "exposition"]


# What a sender counts: there from the beginning, so that a rate over them is right from the beginning, too.
SENDER_COUNTS: Final = (
    "sent", "sent_directly", "relayed", "refused", "held_back", "database_errors", "resent",
    "results", "results_unknown", "results_ignored", "results_unreadable", "result_errors",
    "done", "rolled_back", "reversed", "reverse_failed",
    "alerts_send", "alerts_reverse", "alerts_no_result",
)  # fmt: skip


class Counts:
    """Counters by name.

    Parameters:
        names: of those that are to be there before they are first added to.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._mutex = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._mutex:
                self._counts[name] = self._counts.get(name, 0) + count

    def get(self, name: str) -> int:
        return self._counts.get(name, 0)

    def all(self) -> dict[str, int]:
        with self._mutex:
            return dict(self._counts)


def exposition(counts: Mapping[str, int], gauges: Mapping[str, float], app: str) -> str:
    """The text format of Prometheus."""
    escaped = app.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'{{app="{escaped}"}}'
    lines: list[str] = []
    for name, value in sorted(counts.items()):
        lines += [f"# TYPE dmq_outbox_{name}_total counter", f"dmq_outbox_{name}_total{labels} {value}"]
    for name, level in sorted(gauges.items()):
        lines += [f"# TYPE dmq_outbox_{name} gauge", f"dmq_outbox_{name}{labels} {level:g}"]
    return "\n".join(lines) + "\n"
