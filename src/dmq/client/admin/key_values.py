"""The registry's key-value space from a program: `client.admin.key_values`.

What the parts of an installation tell each other: small values under a namespace and a key, for ever or for a time
that the writer keeps renewing. The broker keeps them in its journal.

What always holds: what was put is durable; what expired is not there; calls wait and are asked again as those of
`client.admin.admin`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from dmq.client.admin import calls
from dmq.client.admin.calls import Call

__all__ = ["AioRegistry", "Registry"]

T = TypeVar("T")


class Conversing(Protocol):
    """Who holds conversations with the broker."""

    def converse(self, call: Call[T]) -> T: ...


class AioConversing(Protocol):
    """The same on an event loop."""

    async def converse(self, call: Call[T]) -> T: ...


class Registry:
    """The key-value space of a blocking program."""

    def __init__(self, broker: Conversing) -> None:
        self._broker = broker

    def put(self, namespace: str, key: str, value: bytes | str, *, ttl: float | None = None) -> None:
        """Let a key hold a value, in place of what it held.

        Parameters:
            value: at most 4096 bytes; a text is kept as UTF-8.
            ttl: seconds after which it goes, unless it is put again before; None keeps it.

        Raises:
            LimitReached: the space is full.
            InvalidName, InvalidSettings: a name, the value or the time cannot be used.
        """
        self._broker.converse(calls.put(namespace, key, value, ttl))

    def get(self, namespace: str, key: str) -> bytes | None:
        """What a key holds; None if it is not there."""
        return self._broker.converse(calls.get(namespace, key))

    def entries(self, namespace: str, prefix: str = "") -> dict[str, bytes]:
        """All keys of a namespace that begin with a prefix, by name, and what they hold."""
        return self._broker.converse(calls.entries(namespace, prefix))

    def delete(self, namespace: str, key: str) -> bool:
        """Take a key out; whether it was there."""
        return self._broker.converse(calls.delete(namespace, key))


class AioRegistry:
    """The same on an event loop."""

    def __init__(self, broker: AioConversing) -> None:
        self._broker = broker

    async def put(self, namespace: str, key: str, value: bytes | str, *, ttl: float | None = None) -> None:
        """Let a key hold a value; see `Registry.put`."""
        await self._broker.converse(calls.put(namespace, key, value, ttl))

    async def get(self, namespace: str, key: str) -> bytes | None:
        """What a key holds; None if it is not there."""
        return await self._broker.converse(calls.get(namespace, key))

    async def entries(self, namespace: str, prefix: str = "") -> dict[str, bytes]:
        """All keys of a namespace that begin with a prefix, by name, and what they hold."""
        return await self._broker.converse(calls.entries(namespace, prefix))

    async def delete(self, namespace: str, key: str) -> bool:
        """Take a key out; whether it was there."""
        return await self._broker.converse(calls.delete(namespace, key))
