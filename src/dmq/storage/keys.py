"""Keys: a small key-value space in the journal, for what the parts of an installation tell each other.

A namespace holds keys, a key holds some bytes, for ever or until a moment that whoever wrote it keeps moving on: so
what is said of a process goes when the process does.

What always holds: the table is what the events say, and no clock changes it; who reads passes over what has expired,
and the broker writes an event when it takes it out. How much there is, in keys and in bytes, is counted, so that the
broker can refuse more.
"""

from __future__ import annotations

from collections.abc import Iterator

from dmq.storage.events import KeyPut

__all__ = ["KeyTable"]


class KeyTable:
    """See the module."""

    def __init__(self) -> None:
        self._namespaces: dict[str, dict[str, KeyPut]] = {}
        self.count = 0
        self.bytes = 0

    def apply(self, event: KeyPut) -> None:
        """Take in one event: the key is put, or, without a value, gone."""
        keys = self._namespaces.get(event.namespace, {})
        before = keys.pop(event.key, None)
        if before is not None:
            self.count -= 1
            self.bytes -= size_of(before)
        if event.value is not None:
            self._namespaces.setdefault(event.namespace, keys)[event.key] = event
            self.count += 1
            self.bytes += size_of(event)
        elif not keys:
            self._namespaces.pop(event.namespace, None)

    def get(self, namespace: str, key: str) -> KeyPut | None:
        """What a key holds, expired or not."""
        return self._namespaces.get(namespace, {}).get(key)

    def among(self, namespace: str) -> list[KeyPut]:
        """The keys of a namespace by name, expired or not."""
        keys = self._namespaces.get(namespace, {})
        return [keys[name] for name in sorted(keys)]

    def __iter__(self) -> Iterator[KeyPut]:
        for keys in self._namespaces.values():
            yield from keys.values()

    def dump(self) -> list[KeyPut]:
        """All of it, as `load` takes it."""
        return list(self)

    def load(self, dumped: list[KeyPut]) -> None:
        """Become what `dump` gave; called on a new table only."""
        for event in dumped:
            self.apply(event)


def size_of(event: KeyPut) -> int:
    """How many bytes an entry counts for."""
    return len(event.namespace.encode()) + len(event.key.encode()) + len(event.value or b"")
