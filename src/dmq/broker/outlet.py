"""Where messages go: the sinks of members that are pushed to, and pulls that wait.

What always holds: a pull is answered once, or its session is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.broker.lease import Lease
from dmq.broker.member import Member
from dmq.storage.identities import IdRun

__all__ = ["Handed", "Lengths", "Sink", "WaitingPull"]


Lengths: TypeAlias = list[int] | npt.NDArray[np.uint32]


class Handed(NamedTuple):
    """A lease and its messages."""

    queue: int
    lease: Lease
    lengths: Lengths
    pieces: list[memoryview]
    size: int
    ids: list[IdRun]
    sought: int
    topic: str = ""  # the retry topic, if it is of that


class Sink(Protocol):
    """Where a member's messages go."""

    batch: int
    lease_ms: int
    allowed: int  # a bit for each queue it takes

    @property
    def is_ready(self) -> bool:
        """Whether more may be pushed now."""
        ...

    def push(self, handed: Handed) -> None: ...


class WaitingPull:
    """A pull that waits for messages.

    Parameters:
        owner: the session it came from; a member may be back on another one before its first is noticed to be gone.
    """

    __slots__ = ("answer", "deadline_ms", "is_done", "lease_ms", "limit", "max_bytes", "member", "owner", "queue")

    def __init__(
        self,
        owner: object,
        member: Member,
        queue: int | None,
        limit: int,
        max_bytes: int,
        lease_ms: int,
        deadline_ms: int,
        answer: Callable[[Handed | None], None],
    ) -> None:
        self.owner = owner
        self.member = member
        self.queue = queue
        self.limit = limit
        self.max_bytes = max_bytes
        self.lease_ms = lease_ms
        self.deadline_ms = deadline_ms
        self.answer = answer
        self.is_done = False
