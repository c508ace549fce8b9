"""Consumer groups as an operator sees them: positions, seeks, members, lag; and how a group begins and ends.

What always holds: a position is set while no member joins or settles in the middle of it; a group that is deleted
writes nothing behind its end.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from dmq.broker.catalog.catalog import retry_topics
from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.group import MemberState
from dmq.broker.journal.journal import Journal
from dmq.errors import InvalidRequest, UnknownGroup
from dmq.event_log import EventLog
from dmq.model import broadcast_name, check_name, parse_broadcast_name
from dmq.protocol.admin import GroupInfo, MemberInfo
from dmq.protocol.consume import QueueMove, QueuePosition, Seek, SubscribeFlag
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.state.events import PositionDropped, PositionSet, TopicDropped
from dmq.storage.state.state import Topic

__all__ = ["Groups"]

log = EventLog(__name__)

_MOVES_TOLD: Final = 8


class Groups:
    """The consumer groups of one broker."""

    def __init__(self, journal: Journal, channels: Channels) -> None:
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._retention = journal.store.retention
        self._channels = channels
        self._changes = channels.catalog.changes

    # --- beginning and ending ---------------------------------------------------------------------------------------

    def create(self, group: str, topic: str) -> None:
        """See that a group consumes a topic, from its first message on.

        Raises:
            Later: it gets its first positions now: try again when that is done.
            BrokerStopping, InvalidName, UnknownTopic, LimitReached: it cannot.
        """
        self._channels.runtime.readiness.check_running()
        check_name(group, "group")
        found = self._channels.catalog.topic(topic)
        self._channels.begin_group(found, group, group, lambda queue: self._queries.bounds(topic, queue)[0])

    def delete(self, group: str, topic: str = "", by: str = "") -> Coroutine[Any, Any, None]:
        """Forget a group, in one topic or in all; under way from this call on.

        Raises:
            UnknownGroup, UnknownTopic, Later: it cannot be deleted now.
        """
        self.check_known(group)
        topic_id = self._queries.topic(topic).id if topic else None
        change = self._changes.begin(("group", group))
        # At once, so that nothing the group does now is written behind its end.
        self._channels.forget_group(group, topic, UnknownGroup(f"group {group!r} was deleted", group=group))

        async def delete() -> None:
            try:
                gone = retry_topics(self._queries, group=group, topic_id=topic_id)
                await self._writer.write([PositionDropped(group, topic_id), *(TopicDropped(t.id) for t in gone)])
                log.info("group deleted", group=group, topic=topic or "all", by=by)
            finally:
                self._changes.end(change)

        return delete()

    def check_known(self, group: str) -> None:
        """Raises UnknownGroup if a group has never consumed here."""
        if not self._channels.topics_of(group) and group not in self._queries.groups():
            raise UnknownGroup(f"group {group!r} has never consumed here: check the name", group=group)

    # --- positions --------------------------------------------------------------------------------------------------

    def seek(self, asked: Seek, client_id: str, by: str = "") -> Coroutine[Any, Any, list[QueueMove]]:
        """Move a group's position (J-12); a dry run only says what would happen. Under way from this call on.

        Parameters:
            client_id: who asks, which in a broadcast group is whose position it is.
            by: the same for the log, with the address.

        Raises:
            UnknownTopic, UnknownGroup, InvalidRequest, Later: it cannot be moved now.
        """
        topic = self._queries.topic(asked.topic)
        group = self._positions_name(asked.group, client_id, bool(asked.flags & SubscribeFlag.BROADCAST))
        queues = range(topic.config.queues) if asked.queue == ANY_QUEUE else [asked.queue]
        change = self._changes.begin(("group", asked.group))

        async def move() -> list[QueueMove]:
            try:
                places = await self._reads.ask(lambda: [self._channels.offset_of(topic, q, asked.to) for q in queues])
                channel = self._channels.channel(self._queries.topic(asked.topic), group)
                moves = [
                    QueueMove(queue, channel.cursor(queue).floor, place)
                    for queue, place in zip(queues, places, strict=True)
                ]
                if not asked.dry_run:
                    await self._writer.write([PositionSet(group, topic.id, move.queue, move.after) for move in moves])
                    self._moved(channel, moves)
                    told = " ".join(f"{move.queue}:{move.before}->{move.after}" for move in moves[:_MOVES_TOLD])
                    log.info("group reset", topic=topic.name, group=group, queues=len(moves), moves=told, by=by)
            finally:
                self._changes.end(change)
            return moves

        return move()

    def _moved(self, channel: Channel, moves: list[QueueMove]) -> None:
        for move in moves:
            channel.seek(move.queue, move.after)
        for member in channel.group.members.values():
            channel.group.wake(member)  # its leases ended with the seek, and gave their credit back
        self._channels.pump_soon(channel)

    def _positions_name(self, group: str, client_id: str, is_broadcast: bool) -> str:
        """What the positions are kept under that a client means: the group's, or its own in a broadcast group."""
        known = self._queries.groups()
        alone = broadcast_name(group, client_id)
        if is_broadcast or (group not in known and alone in known):
            self.check_known(alone)
            return alone
        if not self._channels.topics_of(group) and any(
            found is not None and found[0] == group for found in map(parse_broadcast_name, known)
        ):
            raise InvalidRequest(
                f"{group!r} is a broadcast group, in which every member has a place of its own: move a member with its "
                "own consumer.seek()",
                group=group,
            )
        self.check_known(group)
        return group

    def positions(self, group: str, topic: str = "") -> list[QueuePosition]:
        """Where a group stands in each queue of a topic, or of all it consumes."""
        if topic:
            return self._positions(self._queries.topic(topic), group)
        topics = self._channels.topics_of(group)
        self.check_known(group)
        return [row for found in topics for row in self._positions(found, group)]

    def _positions(self, topic: Topic, group: str) -> list[QueuePosition]:
        rows = []
        live = self._channels.open.get((topic.name, group))
        retention = self._retention
        for queue in range(topic.config.queues):
            first, following = self._queries.bounds(topic.name, queue)
            if live is not None:
                cursor = live.cursor(queue)
                place, handed_out, leased = cursor.position, cursor.next, cursor.out
            else:
                stored = self._queries.position(group, topic.name, queue)
                if stored is None:
                    continue
                place, handed_out, leased = stored, stored.floor, 0
            rows.append(
                QueuePosition(
                    topic.name,
                    queue,
                    first,
                    following,
                    floor=min(max(place.floor, first), following),
                    handed_out=handed_out,
                    settled=sum(end - start for start, end in place.ranges),
                    leased=leased,
                    retrying=self._queries.retrying(group, topic.id, queue),
                    dropped=retention.dropped_from(group, topic.id, queue, place, first=first),
                    is_holding=(group, topic.id, queue) in retention.holds,
                )
            )
        return rows

    # --- what there is ----------------------------------------------------------------------------------------------

    def page(self, topic: str, after: str, limit: int) -> tuple[list[GroupInfo], bool]:
        """Groups by name, of one topic or of all, and whether there are more."""
        channels = self._channels
        names = channels.group_names() if not topic else set(channels.groups_of(self._queries.topic(topic)))
        chosen = sorted(name for name in names if name > after)
        return [self.info(name) for name in chosen[:limit]], len(chosen) > limit

    def info(self, group: str) -> GroupInfo:
        """What a group consumes, with how many members, and how much it has not consumed."""
        topics = self._channels.topics_of(group)
        live = (self._channels.open.get((topic.name, group)) for topic in topics)
        members = sum(len(channel.group.members) for channel in live if channel is not None)
        rows = [row for topic in topics for row in self._positions(topic, group)]
        lag = sum(row.next_offset - row.floor - row.settled for row in rows)
        retrying = sum(row.retrying for row in rows)
        return GroupInfo(group, [topic.name for topic in topics], members, lag, retrying=retrying)

    def members(self, group: str) -> list[MemberInfo]:
        """The members of a group in all topics.

        Raises:
            UnknownGroup: there is no such group.
        """
        self.check_known(group)
        found = []
        for (topic, name), channel in self._channels.open.items():
            if name != group:
                continue
            for member in channel.group.members.values():
                subscriber = channel.subscribers.get(member.name)
                found.append(
                    MemberInfo(
                        member.name,
                        topic,
                        "" if subscriber is None else subscriber.sink.address,
                        member.subscription.filter,
                        version=member.subscription.version,
                        leased=member.messages_out,
                        is_connected=member.state in (MemberState.ACTIVE, MemberState.SILENT),
                        is_silent=member.is_silent,
                    )
                )
        return found
