"""What a member and the broker that it makes know of each other.

The Broker exists on the leader only. The member makes it when the start of its epoch is committed, and drops it whole
when it ceases to lead; the next leadership makes another one.
"""

from __future__ import annotations

from typing import Protocol

from dmq.storage.store import MessageStore

__all__ = ["Leadership", "Service"]


class Leadership(Protocol):
    """What a Broker asks of the member that made it, on the event loop; good for one epoch."""

    @property
    def epoch(self) -> int: ...

    @property
    def shard(self) -> int:
        """The shard's number."""
        ...

    def may_serve(self) -> bool:
        """Whether we may answer and hand out at this moment. Called before each answer: must be quick."""
        ...

    def check_serving(self) -> None:
        """Raises NotLeader, with the leader's address in the detail if it is known, unless `may_serve`."""
        ...

    def check_writable(self) -> None:
        """Raises NotLeader or NotEnoughReplicas where a write would not be committed for now; nothing is written then.

        Too few in sync, or too much that is not committed.
        """
        ...

    def check_open(self) -> None:
        """Raises ShardConflict where the shard takes no messages, by an operator's word; nothing is written then."""
        ...

    def wrote(self) -> None:
        """The store has written more: it is on its way to the followers when this returns."""
        ...

    def flushed(self) -> None:
        """The store has flushed more. What is committed by that is visible in the store when this returns."""
        ...


class Service(Protocol):
    """What serves clients: makes the Broker and drops it. The member calls it on the event loop."""

    async def begin(self, store: MessageStore, leadership: Leadership) -> None:
        """The start of our epoch is committed: serve clients with this store."""
        ...

    def committed(self) -> None:
        """More of the store is visible because followers have it: answer what waited for that."""
        ...

    async def hold(self) -> None:
        """Take no more writes, and let those that are under way be flushed here: a hand-over begins."""
        ...

    def resume(self) -> None:
        """The hand-over does not take place: take writes again."""
        ...

    async def drop(self) -> None:
        """We do not lead any more. From the moment of the call nothing is answered, handed out or written; connections
        with an answer outstanding end. When it returns, nobody uses the store, which is still open.

        Also called if `begin` has failed, and once for each `begin`.
        """
        ...
