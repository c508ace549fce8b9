"""The retry policy: what to do with a batch that was refused, or never answered. Pure decisions (D-06, J-09).

Refused means that nothing was stored: the batch may go to another broker, up to `retries` times, or to the same one
after the time the broker named. One that is over a limit is not sent again: a limit holds on every broker, and its
sender is told, with the time after which to try. Unanswered means that it may be stored: it goes to the same broker
again, as RESEND with the same numbers, so that it is stored once; only if that broker is gone may a batch that has no
order to keep go to another, where consumers know it by its id. The members of a shard are one broker here: what one of
them may have stored, the next leader has, or never will have. A shard with too few replicas is waited for until the
batch's deadline.

What always holds: a decision never lies beyond the batch's deadline; what cannot succeed by trying again is not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from dmq.errors import (
    BrokerStopping,
    Busy,
    DMQError,
    NotConnected,
    NotEnoughReplicas,
    RateLimited,
    RegistryDown,
    ServerError,
    TimedOut,
    UnknownTopic,
)

__all__ = ["Decision", "History", "RetryPolicy", "Step", "pause_after", "unknown_after"]

PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 5.0
REPLICAS_SECONDS: Final = 0.5  # between two tries, where replicas are missing that may be back any moment


class Step(Enum):
    """What to do next."""

    FAIL = "fail"
    AGAIN = "again"  # to the same broker, after the pause
    ELSEWHERE = "elsewhere"  # to another broker
    REFRESH = "refresh"  # ask for the topic, then to the same broker


class Decision(NamedTuple):
    """The step, and the pause before it."""

    step: Step
    pause: float = 0.0


class History(NamedTuple):
    """What happened to a batch so far."""

    refusals: int = 0  # without a time to try again
    moves: int = 0  # to another broker
    is_unanswered: bool = False  # it may be stored
    is_pinned: bool = False  # its order binds it to its queue
    is_refreshed: bool = False
    deadline: float | None = None  # on the monotonic clock


def pause_after(error: DMQError, refusals: int, pause_max: float = PAUSE_MAX) -> float:
    """Seconds to wait before a batch is sent again: as long as the broker said, else longer with each refusal.

    Parameters:
        refusals: how often the batch was refused before without a time.
    """
    hint = error.retry_after
    return min(PAUSE_MIN * 2 ** min(refusals, 10), pause_max) if hint is None else hint


def unknown_after(timeout: float) -> str:
    """What a sender is told whose message may be stored."""
    return (
        f"the broker did not answer within {timeout:g} s; whether the message is stored is not known: send the same "
        "dmq.Message again, or with the same id, and it is stored once"
    )


class RetryPolicy:
    """The rules of one producer.

    Parameters:
        retries: how often a refused batch is tried again.
        resend_after: seconds after the first sending at which an unanswered batch is sent again.
    """

    def __init__(self, retries: int = 3, resend_after: Sequence[float] = (30.0, 60.0, 90.0)) -> None:
        self.retries: Final = retries
        self.resend_after: Final = tuple(resend_after)
        last = self.resend_after[-1] if self.resend_after else 30.0
        before = self.resend_after[-2] if len(self.resend_after) > 1 else 0.0
        self.give_up_after: Final = last + (last - before)
        """Seconds after the first sending at which an unanswered batch is given up: as long after the last
        resending as that one came after the one before."""

    def after_refusal(self, history: History, error: DMQError, now: float, has_other: bool) -> Decision:
        """The broker answered with an error.

        Parameters:
            has_other: there is another broker that could be asked.
        """
        if isinstance(error, UnknownTopic):
            return Decision(Step.FAIL if history.is_refreshed else Step.REFRESH)
        if not error.retriable or isinstance(error, RateLimited):
            return Decision(Step.FAIL)
        hint = error.retry_after
        # A broker that stops will be back, or its connection break: to wait for that is not a try.
        is_timed = (isinstance(error, Busy) and hint is not None) or isinstance(
            error, BrokerStopping | NotEnoughReplicas
        )
        if not is_timed and history.refusals >= self.retries:
            return Decision(Step.FAIL)
        pause_max = REPLICAS_SECONDS if isinstance(error, NotEnoughReplicas) else PAUSE_MAX
        pause = pause_after(error, history.refusals, pause_max)
        # A broker that failed in a way it did not expect may have stored it: only itself can tell.
        # All brokers of a cluster share their registry.
        is_stuck = history.is_unanswered or history.is_pinned or isinstance(error, ServerError | RegistryDown)
        may_move = has_other and not is_stuck
        if may_move and history.moves < self.retries:
            return Decision(Step.ELSEWHERE)
        if history.deadline is not None and now + pause >= history.deadline:
            return Decision(Step.FAIL)
        return Decision(Step.AGAIN, pause)

    def may_move(self, history: History, is_same: bool) -> bool:
        """Whether a batch that was on its way when its connection broke may go out over this one."""
        return is_same or not (history.is_unanswered and history.is_pinned)

    def is_resend_due(self, resends: int, sent_at: float, now: float) -> bool:
        """Whether an unanswered batch is to be sent again now."""
        return resends < len(self.resend_after) and now - sent_at >= self.resend_after[resends]

    def is_given_up(self, sent_at: float, now: float) -> bool:
        """Whether nothing more is expected of an unanswered batch."""
        return now - sent_at >= self.give_up_after

    @staticmethod
    def too_late(
        history: History, last: Exception | None, was_sent: bool, timeout: float, *, away: Sequence[str] = ()
    ) -> DMQError:
        """What a synchronous send raises when its time is over.

        Parameters:
            away: shards that the message could go to, and that are not connected.
        """
        if was_sent and (last is None or isinstance(last, NotConnected) or history.is_unanswered):
            return TimedOut(unknown_after(timeout))
        if isinstance(last, DMQError):
            return last
        if away:
            return NotConnected(
                f"no leader of shard {' or '.join(away)} could be reached within {timeout:g} s; the message was not "
                f"sent: `dmq shard show {away[0]}` says what to do, then send it again"
            )
        return NotConnected(f"no broker could be reached within {timeout:g} s; the message was not sent")
