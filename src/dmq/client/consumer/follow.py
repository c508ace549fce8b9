"""Following a topic without a group: what arrives, as it arrives, and nothing is consumed.

What always holds: each queue is read in order and without gaps from where it was begun, except for what retention took
before it was read; messages of several queues come in the order they were stored, as far as one look sees them. A shard
that does not answer holds up nobody: its queues are read on when it does.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from dmq.client.admin.admin import Admin
from dmq.client.admin.calls import When
from dmq.client.admin.reports import StoredMessage
from dmq.client.arguments import check_tags
from dmq.errors import NotConnected, NotLeader, TimedOut

__all__ = ["FollowOptions", "follow"]

_READ_MESSAGES: Final = 500
_POLL_SECONDS: Final = 0.1


class FollowOptions(NamedTuple):
    """Which messages to follow.

    Attributes:
        queue: only this one.
        tags: only these, as in `a || b`.
        ends: stop at the end of what is there now.
    """

    queue: int | None = None
    tags: str = ""
    ends: bool = False


_ALL: Final = FollowOptions()


def _when(message: StoredMessage) -> tuple[int, int, int]:
    """When a message was stored; those of one millisecond are as they stand in the journal."""
    return message.stored_at_ms, message.shard, message.journal_offset


def follow(
    admin: Admin,
    topic: str,
    start: When = "latest",
    options: FollowOptions = _ALL,
    *,
    on_missing: Callable[[Sequence[str]], object] = lambda shards: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[StoredMessage]:
    """Messages of a topic from a place on, for ever.

    Parameters:
        start: as in `Admin.peek`.
        on_missing: called with the names of the shards that do not answer, whenever these are others than before.
        sleep: waits between two looks.

    Raises:
        UnknownTopic: it is not there, or no longer.
        InvalidSettings: `tags` are not a filter.
    """
    queue, tags, ends = options.queue, options.tags, options.ends
    check_tags(tags)
    begin = {(row.shard, row.queue): row.at for row in admin.offsets(topic, queue=queue, at=start)}
    missing: Sequence[str] = ()
    limits = {(row.shard, row.queue): row.next_offset for row in admin.offsets(topic, queue=queue)} if ends else {}
    while True:
        batches: list[list[StoredMessage]] = []
        found = False
        rows = admin.offsets(topic, queue=queue)
        if rows.missing != missing:
            missing = rows.missing
            on_missing(missing)
        for row in rows:
            # A queue that was added since is read from its beginning.
            place = row.shard, row.queue
            at = begin.setdefault(place, row.first_offset)
            if at >= limits.get(place, row.next_offset):
                continue
            try:
                messages, begin[place] = admin.read(
                    topic, row.queue, at, limit=_READ_MESSAGES, tags=tags, shard=row.shard
                )
            except (NotConnected, NotLeader, TimedOut):
                if not row.shard:
                    raise
                continue  # it failed over between the two questions
            found = found or begin[place] > at
            batches.append([m for m in messages if not ends or m.offset < limits.get(place, 0)])
        yield from heapq.merge(*batches, key=_when)
        if not found:
            if ends:
                return
            sleep(_POLL_SECONDS)
