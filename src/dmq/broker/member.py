"""Members: the consumers of a group, what each asked for and how much it can still take.

Pure code. Credit is not a counter of its own: it is what a member asked for less what is out with it, so whatever ends
a lease returns credit, and nothing can be returned twice.

What always holds: a member gets nothing pushed while it is away, superseded, before its backlog may begin, or while as
many messages or bytes are out with it as it asked for.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dmq.broker.lease import Holder

__all__ = ["Member", "MemberState", "Subscription"]


class Subscription(msgspec.Struct, frozen=True):
    """What all members of a group agree on.

    Attributes:
        filter: the tag expression, as normalised by the caller; empty means everything.
        version: a higher one replaces the others.
        strategy: by which the members divide the queues among themselves; empty if the broker shares out messages.
    """

    filter: str = ""
    version: int = 0
    is_ordered: bool = False
    is_broadcast: bool = False
    strategy: str = ""

    def agrees(self, other: Subscription) -> bool:
        """Whether both may be members of one group, whatever their versions."""
        return (self.filter, self.is_ordered, self.is_broadcast, self.strategy) == (
            other.filter,
            other.is_ordered,
            other.is_broadcast,
            other.strategy,
        )

    def describe(self) -> str:
        """In words, for an error message."""
        words = ["ordered" if self.is_ordered else "unordered"]
        if self.is_broadcast:
            words.append("broadcast")
        if self.strategy:
            words.append(f"strategy {self.strategy!r}")
        tags = f"tags {self.filter!r}" if self.filter else "all tags"
        return f"{tags}, {', '.join(words)}, version {self.version}"


class MemberState(Enum):
    """Where a member stands."""

    ACTIVE = "active"
    AWAY = "away"  # its connection broke; it may come back within its grace time
    SUPERSEDED = "superseded"  # a higher version replaced its subscription: it may settle what it has, no more


class Member(Holder):
    """One consumer of a group.

    Parameters:
        name: its client id.
        subscription: what it joined with.
        prefetch: how many messages may be out with it at once.
        prefetch_bytes: how many bytes; one more batch may go out while it is below.
    """

    __slots__ = ("away_until_ms", "backlog_at_ms", "is_superseded", "prefetch", "prefetch_bytes", "subscription")

    def __init__(self, name: str, subscription: Subscription, prefetch: int, prefetch_bytes: int) -> None:
        super().__init__(name)
        self.subscription = subscription
        self.prefetch = prefetch
        self.prefetch_bytes = prefetch_bytes
        self.away_until_ms: int | None = None
        self.backlog_at_ms: int | None = None  # not before the acknowledgement of its subscription is on its way
        self.is_superseded = False

    @property
    def state(self) -> MemberState:
        if self.is_superseded:
            return MemberState.SUPERSEDED
        return MemberState.ACTIVE if self.away_until_ms is None else MemberState.AWAY

    @property
    def may_pull(self) -> bool:
        """Whether anything may be handed to it on its own request."""
        return self.away_until_ms is None and not self.is_superseded

    def credit(self, now_ms: int) -> int:
        """How many messages may be pushed to it now."""
        if not self.may_pull or self.backlog_at_ms is None or now_ms < self.backlog_at_ms:
            return 0
        if self.bytes_out >= self.prefetch_bytes:
            return 0
        return max(self.prefetch - self.messages_out, 0)
