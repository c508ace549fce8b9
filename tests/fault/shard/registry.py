"""A member's client of the simulated registry: the memory registry behind a line that delays, loses and is cut.

What always holds: the contract of `dmq.registry.registry`. Requests of one client arrive in their order, and so do
answers. The registry keeps true time; the client's deadline is on its machine's clock. The session is kept by a thread
of its own in real life: it goes on while the loop is wedged, and stands still with the whole process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dmq.errors import DMQError, RegistryDown, SessionExpired, WriteUnknown
from dmq.registry.memory import Fate, MemoryRegistry
from dmq.registry.registry import Entry, Operation, check_path, check_write
from dmq.registry.tenure import Tenure
from dmq.registry.watch import Watch, Watches
from tests.fault.shard.clock import MachineClock
from tests.fault.shard.loop import Schedule, VirtualLoop

__all__ = ["Line", "SimulatedRegistry"]

_BEATS_A_SESSION = 3


class Line:
    """Between one member and the registry; outlives the member's processes.

    Attributes:
        loses_requests, loses_answers: it is cut that way.
        is_stopped: the process as a whole stands still: its thread keeps no session.
        fate_of: what becomes of a write, where that is not left to chance.
        late_seconds: after how long a late write is carried out, at least and at most.
    """

    def __init__(self) -> None:
        self.loses_requests = False
        self.loses_answers = False
        self.is_stopped = False
        self.delay = (0.0005, 0.004)
        self.fate_of: Callable[[Sequence[Operation]], Fate | None] = lambda operations: None
        self.late_seconds = (0.0, 12.0)

    def mend(self) -> None:
        self.loses_requests = self.loses_answers = False
        self.delay = (0.0005, 0.004)
        self.fate_of = lambda operations: None


class SimulatedRegistry:
    """See `dmq.registry.registry.Registry`; of one process."""

    def __init__(
        self, registry: MemoryRegistry, line: Line, *, schedule: Schedule, loop: VirtualLoop, clock: MachineClock
    ) -> None:
        self._registry = registry
        self._line = line
        self._schedule = schedule
        self._loop = loop
        self._clock = clock
        self._rng: random.Random = registry.random
        self._watches = Watches()
        self._tenure = Tenure(registry.session_seconds)
        self._tenure.begin(registry.open_session())
        self._request_at = self._answer_at = 0.0
        self._is_known_down = False
        self.is_over = False
        registry._clients.append(self)  # type: ignore[arg-type]
        self._beat_later()

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
        entry: Entry | None = await self._ask(lambda: self._registry.read(path))
        return entry

    async def children(self, path: str) -> list[Entry]:
        check_path(path)
        entries: list[Entry] = await self._ask(lambda: self._registry.children(path))
        return entries

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        check_write(operations)
        operations = tuple(operations)
        session, sent_at = self.session, self._clock.boottime()

        def carry_out() -> tuple[int | None, ...]:
            return self._registry.write(session, operations)

        try:
            versions: tuple[int | None, ...] = await self._ask(carry_out, (session, operations))
        except SessionExpired:
            if session == self.session:
                self._begin_again()
            raise
        self._tenure.answered(operations, session, sent_at)
        return versions

    def watch(self, prefix: str) -> Watch:
        watch = self._watches.open(check_path(prefix))
        watch.add_all()
        return watch

    async def close(self) -> None:
        if self.is_over:
            return
        self.end()
        if not self._line.loses_requests:
            self._registry.expire(self.session)
        self._tenure.end()

    def end(self) -> None:
        """The process is gone; its session goes with time."""
        if not self.is_over:
            self.is_over = True
            self._registry.forget(self)  # type: ignore[arg-type]

    def lose_session(self) -> None:
        """The registry ends the session before its time. Until `deadline` a session lives, so that ends with it,
        however much of what the registry says is lost."""
        self._registry.expire(self.session)
        self._tenure.end()

    def close_session(self) -> None:
        """As the watchdog does it, from its own thread."""
        if not self._line.loses_requests:
            self._registry.expire(self.session)

    # --- the line ---------------------------------------------------------------------------------------------------

    async def _ask(self, do: Callable[[], Any], write: tuple[int, Sequence[Operation]] | None = None) -> Any:
        if self.is_over:
            raise RegistryDown("this client of the registry is closed: open another one")
        if self._is_known_down and (self._line.loses_requests or self._line.loses_answers):
            await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            if self._line.loses_requests or self._line.loses_answers:
                raise RegistryDown("the registry cannot be reached: check the network between here and there")
        self._is_known_down = False
        answered: asyncio.Future[Any] = self._loop.create_future()
        now = self._schedule.now
        self._request_at = max(self._request_at, now + self._rng.uniform(*self._line.delay))
        self._schedule.after(self._request_at - now, lambda: self._arrive(do, write, answered))
        try:
            async with asyncio.timeout(self.session_seconds / 2):
                return await answered
        except TimeoutError:
            self._is_known_down = True
            if write is None:
                raise RegistryDown("the registry does not answer: check the network") from None
            raise WriteUnknown(
                "the registry did not answer a write: settle it by another write that is answered, and then read"
            ) from None

    def _arrive(
        self, do: Callable[[], Any], write: tuple[int, Sequence[Operation]] | None, answered: asyncio.Future[Any]
    ) -> None:
        registry = self._registry
        fate = Fate.ANSWERED if write is None else self._line.fate_of(write[1]) or registry.draw_fate()
        if self._line.loses_requests:
            fate = Fate.LATE if fate is Fate.LATE else Fate.LOST
        if fate is Fate.LATE and write is not None:
            registry.delay(*write)
            self._schedule.after(self._rng.uniform(*self._line.late_seconds), lambda: _land(registry))
        if fate in (Fate.LATE, Fate.LOST):
            return
        outcome: Any
        try:
            outcome = do()
        except DMQError as error:
            outcome = error
        if not isinstance(outcome, SessionExpired):
            registry.renew(self.session)
        if fate is Fate.UNANSWERED or self._line.loses_answers:
            return
        now = self._schedule.now
        self._answer_at = max(self._answer_at, now + self._rng.uniform(*self._line.delay))
        self._schedule.after(self._answer_at - now, lambda: self._call(_settle, answered, outcome))

    def _call(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.is_over:
            self._loop.call_soon(action, *arguments)

    # --- the session ------------------------------------------------------------------------------------------------

    def _beat_later(self) -> None:
        self._schedule.after(self.session_seconds / _BEATS_A_SESSION, self._beat)

    def _beat(self) -> None:
        if self.is_over:
            return
        self._beat_later()
        line = self._line
        if line.is_stopped or line.loses_requests:
            return
        session = self.session
        if not self._registry.renew(session) and not line.loses_answers:

            def begin() -> None:
                if self.session == session:
                    self._begin_again()

            self._call(begin)

    def _begin_again(self) -> None:
        self._tenure.begin(self._registry.open_session())
        self._watches.add_all()

    def hear(self, paths: Iterable[str]) -> None:
        """These have changed; told by the registry."""
        paths = tuple(paths)

        def arrive() -> None:
            if self._line.loses_answers:
                # Its connection is gone by the time it is heard again: then anything may have changed.
                self._schedule.after(0.5, arrive)
                return
            self._call(self._watches.add, paths)

        self._schedule.after(self._rng.uniform(*self._line.delay), arrive)


def _land(registry: MemoryRegistry) -> None:
    registry.land_late()


def _settle(answered: asyncio.Future[Any], outcome: Any) -> None:
    if answered.done():
        return
    if isinstance(outcome, DMQError):
        answered.set_exception(outcome)
    else:
        answered.set_result(outcome)
