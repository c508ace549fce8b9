"""A registry in memory, for a single process, for tests and for simulations.

`MemoryRegistry` is the registry itself, and `connect` gives each broker a client of its own. Nothing here waits, and
nothing happens by itself but beats of clients that ask for them: with a clock that is moved by hand and one seed, two
runs of a program are the same.

For tests a registry can be unkind. A write can be lost, be carried out without an answer, or be carried out later
(`Fate`), by plan or by chance; a client can be cut off; a session can be expired.

What always holds: the contract of `dmq.registry.registry`, whatever the faults. A late write is carried out before the
next write of its session, or never; it is refused if its session is over by then. A session that is due to expire is
gone before anything else happens.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, RegistryDown, SessionExpired, WriteUnknown
from dmq.registry.registry import SESSION_SECONDS, Entry, Operation, check_path, check_write
from dmq.registry.tenure import Tenure
from dmq.registry.tree import Tree
from dmq.registry.watch import Watch, Watches

__all__ = ["Fate", "MemoryClient", "MemoryRegistry"]

_LATE_MAX: Final = 256
_BEATS_A_SESSION: Final = 3


class Fate(Enum):
    """What becomes of a write."""

    ANSWERED = 0
    UNANSWERED = 1  # carried out, and the answer is lost
    LOST = 2  # never carried out, nor answered
    LATE = 3  # not answered, and carried out later or never


class _LateWrite(NamedTuple):
    session: int
    operations: Sequence[Operation]


class MemoryRegistry:
    """The tree, and the sessions of its clients.

    Parameters:
        clock: its boot time counts.
        seed: of the chances below.
        chances: how often a write meets a fate, each between 0 and 1; the rest is answered.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        session_seconds: float = SESSION_SECONDS,
        seed: int = 0,
        chances: Mapping[Fate, float] | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.session_seconds = session_seconds
        self.random = random.Random(seed)
        self.chances = dict(chances or {})
        self._tree = Tree()
        self._expires_at: dict[int, float] = {}
        self._sessions = 0
        self._clients: list[MemoryClient] = []
        self._late: deque[_LateWrite] = deque(maxlen=_LATE_MAX)

    def connect(self, *, beats: bool = True) -> MemoryClient:
        """A client with a session.

        Parameters:
            beats: a task of the running event loop keeps the session alive; without, only what the client does.
        """
        client = MemoryClient(self, beats=beats)
        self._clients.append(client)
        return client

    # --- for its clients --------------------------------------------------------------------------------------------

    def open_session(self) -> int:
        self.tick()
        self._sessions += 1
        self._expires_at[self._sessions] = self.clock.boottime() + self.session_seconds
        return self._sessions

    def renew(self, session: int) -> bool:
        """Let a session live on; False if it is over."""
        self.tick()
        if session not in self._expires_at:
            return False
        self._expires_at[session] = self.clock.boottime() + self.session_seconds
        return True

    def read(self, path: str) -> Entry | None:
        self.tick()
        return self._tree.read(path)

    def children(self, path: str) -> list[Entry]:
        self.tick()
        return self._tree.children(path)

    def write(self, session: int, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """Carry out a write.

        Raises:
            SessionExpired: the session is over.
            RegistryConflict: an operation does not apply.
        """
        self._settle_late(session)
        if not self.renew(session):
            raise _expired(session)
        applied = self._tree.apply(operations, session)
        self._announce(applied.changed)
        return applied.versions

    def delay(self, session: int, operations: Sequence[Operation]) -> None:
        """Carry out a write later, or never."""
        self._late.append(_LateWrite(session, operations))

    def forget(self, client: MemoryClient) -> None:
        self._clients.remove(client)

    # --- time and faults --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End the sessions whose time is over."""
        now = self.clock.boottime()
        for session in [one for one, at in self._expires_at.items() if at <= now]:
            self.expire(session)

    def expire(self, session: int) -> None:
        """End a session now."""
        if self._expires_at.pop(session, None) is not None:
            self._announce(self._tree.drop_session(session))

    def land_late(self) -> int:
        """Carry out the late writes that are left, in their order; returns how many applied."""
        landed = 0
        while self._late:
            landed += self._land(self._late.popleft())
        return landed

    def _settle_late(self, session: int) -> None:
        """Before a write of a session: those that were late are carried out, or never will be."""
        ours = [late for late in self._late if late.session == session]
        if ours:
            self._late = deque((late for late in self._late if late.session != session), _LATE_MAX)
        for late in ours:
            if self.random.random() < 0.5:
                self._land(late)

    def _land(self, late: _LateWrite) -> bool:
        self.tick()
        if late.session not in self._expires_at:
            return False
        try:
            applied = self._tree.apply(late.operations, late.session)
        except DMQError:
            return False  # there is nobody to tell
        self._announce(applied.changed)
        return True

    def draw_fate(self) -> Fate:
        """The fate of the next write, by chance."""
        if not self.chances:
            return Fate.ANSWERED
        drawn = self.random.random()
        for fate, chance in self.chances.items():
            drawn -= chance
            if drawn < 0:
                return fate
        return Fate.ANSWERED

    def _announce(self, paths: Iterable[str]) -> None:
        paths = tuple(paths)
        for client in self._clients:
            client.hear(paths)


class MemoryClient:
    """One broker's `Registry`.

    Attributes:
        fates: of its next writes, first first; by chance once they are used up.
    """

    def __init__(self, registry: MemoryRegistry, *, beats: bool) -> None:
        self._registry = registry
        self._watches = Watches()
        self._tenure = Tenure(registry.session_seconds)
        self._tenure.begin(registry.open_session())
        self._is_cut = False
        self._is_cut_noticed = False
        self._is_closed = False
        self.fates: deque[Fate] = deque()
        self._beater = asyncio.get_running_loop().create_task(self._keep_beating()) if beats else None

    @property
    def session_seconds(self) -> float:
        return self._registry.session_seconds

    @property
    def session(self) -> int:
        return self._tenure.session

    @property
    def deadline(self) -> float:
        return self._tenure.deadline

    async def read(self, path: str) -> Entry | None:
        check_path(path)
        self._reach()
        return self._registry.read(path)

    async def children(self, path: str) -> list[Entry]:
        check_path(path)
        self._reach()
        return self._registry.children(path)

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        check_write(operations)
        operations = tuple(operations)
        registry, session, sent_at = self._registry, self.session, self._registry.clock.boottime()
        fate = self.fates.popleft() if self.fates else registry.draw_fate()
        if self._is_cut and not self._is_cut_noticed and not self._is_closed:
            self._is_cut_noticed = True  # it is sent into a connection that is dead
            fate = Fate.LATE if fate is Fate.LATE else Fate.LOST
        else:
            self._check_reached()
        if fate is Fate.LATE:
            registry.delay(session, operations)
        if fate in (Fate.LATE, Fate.LOST):
            raise _unanswered()
        try:
            versions = registry.write(session, operations)
        except DMQError as error:
            if fate is Fate.UNANSWERED:
                raise _unanswered() from None
            if isinstance(error, SessionExpired):
                self._begin_again()
            raise
        if fate is Fate.UNANSWERED:
            raise _unanswered()
        self._tenure.answered(operations, session, sent_at)
        return versions

    def watch(self, prefix: str) -> Watch:
        watch = self._watches.open(check_path(prefix))
        if not self._is_cut:
            watch.add_all()
        return watch

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._beater is not None:
            self._beater.cancel()
        if not self._is_cut:
            self._registry.expire(self.session)
        self._tenure.end()
        self._registry.forget(self)

    # --- for the registry, and for tests ----------------------------------------------------------------------------

    def hear(self, paths: Iterable[str]) -> None:
        """These have changed."""
        if not self._is_cut:
            self._watches.add(paths)

    def beat(self) -> None:
        """Let the session live on; open another if it is over."""
        if not (self._is_cut or self._is_closed) and not self._registry.renew(self.session):
            self._begin_again()

    def cut(self) -> None:
        """Cut the client off: its next write is not answered, and then it notices that nobody is there."""
        self._is_cut = True
        self._is_cut_noticed = False

    def mend(self) -> None:
        """Let the client reach the registry again."""
        self._is_cut = False
        self.beat()
        self._watches.add_all()

    def _begin_again(self) -> None:
        self._tenure.begin(self._registry.open_session())
        self._watches.add_all()

    def _reach(self) -> None:
        """The client is heard, whatever it asks for.

        Raises:
            RegistryDown: it is not.
        """
        self._check_reached()
        self.beat()

    def _check_reached(self) -> None:
        if self._is_closed:
            raise RegistryDown("this client of the registry is closed: open another one")
        if self._is_cut:
            self._is_cut_noticed = True
            raise RegistryDown("the registry cannot be reached: check the network between here and there")

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self.session_seconds / _BEATS_A_SESSION)
            self.beat()


def _expired(session: int) -> SessionExpired:
    return SessionExpired(
        "nothing was written: the registry has had no sign of this client for longer than its session lives; its "
        "ephemeral entries are gone, and must be created again",
        session=session,
    )


def _unanswered() -> WriteUnknown:
    return WriteUnknown(
        "the registry did not answer a write, which may have been carried out, or still will be: settle it by another "
        "write that is answered, and then read"
    )
