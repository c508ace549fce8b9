"""The key-value space of the broker: `await client.registry.put("shop", "leader", "host-1", ttl=30)`.

What the parts of an installation tell each other: small values under a namespace and a key, for ever or for a time
that the writer keeps renewing. The broker keeps them in its journal.

What always holds: a value that was put is durable; an expired one is not found; calls wait and are asked again as
those of `client.admin` are.
"""

from __future__ import annotations

from dmq.client.admin import calls
from dmq.client.aio.admin import AioAdmin

__all__ = ["AioRegistry"]


class AioRegistry:
    """The key-value space."""

    def __init__(self, admin: AioAdmin) -> None:
        self._admin = admin

    async def put(self, namespace: str, key: str, value: bytes | str, *, ttl: float | None = None) -> None:
        """Set the value of a key.

        Parameters:
            value: at most 4096 bytes; a text is kept as UTF-8.
            ttl: seconds after which the key expires, unless it is put again before; None keeps it.

        Raises:
            LimitReached: the space is full.
            InvalidName, InvalidSettings: a name, the value or the time cannot be used.
        """
        await self._admin._converse(calls.put(namespace, key, value, ttl))

    async def get(self, namespace: str, key: str) -> bytes | None:
        """The value of a key; None if there is no such key."""
        return await self._admin._converse(calls.get(namespace, key))

    async def entries(self, namespace: str, prefix: str = "") -> dict[str, bytes]:
        """All keys of a namespace that begin with a prefix, by name, with their values."""
        return await self._admin._converse(calls.entries(namespace, prefix))

    async def delete(self, namespace: str, key: str) -> bool:
        """Delete a key; whether it existed."""
        return await self._admin._converse(calls.delete(namespace, key))
