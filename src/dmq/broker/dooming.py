"""Dooming: messages that were read to be handed out, and must not be: they expired, or had all their attempts.

Pure code. A message that kills its consumer is never nacked: only here is noticed that it was handed out often enough.
Expiry is looked at here too, where a message would go out: what nobody asks for need not be looked for.

What always holds: what is doomed is what was read, in order; an attempt that would be the last one allowed is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dmq.broker.moving import Origin, origins_of
from dmq.broker.retry import is_exhausted
from dmq.storage.identities import IdRun
from dmq.storage.reading import Slice

__all__ = ["Doomed", "find_doomed"]


class Doomed(NamedTuple):
    """Messages for the dead letters."""

    expired: list[Origin]
    exhausted: list[Origin]

    @property
    def offsets(self) -> set[int]:
        return {origin.offset for origins in self for origin in origins}


def find_doomed(
    found: Slice,
    offsets: Sequence[int],
    ids: Sequence[IdRun],
    *,
    attempt: int,
    attempts_max: int,
    now_ms: int,
    ttl_ms: int | None,
    is_retry: bool,
) -> Doomed | None:
    """What of the messages that were read must not go out; None if all may.

    Parameters:
        found, offsets, ids: what was read.
        attempt: which hand-out from this queue it would be.
        attempts_max: as of `retry.is_exhausted`.
        ttl_ms: how long messages of this topic live after they were stored; a retry carries its own expiry.
        is_retry: they stand in a retry topic.
    """
    expired: list[Origin] = []
    exhausted: list[Origin] = []
    for origin in origins_of(found, offsets, ids, is_retry=is_retry):
        expires_at_ms = origin.failed.expires_at_ms
        if ttl_ms is not None and not is_retry:
            at_ms = origin.stored_at_ms + ttl_ms
            expires_at_ms = at_ms if expires_at_ms is None else min(at_ms, expires_at_ms)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            expired.append(origin)
        elif is_exhausted(origin.failed.attempts + attempt - 1, attempts_max):
            exhausted.append(origin)
    return Doomed(expired, exhausted) if expired or exhausted else None
