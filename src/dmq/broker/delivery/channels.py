"""The channels of a broker: made when they are first needed, pumped, ticked, and forgotten when no client uses them.

What always holds: there is one channel for a topic and a group, and it is of the topic's present incarnation; a channel
with something to hand out is pumped in this turn of the loop or the next; a broker that is drained or stopping hands
nothing out; a client that is doubted or silent is looked at with every tick, before leases end; a channel that is idle
for a minute is forgotten, since the store has all there is to know of it.

Rebalance: members that divide the queues of a topic among themselves are told who they are (R-08).

Each computes its share by the strategy all of them have, and says which queues it takes. Until two that heard of a
change at different times agree, a queue may have two takers or none; two do no harm, since a message is leased to one
of them, and none lasts no longer than the news is on its way.

What always holds: after the last of some changes every member is told; changes that come together are told together, so
that many members that start at once do not hear of each one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.delivery.channel import RETRY, Channel, ChannelParts, FailureMover, Traffic
from dmq.broker.delivery.cursor import LeaseNumbers
from dmq.broker.delivery.group import BroadcastCursors, Group, Member, MemberState, Pulse, kept_subscription
from dmq.broker.delivery.lease import Tally
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Histogram, Runtime
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.model import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX, retry_topic_name, retry_topic_parts
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.header import LIST_MAX
from dmq.settings import BrokerSettings
from dmq.storage.state.events import PositionDropped
from dmq.storage.state.state import Topic

__all__ = ["Channels"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 1.0
_IDLE_MS: Final = 60_000
_KEPT_MAX: Final = 100_000  # pairs of topic and group whose traffic is remembered while nobody uses them
_PUMP_NOW_MAX: Final = 4  # groups that are served before the producer is answered


class Channels:
    """The channels of one broker, by topic and group.

    Parameters:
        failures: takes messages that failed to their retry or to the dead letters.
        on_dead_letters: told when a topic of dead letters has something new.

    Attributes:
        open: the channels in use.
        quiet: the clients that are doubted or silent.
        traffic: of all channels, also those that are no longer in use.
        waits: how long messages lay in the journal before they were handed out for the first time.
    """

    def __init__(
        self,
        journal: Journal,
        runtime: Runtime,
        catalog: Catalog,
        settings: BrokerSettings,
        failures: FailureMover,
    ) -> None:
        self.queries = journal.queries
        self.writer = journal.writer
        self.runtime = runtime
        self.catalog = catalog
        self.settings = settings
        self.rebalance = Rebalance()
        self.on_dead_letters: Callable[[str], None] = lambda topic: None
        self.open: dict[tuple[str, str], Channel] = {}
        self.quiet: set[Pulse] = set()
        self.traffic, self.waits = Traffic(), Histogram()
        self._tally = Tally()
        self._kept: dict[tuple[str, str], Traffic] = {}  # of channels that are idle and may come back
        self._by_topic: dict[str, list[Channel]] = {}
        self._pumping: set[Channel] = set()
        self._broadcasts = BroadcastCursors(int(settings.broadcast_expiry_hours * 3_600_000))
        self._loop = asyncio.get_running_loop()
        is_led = runtime.readiness.leadership is not None
        self._parts = ChannelParts(
            self.queries,
            LeaseNumbers(self.queries.epoch, itertools.count(1), self._tally),
            self.writer.write_lazily,
            failures,
            pump_soon=self.pump_soon,
            pulls_waiting_max=settings.pulls_waiting_max,
            lease_ms=int(settings.lease_seconds * 1000),
            doubt=self._doubt,
            traffic=self.traffic,
            waits=self.waits,
            inherited_until_ms=runtime.clock.now_ms + int(settings.grace_seconds * 1000) if is_led else 0,
            inherited=self.queries.next_offsets() if is_led else {},
        )
        # Groups that began in topics while others may still come back to what another leader handed out to them.
        self._begun: set[tuple[str, int]] | None = set() if is_led else None

    # --- channels ---------------------------------------------------------------------------------------------------

    def channel(self, topic: Topic, group: str) -> Channel:
        """The group at the topic, made when first needed."""
        found = self.open.get((topic.name, group))
        if found is not None and found.topic.id == topic.id:
            if found.topic is not topic:
                found.set_topic(topic)
            return found
        if found is not None:
            self._forget_topic(topic.name)  # an earlier incarnation
        members = Group(group, topic.name, kept_subscription(self.queries, group, topic.id))
        made = Channel(topic, members, self._parts, self._kept.pop((topic.name, group), None))
        if self._begun is not None and (group, topic.id) in self._begun:
            made.begin_anew()
        retries = self.queries.find_topic(retry_topic_name(group, topic.id))
        if retries is not None:
            made.set_retry_topic(retries)
        self.open[topic.name, group] = made
        self._by_topic.setdefault(topic.name, []).append(made)
        return made

    def begin_group(self, topic: Topic, group: str, name: str, offset: Callable[[int], int]) -> None:
        """See that a group has a position in every queue; as `Catalog.begin_group`."""
        if self._begun is not None and self.queries.position(group, topic.name, 0) is None:
            self._begun.add((group, topic.id))
        self.catalog.begin_group(topic, group, name, offset)

    def of_topic(self, topic: str) -> list[Channel]:
        """The channels of a topic that are in use."""
        return [*self._by_topic.get(topic, ())]

    def forget_group(self, group: str, topic: str = "", error: DMQError | None = None) -> None:
        """The group is no longer kept, here or in one topic.

        Parameters:
            error: what its subscribers are told.
        """
        for key in [key for key in self.open if key[1] == group and topic in ("", key[0])]:
            if error is not None:
                self.open[key].end_subscriptions(error)
            self._forget(self.open[key])
        for key in [key for key in self._kept if key[1] == group and topic in ("", key[0])]:
            del self._kept[key]

    def _forget_topic(self, name: str) -> None:
        for channel in self.of_topic(name):
            self._forget(channel)
        for key in [key for key in self._kept if key[0] == name]:
            del self._kept[key]

    def traffic_of(self, topic: str, group: str) -> Traffic | None:
        """What a group was handed out of a topic since the broker started; None if it consumed nothing."""
        live = self.open.get((topic, group))
        return self._kept.get((topic, group)) if live is None else live.traffic

    def _forget(self, channel: Channel) -> None:
        name = channel.topic.name
        del self.open[name, channel.group.name]
        self._by_topic[name].remove(channel)
        if not self._by_topic[name]:
            del self._by_topic[name]
        self._pumping.discard(channel)
        channel.close()

    def topic_changed(self, topic: Topic) -> None:
        """The topic has other settings: its channels go on with them."""
        for channel in self.of_topic(topic.name):
            self.channel(topic, channel.group.name)
            self.rebalance.changed(channel)
            self.pump_soon(channel)

    def topic_deleted(self, name: str, error: DMQError) -> None:
        """The topic is gone: its consumers get nothing more, and are told why."""
        for channel in self.of_topic(name):
            channel.end_subscriptions(error)
        self._forget_topic(name)

    def end(self, error: DMQError) -> None:
        """The broker goes, and clients may stay: all subscriptions end, and whatever waits is answered."""
        for channel in [*self.open.values()]:
            channel.end_subscriptions(error)
            self._forget(channel)

    # --- what there is ----------------------------------------------------------------------------------------------

    def topics_of(self, group: str) -> list[Topic]:
        """The topics a group consumes."""
        known = {topic_id for topic_id, _ in self.queries.positions_of(group)}
        live = {topic for topic, name in self.open if name == group}
        return [
            topic
            for topic in self.queries.topics()
            if (topic.id in known or topic.name in live) and not topic.name.startswith(RETRY_PREFIX)
        ]

    def group_names(self) -> set[str]:
        """All groups, except for DMQ's own."""
        names = {*self.queries.groups(), *(group for _, group in self.open)}
        return {name for name in names if not name.startswith(SYSTEM_PREFIX)}

    def groups_of(self, topic: Topic) -> list[str]:
        """The groups that consume a topic."""
        return sorted(name for name in self.group_names() if topic.id in {t.id for t in self.topics_of(name)})

    def offset_of(self, topic: Topic, queue: int, point: Point) -> int:
        """The queue offset a point means; may need the disk."""
        first, following = self.queries.bounds(topic.name, queue)
        match point.kind:
            case PointKind.EARLIEST:
                return first
            case PointKind.LATEST:
                return following
            case PointKind.OFFSET:
                return min(max(point.value, first), following)
            case PointKind.TIME:
                return self.queries.offset_since(topic.name, queue, point.value)
            case _:
                since_ms = max(0, self.runtime.clock.wall.now_ms() - point.value)
                return self.queries.offset_since(topic.name, queue, since_ms)

    @property
    def out(self) -> int:
        """How many messages are leased."""
        return self._tally.out

    # --- pumping ----------------------------------------------------------------------------------------------------

    def is_heard(self, topic: str) -> bool:
        """Whether `visible` has to be told of a topic."""
        return topic in self._by_topic or topic.startswith(SYSTEM_PREFIX)

    def visible(self, touched: set[tuple[str, int]]) -> None:
        """Messages became visible in these queues: serve the groups that wait for them."""
        touching: set[Channel] = set()
        for topic, queue in touched:
            for channel in self._by_topic.get(topic, ()):
                channel.selection.mark(queue)
                touching.add(channel)
            if topic.startswith(SYSTEM_PREFIX):
                self._system_visible(topic, queue)
        if not touching:
            return
        if len(touching) <= _PUMP_NOW_MAX:
            self._pump_now(touching)  # so that the answer and the push leave together
        else:
            for channel in touching:
                self.pump_soon(channel)

    def _system_visible(self, name: str, queue: int) -> None:
        if name.startswith(DLQ_PREFIX):
            self.on_dead_letters(name)
        elif name.startswith(RETRY_PREFIX):
            self.retries_visible(name, queue)

    def retries_visible(self, name: str, queue: int) -> None:
        """Messages came into a retry topic: offer them to their group, if it is in use."""
        parts = retry_topic_parts(name)
        topic = None if parts is None else self.queries.topic_by_id(parts[1])
        channel = None if parts is None or topic is None else self.open.get((topic.name, parts[0]))
        if channel is None or topic is None or channel.topic.id != topic.id:
            return
        before = channel.retry_topic
        if before is None or queue >= before.config.queues:
            channel.set_retry_topic(self.queries.topic(name))
        channel.selection.mark(queue + RETRY)
        self.pump_soon(channel)

    def pump_soon(self, channel: Channel) -> None:
        """Serve the channel at the end of this turn of the loop."""
        if not self._pumping:
            self._loop.call_soon(self._pump)
        self._pumping.add(channel)

    def pump_all(self) -> None:
        """Serve all of them: the broker is back in use."""
        for channel in self.open.values():
            self.pump_soon(channel)

    def _pump(self) -> None:
        pumping, self._pumping = self._pumping, set()
        self._pump_now(pumping)

    def _pump_now(self, pumping: set[Channel]) -> None:
        if not pumping:
            return
        if not self.runtime.readiness.is_running:
            for channel in pumping:
                channel.begin_turn()
            return  # what goes out now would only come back
        now_ms = self.runtime.clock.now_ms
        for channel in pumping:
            try:
                channel.pump(now_ms)
            except Exception as error:
                log.error(
                    "delivery failed, and is tried again",
                    once_for=(topic := channel.topic.name, group := channel.group.name),
                    topic=topic,
                    group=group,
                    error=error,
                    exc_info=None if isinstance(error, DMQError) else error,
                )
                # Maybe it was the disk, or a lack of files: nothing else might ever ask again.
                self._loop.call_later(_AGAIN_SECONDS, self.pump_soon, channel)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Time has passed: leases end, members are gone, pulls have waited long enough, idle channels are forgotten."""
        for pulse in [*self.quiet]:
            self.look(pulse, now_ms)
        for channel in [*self.open.values()]:
            if channel.tick(now_ms):
                self.pump_soon(channel)
            self._forget_if_idle(channel, now_ms)
        self._expire_broadcasts(now_ms)
        if self._begun is not None and self._parts.inherited_until_ms <= now_ms:
            self._begun = None

    def _doubt(self, pulse: Pulse, now_ms: int) -> int:
        """A client let a lease run out: it is to say something until the time that is returned."""
        self.quiet.add(pulse)
        return pulse.doubt(now_ms)

    def look(self, pulse: Pulse, now_ms: int) -> None:
        """Look whether a client that is doubted or silent has spoken."""
        pulse.look(now_ms)
        if not pulse.is_quiet:
            self.quiet.discard(pulse)

    @property
    def silent(self) -> list[Member]:
        """The members that are silent."""
        found = (member for pulse in self.quiet for member in pulse.members if member.is_silent)
        return list(dict.fromkeys(found))

    def _expire_broadcasts(self, now_ms: int) -> None:
        """Forget the cursors of broadcast members that have been away for long."""
        if now_ms < self._broadcasts.next_look_ms:
            return
        used = {group for (_, group), channel in self.open.items() if channel.group.members}
        for name in self._broadcasts.look(self.queries.groups(), used, now_ms):
            log.info("broadcast member expired", name=name)
            self.forget_group(name)
            self.writer.write_soon([PositionDropped(name, None)])

    def _forget_if_idle(self, channel: Channel, now_ms: int) -> None:
        if not channel.may_be_forgotten or self.queries.visible < self.queries.end:
            channel.idle_since_ms = None  # what it knows of acks that are not committed, the store does not know yet
        elif channel.idle_since_ms is None:
            channel.idle_since_ms = now_ms
        elif now_ms - channel.idle_since_ms > _IDLE_MS:
            self.writer.write_soon(channel.take_skipped(now_ms))
            self._forget(channel)
            if len(self._kept) < _KEPT_MAX:
                self._kept[channel.topic.name, channel.group.name] = channel.traffic

    def write_skipped(self) -> None:
        """Write what filters passed over: the broker stops."""
        now_ms = self.runtime.clock.now_ms
        for channel in self.open.values():
            self.writer.write_soon(channel.take_skipped(now_ms))


_TOGETHER_SECONDS: Final = 0.02
_REBALANCE_SECONDS: Final = 0.2  # for one that does not read: what waits for it must not pile up


class Rebalance:
    """The news of all groups of one broker; made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: set[Channel] = set()

    def changed(self, channel: Channel, seconds: float = _TOGETHER_SECONDS) -> None:
        """A member came or went, or the topic has more queues; nothing if the broker shares out its messages."""
        subscription = channel.group.subscription
        if subscription is None or not subscription.strategy:
            return
        if not self._changed:
            self._loop.call_later(seconds, self._tell)
        self._changed.add(channel)

    def _tell(self) -> None:
        changed, self._changed = self._changed, set()
        for channel in changed:
            members = channel.group.members.values()
            names = sorted(member.name for member in members if member.state is MemberState.ACTIVE)[:LIST_MAX]
            for subscriber in channel.subscribers.values():
                if not subscriber.sink.is_ready:
                    self.changed(channel, _REBALANCE_SECONDS)
                else:
                    subscriber.sink.tell_members(channel.topic.config.queues, names)
