"""Which half messages end together: all of a transaction's, under the id of its first one.

A transaction with one message is not mentioned here at all; of one with more, the further ones name the first.

What always holds: a message has at most one first, and is among the members of that; what is kept of a message goes
when it ends, and what is kept of one that never was stored, when its first does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["JoinedTransactions"]

_ID_BYTES = 16


class JoinedTransactions:
    """See the module. Messages are named by their 16-byte ids."""

    def __init__(self) -> None:
        self._firsts: dict[bytes, bytes] = {}
        self._members: dict[bytes, dict[bytes, None]] = {}

    def join(self, pairs: bytes) -> None:
        """Messages belong to transactions: ids in pairs, a message's own and that of the first."""
        for at in range(0, len(pairs), 2 * _ID_BYTES):
            member, first = pairs[at : at + _ID_BYTES], pairs[at + _ID_BYTES : at + 2 * _ID_BYTES]
            self._put(member, first)

    def _put(self, member: bytes, first: bytes) -> None:
        if member != first and member not in self._firsts:
            self._firsts[member] = first
            self._members.setdefault(first, {})[member] = None

    def first_of(self, message_id: bytes) -> bytes:
        """The first message of a transaction, by any of them."""
        return self._firsts.get(message_id, message_id)

    def members_of(self, first: bytes) -> Collection[bytes]:
        """The further messages of a transaction, by the first."""
        return self._members.get(first, ())

    def ended(self, message_ids: Iterable[bytes], still_open: Collection[bytes]) -> None:
        """Messages have ended.

        Parameters:
            still_open: those that have not.
        """
        if not self._firsts:
            return
        for message_id in message_ids:
            self._forget(message_id)
            for member in [m for m in self._members.get(message_id, ()) if m not in still_open]:
                self._forget(member)

    def _forget(self, member: bytes) -> None:
        first = self._firsts.pop(member, None)
        if first is not None:
            members = self._members[first]
            del members[member]
            if not members:
                del self._members[first]

    def dump(self) -> list[tuple[bytes, bytes]]:
        """Everything, as plain data."""
        return list(self._firsts.items())

    def load(self, dumped: Iterable[tuple[bytes, bytes]]) -> None:
        """Become what `dump` gave."""
        for member, first in dumped:
            self._put(member, first)
