"""Gaps in a strict sequence: what becomes of a message that came before the one it follows (T-09). Pure code.

What always holds: a message that waits goes back to the broker and comes again, so that messages of other business ids
go on; what is done about a gap that never closes is a matter of policy alone.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from dmq.client.consumer.handler import Reject, Retry
from dmq.errors import InvalidSettings
from dmq.outbox.alerts import Alert, AlertKind, OnAlert
from dmq.outbox.inbox.consumption import Consumption
from dmq.outbox.inbox.recorder import Gap

__all__ = ["GAP_POLICIES", "LOOK_SECONDS", "GapPolicy", "judge_gap"]

GAP_POLICIES: Final = ("wait", "skip", "dead-letter")
LOOK_SECONDS: Final = 0.02  # how often a consumer that is patient looks whether a gap is closed
_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS_MAX: Final = 30.0


class GapPolicy(NamedTuple):
    """What becomes of a gap.

    Attributes:
        policy: after `seconds`, "dead-letter" gives the waiting message up, "skip" consumes it without the one that is
            missing, "wait" goes on waiting.
        seconds: how long a gap may be open, from when it was first noticed.
        patience: how long a handler's thread waits at first, since the message before is often in the hands of a
            neighbour.
    """

    policy: str = "wait"
    seconds: float = 300.0
    patience: float = 0.2

    def check(self) -> GapPolicy:
        """Itself.

        Raises:
            InvalidSettings: a value makes no sense.
        """
        if self.policy not in GAP_POLICIES:
            raise InvalidSettings(f"gap policy {self.policy!r} is unknown: use {', '.join(GAP_POLICIES)}")
        if not self.seconds >= 0 or not self.patience >= 0:
            raise InvalidSettings("the seconds of a gap policy are not below 0")
        return self

    def is_passed_over(self, gap: Gap, now_ms: int) -> bool:
        """Whether the message behind it is consumed nevertheless."""
        return self.policy == "skip" and _waited(gap, now_ms) >= self.seconds

    def judge(self, sequence: int, last: int, waited_seconds: float, attempt: int) -> Any:
        """What to do: None to consume the message in spite of the gap, or what to raise."""
        text = f"number {sequence} waits for number {last + 1}"
        if self.policy != "wait" and waited_seconds >= self.seconds:
            if self.policy == "skip":
                return None
            return Reject(f"{text}, which did not come in {self.seconds:g} seconds")
        pause = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2.0 ** min(attempt - 1, 10))
        if self.policy != "wait":
            pause = min(pause, max(_PAUSE_SECONDS, self.seconds - waited_seconds))
        return Retry(text, after=pause)


def _waited(gap: Gap, now_ms: int) -> float:
    """Seconds for which a gap has been open."""
    return 0.0 if gap.waiting_since_ms is None else max(0.0, (now_ms - gap.waiting_since_ms) / 1000)


def judge_gap(policy: GapPolicy, taken: Consumption, gap: Gap, now_ms: int, alert: OnAlert) -> None:
    """A gap stays open: returns if the message is to be consumed nevertheless.

    Raises:
        Retry, Reject: what is to become of the message instead.
    """
    row = taken.row
    waited = _waited(gap, now_ms)
    verdict = policy.judge(row.sequence or 0, gap.last, waited, taken.attempt)
    if verdict is None or isinstance(verdict, Reject):
        what = "is consumed without it" if verdict is None else "becomes a dead letter"
        alert(
            Alert(
                kind=AlertKind.GAP,
                send_id=row.send_id,
                topic=row.topic,
                business_id=row.business_id,
                group=row.group,
                attempts=taken.attempt,
                reason=f"number {gap.last + 1} did not come in {waited:.0f} seconds: number {row.sequence} {what}",
            )
        )
    if verdict is not None:
        raise verdict from None
