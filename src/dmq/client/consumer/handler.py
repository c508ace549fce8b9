"""Handling: what a handler's end means for its message, and how fast handlers may start. Pure.

What always holds: whatever a handler does, its message is acked, given back or rejected, never lost; an error that the
handler did not mean is tried again here first (J-02).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dmq.client.arguments import delay_ms, reason_text
from dmq.client.consumer.message import ReceivedMessage, facts_of
from dmq.errors import InvalidSettings
from dmq.event_log import EventLog

__all__ = ["POLICIES", "RateLimit", "Reject", "Retry", "Verdict", "begin_handling", "judge", "tell_failure"]

log = EventLog(__name__)

POLICIES: Final = ("caller-runs", "block", "reject")


class Retry(Exception):
    """Raised by a handler: deliver this message again.

    Parameters:
        after: seconds until then; left out, the broker's retry table says.
        reason: why, for the person who looks into it.

    Raises:
        InvalidSettings: `after` is not a time.
    """

    def __init__(self, reason: str = "", *, after: float | None = None) -> None:
        super().__init__(reason or "retry")
        delay_ms(after)
        self.after = after
        self.reason = reason


class Reject(Exception):
    """Raised by a handler: no attempt will help, keep this message among the dead letters."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "rejected")
        self.reason = reason


class RateLimit:
    """A policy of `run`: handlers start at most so often.

    Parameters:
        per_second: messages a second.
        burst: how many may start at once after a quiet time; one second's worth if left out.

    Raises:
        InvalidSettings: not above zero.
    """

    __slots__ = ("burst", "per_second")

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        if not _is_above(per_second, 0) or (burst is not None and not (_is_above(burst, 0) and burst >= 1)):
            raise InvalidSettings(f"a rate limit is above 0 a second with a burst of at least 1, not {per_second!r}")
        self.per_second = per_second
        self.burst = max(1.0, per_second if burst is None else burst)


def _is_above(value: Any, low: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > low


class Verdict(NamedTuple):
    """What to do after a handler ended: call it again, or say something of its message."""

    is_again: bool
    settle: Callable[[ReceivedMessage], object]
    is_error: bool = False  # worth a line in the log


def judge(error: BaseException | None, tries: int, local_retries: int) -> Verdict:
    """What a handler's end means.

    Parameters:
        error: what it raised, or None.
        tries: how often it was called for this message by now.
        local_retries: how often an error it did not mean is tried again here.
    """
    if error is None:
        return Verdict(False, lambda message: message.ack())
    if isinstance(error, Retry):
        after, reason = error.after, reason_text(error.reason)
        return Verdict(False, lambda message: message.nack(after, reason))
    if isinstance(error, Reject):
        why = reason_text(error.reason)
        return Verdict(False, lambda message: message.reject(why))
    if isinstance(error, Exception) and tries <= local_retries:
        return Verdict(True, lambda message: None)
    text = f"{type(error).__name__}: {reason_text(error)}"
    return Verdict(False, lambda message: message.nack(None, text), is_error=True)


def tell_failure(message: ReceivedMessage, error: BaseException | None) -> None:
    """Log that a handler failed; the same kind of error at most every ten seconds, with how many there were."""
    once_for = (message.group, message.topic, type(error).__name__)
    text = reason_text(error) or type(error).__name__  # KeyError has a text, StopIteration and many others have none
    log.warning("a handler failed", once_for=once_for, **facts_of(message), error=text, exc_info=error)


def begin_handling(handler: Any, group: str) -> Any:
    """Tell a handler that wants to know (it has a method `consuming`) that a consumer of a group begins with it."""
    told = getattr(handler, "consuming", None)
    return None if told is None else told(group)


def check_policy(policy: object) -> str | RateLimit:
    """The policy, if it is one.

    Raises:
        InvalidSettings: it is not one.
    """
    if isinstance(policy, RateLimit):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    raise InvalidSettings(f"policy {policy!r} is unknown: use {', '.join(POLICIES)} or dmq.RateLimit(per_second)")


def check_pool(handler: Any, workers: Any, local_retries: Any) -> None:
    """Refuse a handler that cannot be called, and numbers that make no sense.

    Raises:
        InvalidSettings: one of them does not.
    """
    if not callable(handler):
        raise InvalidSettings(f"a handler is a function that takes a message, not {handler!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1024:
        raise InvalidSettings(f"workers is a whole number from 1 to 1024, not {workers!r}")
    if isinstance(local_retries, bool) or not isinstance(local_retries, int) or local_retries < 0:
        raise InvalidSettings(f"local_retries is a whole number from 0 on, not {local_retries!r}")
