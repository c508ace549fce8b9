"""Asking again: what becomes of a request whose connection broke, or that the broker refused for the moment. Pure.

A request that was refused was not carried out, so it is asked again after the time the broker named. One that a member
of a shard has refused because it does not lead is asked of the leader, once there is a connection to it. One whose
connection broke before the answer came may have been carried out: it is asked again if that does no harm, else it
raises, and says so.

What always holds: a request that is not safe to repeat is sent once; a broker whose connection breaks at the same
request again and again is not asked for ever.
"""

from __future__ import annotations

from typing import Final

from dmq.client.connection.failover import Backoff
from dmq.errors import BrokerStopping, Busy, DMQError, NotConnected, NotEnoughReplicas, NotLeader
from dmq.protocol import Command, Frame, Header, error_from_status
from dmq.protocol.admin import TopicCreate

__all__ = ["Repeats", "is_repeatable"]

# That many connections may break at one request; a broker that comes and goes is met more often than not.
BREAKS_MAX: Final = 16
# So often a request is refused for want of replicas, in about half a minute, before that is the answer.
REPLICAS_MAX: Final = 40
PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0

# Questions, and what leaves things as one has said they shall be. A new command is sent once until it stands here.
_REPEATABLE: Final = frozenset(
    {
        Command.HEARTBEAT,
        Command.STATS,
        Command.CLUSTER,
        Command.TRANSACTION_END,
        Command.TRANSACTION_LIST,
        Command.PRODUCER_STATES,
        Command.SETTLE,  # asked only to extend a lease; acks are told
        Command.SEEK,
        Command.POSITION,
        Command.OFFSETS,
        Command.PEEK,
        Command.FIND,
        Command.FETCH,
        Command.ARCHIVED,  # it never goes back
        Command.LOCATE,
        Command.TOPIC_UPDATE,
        Command.TOPIC_LIST,
        Command.TOPIC_DESCRIBE,
        Command.GROUP_CREATE,
        Command.GROUP_LIST,
        Command.GROUP_DESCRIBE,
        Command.DELAY_LIST,
        Command.DEAD_LETTER_LIST,
        Command.LIMIT_GET,
        Command.LIMIT_SET,
        Command.KEY_PUT,
        Command.KEY_GET,
        Command.KEY_LIST,
        Command.SHARD_LIST,
        Command.SHARD_SHOW,
        Command.SHARD_SET,
        Command.SHARD_MEMBER,
        Command.CLUSTER_SHOW,
        Command.CLUSTER_FINALIZE,
        Command.CLUSTER_EXPORT,
        Command.CLUSTER_IMPORT,
        Command.SHARD_ADD,
        Command.SHARD_DRAIN,
        Command.TRACE,
        Command.WHY,
    }
)


def is_repeatable(command: int, header: Header) -> bool:
    """Whether asking twice does what asking once does."""
    if isinstance(header, TopicCreate):
        return header.allow_existing
    return command in _REPEATABLE


class Repeats:
    """The rules for one request, and what happened to it so far.

    Parameters:
        moves: another member of a shard is connected to when one does not lead.
    """

    def __init__(self, command: int, header: Header, *, moves: bool = True) -> None:
        self._moves = moves
        self._is_repeatable = is_repeatable(command, header)
        self._breaks = 0
        self._refusals = 0  # for want of replicas
        self._backoff = Backoff(PAUSE_MIN, PAUSE_MAX)

    def after_break(self, error: NotConnected) -> float:
        """The connection broke before the answer came: the pause before the request is sent again.

        Raises:
            NotConnected: it is not to be sent again.
        """
        self._breaks += 1
        if not self._is_repeatable:
            raise NotConnected(
                f"{error.message} before the answer came, so whether it was done is not known: look, then try again",
                **error.detail,
            ) from error
        if self._breaks >= BREAKS_MAX:
            raise NotConnected(
                f"the connection broke {self._breaks} times before the answer came, the last time because "
                f"{error.message}: look into the broker's log",
                **error.detail,
            ) from error
        return self._backoff.take() if self._breaks > 1 else 0.0

    def after_answer(self, frame: Frame) -> float | None:
        """The pause before the request is sent again; None if this is the answer."""
        if not frame.status:
            return None
        error: DMQError = error_from_status(frame.status, frame.header)
        if isinstance(error, NotLeader):
            return 0.0 if self._moves else None
        if isinstance(error, NotEnoughReplicas):
            self._refusals += 1
            if self._refusals > REPLICAS_MAX:
                return None
        elif not isinstance(error, Busy | BrokerStopping):
            return None
        return self._backoff.take() if error.retry_after is None else max(PAUSE_MIN, error.retry_after)
