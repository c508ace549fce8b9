"""Alerts: what the outbox cannot mend by itself is told to a person.

What always holds: an alert is logged and counted whatever the user's callback does; a callback that fails fails alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from dmq.event_log import EventLog
from dmq.outbox.metrics import Counts

__all__ = ["Alert", "AlertKind", "OnAlert", "alert_with"]

log = EventLog(__name__)


class AlertKind(StrEnum):
    """What it is about."""

    SEND = "send"  # a broker refuses a message again and again
    REVERSE = "reverse"  # the reverse business fails again and again
    NO_RESULT = "no-result"  # sent, asked for, and still no result
    GAP = "gap"  # a strict sequence has a hole that does not close


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs a person."""

    kind: AlertKind
    send_id: str
    topic: str
    business_id: str | None = None
    group: str = ""
    attempts: int = 0
    reason: str = ""
    count: int = 1  # of messages it is about; `send_id` is the first of them


OnAlert = Callable[[Alert], Any]


def alert_with(on_alert: OnAlert | None, counts: Counts) -> OnAlert:
    """A function that logs, counts, and calls the user's callback."""

    def alert(alert: Alert) -> None:
        counts.add(f"alerts_{alert.kind.name.lower()}")
        log.error(
            "the outbox needs help",
            kind=str(alert.kind),
            send_id=alert.send_id,
            topic=alert.topic,
            attempts=alert.attempts,
            reason=alert.reason,
            messages=alert.count,
        )
        if on_alert is not None:
            try:
                on_alert(alert)
            except Exception:
                log.exception("on_alert failed", once_for=())

    return alert
