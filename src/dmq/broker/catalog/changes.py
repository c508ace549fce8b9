"""Changes to topics and groups that are on their way to the disk, and requests that wait for them.

A change is written by the writer like everything else, and answered when it is durable; meanwhile the loop goes on.
Requests that name the topic or the group it is about wait here until it is done, and are then served in the order in
which they came. So a topic that is created twice at once is created once, a message sent right behind `create` finds
its topic, and nobody joins a group in the middle of a seek.

What always holds: one change at a time for one name; each request that waits is called exactly once; no more than
`waiting_max` changes are under way, no more than as many requests and `waiting_bytes_max` of their bytes wait, and
beyond that they are refused with `Busy`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from dmq.errors import Busy, DMQError

__all__ = ["Change", "Changes", "Later", "Name"]

_AGAIN_MS: Final = 50

Name: TypeAlias = tuple[str, str]  # ("topic" or "group", its name)
T = TypeVar("T")
Resume: TypeAlias = Callable[[DMQError | None], None]


class Change:
    """One change under way, and who waits for it."""

    __slots__ = ("name", "waiting")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.waiting: list[tuple[Resume, int]] = []


class Later(Exception):
    """Not an error: the request is to be served when a change is done."""

    def __init__(self, change: Change) -> None:
        super().__init__(change.name)
        self.change = change


class Changes:
    """The changes of one broker."""

    def __init__(self, waiting_max: int, waiting_bytes_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting_bytes_max = waiting_bytes_max
        self.under_way: dict[Name, Change] = {}
        self.waiting = 0
        self.waiting_bytes = 0

    def check(self, *names: Name) -> None:
        """Raises Later while one of these is being changed."""
        for name in names:
            change = self.under_way.get(name)
            if change is not None:
                raise Later(change)

    def begin(self, name: Name) -> Change:
        """A change begins; `end` it, whatever comes of it.

        Raises:
            Later: another one of the same name is under way.
            Busy: too many are.
        """
        self.check(name)
        if len(self.under_way) >= self._waiting_max:
            raise Busy(
                f"{len(self.under_way)} topics and groups are being changed: try again shortly",
                retry_after_ms=_AGAIN_MS,
            )
        change = self.under_way[name] = Change(name)
        return change

    def wait(self, change: Change, resume: Resume, size: int) -> None:
        """Have a request served when a change is done.

        Parameters:
            resume: called with None, or with the reason why there is no sense in serving it.
            size: its bytes.

        Raises:
            Busy: too much waits already.
        """
        if self.waiting >= self._waiting_max or (
            self.waiting_bytes and self.waiting_bytes + size > self._waiting_bytes_max
        ):
            raise Busy(
                f"{self.waiting} requests wait for {change.name[0]} {change.name[1]!r} and others to be changed: "
                "try again shortly",
                retry_after_ms=_AGAIN_MS,
            )
        self.waiting += 1
        self.waiting_bytes += size
        change.waiting.append((resume, size))

    async def after(self, operation: Callable[[], T]) -> T:
        """Do something that may raise `Later`: again after each change that it has to wait for.

        Raises:
            DMQError: the operation failed, or a change that it waited for.
        """
        while True:
            try:
                return operation()
            except Later as later:
                done: asyncio.Future[DMQError | None] = asyncio.get_running_loop().create_future()
                self.wait(later.change, done.set_result, 0)
            error = await done
            if error is not None:
                raise error

    def end(self, change: Change, error: DMQError | None = None) -> None:
        """The change is done, or failed: serve who waited, in order.

        Parameters:
            error: what those who waited are told instead of being served.
        """
        del self.under_way[change.name]
        for resume, size in change.waiting:
            self.waiting -= 1
            self.waiting_bytes -= size
            resume(error)
