"""The clock, the readiness and the tasks of one broker, handed to the rooms together."""

from __future__ import annotations

from typing import NamedTuple

from dmq.broker.runtime.readiness import Readiness
from dmq.broker.runtime.steady_clock import SteadyClock
from dmq.broker.runtime.tasks import Tasks
from dmq.clock import Clock
from dmq.shard.service import Leadership

__all__ = ["Runtime"]


class Runtime(NamedTuple):
    """What a room runs on; made on the event loop."""

    clock: SteadyClock
    readiness: Readiness
    tasks: Tasks

    @classmethod
    def on(cls, wall: Clock, leadership: Leadership | None = None) -> Runtime:
        """A new one that begins now."""
        return cls(SteadyClock(wall), Readiness(leadership), Tasks())
