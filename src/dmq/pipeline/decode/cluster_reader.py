"""A reader of all journals of a cluster: one `JournalReader` for each shard, found by asking any of its brokers.

What always holds: shards are known by their numbers; a lone broker is shard 0. A shard that has no leader for a while
is waited for, as long as the timeout says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self, TypeVar

from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import Router
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import OneBroker
from dmq.clock import Clock, SystemClock
from dmq.errors import OffsetGone
from dmq.pipeline.decode.journal_reader import TIMEOUT, JournalReader, Patience, server_url
from dmq.protocol import Command, decode_response
from dmq.protocol.cluster.route import Route, RouteReply

__all__ = ["LONE", "ClusterReader", "shard_reader", "shard_servers"]

T = TypeVar("T")

LONE = 0  # the shard that a broker by itself is
ASKED_AT_ONCE: Final = 16  # shards


class ClusterReader:
    """Connections to all shards, each made when it is first used. A context manager; used by one thread.

    Parameters:
        servers, app, timeout: as of `JournalReader`; the servers may be members of any shard.
        is_patient: whether the first connection is waited for; else it is an error at once if nobody answers.

    Raises:
        NotConnected: nobody answered within the timeout.
        InvalidSettings: the addresses make no sense.
    """

    def __init__(
        self,
        servers: str,
        app: str = "dmq-spark",
        timeout: float | Patience = TIMEOUT,
        *,
        is_patient: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._patience = timeout if isinstance(timeout, Patience) else Patience(timeout)
        self._timeout = self._patience.timeout
        self._clock = clock or SystemClock()
        first = self._timeout if is_patient else None
        self._guide: Router | None = Router(
            OneBroker.at(server_url(servers), first),
            PoolSettings(make_hello(app, None), self._clock, timeout=first, any_member=True),
        )
        self._guide.open()
        self._readers: dict[int, JournalReader] = {}
        if self._guide.home.connection().reply.shard is None:
            self._guide.close()
            self._guide = None
        self._shards: Mapping[int, str] = {LONE: servers}
        self.refresh()

    def refresh(self) -> None:
        """Ask which shards there are now."""
        if self._guide is None:
            return
        reply: RouteReply = decode_response(
            self._guide.home.request(Command.ROUTE, Route(), timeout=self._timeout, answer_seconds=self._timeout)
        )
        # A member that nobody hears of now may be the one that comes back: what was known of a shard stays.
        found = {shard.number: ",".join(shard.members) for shard in reply.shards if shard.members}
        self._shards = {**(self._shards if LONE not in self._shards else {}), **found}

    @property
    def shards(self) -> Mapping[int, str]:
        """Where the members of each shard are, by its number, as `JournalReader` takes it."""
        return self._shards

    def of(self, shard: int) -> JournalReader:
        """The reader of a shard's journal.

        Raises:
            OffsetGone: there is no such shard.
            NotConnected: it has no leader, and got none within the timeout.
        """
        reader = self._readers.get(shard)
        if reader is None:
            where = self._shards.get(shard)
            if where is None:
                there = ", ".join(map(str, sorted(self._shards)))
                raise OffsetGone(f"shard {shard} is not in the cluster: there are {there}", shard=shard)
            reader = self._readers[shard] = JournalReader(where, self._app, self._patience, clock=self._clock)
        return reader

    def ask_all(self, ask: Callable[[int, JournalReader], T]) -> dict[int, T]:
        """The answers of all shards to a question, by their numbers; all are asked at once.

        Parameters:
            ask: called with a shard's number and its reader, perhaps in another thread.
        """
        shards = sorted(self._shards)
        if len(shards) == 1:
            return {shard: ask(shard, self.of(shard)) for shard in shards}
        with ThreadPoolExecutor(min(len(shards), ASKED_AT_ONCE), "dmq-shard") as threads:
            return dict(zip(shards, threads.map(lambda shard: ask(shard, self.of(shard)), shards), strict=True))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._guide is not None:
            self._guide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shard_servers(
    servers: str, app: str, timeout: float | Patience = TIMEOUT, *, is_patient: bool = True
) -> Mapping[int, str]:
    """Where the members of each shard are, by its number; of a lone broker, where it is."""
    with ClusterReader(servers, app, timeout, is_patient=is_patient) as reader:
        return reader.shards


def shard_reader(
    servers: str, shard: int, app: str = "dmq-spark", timeout: float | Patience = TIMEOUT
) -> JournalReader:
    """A reader of one shard of a cluster, known by any of its brokers; errors as of `ClusterReader`."""
    if shard == LONE:
        return JournalReader(servers, app, timeout)
    where = shard_servers(servers, app, timeout).get(shard)
    if where is None:
        raise OffsetGone(f"shard {shard} is not in the cluster any more", shard=shard)
    return JournalReader(where, app, timeout)
