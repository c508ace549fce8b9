"""The broker: one store, its writer, the groups that consume it, and the commands clients send.

Everything here happens on one event loop. No request that reads or changes something makes it wait for a disk: what is
written goes through the writer, and handlers that read or wait are coroutines. It may wait for one where messages of a
backlog are handed out, where delays are loaded, where a segment begins or goes, and for a lone flush on a disk that has
been quick (docs/internals/architecture.md has the list).

What always holds: a connection is served only after its hello; a command that fails is answered with its error and
harms nobody else; requests about a topic or group that is being changed wait for that, in their order; a stopping or
drained broker says so, takes nothing new, and finishes what is under way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from dmq.broker.catalog import catalog
from dmq.broker.catalog.changes import Changes, Later
from dmq.broker.catalog.key_values import KeySpace
from dmq.broker.dead_letters.dead_letters import DeadLetters, open_letters
from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import BroadcastCursors, Group, kept_subscription
from dmq.broker.delivery.rebalance import Dividing
from dmq.broker.journal.disk import Arrivals, DiskReads
from dmq.broker.journal.writer import JournalWriter, nobody_waits
from dmq.broker.publish.rate_limits import Limits, kept_limits
from dmq.broker.retry.mover import Moves
from dmq.broker.schedule.delays import Delays
from dmq.broker.schedule.transactions import Transactions
from dmq.broker.wire.dispatcher import Tasks, Work, check_changes, go_on, wait_for
from dmq.broker.wire.session import Session
from dmq.clock import Clock
from dmq.deadletters.url import MEMORY
from dmq.errors import BrokerStopping, DMQError, InvalidRequest, UnknownTopic
from dmq.model import DLQ_PREFIX, RESULT_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX, Durability, TopicConfig, retry_topic_name
from dmq.net.connection import Connection, WriteCoalescer
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.session import ServerReboot
from dmq.settings import BrokerSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Event, PositionDropped, Settled
from dmq.storage.state.state import Topic
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["Broker", "Handler", "Work"]

log = logging.getLogger(__name__)

# What a handler returns goes on by itself; requests are begun in the order they came in.
Handler = Callable[["Broker", Session, Frame, Any], Work | None]

_TICK_SECONDS: Final = 0.05
_LATE_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 1.0
_IDLE_MS: Final = 60_000
_PUMP_NOW_MAX: Final = 4  # groups that are served before whoever published is answered


class Broker:
    """See the module. It is the `Peer` of its connections.

    Parameters:
        handlers: what to do for each command; the hello comes without a session.
        letters: makes the store of dead letters when it is first needed; one in memory if left out.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        handlers: dict[int, Handler],
        hello: Callable[[Broker, Connection, Frame], None],
        letters: Callable[[], DeadLetterStore] | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self._handlers = handlers
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self.outbox = WriteCoalescer()
        self.writer = JournalWriter(
            store, clock, settings.waiting_bytes_max, self.outbox, self._visible, self._store_failed
        )
        self.reads = DiskReads(store.queries)
        self.changes = Changes(settings.pulls_waiting_max, settings.waiting_bytes_max)
        self.dividing = Dividing(self._loop)
        self._tasks = Tasks()
        self.run = self._tasks.run
        self._broadcasts = BroadcastCursors(int(settings.broadcast_expiry_hours * 3_600_000))
        self.address = ""
        self.sessions: set[Session] = set()
        self.consumptions: dict[tuple[str, str], Consumption] = {}
        self._by_topic: dict[str, list[Consumption]] = {}
        self._lease_numbers = itertools.count(1)
        self._pumping: set[Consumption] = set()
        self.arrivals = Arrivals(settings.pulls_waiting_max)
        self.ended: Counter[str] = Counter()  # what consumptions had counted that are no more
        self.is_stopping = False
        self.is_draining = False
        self.failed = asyncio.Event()
        self.stop_asked = asyncio.Event()
        self.counters: dict[str, int] = dict.fromkeys(
            ("connections", "requests", "errors", "messages_in", "bytes_in", "duplicates", "limited"), 0
        )
        self._started_wall_ms = clock.now_ms()
        self._started_at = clock.monotonic()
        self.moves = Moves(self)
        self.delays = Delays(self)
        self.dead_letters = DeadLetters(
            self, letters or (lambda: open_letters(MEMORY)), settings.dead_letters_per_second
        )
        self.transactions = Transactions(self)
        self.limits = Limits()
        self.load_limits()
        self.keys = KeySpace(self)
        self._round_robin = itertools.count(time.monotonic_ns() & 0xFFFF)
        self._ticked_at = self._loop.time()
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)

    @property
    def now_ms(self) -> int:
        """Broker time: the wall clock at the start and the monotonic clock since, so that it never runs backwards."""
        return self._started_wall_ms + int((self.clock.monotonic() - self._started_at) * 1000)

    # --- connections ------------------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.counters["connections"] += 1

    def received(self, connection: Connection, frame: Frame) -> None:
        self.counters["requests"] += 1
        session = connection.session
        try:
            if isinstance(session, Session):
                self._serve(session, frame)
            elif frame.command == Command.HELLO and frame.kind == Kind.REQUEST:
                self._hello(self, connection, frame)
            else:
                connection.send(error_frame(InvalidRequest("say hello first"), frame.command, frame.correlation))
                connection.close()
        except DMQError as error:
            self.failed_request(connection, frame, error)
        except Exception as error:
            log.exception("a command failed")
            self.failed_request(connection, frame, error)

    def _serve(self, session: Session, frame: Frame) -> None:
        if frame.kind == Kind.RESPONSE:
            return  # an answer to nothing we asked is ignored (D-23)
        header = decode_request(frame)
        handler = self._handlers.get(frame.command)
        if handler is None:
            raise InvalidRequest(f"command {Command(frame.command).name} is not served by this broker")
        try:
            if self.changes.under_way:
                check_changes(self.changes, session, header)
            work = handler(self, session, frame, header)
        except Later as later:
            wait_for(self, later.change, session, frame, header)
        else:
            if work is not None:
                go_on(self, handler, session, frame, work)

    def failed_request(self, connection: Connection, frame: Frame, error: BaseException) -> None:
        """Answer that a request did not work."""
        self.counters["errors"] += 1
        if frame.kind == Kind.REQUEST:
            connection.send(error_frame(error, frame.command, frame.correlation))

    def writable(self, connection: Connection) -> None:
        session = connection.session
        if isinstance(session, Session):
            for pusher in session.pushers.values():
                pusher.consumption.group.wake(pusher.member)
                self.pump_soon(pusher.consumption)

    def disconnected(self, connection: Connection) -> None:
        session = connection.session
        if not isinstance(session, Session):
            return
        self.sessions.discard(session)
        self.transactions.leave(session)
        session.leave_groups(int(self.settings.grace_seconds * 1000))

    def check_running(self) -> None:
        """Raises BrokerStopping where nothing new is taken any more."""
        self.check_open()
        if self.is_draining:
            raise BrokerStopping("the broker is drained: use another one, or this one when it is back in use")

    def check_open(self) -> None:
        """Raises BrokerStopping where nobody is listened to any more."""
        if self.is_stopping:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")

    # --- topics and groups ------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic.

        Raises:
            UnknownTopic: there is none.
            Later: it is being created, because the settings say so.
        """
        try:
            return self.store.queries.topic(name)
        except UnknownTopic:
            if name.startswith(RESULT_PREFIX):
                raise catalog.make_result_topic(self, name) from None
            if not self.settings.auto_create or name.startswith(SYSTEM_PREFIX):
                raise
        raise catalog.make_topic(self, name)

    async def create_topic(self, name: str, config: TopicConfig, *, system: bool = False) -> Topic:
        """Make a topic; see `beginnings`."""
        return await catalog.create_topic(self, name, config, system=system)

    def load_limits(self) -> None:
        """Put the limits in force that the store has; called when they, or topics, have changed."""
        self.limits.replace(kept_limits(self.store.queries), self.clock.monotonic())

    def choose_queue(self, topic: Topic) -> int:
        """A queue for a producer that does not care."""
        return next(self._round_robin) % topic.config.queues

    def consumption(self, topic: Topic, group: str) -> Consumption:
        """The group at the topic, made when first needed."""
        found = self.consumptions.get((topic.name, group))
        if found is not None and found.topic.id == topic.id:
            if found.topic is not topic:
                for queue in range(found.topic.config.queues, topic.config.queues):
                    found.selection.mark(queue)
                found.topic = topic
            return found
        if found is not None:
            self.forget_topic(topic.name)  # an earlier incarnation
        made = Consumption(
            topic,
            Group(group, topic.name, kept_subscription(self.store.queries, group, topic.id)),
            self.store.queries,
            self._lease_numbers,
            self.write_lazily,
            self.settings.pulls_waiting_max,
            self.moves.bury_doomed,
            self.pump_soon,
        )
        retries = self.store.queries.find_topic(retry_topic_name(group, topic.id))
        if retries is not None:
            made.set_retry_topic(retries)
        self.consumptions[topic.name, group] = made
        self._by_topic.setdefault(topic.name, []).append(made)
        return made

    def consumptions_of(self, topic: str) -> list[Consumption]:
        """The groups that consume a topic and are in use."""
        return [*self._by_topic.get(topic, ())]

    def forget_topic(self, name: str) -> None:
        """The topic is gone: its consumers get nothing more."""
        for consumption in self.consumptions_of(name):
            self._forget(consumption)

    def forget_group(self, group: str, topic: str = "") -> None:
        """The group is no longer kept, here or in one topic."""
        for key in [key for key in self.consumptions if key[1] == group and topic in ("", key[0])]:
            self._forget(self.consumptions[key])

    def _forget(self, consumption: Consumption) -> None:
        name = consumption.topic.name
        del self.consumptions[name, consumption.group.name]
        self._by_topic[name].remove(consumption)
        if not self._by_topic[name]:
            del self._by_topic[name]
        self._pumping.discard(consumption)
        self.ended.update(consumption.counts)
        consumption.close()

    def topics_of(self, group: str) -> list[Topic]:
        """The topics a group consumes."""
        known = {topic_id for topic_id, _ in self.store.queries.positions_of(group)}
        live = {topic for topic, name in self.consumptions if name == group}
        return [
            topic
            for topic in self.store.queries.topics()
            if (topic.id in known or topic.name in live) and not topic.name.startswith(RETRY_PREFIX)
        ]

    def group_names(self) -> set[str]:
        """All groups, but for our own."""
        names = {*self.store.queries.groups(), *(group for _, group in self.consumptions)}
        return {name for name in names if not name.startswith(SYSTEM_PREFIX)}

    def groups_of(self, topic: Topic) -> list[str]:
        """The groups that consume a topic."""
        return sorted(name for name in self.group_names() if topic.id in {t.id for t in self.topics_of(name)})

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events with the next unit; nobody waits for them."""
        items = list(events)
        if items:
            self.writer.submit(items, Durability.STORED, nobody_waits)

    def write_lazily(self, events: list[Settled]) -> None:
        """Write what was settled with the next unit, or shortly."""
        if events:
            self.writer.submit_lazily(events)

    def write_together(self, items: list[Batch | Event], done: Callable[[DMQError | None], None]) -> None:
        """Write items in one unit, flushed."""
        self.writer.submit(items, Durability.FLUSHED, lambda _, error: done(error), size=_size_of(items), atomic=True)

    async def write_unit(self, items: list[Batch | Event]) -> None:
        """Write items in one unit; durable and visible when this is over.

        Raises:
            DMQError: they could not be written.
        """
        written: asyncio.Future[None] = self._loop.create_future()

        def done(error: DMQError | None) -> None:
            if not written.done():
                written.set_exception(error) if error is not None else written.set_result(None)

        self.write_together(items, done)
        await written

    async def write(self, events: list[Event]) -> None:
        """Write events with the next unit; durable and visible when this is over.

        Raises:
            StorageError: they could not be written.
        """
        written: asyncio.Future[None] = self._loop.create_future()

        def done(_: Any, error: DMQError | None) -> None:
            if not written.done():
                written.set_exception(error) if error is not None else written.set_result(None)

        self.writer.submit(events, Durability.FLUSHED, done)
        await written

    def _visible(self, touched: set[tuple[str, int]]) -> None:
        touching: set[Consumption] = set()
        for topic, queue in touched:
            if topic.startswith(DLQ_PREFIX):
                self.dead_letters.drainer.wake(topic)
            for consumption in self._by_topic.get(topic, ()):
                consumption.selection.mark(queue)
                touching.add(consumption)
            if topic.startswith(RETRY_PREFIX):
                self.moves.arrived(topic, queue)
        self.arrivals.wake()
        if len(touching) <= _PUMP_NOW_MAX:
            self._pump_now(touching)  # so that the answer and the push leave together
        else:
            for consumption in touching:
                self.pump_soon(consumption)

    def _store_failed(self, error: DMQError) -> None:
        log.critical("the store failed; the broker stops", extra={"error": str(error)})
        self.failed.set()

    # --- delivering -------------------------------------------------------------------------------------------------

    def pump_soon(self, consumption: Consumption) -> None:
        """Serve the consumption at the end of this turn of the loop."""
        if not self._pumping:
            self._loop.call_soon(self._pump)
        self._pumping.add(consumption)

    def _pump(self) -> None:
        pumping, self._pumping = self._pumping, set()
        self._pump_now(pumping)

    def _pump_now(self, pumping: set[Consumption]) -> None:
        if self.is_stopping or self.is_draining:
            for consumption in pumping:
                consumption.begin_turn()
            return  # what goes out now would only come back
        now_ms = self.now_ms
        for consumption in pumping:
            try:
                consumption.pump(now_ms)
            except Exception:
                log.exception("delivery failed", extra={"topic": consumption.topic.name})
                # Maybe it was the disk, or a lack of files: nothing else might ever ask again.
                self._loop.call_later(_AGAIN_SECONDS, self.pump_soon, consumption)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        before, self._ticked_at = self._ticked_at, self._loop.time()
        if self._ticked_at - before > _LATE_SECONDS:
            return  # we stood still: what came meanwhile is to be read before anybody is late
        now_ms = self.now_ms
        self.delays.tick(now_ms)
        self.transactions.tick(now_ms)
        self.keys.tick(now_ms)
        for consumption in list(self.consumptions.values()):
            if consumption.tick(now_ms):
                self.pump_soon(consumption)
            self._forget_if_idle(consumption, now_ms)
        self.arrivals.wake()
        self._expire_broadcasts(now_ms)

    def _expire_broadcasts(self, now_ms: int) -> None:
        """Forget the cursors of broadcast members that have been away for long."""
        if now_ms < self._broadcasts.next_look_ms:
            return
        used = {group for (_, group), consumption in self.consumptions.items() if consumption.group.members}
        for name in self._broadcasts.look(self.store.queries.groups(), used, now_ms):
            log.info("broadcast member expired", extra={"name": name})
            self.forget_group(name)
            self.write_events([PositionDropped(name, None)])

    def _forget_if_idle(self, consumption: Consumption, now_ms: int) -> None:
        """A group that nobody uses costs nothing: all there is to know of it is in the store."""
        if not consumption.may_be_forgotten:
            consumption.idle_since_ms = None
        elif consumption.idle_since_ms is None:
            consumption.idle_since_ms = now_ms
        elif now_ms - consumption.idle_since_ms > _IDLE_MS:
            for cursor in consumption.cursors.values():
                self.write_events(cursor.take_skipped(now_ms))
            self._forget(consumption)

    @property
    def out(self) -> int:
        """How many messages are leased."""
        return sum(cursor.out for c in self.consumptions.values() for cursor in c.cursors.values())

    def tell_all(self, head: bytes) -> None:
        """Send one frame to every client."""
        for session in self.sessions:
            session.connection.send(head)

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def stop(self, drain_seconds: float) -> None:
        """Tell clients, finish what is under way, close the store."""
        self.is_stopping = True
        head = one_way_head(
            Command.SERVER_REBOOT, ServerReboot(self.settings.name, int(drain_seconds * 1000), "the broker is stopping")
        )
        self.tell_all(head)
        deadline = self.clock.monotonic() + drain_seconds
        while self.sessions and self.clock.monotonic() < deadline:
            if not self.out and not self.writer.waiting_bytes:
                break
            await asyncio.sleep(0.02)
        self._ticker.cancel()
        self.arrivals.wake()
        await self.dead_letters.close()
        await self.writer.drain()
        await self._tasks.finish(_LATE_SECONDS)
        self.reads.close()
        for consumption in self.consumptions.values():
            for cursor in consumption.cursors.values():
                self.write_events(cursor.take_skipped(self.now_ms))
        await self.writer.close()


def _size_of(items: Iterable[Batch | Event]) -> int:
    return sum(len(item.data) for item in items if isinstance(item, Batch))
