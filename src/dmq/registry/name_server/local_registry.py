"""The registry as the name server itself reads it, without a connection and without a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dmq.errors import DatabaseDown, RegistryDown, Unsupported
from dmq.registry.name_server.backend import Backend, News
from dmq.registry.registry import NO_DEADLINE, SESSION_SECONDS, Entry, Operation, check_path
from dmq.registry.watch import Watch, Watches

__all__ = ["LocalRegistry"]

T = TypeVar("T")


class LocalRegistry:
    """The `Registry` of one name server; it only reads.

    Parameters:
        backend: carries reads out.
    """

    session_seconds = SESSION_SECONDS
    session = 0
    deadline = NO_DEADLINE

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._watches = Watches()

    async def read(self, path: str) -> Entry | None:
        return await _reached(lambda: self._backend.read(check_path(path)))

    async def children(self, path: str) -> list[Entry]:
        return await _reached(lambda: self._backend.children(check_path(path)))

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        raise Unsupported("a name server writes nothing of its own")

    def watch(self, prefix: str) -> Watch:
        watch = self._watches.open(check_path(prefix))
        watch.add_all()
        return watch

    async def close(self) -> None:
        pass

    def tell(self, news: News) -> None:
        """This has changed."""
        if news.is_all:
            self._watches.add_all()
        else:
            self._watches.add(news.paths)


async def _reached(ask: Callable[[], Awaitable[T]]) -> T:
    try:
        return await ask()
    except DatabaseDown as error:
        raise RegistryDown(error.message) from error
