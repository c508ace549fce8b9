"""What a client sees of a shard, without replication: servers that share one disk, of which one has the Broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from dmq.protocol.session import ShardInfo
from dmq.testing import MemoryFiles
from tests.integration.broker_thread import SECONDS, ServedBroker

__all__ = ["StandInShard"]


class StandInShard:
    """Three servers.

    Parameters:
        settings: of each, by name.
    """

    def __init__(self, **settings: Any) -> None:
        self._files = MemoryFiles()
        self.members = [ServedBroker(self._files, auto_create=True, **settings) for _ in range(3)]
        self.leader: int | None = None
        self.epoch = 0
        self._dead: set[int] = set()

    def url_of(self, *members: int) -> str:
        """The URL that names these members."""
        return "dmq://" + ",".join(self.address(at) for at in members)

    @property
    def url(self) -> str:
        return self.url_of(0, 1, 2)

    def address(self, at: int) -> str:
        return self.members[at].server.address

    def __enter__(self) -> Self:
        for at, member in enumerate(self.members):
            member.start()
            self._run(at, member.server.close_broker)
        self.lead(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.stop()

    def lead(self, at: int | None, *, told: bool = True) -> None:
        """Have this member lead, or nobody. The one that led keeps its connections.

        Parameters:
            told: the others know who leads.
        """
        before, self.leader = self.leader, at
        if before is not None:
            self._tell(told=False)
            self._run(before, self.members[before].server.close_broker)
        if at is not None:
            self._open(at)
        self._tell(told=told)

    def kill(self) -> int:
        """End the leader as kill -9 does, and return which it was."""
        at, self.leader = self.leader, None
        assert at is not None
        self.members[at].kill()
        self._files = self._files.kill()
        self._dead.add(at)
        return at

    def take_over(self, at: int) -> None:
        """Have another member lead than the one that was killed."""
        self.leader = at
        for member in self.members:
            member.server._files = self._files
        self._open(at)
        self._tell(told=True)

    def _open(self, at: int) -> None:
        server = self.members[at].server

        async def open_broker() -> None:
            server.open_broker()
            self.epoch = server.broker.store.queries.epoch

        self._run(at, open_broker)

    def _tell(self, *, told: bool) -> None:
        members = [self.address(at) for at in range(3)]
        leader = members[self.leader] if told and self.leader is not None else ""
        for at, member in enumerate(self.members):
            if at in self._dead:
                continue
            info = ShardInfo("s1", self.epoch, at == self.leader, leader, members)

            async def tell(member: ServedBroker = member, info: ShardInfo = info) -> None:
                member.server.dispatcher.shard = info

            self._run(at, tell)

    def _run(self, at: int, function: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await function()

        asyncio.run_coroutine_threadsafe(run(), self.members[at].loop).result(SECONDS)
