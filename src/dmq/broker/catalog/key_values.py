"""The key-value space as the broker serves it: what has expired is not there, and is taken out in time.

What always holds: a key is gone from answers the moment it expires by the broker's clock, which goes on from the wall
clock after a restart; its event follows within a minute. There are never more keys or bytes than the bounds below, what
has expired and is not taken out included, so that a snapshot of the state stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dmq.errors import LimitReached
from dmq.storage.state.events import Event, KeyPut
from dmq.storage.state.state import size_of

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["BYTES_MAX", "KEYS_MAX", "KeySpace"]

KEYS_MAX: Final = 10_000
BYTES_MAX: Final = 4 << 20
_LOOK_MS: Final = 30_000


class KeySpace:
    """See the module."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._next_look_ms = 0
        self._waiting = 0  # keys that are being written
        self._waiting_bytes = 0

    def get(self, namespace: str, key: str) -> KeyPut | None:
        """What a key holds now."""
        found = self._broker.store.queries.keys.get(namespace, key)
        return found if found is not None and self._is_alive(found) else None

    def among(self, namespace: str) -> list[KeyPut]:
        """The keys of a namespace by name."""
        return [entry for entry in self._broker.store.queries.keys.among(namespace) if self._is_alive(entry)]

    def _is_alive(self, entry: KeyPut) -> bool:
        return not entry.expires_at_ms or entry.expires_at_ms > self._broker.now_ms

    async def put(self, entry: KeyPut) -> None:
        """Have it hold this, durably.

        Raises:
            LimitReached: there is no room for more.
            StorageError: it could not be written.
        """
        before = self._broker.store.queries.keys.get(entry.namespace, entry.key)
        more = int(before is None)
        more_bytes = size_of(entry) - (0 if before is None else size_of(before))
        expired: list[Event] = []
        if not self._has_room(more, more_bytes):
            gone = self._expired()
            if not self._has_room(more - len(gone), more_bytes - sum(map(size_of, gone))):
                keys = self._broker.store.queries.keys
                raise LimitReached(
                    f"the key-value space is full ({keys.count:,} keys, {keys.bytes:,} bytes): delete some first"
                )
            expired = [*map(_removal, gone)]
        self._waiting += more
        self._waiting_bytes += max(0, more_bytes)
        try:
            await self._broker.write([*expired, entry])
        finally:
            self._waiting -= more
            self._waiting_bytes -= max(0, more_bytes)

    def _has_room(self, more: int, more_bytes: int) -> bool:
        keys = self._broker.store.queries.keys
        is_counted = more <= 0 or keys.count + self._waiting + more <= KEYS_MAX
        return is_counted and (more_bytes <= 0 or keys.bytes + self._waiting_bytes + more_bytes <= BYTES_MAX)

    async def delete(self, namespace: str, key: str) -> bool:
        """Take it out, durably; whether it was there."""
        is_there = self.get(namespace, key) is not None
        if self._broker.store.queries.keys.get(namespace, key) is not None:
            await self._broker.write([KeyPut(namespace, key)])
        return is_there

    def tick(self, now_ms: int) -> None:
        """Take out what has expired, now and then."""
        if now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + _LOOK_MS
            self._broker.write_events(map(_removal, self._expired()))

    def _expired(self) -> list[KeyPut]:
        return [entry for entry in self._broker.store.queries.keys if not self._is_alive(entry)]


def _removal(entry: KeyPut) -> Event:
    return KeyPut(entry.namespace, entry.key)
