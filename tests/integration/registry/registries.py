"""The registries that the contract's suite runs on: each gives out clients, and does to them what a test asks for."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from dmq.clock import Clock
from dmq.registry.memory import MemoryClient, MemoryRegistry
from dmq.registry.registry import Create, Registry
from dmq.testing.clock import RunningClock

PATIENCE_S = 60.0
_roots = itertools.count(1)


class Registries(Protocol):
    """One registry, as a test sees it."""

    kind: str

    @property
    def clock(self) -> Clock: ...

    async def connect(self) -> Registry:
        """Another client; closed when the test ends."""
        ...

    async def expire(self, client: Registry) -> None:
        """End a client's session, as if it had not been heard for long."""
        ...

    def cut(self, client: Registry) -> None:
        """Let nothing between a client and the registry through."""
        ...

    async def outlast(self, client: Registry) -> None:
        """Let the session of a client that is cut off run out."""
        ...

    def mend(self, client: Registry) -> None: ...

    async def close(self) -> None: ...


class MemoryRegistries:
    kind = "memory"

    def __init__(self) -> None:
        self.clock = RunningClock()
        self.registry = MemoryRegistry(self.clock)
        self._clients: list[MemoryClient] = []

    async def connect(self) -> Registry:
        client = self.registry.connect()
        self._clients.append(client)
        return client

    async def expire(self, client: Registry) -> None:
        self.registry.expire(client.session)

    def cut(self, client: Registry) -> None:
        assert isinstance(client, MemoryClient)
        client.cut()

    async def outlast(self, client: Registry) -> None:
        # In steps, in which the other clients are heard.
        for _ in range(10):
            self.clock.advance(self.registry.session_seconds / 8)
            for other in self._clients:
                other.beat()

    def mend(self, client: Registry) -> None:
        assert isinstance(client, MemoryClient)
        client.mend()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, on an event loop of its own; `registries` makes its first argument there."""

    @functools.wraps(test)
    def run(registries: Callable[[], Registries], **more: Any) -> None:
        async def main() -> None:
            made = registries()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await test(made, **more)
            finally:
                await made.close()

        asyncio.run(main())

    return run


async def new_root(client: Registry) -> str:
    """A path that no other test writes below."""
    root = f"/test-{next(_roots)}-{client.session:x}"
    await client.write([Create(root, b"")])
    return root


async def eventually(holds: Callable[[], Awaitable[object]], what: str = "it never happened") -> None:
    """Wait until something holds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what) from None
