"""The route keeper: keeps a client's route book new. No sockets, no threads.

It asks over the connection to any shard, again after half a minute, and soon when a broker says that routes have
changed or a shard is lost. Where no shard is connected it has the addresses of the URL asked.

What always holds: one question is under way at a time, of at most `TOPICS_MAX` topics; what is wanted meanwhile is
asked for next; a broker is asked to tell of changes over the connection that was asked last. Owners are told of a
change with no lock held.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from dmq.client.connection.link import Link
from dmq.client.connection.route_book import REFRESH_SECONDS, RouteBook, RouteChange
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.cluster.route import TOPICS_MAX, Route, RouteReply

__all__ = ["KeeperOwner", "RouteKeeper"]

log = EventLog(__name__)

SOON_SECONDS: Final = 0.1  # many clients hear of a change in one moment
LOST_SECONDS: Final = 2.0  # between two questions while a shard is not connected
ANSWER_SECONDS: Final = 10.0


class KeeperOwner(Protocol):
    """Whose routes they are: a router."""

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def any_link(self) -> Link | None:
        """A connection to any shard; None while there is none."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether every shard is connected."""
        ...

    def scout(self, asked: Route) -> None:
        """Ask the addresses of the URL, beside all connections; ends in `RouteKeeper.took` or `RouteKeeper.missed`."""
        ...

    def routes_taken(self, change: RouteChange) -> None:
        """The book has changed."""
        ...


class RouteKeeper:
    """Keeps one book. Thread-safe."""

    def __init__(self, book: RouteBook, owner: KeeperOwner) -> None:
        self.book: Final = book
        self._owner = owner
        self._random = random.Random()
        self._lock = threading.Lock()  # guards the book and what follows
        self._wanted: set[str] = set()
        self._is_wanted = False
        self._is_asking = False
        self._asked = 0  # questions, to tell the one that is given up

    def begin(self) -> None:
        """Ask now and then from now on."""
        self._later()
        self.want()

    def _later(self) -> None:
        seconds = REFRESH_SECONDS if self._owner.is_whole else LOST_SECONDS
        self._owner.call_later(seconds * self._random.uniform(0.75, 1.0), self._refresh)

    def _refresh(self) -> None:
        with self._lock:
            due = self.book.due() if self._owner.is_whole else []
        self.want(due, 0.0)
        self._later()

    def changed(self, topics: Iterable[str]) -> None:
        """A broker says that these have changed; of none, that more have than it names, or the shards have."""
        with self._lock:
            topics = [*topics] or self.book.due()
        self.want(topics)

    def want(self, topics: Iterable[str] = (), seconds: float = SOON_SECONDS) -> None:
        """Have the shards and these topics asked for soon."""
        with self._lock:
            self._wanted.update(topics)
            is_first, self._is_wanted = not self._is_wanted, True
        if is_first:
            self._owner.call_later(seconds * self._random.uniform(0.5, 1.0), self._ask)

    def _ask(self) -> None:
        with self._lock:
            if self._is_asking or not self._is_wanted:
                return
            topics = sorted(self._wanted)[:TOPICS_MAX]
            self._wanted.difference_update(topics)
            self._is_asking, self._is_wanted = True, bool(self._wanted)
            self._asked += 1
            number = self._asked
        asked, link = Route(topics, is_watched=True), self._owner.any_link()
        if link is None:
            self._owner.scout(asked)
            return
        self._owner.call_later(ANSWER_SECONDS, lambda: self._give_up(number))
        try:
            link.submit(Command.ROUTE, asked, on_answer=lambda answer: self._answered(asked, answer))
        except DMQError:
            self.missed(asked)

    def _give_up(self, number: int) -> None:
        with self._lock:
            if not self._is_asking or self._asked != number:
                return
        self._end()

    def _answered(self, asked: Route, answer: Frame | DMQError) -> None:
        try:
            if isinstance(answer, DMQError):
                raise answer
            reply: RouteReply = decode_response(answer)
        except DMQError as error:
            log.debug("routes not learned", error=error)
            self.missed(asked)
        else:
            self.took(reply, asked.topics)

    def missed(self, asked: Route) -> None:
        """A question had no answer: it is asked again in a while."""
        self._end()
        self.want(asked.topics, LOST_SECONDS)

    def took(self, reply: RouteReply, asked: Iterable[str] = ()) -> None:
        """An answer came."""
        self.learned(reply, asked)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_asking = False
            must_ask = self._is_wanted
        if must_ask:
            self._ask()

    def learned(self, reply: RouteReply, asked: Iterable[str] = ()) -> None:
        """Take an answer to somebody else's question."""
        with self._lock:
            change = self.book.take(reply, asked)
        if reply.cluster != self.book.cluster:
            log.error(
                "a broker answers with the routes of another cluster, and is not believed",
                once_for=reply.cluster,
                cluster=reply.cluster,
                own=self.book.cluster,
            )
        if change != RouteChange():
            self._owner.routes_taken(change)
