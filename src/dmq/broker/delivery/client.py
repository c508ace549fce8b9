"""A client of the broker as delivery sees it: what it consumes, and what it says of the messages it got.

A connection of the wire has one; so has whatever else consumes: a gateway's session, the console, a test. All it needs
is a sink for what is pushed and callbacks for what is pulled.

What always holds: a subscription ends with its client, and its leases stay the member's own for the grace time; of two
clients that subscribe under one name the later one gets the messages, and the earlier one is told. A client that speaks
is believed to live from that on; one that falls silent says so in the log, once, and once when it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.group import Member, Pulse, Subscription, Voice, group_of, must_keep, normalised, with_retries
from dmq.broker.delivery.waiters import Demand, Handed, Sink, Subscriber, WaitingPull
from dmq.errors import (
    BrokerStopping,
    DMQError,
    InvalidRequest,
    MissingClientId,
    SubscriptionSuperseded,
    UnknownGroup,
    UnknownTopic,
)
from dmq.event_log import EventLog
from dmq.model import broadcast_name, check_name
from dmq.protocol.consume import Credit, LeaseRef, Pull, Settle, Subscribe, SubscribeFlag, SubscribeReply, Unsubscribe
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.state.events import SubscriptionPut
from dmq.storage.state.state import Topic

__all__ = ["Client", "Subscribed"]

log = EventLog(__name__)

_PULL_BYTES: Final = 4 << 20
_NO_PUSH: Final = 0
_BROADCAST: Final = int(SubscribeFlag.BROADCAST)


class Subscribed(NamedTuple):
    """One subscription of a client."""

    channel: Channel
    subscriber: Subscriber


class Client:
    """One client.

    Parameters:
        client_id: what it is called as a member, unless it says another name.
        app: the app it belongs to; an id that begins with it and a dash was made up for it.
        address: where it is, for people.
        voice: where one hears of it; without one it is never doubted.

    Attributes:
        takes_blocks: it reads bodies that stand in blocks (`dmq.records.block`); the owner may set it.
    """

    def __init__(
        self, channels: Channels, client_id: str, app: str = "", address: str = "", voice: Voice | None = None
    ) -> None:
        self._channels = channels
        self.client_id = client_id
        self.app = app
        self.address = address
        self.takes_blocks = False
        self._pulse = None if voice is None else Pulse(voice, self._pulse_changed)
        self.subscriptions: dict[int, Subscribed] = {}
        self.pulling: set[tuple[Channel, Member]] = set()

    # --- joining ----------------------------------------------------------------------------------------------------

    def _join(self, asked: Pull | Subscribe, prefetch: int, prefetch_bytes: int) -> tuple[Channel, Member]:
        """Become a member of a group."""
        channels = self._channels
        channels.runtime.readiness.check_running()
        check_name(asked.group, "group")
        topic = channels.catalog.topic(asked.topic)
        is_broadcast = bool(asked.flags & SubscribeFlag.BROADCAST)
        name = asked.member or self.client_id
        if is_broadcast and not asked.member and self.client_id.startswith(f"{self.app}-"):
            raise MissingClientId("a broadcast consumer needs a name that stays: pass client_id= to connect")
        group = broadcast_name(asked.group, name) if is_broadcast else asked.group
        channels.begin_group(
            topic, group, asked.group, lambda queue: channels.offset_of(topic, queue, asked.start_from)
        )
        channel = channels.channel(topic, group)
        subscription = Subscription(
            normalised(asked.tags),
            asked.version,
            is_ordered=bool(asked.flags & SubscribeFlag.ORDERED),
            is_broadcast=is_broadcast,
            strategy=asked.strategy if isinstance(asked, Subscribe) else "",
        )
        joined = channel.group.join(name, subscription, prefetch, prefetch_bytes)
        held = channel.group.subscription
        if must_keep(channels.queries.subscription(group, topic.id), held) and held is not None:
            kept = SubscriptionPut(group, topic.id, held.filter, held.version, is_ordered=held.is_ordered)
            channels.writer.write_soon([kept])
        channel.set_ordered(subscription.is_ordered, channels.runtime.clock.now_ms)
        if asked.parallel:
            channel.set_parallel(asked.parallel)
        channel.max_attempts = asked.max_attempts
        if joined.is_resumed:
            for cursor in channel.cursors.values():
                cursor.resume(joined.member)
        for member in joined.superseded:
            subscriber = channel.subscribers.pop(member.name, None)
            if subscriber is not None:
                subscriber.sink.end(
                    SubscriptionSuperseded(
                        f"a newer version of group {group!r} has taken over: stop, or deploy the program again",
                    )
                )
        return channel, joined.member

    # --- signs of life ----------------------------------------------------------------------------------------------

    def _attach(self, member: Member) -> None:
        if self._pulse is not None:
            member.attach(self._pulse)

    def _detach(self, member: Member) -> None:
        if self._pulse is not None:
            member.detach(self._pulse)

    def _spoke(self) -> None:
        """The client asks for something, so it lives."""
        if self._pulse is not None and self._pulse.is_quiet:
            self._channels.look(self._pulse, self._channels.runtime.clock.now_ms)

    def _pulse_changed(self, was_silent: bool) -> None:
        """The client is silent from now on, or has spoken."""
        places = {(found.channel, found.subscriber.member) for found in self.subscriptions.values()}
        for channel, member in places | self.pulling:
            channel.pulse_changed(member)
            if member.is_silent != was_silent:
                self._tell_silence(channel, member)
            self._changed(channel)

    def _tell_silence(self, channel: Channel, member: Member) -> None:
        tell, event = (
            (log.warning, "member silent: its lease ran out without a sign of life, it gets nothing until it speaks")
            if member.is_silent
            else (log.info, "member back: it has spoken")
        )
        tell(
            event,
            once_for=(channel.topic.name, channel.group.name, member.name),
            group=group_of(channel.group.name),
            topic=channel.topic.name,
            member=member.name,
            client_id=self.client_id,
            address=self.address,
            leased=member.messages_out,
        )

    # --- pushed messages --------------------------------------------------------------------------------------------

    def subscribe(self, asked: Subscribe, sink: Sink, answer: Callable[[SubscribeReply], None]) -> None:
        """Have messages pushed from now on (D-12); after a reconnect it takes up where it was.

        Parameters:
            answer: called once, before the first message is pushed.

        Raises:
            Later: the topic or the group is being changed: try again when that is done.
            InvalidRequest, UnknownTopic, BrokerStopping, SubscriptionConflict, SubscriptionSuperseded, MissingClientId,
                NotAllowed: it is refused.
        """
        if asked.subscription in self.subscriptions:
            raise InvalidRequest(
                f"subscription {asked.subscription} is in use on this connection: choose another number"
            )
        channels = self._channels
        self._spoke()
        _check_queues(channels.catalog.topic(asked.topic), asked.queues)
        settings = channels.settings
        messages = asked.prefetch_messages or settings.prefetch_messages
        size = asked.prefetch_bytes or settings.prefetch_bytes
        channel, member = self._join(asked, messages, size)
        subscriber = Subscriber(self, asked.subscription, member, sink, batch=asked.batch or messages)
        subscriber.lease_ms = asked.lease_ms or int(settings.lease_seconds * 1000)
        subscriber.takes_blocks = self.takes_blocks
        subscriber.allowed = _bits(asked.queues) if asked.queues or asked.strategy else -1
        self.subscriptions[asked.subscription] = Subscribed(channel, subscriber)
        self._take_over(channel, member)
        self._attach(member)
        channel.subscribers[member.name] = subscriber
        now_ms = channels.runtime.clock.now_ms
        reply = SubscribeReply(
            asked.subscription,
            channel.topic.config.queues,
            messages,
            size,
            lease_ms=subscriber.lease_ms,
            offline_delay_ms=settings.offline_delay_ms,
            lost=_take_stock(channel, member, asked.holding, now_ms),
        )
        answer(reply)
        channel.group.subscribed(member, now_ms, settings.offline_delay_ms)
        channels.rebalance.changed(channel)
        channels.pump_soon(channel)

    def _take_over(self, channel: Channel, member: Member) -> None:
        """A client comes under a name that is in use: the one before is told, or it would wait for ever."""
        before = channel.subscribers.get(member.name)
        if before is not None and before.owner is not self:
            before.owner.lost(before.number)
            # A client that lost its connection and is back before the broker saw the loss is told as well.
            once_for = channel.topic.name, channel.group.name, member.name
            log.warning("consumer taken over", once_for=once_for, group=channel.group.name, member=member.name)
            before.sink.end(
                SubscriptionSuperseded(
                    f"another client, at {self.address}, consumes in group {channel.group.name!r} as {member.name!r} "
                    "now: give each client a client_id of its own, or none"
                )
            )

    def lost(self, number: int) -> None:
        """Another client has taken over one of its subscriptions."""
        found = self.subscriptions.pop(number, None)
        if found is not None:
            self._detach(found.subscriber.member)

    def unsubscribe(self, asked: Unsubscribe) -> None:
        """End a subscription; or, by the name of a member, its pulling."""
        found = self.subscriptions.pop(asked.subscription, None)
        if found is None:
            if asked.member:
                self._stop_pulling(asked)
            return
        channel, subscriber = found
        name = subscriber.member.name
        self._detach(subscriber.member)
        if channel.subscribers.get(name) is subscriber:
            del channel.subscribers[name]
            member = channel.group.leave(name)
            if member is not None and asked.release:
                channel.forget(member, self._channels.runtime.clock.now_ms, is_clean=True)
        self._changed(channel)

    def assign(self, number: int, queues: Iterable[int]) -> None:
        """A subscription takes other queues than before (R-08)."""
        found = self.subscriptions.get(number)
        if found is not None:
            _check_queues(found.channel.topic, queues)
            found.subscriber.allowed = _bits(queues)
            self._wake(found)

    def credit(self, asked: Credit) -> None:
        """More messages, or fewer, may be out with a subscription."""
        found = self.subscriptions.get(asked.subscription)
        if found is not None:
            member = found.subscriber.member
            member.prefetch = max(0, member.prefetch + asked.messages)
            member.prefetch_bytes = max(0, member.prefetch_bytes + asked.bytes)
            self._wake(found)

    def wake(self) -> None:
        """The sinks of the client take more again."""
        for found in self.subscriptions.values():
            self._wake(found)

    def _wake(self, found: Subscribed) -> None:
        found.channel.group.wake(found.subscriber.member)
        self._channels.pump_soon(found.channel)

    def _changed(self, channel: Channel) -> None:
        self._channels.rebalance.changed(channel)
        self._channels.pump_soon(channel)

    # --- pulled messages --------------------------------------------------------------------------------------------

    def pull(self, asked: Pull, answer: Callable[[Handed | None], None]) -> None:
        """A batch now, or within the time the client is ready to wait (R-02).

        Parameters:
            answer: called once, with None if there is nothing.

        Raises:
            Later: the topic or the group is being changed: try again when that is done.
            Busy: too many pulls wait.
            UnknownTopic, BrokerStopping, SubscriptionConflict, SubscriptionSuperseded, MissingClientId, NotAllowed: it
                is refused.
        """
        channels = self._channels
        self._spoke()
        allowed = -1
        if asked.queue != ANY_QUEUE:
            _check_queues(channels.catalog.topic(asked.topic), [asked.queue])
            allowed = with_retries(1 << asked.queue)
        channel, member = self._pulling_member(asked)
        now_ms = channels.runtime.clock.now_ms
        demand = Demand(
            member,
            asked.max_messages,
            asked.max_bytes or _PULL_BYTES,
            asked.lease_ms or int(channels.settings.lease_seconds * 1000),
            allowed=allowed,
            takes_blocks=self.takes_blocks,
        )
        found = channel.try_pull(demand, now_ms)
        if found is not None:
            answer(*found)
        elif asked.wait_ms or channel.is_looking:
            channel.wait(WaitingPull(self, demand, now_ms + asked.wait_ms, answer))
        else:
            answer(None)

    def _pulling_member(self, asked: Pull) -> tuple[Channel, Member]:
        """The member that pulls; it joins with its first pull."""
        found = self._channels.open.get((asked.topic, asked.group))
        if found is not None and not asked.flags & _BROADCAST:
            member = found.group.members.get(asked.member or self.client_id)
            if (
                member is not None
                and (found, member) in self.pulling
                and member.may_pull
                and (found.group.subscription is not None and found.group.subscription.filter == normalised(asked.tags))
            ):
                self._channels.runtime.readiness.check_running()
                return found, member
        channel, member = self._join(asked, _NO_PUSH, _NO_PUSH)
        if (channel, member) not in self.pulling:
            self.pulling.add((channel, member))
            member.pullers += 1
            self._attach(member)
            if asked.holding is not None:
                _take_stock(channel, member, asked.holding, self._channels.runtime.clock.now_ms)
        return channel, member

    def _stop_pulling(self, asked: Unsubscribe) -> None:
        for channel, member in [*self.pulling]:
            if (channel.topic.name, member.name) != (asked.topic, asked.member):
                continue
            if group_of(channel.group.name) != asked.group:
                continue
            self.pulling.discard((channel, member))
            member.pullers -= 1
            self._detach(member)
            channel.end_pulls(self, member)
            if _is_last(channel, member) and channel.group.leave(member.name) is not None:
                channel.forget(member, self._channels.runtime.clock.now_ms, is_clean=True)
                self._changed(channel)

    # --- settling ---------------------------------------------------------------------------------------------------

    def settle(self, asked: Settle, *, is_waited_for: bool = True) -> list[tuple[int, DMQError]]:
        """What the client says of messages it has.

        Parameters:
            is_waited_for: the client relies on it, so it is written at the end of this turn of the loop.

        Returns:
            The settlements that do not count, by their index, and why.

        Raises:
            BrokerStopping: nothing is settled any more.
            UnknownGroup: the group has nothing of the topic.
        """
        channels = self._channels
        if channels.writer.is_closed:
            raise BrokerStopping("the broker has stopped: what is not settled yet is handed out again when it is back")
        name = asked.member or self.client_id
        channel = channels.open.get((asked.topic, asked.group)) or self._settled_channel(asked, name)
        refused: list[tuple[int, DMQError]] = []
        now_ms = channels.runtime.clock.now_ms
        for index, settlement in enumerate(asked.settlements):
            try:
                channel.settle(settlement, now_ms)
            except DMQError as error:
                refused.append((index, error))
        member = channel.group.members.get(name)
        if member is not None:
            channel.group.wake(member)
        if channel.awaits:
            channels.pump_soon(channel)
        if is_waited_for or channel.watches.count:
            channels.writer.hurry()
        return refused

    def _settled_channel(self, asked: Settle, name: str) -> Channel:
        channels = self._channels
        alone = broadcast_name(asked.group, name)
        found = channels.open.get((asked.topic, alone))
        if found is not None:
            return found
        # After a restart acks of leases from before still count; a group that never was here has none.
        known = channels.queries.groups()
        for group in (asked.group, alone):
            if group in known:
                return channels.channel(channels.queries.topic(asked.topic), group)
        raise UnknownGroup(f"group {asked.group!r} has nothing of topic {asked.topic!r}", group=asked.group)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def leave(self, grace_ms: int, *, is_silent: bool = False) -> None:
        """The client is gone: what its members hold stays theirs for the grace time.

        Parameters:
            is_silent: it was given up because nothing was heard of it.
        """
        now_ms = self._channels.runtime.clock.now_ms
        if self._pulse is not None:
            self._channels.quiet.discard(self._pulse)
        for channel, subscriber in self.subscriptions.values():
            name = subscriber.member.name
            self._detach(subscriber.member)
            subscriber.member.is_silent |= is_silent
            if channel.subscribers.get(name) is subscriber:
                channel.away(name, now_ms, grace_ms)
                self._channels.rebalance.changed(channel)
        for channel, member in self.pulling:
            channel.cancel_pulls(self)
            member.pullers -= 1
            self._detach(member)
            member.is_silent |= is_silent
            if _is_last(channel, member):
                channel.away(member.name, now_ms, grace_ms)
                self._channels.rebalance.changed(channel)
        self.subscriptions.clear()
        self.pulling.clear()


def _is_last(channel: Channel, member: Member) -> bool:
    """Whether a member that pulled is still one, and gets nothing through another client either."""
    return (
        channel.group.members.get(member.name) is member
        and member.name not in channel.subscribers
        and not member.pullers
    )


def _take_stock(channel: Channel, member: Member, holding: list[LeaseRef], now_ms: int) -> list[LeaseRef]:
    """Which leases a member thinks it has that it has not; what it has and does not think of is handed out again."""
    held = {(channel.queue_of(ref.topic, ref.queue), ref.epoch, ref.lease) for ref in holding}
    for key, epoch, _ in held:
        if key is not None and epoch < channel.cursor(key).epoch:
            channel.inherit(key, member)
    mine = set()
    for queue, cursor in channel.cursors.items():
        for lease in cursor.leases():
            if lease.holder is member:
                mine.add((queue, lease.epoch, lease.number))
                if (queue, lease.epoch, lease.number) not in held:
                    cursor.nack(lease.epoch, lease.number, None, now_ms, was_tried=False)
                    channel.selection.mark(queue)
    return [ref for ref in holding if (channel.queue_of(ref.topic, ref.queue), ref.epoch, ref.lease) not in mine]


def _check_queues(topic: Topic, queues: Iterable[int]) -> None:
    """A consumer of a queue that does not exist would wait for ever."""
    for queue in queues:
        if queue >= topic.config.queues:
            raise UnknownTopic(f"topic {topic.name!r} has queues 0-{topic.config.queues - 1}, not {queue}")


def _bits(queues: Iterable[int]) -> int:
    """What a subscription may be pushed that takes these queues."""
    return with_retries(sum(1 << queue for queue in set(queues)))
