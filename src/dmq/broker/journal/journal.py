"""The store, its writer and its readers, handed to the rooms together."""

from __future__ import annotations

from typing import NamedTuple

from dmq.broker.journal.arrivals import Arrivals
from dmq.broker.journal.disk_reads import DiskReads
from dmq.broker.journal.shard_writer import ShardWriter
from dmq.broker.journal.writer import JournalWriter
from dmq.clock import Clock
from dmq.net.connection import WriteCoalescer
from dmq.settings import BrokerSettings
from dmq.shard.service import Leadership
from dmq.storage.queries import Queries
from dmq.storage.store import MessageStore

__all__ = ["Journal"]


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
