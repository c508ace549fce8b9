"""Doomed messages: they were read to be handed out, and must not be: they expired, had all their attempts, or were
stored as something that nobody can read.

Pure code. A message that kills its consumer is never nacked: only here is noticed that it was handed out often enough.
Expiry is looked at here too, where a message would go out: messages that no consumer asks for need not be looked for.

What always holds: doomed messages are some of those that were read, in order; an attempt that would be the last one
allowed is not doomed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dmq.broker.delivery.origin import Origin

__all__ = ["Doomed", "Terms", "find_doomed", "is_exhausted"]


class Doomed(NamedTuple):
    """Messages for the dead letters."""

    expired: list[Origin]
    exhausted: list[Origin]
    corrupt: list[Origin]

    @property
    def offsets(self) -> set[int]:
        return {origin.offset for origins in self for origin in origins}


class Terms(NamedTuple):
    """What a message has to keep to be handed out.

    Attributes:
        attempt: which hand-out from this queue it would be.
        attempts_max: as of `is_exhausted`.
        ttl_ms: how long messages of this topic live after they were stored; None where each says so itself, as a
            retry does.
    """

    attempt: int
    attempts_max: int
    now_ms: int
    ttl_ms: int | None


def is_exhausted(attempts: int, attempts_max: int) -> bool:
    """Whether so many attempts that failed are all a message gets; 0 allows any number."""
    return 0 < attempts_max <= attempts


def find_doomed(origins: Iterable[Origin], terms: Terms) -> Doomed | None:
    """What of the messages that were read must not go out; None if all may."""
    attempt, attempts_max, now_ms, ttl_ms = terms
    expired: list[Origin] = []
    exhausted: list[Origin] = []
    corrupt: list[Origin] = []
    for origin in origins:
        if origin.corrupt:
            corrupt.append(origin)
            continue
        expires_at_ms = origin.failed.expires_at_ms
        if ttl_ms is not None:
            at_ms = origin.stored_at_ms + ttl_ms
            expires_at_ms = at_ms if expires_at_ms is None else min(at_ms, expires_at_ms)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            expired.append(origin)
        elif is_exhausted(origin.failed.attempts + attempt - 1, attempts_max):
            exhausted.append(origin)
    return Doomed(expired, exhausted, corrupt) if expired or exhausted or corrupt else None
