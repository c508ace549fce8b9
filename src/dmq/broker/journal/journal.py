"""The store, its writer and its readers, handed to the rooms together.

When the journal had reached an offset: marks of the last hours, for ages of messages that are not read for it.

What always holds: no more than `MARKS_MAX` marks are kept; a time is never later than when the offset was written, and
at most as much earlier as its marks are apart: a second at first, more where old marks were thinned out.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from dmq.broker.journal.arrivals import Arrivals
from dmq.broker.journal.disk import DiskReads
from dmq.broker.journal.shard_writer import ShardWriter
from dmq.broker.journal.writer import JournalWriter
from dmq.clock import Clock
from dmq.net.connection import WriteCoalescer
from dmq.settings import BrokerSettings
from dmq.shard.service import Leadership
from dmq.storage.queries import Queries
from dmq.storage.store import MessageStore

__all__ = ["Journal", "JournalTimes"]


class Journal(NamedTuple):
    """What a room reads from and writes to; made on the event loop."""

    store: MessageStore
    queries: Queries
    writer: JournalWriter
    reads: DiskReads
    arrivals: Arrivals

    @classmethod
    def of(
        cls,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        outbox: WriteCoalescer,
        leadership: Leadership | None = None,
    ) -> Journal:
        """The writer and the readers of a store; in a shard, those of its leader."""
        arrivals = Arrivals(settings.pulls_waiting_max)
        bytes_max = settings.waiting_bytes_max
        reads = DiskReads(store.queries)
        if leadership is None:
            writer = JournalWriter(store, clock, bytes_max, outbox, arrivals=arrivals)
        else:
            writer = ShardWriter(store, clock, bytes_max, outbox, arrivals=arrivals, leadership=leadership)
            reads.check_serving = leadership.check_serving
        return cls(store, store.queries, writer, reads, arrivals=arrivals)


MARKS_MAX: Final = 4096
_APART_MS: Final = 1000


class JournalTimes:
    """The marks of one broker, from its start on."""

    def __init__(self, started_ms: int) -> None:
        self.started_ms = started_ms
        self._offsets: list[int] = []
        self._times_ms: list[int] = []

    def mark(self, offset: int, now_ms: int) -> None:
        """The journal ends there now; asked often, it keeps a mark now and then."""
        if self._times_ms and (now_ms - self._times_ms[-1] < _APART_MS or offset == self._offsets[-1]):
            return
        self._offsets.append(offset)
        self._times_ms.append(now_ms)
        if len(self._offsets) > MARKS_MAX:
            # Of the older half every second one goes: what is old needs no exact age.
            del self._offsets[1 : MARKS_MAX // 2 : 2], self._times_ms[1 : MARKS_MAX // 2 : 2]

    def at(self, offset: int) -> int | None:
        """When the byte at an offset was written; None if that was before the broker started."""
        index = bisect_right(self._offsets, offset) - 1
        return None if index < 0 else self._times_ms[index]
