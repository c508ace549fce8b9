"""Whether a broker takes new work: it runs, is drained, or is stopping; in a shard, it must have the right to serve.

What always holds: a stopping broker never runs again; a drained one may. Both finish the work that is under way.
"""

from __future__ import annotations

from dmq.errors import BrokerStopping
from dmq.shard.service import Leadership

__all__ = ["Readiness"]


class Readiness:
    """The state of one broker; every room asks it before it begins something.

    Parameters:
        leadership: in a shard, the one that the broker was made for.
    """

    __slots__ = ("is_draining", "is_stopping", "leadership")

    def __init__(self, leadership: Leadership | None = None) -> None:
        self.is_stopping = False
        self.is_draining = False
        self.leadership = leadership

    @property
    def is_running(self) -> bool:
        """Whether new work is taken, and anything handed out."""
        if self.is_stopping or self.is_draining:
            return False
        return self.leadership is None or self.leadership.may_serve()

    @property
    def state(self) -> str:
        """In one word, for clients and people."""
        if self.is_stopping:
            return "stopping"
        return "drained" if self.is_draining else "running"

    def check_running(self) -> None:
        """Raises BrokerStopping where no new work is taken, NotLeader where the right to serve is gone."""
        self.check_open()
        if self.is_draining:
            raise BrokerStopping("the broker is drained: use another one, or this one when it is back in use")
        if self.leadership is not None:
            self.leadership.check_serving()

    def check_open(self) -> None:
        """Raises BrokerStopping where the broker is stopping."""
        if self.is_stopping:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")
