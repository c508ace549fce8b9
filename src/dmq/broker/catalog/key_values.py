"""The key-value space: small values that the broker keeps for its clients, each until it expires.

What always holds: a key is gone from answers the moment it expires by the broker's clock, which goes on from the wall
clock after a restart; its event follows within a minute. There are never more keys or bytes than the bounds below,
expired keys included until their event is written, so that a snapshot of the state stays small.

The key-value space of a cluster: in the registry, so that every leader has the same.

What always holds: a key is gone from answers the moment it expires by the clock of the leader that is asked; its entry
goes when somebody comes upon it. What the journal of a shard had before there was a registry is found where the
registry has nothing, until it is written or deleted.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Busy, LimitReached, RegistryConflict, SessionExpired, UnknownEntry
from dmq.registry.contents import KeyContent, decode_content, encode_content
from dmq.registry.metadata import Metadata
from dmq.registry.paths import name_of
from dmq.registry.registry import Create, Delete, Entry, Put, needs_registry
from dmq.storage.state.events import Event, KeyPut
from dmq.storage.state.state import size_of

__all__ = ["BYTES_MAX", "KEYS_MAX", "ClusterKeys", "KeyValue", "KeyValues"]

KEYS_MAX: Final = 10_000
BYTES_MAX: Final = 4 << 20
_LOOK_MS: Final = 30_000
_MS_MAX: Final = (1 << 63) - 1


class KeyValue(NamedTuple):
    """A key and what it holds."""

    key: str
    value: bytes
    left_ms: int  # until it expires; 0: it does not


class KeyValues:
    """The key-value space of one broker; a drained broker still serves it."""

    def __init__(self, journal: Journal, runtime: Runtime) -> None:
        self._queries = journal.queries
        self._writer = journal.writer
        self._runtime = runtime
        self._next_look_ms = 0
        self._waiting = 0  # keys that are being written
        self._waiting_bytes = 0

    def get(self, namespace: str, key: str) -> KeyValue | None:
        """What a key holds now."""
        found = self._queries.keys.get(namespace, key)
        return self._shown(found) if found is not None and self._is_alive(found) else None

    def _is_alive(self, entry: KeyPut) -> bool:
        return not entry.expires_at_ms or entry.expires_at_ms > self._runtime.clock.now_ms

    def page(self, namespace: str, prefix: str, after: str, limit: int) -> tuple[list[KeyValue], bool]:
        """Keys of a namespace by name, and whether there are more."""
        chosen = [
            entry
            for entry in self._queries.keys.among(namespace)
            if self._is_alive(entry) and entry.key.startswith(prefix) and entry.key > after
        ]
        return [self._shown(entry) for entry in chosen[:limit]], len(chosen) > limit

    def _shown(self, entry: KeyPut) -> KeyValue:
        left_ms = max(1, entry.expires_at_ms - self._runtime.clock.now_ms) if entry.expires_at_ms else 0
        return KeyValue(entry.key, entry.value or b"", left_ms)

    async def put(self, namespace: str, key: str, value: bytes, ttl_ms: int = 0) -> None:
        """Keep a value under a key, durably.

        Parameters:
            ttl_ms: how long; 0 is until it is deleted.

        Raises:
            BrokerStopping: the broker is stopping.
            LimitReached: there is no room for more.
            StorageError: it could not be written.
        """
        self._runtime.readiness.check_open()
        expires_at_ms = min(self._runtime.clock.now_ms + ttl_ms, _MS_MAX) if ttl_ms else 0
        entry = KeyPut(namespace, key, value, expires_at_ms)
        before = self._queries.keys.get(entry.namespace, entry.key)
        more = int(before is None)
        more_bytes = size_of(entry) - (0 if before is None else size_of(before))
        expired: list[Event] = []
        if not self._has_room(more, more_bytes):
            gone = self._expired()
            if not self._has_room(more - len(gone), more_bytes - sum(map(size_of, gone))):
                keys = self._queries.keys
                raise LimitReached(
                    f"the key-value space is full ({keys.count:,} keys, {keys.bytes:,} bytes): delete some first"
                )
            expired = [*map(_removal, gone)]
        self._waiting += more
        self._waiting_bytes += max(0, more_bytes)
        try:
            await self._writer.write([*expired, entry])
        finally:
            self._waiting -= more
            self._waiting_bytes -= max(0, more_bytes)

    def _has_room(self, more: int, more_bytes: int) -> bool:
        keys = self._queries.keys
        is_counted = more <= 0 or keys.count + self._waiting + more <= KEYS_MAX
        return is_counted and (more_bytes <= 0 or keys.bytes + self._waiting_bytes + more_bytes <= BYTES_MAX)

    async def delete(self, namespace: str, key: str) -> bool:
        """Take a key out, durably; returns whether it was there."""
        self._runtime.readiness.check_open()
        is_there = self.get(namespace, key) is not None
        if self._queries.keys.get(namespace, key) is not None:
            await self._writer.write([KeyPut(namespace, key)])
        return is_there

    def tick(self, now_ms: int) -> None:
        """Take out what has expired, now and then."""
        if now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + _LOOK_MS
            self._writer.write_soon(map(_removal, self._expired()))

    def _expired(self) -> list[KeyPut]:
        return [entry for entry in self._queries.keys if not self._is_alive(entry)]


def _removal(entry: KeyPut) -> Event:
    return KeyPut(entry.namespace, entry.key)


_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.05


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
