"""How the members of a shard reach each other: what a network offers to a member, and what it tells one.

A member knows the others only by this, so that a simulation can stand in the network's place.

What always holds: what one side sends on a connection arrives in its order, whole and unchanged, or the connection
ends; nothing arrives on a connection after its end was told. How long something is under way, nobody knows.
"""

from __future__ import annotations

from typing import Protocol

from dmq.protocol.cluster.replication import (
    Confirm,
    Follow,
    FollowReply,
    Handover,
    Journal,
    Repair,
    RepairReply,
    Standing,
    StandingReply,
)
from dmq.storage.files import Buffer

__all__ = ["Following", "Hearing", "Peers", "Seat"]


class Following(Protocol):
    """The follower's end of a connection to its leader; FOLLOW was answered."""

    @property
    def reply(self) -> FollowReply: ...

    @property
    def has_next(self) -> bool:
        """Whether a frame is there already."""
        ...

    async def next(self) -> tuple[Journal | Handover, Buffer]:
        """The next frame that the leader pushed.

        Raises:
            NotConnected: the connection has ended.
        """
        ...

    def confirm(self, confirm: Confirm) -> None:
        """Tell the leader what we have; nothing happens if the connection has ended."""
        ...

    def close(self) -> None: ...


class Seat(Protocol):
    """The leader's end of a connection to a follower."""

    @property
    def is_writable(self) -> bool:
        """Whether more may be sent now; `Hearing.writable` tells when it may again."""
        ...

    def send(self, frame: Journal | Handover, body: Buffer = b"") -> None:
        """Push a frame; nothing happens if the connection has ended."""
        ...

    def close(self) -> None: ...


class Peers(Protocol):
    """The way to other members, by the addresses that the registry has of them."""

    async def follow(self, address: str, request: Follow) -> Following:
        """Connect to a leader.

        Raises:
            NotConnected, TimedOut: it was not reached, or did not answer.
            NotLeader, StaleEpoch, NotInCluster: it refused.
        """
        ...

    async def standing(self, address: str, asked: Standing, seconds: float) -> StandingReply:
        """Ask a member how far its journal goes.

        Raises:
            NotConnected, TimedOut, NotInCluster.
        """
        ...

    async def repair(self, address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        """Ask a member for committed bytes of the journal; fewer may come, and they are to be checked.

        Raises:
            NotConnected, TimedOut, NotInCluster, OffsetGone, Damaged.
        """
        ...


class Hearing(Protocol):
    """What a member answers and hears; the network calls it on the member's event loop."""

    def follow(self, request: Follow, seat: Seat) -> FollowReply:
        """A follower asks for our journal. What is pushed to its seat follows the answer.

        Raises:
            NotLeader, StaleEpoch, NotInCluster: the answer is this error.
        """
        ...

    def confirmed(self, seat: Seat, confirm: Confirm) -> None: ...

    def writable(self, seat: Seat) -> None: ...

    def left(self, seat: Seat) -> None:
        """The connection of a follower has ended; told once."""
        ...

    def standing(self, asked: Standing) -> StandingReply:
        """How far our journal goes.

        Raises:
            NotInCluster, BrokerStopping: the answer is this error.
        """
        ...

    async def repair(self, asked: Repair) -> tuple[RepairReply, Buffer]:
        """Committed bytes of our journal, at most a megabyte; they need not be whole units.

        Raises:
            NotInCluster, OffsetGone, Damaged: the answer is this error.
        """
        ...
