"""A watch: changes below a prefix, gathered until the caller takes them.

What always holds: what was added and not taken yet is taken with the next call, in the order in which paths first
changed; a path that changes again meanwhile is named once. Beyond `paths_max` paths a watch says that anything may have
changed, so that a caller that is slow costs no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

__all__ = ["Changes", "Watch", "Watches", "wait_for_first"]

PATHS_MAX: Final = 1024


class Changes(NamedTuple):
    """What has changed since the last ones were taken.

    Attributes:
        is_all: anything below the prefix may have changed; then there are no paths.
    """

    paths: tuple[str, ...]
    is_all: bool


class Watch:
    """Made by `Registry.watch`, which also fills it."""

    def __init__(self, prefix: str, forget: Callable[[Watch], None], paths_max: int = PATHS_MAX) -> None:
        self.prefix = prefix
        self._below = prefix if prefix.endswith("/") else f"{prefix}/"
        self._forget = forget
        self._paths_max = paths_max
        self._paths: dict[str, None] = {}
        self._is_all = False
        self._something = asyncio.Event()
        self.is_closed = False

    def concerns(self, path: str) -> bool:
        return path == self.prefix or path.startswith(self._below)

    def add(self, path: str) -> None:
        """A path has changed."""
        if not self._is_all and self.concerns(path):
            self._paths[path] = None
            if len(self._paths) > self._paths_max:
                self.add_all()
            self._something.set()

    def add_all(self) -> None:
        """Anything may have changed."""
        self._paths.clear()
        self._is_all = True
        self._something.set()

    def take(self) -> Changes | None:
        """What there is; None if there is nothing."""
        if not self._something.is_set():
            return None
        changes = Changes(tuple(self._paths), self._is_all)
        self._paths, self._is_all = {}, False
        self._something.clear()
        return changes

    async def wait(self) -> None:
        """Until there is something to take."""
        await self._something.wait()

    async def next(self) -> Changes:
        """Wait until there is something, and take it."""
        while True:
            await self._something.wait()
            changes = self.take()
            if changes is not None:
                return changes

    def close(self) -> None:
        """Hear of nothing more."""
        if not self.is_closed:
            self.is_closed = True
            self._forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watches:
    """The watches of one client."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def open(self, prefix: str) -> Watch:
        watch = Watch(prefix, self._watches.remove)
        self._watches.append(watch)
        return watch

    @property
    def prefixes(self) -> list[str]:
        """What is watched, without what lies below another one of them."""
        wanted = sorted({watch.prefix for watch in self._watches})
        return [one for one in wanted if not any(one != other and _is_below(one, other) for other in wanted)]

    def add(self, paths: Iterable[str]) -> None:
        for path in paths:
            for watch in self._watches:
                watch.add(path)

    def take(self) -> list[Changes]:
        """What each of them has, if it has something."""
        return [changes for watch in self._watches if (changes := watch.take()) is not None]

    def add_all(self, prefix: str = "/") -> None:
        """Anything at or below the prefix may have changed."""
        for watch in self._watches:
            if watch.concerns(prefix) or _is_below(watch.prefix, prefix):
                watch.add_all()


async def wait_for_first(waits: Iterable[Coroutine[Any, Any, object]], seconds: float) -> None:
    """Until one of the waits is over, or so many seconds are; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_below(path: str, prefix: str) -> bool:
    """Whether a path is a prefix or below it."""
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")
