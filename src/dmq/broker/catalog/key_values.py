"""The key-value space: small values that the broker keeps for its clients, each until it expires.

What always holds: a key is gone from answers the moment it expires by the broker's clock, which goes on from the wall
clock after a restart; its event follows within a minute. There are never more keys or bytes than the bounds below,
expired keys included until their event is written, so that a snapshot of the state stays small.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import LimitReached
from dmq.storage.state.events import Event, KeyPut
from dmq.storage.state.state import size_of

__all__ = ["BYTES_MAX", "KEYS_MAX", "KeyValue", "KeyValues"]

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
