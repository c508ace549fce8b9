"""The broker: one store, and the rooms that serve it, wired together.

Nothing is decided here. Everything happens on one event loop. No request that reads or changes something makes it wait
for a disk: what is written goes through the writer, and operations that read or wait are coroutines. The loop may wait
for the disk where messages of a backlog are handed out, where delays are loaded, where a segment begins or goes, and
for a lone flush on a disk that has been quick (docs/internals/architecture.md has the list).

What always holds: a stopping or drained broker says so, takes nothing new, and finishes what is under way. The Broker
of a shard's leader is not stopped but dropped: it finishes nothing, and leaves the store to its member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.catalog.cluster_access import ClusterAccess
from dmq.broker.catalog.cluster_topics import ClusterTopics
from dmq.broker.catalog.key_values import ClusterKeys, KeyValues
from dmq.broker.dead_letters.dead_letters import DeadLetters
from dmq.broker.dead_letters.letter_thread import open_letters
from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.groups import Groups
from dmq.broker.delivery.reader import Reader
from dmq.broker.journal.journal import Journal, JournalTimes
from dmq.broker.journal.shard_writer import ShardWriter, unanswered
from dmq.broker.maintenance import Audience, Maintenance
from dmq.broker.publish.publisher import Publisher
from dmq.broker.publish.rate_limits import ClusterLimits, RateLimits
from dmq.broker.publish.straight_path import StraightPath
from dmq.broker.retry.mover import Mover
from dmq.broker.retry.policy import check_table
from dmq.broker.runtime.runtime import Runtime
from dmq.broker.schedule.delays import Delays
from dmq.broker.schedule.leftovers import Leftovers
from dmq.broker.schedule.transactions import Transactions
from dmq.clock import Clock
from dmq.deadletters.url import MEMORY
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.registry.cluster_view import ViewChange
from dmq.settings import BrokerSettings
from dmq.shard.repair.scrubber import ScrubbedJournal, Scrubber, ScrubWays
from dmq.shard.service import Leadership
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["Broker"]

log = EventLog(__name__)

_CLOCK_SET_MS: Final = 5000  # the wall clock moved by more than this against ours: it was set
_TICK_SECONDS: Final = 0.05
_LATE_SECONDS: Final = 1.0
_UNSURE_SECONDS: Final = 2.0  # without the right to serve; its end is already seconds behind what was heard last
_CATCH_UP_SECONDS: Final = 1.0  # no client is late so long after we stood still
_CATCH_UP_PAIRS: Final = 500  # of topic and group, in a tick: about a millisecond


class Broker:
    """One broker; made on the event loop, running from then on.

    Parameters:
        store: opened with `checkpoint_inline=False`.
        audience: the clients that are connected.
        letters: makes the store of dead letters when it is first needed; one in memory if left out.
        leadership: in a shard, that of the member whose store it is.

    Attributes:
        scrubber: looks for damage in the journal; None in a shard, where the member does.
        cluster, cluster_keys: the topics and the key-value space of the cluster; None of a lone broker.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        audience: Audience,
        letters: Callable[[], DeadLetterStore] | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        self.settings = settings
        self.audience = audience
        self.leadership = leadership
        self.runtime = runtime = Runtime.on(clock, leadership)
        self.clock = runtime.clock
        self.readiness = runtime.readiness
        self.journal = journal = Journal.of(store, settings, clock, audience.outbox, leadership=leadership)
        self.store, self.queries, self.writer, self.reads, self.arrivals = journal
        self.catalog = catalog = Catalog(journal, runtime, settings, check_table)
        self.changes = catalog.changes
        self.keys = KeyValues(journal, runtime)
        mover = Mover(journal, runtime, catalog, settings.retry_table)
        self.channels = Channels(journal, runtime, catalog, settings, failures=mover)
        self.groups = Groups(journal, self.channels)
        self.reader = Reader(journal, self.channels)
        self.delays = Delays(journal, runtime, catalog)
        self.transactions = Transactions(journal, runtime, catalog, settings)
        self.dead_letters = DeadLetters(
            journal, runtime, catalog, settings, make=letters or (lambda: open_letters(MEMORY))
        )
        self.limits = RateLimits(journal, runtime)
        self.publisher = Publisher(
            journal,
            self.channels,
            self.limits,
            self.delays,
            transactions=self.transactions,
            dead_letters=self.dead_letters,
        )
        self.straight = StraightPath(store, self.writer, self.publisher, self.changes, is_on=settings.straight)
        self.maintenance = Maintenance(runtime.readiness, self.channels, audience)
        catalog.listeners += [self.channels, self.limits, self.publisher]
        self.channels.on_dead_letters = self.dead_letters.drain.wake
        self.writer.on_visible = self.channels.visible
        self.writer.is_heard = self.channels.is_heard
        self.writer.on_failed = self._store_failed
        self.scrubber = self._make_scrubber() if leadership is None else None
        self._scrubbing: asyncio.Task[None] | None = None
        self.cluster: ClusterTopics | None = None
        self.cluster_keys: ClusterKeys | None = None
        self.times = JournalTimes(clock.now_ms())
        self.failed = asyncio.Event()
        self.stop_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ticked_at = self._loop.time()
        self._suspended = self.clock.suspended
        self._clients_at = 0.0
        self._behind_ms = 0  # our time, behind the wall clock, when it was told last
        self._paused_at: float | None = None  # we lead, and may not serve
        self._is_sent_away = False
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)

    def _make_scrubber(self) -> Scrubber:
        store, queries = self.store, self.queries
        return Scrubber(
            ScrubWays(store.files, store.settings, self.clock.wall, self.reads.work),
            lambda: ScrubbedJournal(store.damage, queries.start, min(queries.visible, queries.flushed)),
            remedy="put the segment back from a backup, or dmq journal verify tells what is lost",
        )

    def begin_scrub(self) -> None:
        """Look for damage from now on, until it stops."""
        if self.scrubber is not None and self._scrubbing is None:
            self._scrubbing = self._loop.create_task(self.scrubber.run())

    async def end_scrub(self) -> None:
        """Look no more; when this returns, nothing of it is under way on the loop."""
        if self._scrubbing is not None:
            self._scrubbing.cancel()
            await asyncio.wait([self._scrubbing])
            self._scrubbing = None

    def enter_cluster(self, access: ClusterAccess) -> None:
        """From now on the registry says which topics there are."""
        rest = Leftovers(self.journal, self.delays, self.transactions)
        self.cluster = ClusterTopics(self.catalog, self.runtime, access, rest, topics_max=self.settings.topics_max)
        self.catalog.authority = self.cluster
        self.cluster_keys = ClusterKeys(access.entries.metadata, self.runtime, self.keys)
        self.limits.shared = ClusterLimits(access)
        access.view.listeners.append(self._reload_limits)
        self.limits.reload()
        self.cluster.start()

    def _reload_limits(self, change: ViewChange) -> None:
        shared = self.limits.shared
        if shared is not None and shared.concerns(change):
            self.limits.reload()

    def _store_failed(self, error: DMQError) -> None:
        log.critical("the store failed; the broker stops", error=error)
        self.failed.set()

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        before, self._ticked_at = self._ticked_at, self._loop.time()
        suspended, self._suspended = self._suspended, self.clock.suspended
        late = self._ticked_at - before + self._suspended - suspended
        if late > _LATE_SECONDS:
            # We stood still: what came meanwhile is to be read before any client is late.
            self._clients_at = self._ticked_at + min(late, _CATCH_UP_SECONDS)
            return
        if self.leadership is not None and not self._may_serve(self.leadership):
            return
        now_ms = self.clock.now_ms
        self._compare_clocks()
        if self.leadership is None or self._may_write(self.leadership):
            self.delays.tick(now_ms)
            self.transactions.tick(now_ms)
            self.keys.tick(now_ms)
        if self._ticked_at >= self._clients_at:
            self.channels.tick(now_ms)
        self.arrivals.wake()
        self.times.mark(self.queries.end, now_ms)
        if (lags := self.queries.lags).is_behind:
            lags.catch_up(_CATCH_UP_PAIRS)

    def _compare_clocks(self) -> None:
        """Say so when the machine's clock was set: delays go by the time from before, until another broker leads."""
        behind_ms = self.clock.behind_ms
        if abs(behind_ms - self._behind_ms) > _CLOCK_SET_MS:
            self._behind_ms = behind_ms
            log.warning(
                "the machine's clock was set: delays and expiries go on by the time from before; restart the broker, "
                "or hand its shard over, to go by the new one",
                behind_seconds=round(behind_ms / 1000, 1),
            )

    def _may_serve(self, leadership: Leadership) -> bool:
        """Whether time passes for a shard's leader: without the right to serve nothing ends, falls due or goes out.

        Clients that wait here while that lasts are sent away: another member may lead by now, without our knowing.
        """
        if not leadership.may_serve():
            if self._paused_at is None:
                self._paused_at = self._ticked_at
            elif self._ticked_at - self._paused_at >= _UNSURE_SECONDS and not self._is_sent_away:
                self._is_sent_away = True
                log.warning("cannot tell whether it still leads: its clients are sent to look", epoch=leadership.epoch)
                self.audience.send_away()
            return False
        if self._paused_at is not None:
            self._paused_at, self._is_sent_away = None, False
            self.channels.pump_all()
        return True

    def _may_write(self, leadership: Leadership) -> bool:
        """Whether what falls due may be written; it stays due while too few members are in sync."""
        try:
            leadership.check_writable()
        except DMQError:
            return False
        return True

    async def drop(self, refusal: DMQError) -> None:
        """We do not lead the shard any more: from this call on nothing is answered, handed out or written.

        When it returns, nothing uses the store, which stays open. Connections with an answer outstanding end.

        Parameters:
            refusal: for requests of which nothing was done.
        """
        writer = self.writer
        assert isinstance(writer, ShardWriter), "only a shard's leader is dropped"
        self.readiness.is_stopping = True
        self._ticker.cancel()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster.access.view.listeners.remove(self._reload_limits)
        writer.drop(refusal)
        self.reads.drop(refusal)
        self.channels.end(refusal)
        self.dead_letters.drop()
        await self.runtime.tasks.drop(unanswered())
        await asyncio.to_thread(writer.join)
        await asyncio.to_thread(self.reads.close)

    async def stop(self, drain_seconds: float) -> None:
        """Tell clients, finish what is under way, close the store."""
        self.readiness.is_stopping = True
        await self.end_scrub()
        self.audience.tell_reboot(int(drain_seconds * 1000), "the broker is stopping")
        wall = self.clock.wall
        deadline = wall.monotonic() + drain_seconds
        while len(self.audience) and wall.monotonic() < deadline:
            if not self.channels.out and not self.writer.waiting_bytes:
                break
            await asyncio.sleep(0.02)
        self._ticker.cancel()
        self.arrivals.wake()
        await self.dead_letters.close()
        await self.writer.drain()
        await self.runtime.tasks.finish(_LATE_SECONDS)
        self.reads.close()
        self.channels.write_skipped()
        await self.writer.close()
