"""The broker: one store, its writer, the groups that consume it, and the commands clients send.

Everything here happens on one event loop. What always holds: a connection is served only after its hello; a command
that fails is answered with its error and harms nobody else; a stopping broker says so, takes nothing new, and finishes
what is under way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from dmq.broker.consumption import Consumption
from dmq.broker.group import Group
from dmq.broker.session import Session
from dmq.broker.writer import JournalWriter
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DMQError, InvalidRequest, UnknownTopic
from dmq.model import TopicConfig, check_name
from dmq.net.connection import Connection
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.session import ServerReboot
from dmq.settings import BrokerSettings
from dmq.storage.appending import Batch
from dmq.storage.events import Event, PositionSet
from dmq.storage.state import Topic
from dmq.storage.store import MessageStore
from dmq.storage.visibility import Durability

__all__ = ["Broker", "Handler"]

log = logging.getLogger(__name__)

Handler = Callable[["Broker", Session, Frame, Any], None]

_TICK_SECONDS: Final = 0.05
_LATE_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 1.0
_IDLE_MS: Final = 60_000


class Broker:
    """See the module. It is the `Peer` of its connections.

    Parameters:
        handlers: what to do for each command; the hello comes without a session.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        handlers: dict[int, Handler],
        hello: Callable[[Broker, Connection, Frame], None],
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self._handlers = handlers
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self.writer = JournalWriter(store, clock, settings.waiting_bytes_max, self._visible, self._store_failed)
        self.address = ""
        self.sessions: set[Session] = set()
        self.consumptions: dict[tuple[str, str], Consumption] = {}
        self._by_topic: dict[str, list[Consumption]] = {}
        self._lease_numbers = itertools.count(1)
        self._pumping: set[Consumption] = set()
        self._fetchers: list[Callable[[], None]] = []  # whoever waits for the visible offset to move
        self.ended: Counter[str] = Counter()  # what consumptions had counted that are no more
        self.is_stopping = False
        self.failed = asyncio.Event()
        self.counters: dict[str, int] = dict.fromkeys(
            ("connections", "requests", "errors", "messages_in", "bytes_in", "duplicates"), 0
        )
        self._started_wall_ms = clock.now_ms()
        self._started_at = clock.monotonic()
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
            self._failed_request(connection, frame, error)
        except Exception as error:
            log.exception("a command failed")
            self._failed_request(connection, frame, error)

    def _serve(self, session: Session, frame: Frame) -> None:
        if frame.kind == Kind.RESPONSE:
            return  # an answer to nothing we asked is ignored (D-23)
        header = decode_request(frame)
        handler = self._handlers.get(frame.command)
        if handler is None:
            raise InvalidRequest(f"command {Command(frame.command).name} is not served by this broker")
        handler(self, session, frame, header)

    def _failed_request(self, connection: Connection, frame: Frame, error: BaseException) -> None:
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
        grace_ms = int(self.settings.grace_seconds * 1000)
        for pusher in session.pushers.values():
            if pusher.consumption.sinks.get(pusher.member.name) is pusher:
                self._away(pusher.consumption, pusher.member.name, grace_ms)
        for consumption, member in session.pulling:
            consumption.cancel_pulls(session)
            if (
                consumption.group.members.get(member.name) is member
                and member.name not in consumption.sinks
                and not any((consumption, member) in other.pulling for other in self.sessions)
            ):
                self._away(consumption, member.name, grace_ms)

    def _away(self, consumption: Consumption, name: str, grace_ms: int) -> None:
        now_ms = self.now_ms
        consumption.sinks.pop(name, None)
        member = consumption.group.disconnect(name, now_ms, grace_ms)
        if member is not None:
            for cursor in consumption.cursors.values():
                cursor.disconnect(member, now_ms, grace_ms)

    def check_running(self) -> None:
        """Raises BrokerStopping where nothing new is taken any more."""
        if self.is_stopping:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")

    # --- topics and groups ------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic, created now if the settings say so.

        Raises:
            UnknownTopic: there is none.
        """
        try:
            return self.store.topic(name)
        except UnknownTopic:
            if not self.settings.auto_create or name.startswith("%"):
                raise
        check_name(name, "topic")
        return self.store.create_topic(name, TopicConfig(queues=self.settings.auto_create_queues))

    def choose_queue(self, topic: Topic) -> int:
        """A queue for a producer that does not care."""
        return next(self._round_robin) % topic.config.queues

    def consumption(self, topic: Topic, group: str) -> Consumption:
        """The group at the topic, made when first needed."""
        found = self.consumptions.get((topic.name, group))
        if found is not None and found.topic.id == topic.id:
            if found.topic.config.queues != topic.config.queues:
                for queue in range(found.topic.config.queues, topic.config.queues):
                    found.selection.mark(queue)
                found.topic = topic
            return found
        if found is not None:
            self.forget_topic(topic.name)  # an earlier incarnation
        made = Consumption(
            topic,
            Group(group, topic.name),
            self.store,
            self._lease_numbers,
            self.write_events,
            self.settings.pulls_waiting_max,
        )
        self.consumptions[topic.name, group] = made
        self._by_topic.setdefault(topic.name, []).append(made)
        return made

    def begin_group(self, consumption: Consumption, offsets: Callable[[int], int]) -> None:
        """Give a group that was never here its first position in every queue, durably."""
        name, topic = consumption.group.name, consumption.topic
        events: list[Event] = [
            PositionSet(name, topic.id, queue, offsets(queue))
            for queue in range(topic.config.queues)
            if self.store.position(name, topic.name, queue) is None
        ]
        if events:
            self.write_now(events)

    def forget_topic(self, name: str) -> None:
        """The topic is gone: its consumers get nothing more."""
        for consumption in [*self._by_topic.get(name, [])]:
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
        known = {topic_id for topic_id, _ in self.store.positions_of(group)}
        live = {topic for topic, name in self.consumptions if name == group}
        return [topic for topic in self.store.topics() if topic.id in known or topic.name in live]

    def group_names(self) -> set[str]:
        """All groups, but for our own."""
        names = {*self.store.groups(), *(group for _, group in self.consumptions)}
        return {name for name in names if not name.startswith("%")}

    def groups_of(self, topic: Topic) -> list[str]:
        """The groups that consume a topic."""
        return sorted(name for name in self.group_names() if topic.id in {t.id for t in self.topics_of(name)})

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events with the next unit; nobody waits for them."""
        items = list(events)
        if items:
            self.writer.submit(items, Durability.STORED, _nobody_waits)

    def write_together(self, items: list[Batch | Event], done: Callable[[DMQError | None], None]) -> None:
        """Write items in one unit, flushed."""
        self.writer.submit(items, Durability.FLUSHED, lambda _, error: done(error), size=_size_of(items), atomic=True)

    def write_now(self, events: list[Event]) -> None:
        """Write events behind all that was submitted before; durable when this returns."""
        self.writer.catch_up()
        self.store.append(events, Durability.FLUSHED)
        self.store.flush()

    def _visible(self, touched: set[tuple[str, int]]) -> None:
        for topic, queue in touched:
            for consumption in self._by_topic.get(topic, ()):
                consumption.selection.mark(queue)
                self.pump_soon(consumption)
        self._fetch()

    def _fetch(self) -> None:
        fetchers, self._fetchers = self._fetchers, []
        for fetch in fetchers:
            fetch()

    def when_visible(self, call: Callable[[], None]) -> None:
        """Call back when more of the journal has become visible, or some time has passed.

        Raises:
            Busy: too many wait already.
        """
        if len(self._fetchers) >= self.settings.pulls_waiting_max:
            raise Busy(f"{len(self._fetchers)} wait for the journal already: try again shortly", retry_after_ms=100)
        self._fetchers.append(call)

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
        if self.is_stopping:
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
        for consumption in list(self.consumptions.values()):
            if consumption.tick(now_ms):
                self.pump_soon(consumption)
            self._forget_if_idle(consumption, now_ms)
        self._fetch()

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

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def stop(self, drain_seconds: float) -> None:
        """Tell clients, finish what is under way, close the store."""
        self.is_stopping = True
        head = one_way_head(
            Command.SERVER_REBOOT, ServerReboot(self.settings.name, int(drain_seconds * 1000), "the broker is stopping")
        )
        for session in self.sessions:
            session.connection.send(head)
        deadline = self.clock.monotonic() + drain_seconds
        while self.sessions and self.clock.monotonic() < deadline:
            out = sum(cursor.out for c in self.consumptions.values() for cursor in c.cursors.values())
            if not out and not self.writer.waiting_bytes:
                break
            await asyncio.sleep(0.02)
        self._ticker.cancel()
        for consumption in self.consumptions.values():
            for cursor in consumption.cursors.values():
                self.write_events(cursor.take_skipped(self.now_ms))
        await self.writer.close()


def _nobody_waits(_: Any, error: DMQError | None) -> None:
    if error is not None:
        # What was settled is handed out again after a restart: at least once.
        log.error("events could not be written", extra={"error": str(error)})


def _size_of(items: Iterable[Batch | Event]) -> int:
    return sum(len(item.data) for item in items if isinstance(item, Batch))
