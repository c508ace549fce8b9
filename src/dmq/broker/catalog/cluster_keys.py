"""The key-value space of a cluster: in the registry, so that every leader has the same.

What always holds: a key is gone from answers the moment it expires by the clock of the leader that is asked; its entry
goes when somebody comes upon it. What the journal of a shard had before there was a registry is found where the
registry has nothing, until it is written or deleted.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dmq.broker.catalog.key_values import KEYS_MAX, KeyValue, KeyValues
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Busy, LimitReached, RegistryConflict, SessionExpired, UnknownEntry
from dmq.registry.contents import KeyContent, decode_content, encode_content
from dmq.registry.metadata import Metadata
from dmq.registry.paths import name_of
from dmq.registry.registry import Create, Delete, Entry, Put, needs_registry

__all__ = ["ClusterKeys"]

_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.05
_MS_MAX: Final = (1 << 63) - 1


class ClusterKeys:
    """The key-value space as one leader reaches it.

    Parameters:
        before: that of the journal.
    """

    def __init__(self, metadata: Metadata, runtime: Runtime, before: KeyValues) -> None:
        self._registry = metadata.registry
        self._write = metadata.write_unmentioned
        self._paths = metadata.paths
        self._runtime = runtime
        self._before = before

    async def get(self, namespace: str, key: str) -> KeyValue | None:
        """What a key holds now.

        Raises:
            RegistryDown: the registry does not answer.
        """
        with needs_registry():
            entry = await self._registry.read(self._paths.key_value(namespace, key))
        if entry is None:
            return self._before.get(namespace, key)
        return self._shown(entry)

    def _shown(self, entry: Entry) -> KeyValue | None:
        content, now_ms = decode_content(KeyContent, entry.value, entry.path), self._runtime.clock.now_ms
        if content.expires_at_ms and content.expires_at_ms <= now_ms:
            return None
        left_ms = max(1, content.expires_at_ms - now_ms) if content.expires_at_ms else 0
        return KeyValue(name_of(entry.path), content.value, left_ms)

    async def page(self, namespace: str, prefix: str, after: str, limit: int) -> tuple[list[KeyValue], bool]:
        """Keys of a namespace by name, and whether there are more.

        Raises:
            RegistryDown: the registry does not answer.
        """
        with needs_registry():
            entries = await self._entries(namespace)
        shown: dict[str, KeyValue | None] = {one.key: one for one in self._before.page(namespace, "", "", KEYS_MAX)[0]}
        shown |= {name_of(entry.path): self._shown(entry) for entry in entries}
        found = [one for one in shown.values() if one is not None and one.key.startswith(prefix) and one.key > after]
        chosen = sorted(found, key=lambda one: one.key)
        return chosen[:limit], len(chosen) > limit

    async def _entries(self, namespace: str) -> list[Entry]:
        try:
            return await self._registry.children(self._paths.namespace(namespace))
        except UnknownEntry:
            return []

    async def put(self, namespace: str, key: str, value: bytes, ttl_ms: int = 0) -> None:
        """Keep a value under a key, durably.

        Raises:
            LimitReached: there is no room for more.
            RegistryDown, WriteUnknown: the registry does not answer.
        """
        self._runtime.readiness.check_open()
        expires_at_ms = min(self._runtime.clock.now_ms + ttl_ms, _MS_MAX) if ttl_ms else 0
        path, content = self._paths.key_value(namespace, key), encode_content(KeyContent.of(value, expires_at_ms))
        for _ in range(_ATTEMPTS):
            with needs_registry():
                try:
                    entry = await self._registry.read(path)
                    if entry is not None:
                        await self._write([Put(path, content, entry.version)])
                        return
                    await self._make_room(namespace)
                    await self._write([Create(path, content)])
                    return
                except (RegistryConflict, SessionExpired):
                    await asyncio.sleep(_PAUSE_SECONDS)
        raise Busy(f"key {key!r} is written all the time: try again", retry_after_ms=100)

    async def _make_room(self, namespace: str) -> None:
        folder = self._paths.namespace(namespace)
        if await self._registry.read(folder) is None:
            await self._write([Create(folder, b"")])
            return
        entries = await self._entries(namespace)
        gone = [entry for entry in entries if self._shown(entry) is None]
        for entry in gone[:100]:
            await self._write([Delete(entry.path, entry.version)])
        if len(entries) - len(gone) >= KEYS_MAX:
            raise LimitReached(f"namespace {namespace!r} is full ({len(entries):,} keys): delete some first")

    async def delete(self, namespace: str, key: str) -> bool:
        """Take a key out, durably; returns whether it was there.

        Raises:
            RegistryDown, WriteUnknown: the registry does not answer.
        """
        path = self._paths.key_value(namespace, key)
        was_before = await self._before.delete(namespace, key)
        for _ in range(_ATTEMPTS):
            with needs_registry():
                entry = await self._registry.read(path)
                if entry is None:
                    return was_before
                try:
                    await self._write([Delete(path, entry.version)])
                    return was_before or self._shown(entry) is not None
                except (RegistryConflict, SessionExpired):
                    await asyncio.sleep(_PAUSE_SECONDS)
        raise Busy(f"key {key!r} is written all the time: try again", retry_after_ms=100)
