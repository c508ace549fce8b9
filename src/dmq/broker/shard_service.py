"""The service of a shard's member: makes the Broker when the member leads, and drops it when it ceases to.

What always holds: there is a Broker only between `begin` and `drop`, on the store that `begin` was given; connections
outlive it, and are told where the leader is. A Broker that was dropped touches the store no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_access import ClusterAccess
from dmq.broker.journal.shard_writer import ShardWriter
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.errors import DatabaseDown
from dmq.shard.service import Leadership
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["ShardService"]


class ShardService:
    """Serves the clients of one server while its member leads.

    Parameters:
        letters: makes the store of dead letters; None if they wait in the journal, since no database of theirs can be
            reached by every member.

    Attributes:
        failed: set when the store of a Broker failed.
        stop_asked: set when an operator wants the process to stop.
        access: the cluster, for the Brokers it makes.
        begun: how many Brokers it has made.
        began: set whenever it has made one.
    """

    def __init__(self, dispatcher: Dispatcher, letters: Callable[[], DeadLetterStore] | None) -> None:
        self._dispatcher = dispatcher
        self._letters = letters
        self.failed, self.stop_asked = asyncio.Event(), asyncio.Event()
        self._writer: ShardWriter | None = None
        self.access: ClusterAccess | None = None
        self.begun = 0
        self.began = asyncio.Event()

    async def begin(self, store: MessageStore, leadership: Leadership) -> None:
        """The start of our epoch is committed: serve clients with this store."""
        dispatcher = self._dispatcher
        broker = Broker(
            store,
            dispatcher.settings.broker,
            dispatcher.clock,
            dispatcher,
            letters=self._letters or no_letters,
            leadership=leadership,
        )
        assert isinstance(broker.writer, ShardWriter)
        broker.failed, broker.stop_asked = self.failed, self.stop_asked
        self._writer = broker.writer
        if self.access is not None:
            broker.enter_cluster(self.access)
        dispatcher.attach(broker)
        self.begun += 1
        self.began.set()
        if self._letters is not None:
            broker.dead_letters.start(at_once=True)

    def committed(self) -> None:
        """More of the store is visible because followers have it: answer what waited for that."""
        if self._writer is not None:
            self._writer.committed()

    async def hold(self) -> None:
        """Take no more writes, and let those that are under way be flushed here: a hand-over begins."""
        if self._writer is not None:
            await self._writer.hold()

    def resume(self) -> None:
        """The hand-over does not take place: take writes again."""
        if self._writer is not None:
            self._writer.resume()

    async def drop(self) -> None:
        """We do not lead any more: nothing is answered, handed out or written from this call on."""
        broker = self._dispatcher.detach()
        self._writer = None
        if broker is not None:
            await broker.drop(self._dispatcher.no_broker())


def no_letters() -> DeadLetterStore:
    """There is no database that every member could use."""
    raise DatabaseDown(
        "dead letters of a shard wait in its journal until there is a database that every member reaches: set "
        "broker.dead_letters_url to a server's, such as postgresql://… or mysql://…"
    )
