"""Administration: `await client.admin.topics()`.

What always holds: every call is one conversation of `dmq.client.admin.calls`, `dead_letters` or `shards`. It
waits for a connection as the client was told to, and is asked again when the connection breaks, if that does no harm
(`dmq.client.connection.failover`). A call that raises `TimedOut` or `NotConnected` may or may not have been
carried out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar

from dmq.client.admin import calls, cluster, dead_letters, shards
from dmq.client.admin.calls import ANSWER_SECONDS, Call, When
from dmq.client.admin.cluster import BalancePlan, ClusterReport, ImportOutcome, balanced
from dmq.client.admin.dead_letters import DeadLetter, DeadLetterOutcome, LetterName
from dmq.client.admin.reports import (
    ArchiveReport,
    BrokerReport,
    DelayReport,
    DrainReport,
    GroupReport,
    Lag,
    LimitReport,
    Move,
    QueueRange,
    ShardAnswers,
    ShardRows,
    StoredMessage,
    Topic,
    TraceReport,
    TransactionReport,
    WhyReport,
    chosen_why,
    interleaved,
    joined_group,
    joined_groups,
    joined_lag,
    joined_topic,
    joined_topics,
    joined_trace,
)
from dmq.client.admin.shards import RepairReport, ShardChange, ShardReport
from dmq.client.aio.pool import AioPool
from dmq.client.aio.router import AioRouter
from dmq.client.arguments import any_name
from dmq.errors import DMQError, NotConnected, UnknownTopic
from dmq.model import MessageId, place_of
from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.shard import ShardSet
from dmq.protocol.session import DrainAction

# twin: blocking
# from dmq.client.connection.router import mended
# twin: end

__all__ = ["AioAdmin"]

T = TypeVar("T")

SHARD_SECONDS: Final = 3.0  # that shards without a leader are waited for, all together
MISSED_SECONDS: Final = 10.0  # that one is not waited for again that had none


class AioAdmin:
    """What can be asked of a broker beside sending and consuming.

    Parameters:
        timeout: how long a call may take; None waits for a connection for ever, and `ANSWER_SECONDS` for an answer.
    """

    def __init__(self, router: AioRouter, timeout: float | None) -> None:
        self._router = router
        self.timeout = timeout
        self._missed: dict[int, float] = {}  # shards that did not answer, and until when they are not waited for

    # twin: blocking
    # @mended
    # twin: end
    async def _converse(self, call: Call[T], at: AioPool | None = None, seconds: float | None = None) -> T:
        """Hold a conversation with the broker to its end, and return its result.

        Parameters:
            at: which broker; that of the topic if left out.
            seconds: how long it may take then.
        """
        try:
            command, header = next(call)
            while True:
                pool, timeout = (self._router.pool_asked(header), self.timeout) if at is None else (at, seconds)
                answer = await pool.request(command, header, timeout=timeout, answer_seconds=ANSWER_SECONDS)
                command, header = call.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _gather(
        self, make: Callable[[], Call[T]], topic: str = "", *, is_change: bool = False
    ) -> ShardAnswers[T]:
        """Hold a conversation with each shard that may have a topic, or with all of them; with a lone broker, that one.

        A shard without a leader is waited for a moment, once in a while.

        Raises:
            DMQError: no shard has an answer, or all would refuse.
        """
        answers: ShardAnswers[T] = ShardAnswers(is_change=is_change)
        if self._router.is_single:
            answers.found.append((0, await self._converse(make())))
            return answers
        deadline = time.monotonic() + SHARD_SECONDS
        for pool in self._router.pools_asked(topic):
            now = time.monotonic()
            seconds = self.timeout
            if pool.current() is None:
                patience = max(0.001, deadline - now) if now >= self._missed.get(pool.shard, 0.0) else 0.001
                seconds = patience if seconds is None else min(seconds, patience)
            try:
                answers.found.append((pool.shard, await self._converse(make(), pool, seconds)))
                self._missed.pop(pool.shard, None)
            except DMQError as error:
                answers.failed(self._router.shard_name(pool.shard), error)
                self._missed[pool.shard] = time.monotonic() + MISSED_SECONDS
        answers.check()
        return answers

    @property
    def shard_names(self) -> dict[int, str]:
        """The names of the shards of the cluster, by their numbers; none of a broker by itself."""
        book = self._router.book
        return {} if book is None else {number: self._router.shard_name(number) for number in book.shards}

    async def create_topic(
        self,
        name: str,
        queues: int = 4,
        *,
        priority: bool = False,
        ttl: float | None = None,
        allow_existing: bool = False,
        **settings: Any,
    ) -> Topic:
        """Create a topic.

        Parameters:
            queues: how many; messages of one queue stay in order. With `priority` there are ten, one for each priority.
            ttl: seconds after which its messages expire; None is never.
            allow_existing: accept a topic of that name if it has the same settings.
            settings: the other settings of a topic, by name.

        Raises:
            TopicExists: a topic of that name exists.
            InvalidName, InvalidSettings: the broker refused the name or a setting.
        """
        return await self._converse(
            calls.create_topic(name, {"queues": queues, "priority": priority, "ttl": ttl, **settings}, allow_existing)
        )

    async def update_topic(self, name: str, **settings: Any) -> Topic:
        """Change some settings of a topic, by name: `queues`, `ttl`, `carry_for`, `properties`, and
        `can_produce` and `can_consume`, which switch sending to the topic and consuming from it on and off.
        """
        return await self._converse(calls.update_topic(name, settings))

    async def place_topic(
        self,
        name: str,
        *,
        add: str = "",
        remove: str = "",
        queues: int = 0,
        drain: bool = False,
        force: bool = False,
    ) -> Topic:
        """Give a topic of a cluster queues in one more shard, or take those of a shard out of it.

        Messages never move. What is removed takes no new messages, and goes when every group has consumed it. Both
        change which queue an ordered message goes to.

        Parameters:
            add, remove: a shard; give one of them.
            queues: in the new shard; as many as the topic has in the others if 0.
            drain: hold ordered messages until what there is is consumed, so that their order is kept over the change.
            force: what is removed goes at once, with its messages.

        Raises:
            Busy: with `drain`, consumers did not get on; nothing was changed.
            InvalidRequest, UnknownEntry, ShardConflict: it cannot be done.
        """
        change = calls.SlotChange(add, remove, queues, drain=drain, force=force)
        return await self._converse(calls.place_topic(name, change))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, its messages and the positions of all groups in it."""
        await self._converse(calls.delete_topic(name))

    async def topics(self, prefix: str = "", *, system: bool = False) -> ShardRows[Topic]:
        """The topics whose names begin with a prefix, by name; those of DMQ itself only with `system`."""
        return joined_topics(await self._gather(lambda: calls.topics(prefix, system)))

    async def topic(self, name: str) -> Topic:
        """One topic, with the groups that consume it. What a shard that does not answer keeps is not counted."""
        answers = await self._gather(lambda: calls.topic(name), name)
        return joined_topic([topic for _, topic in answers.found])

    async def groups(self, topic: str | None = None) -> ShardRows[GroupReport]:
        """All consumer groups, or those that consume a topic."""
        of = any_name("topic", topic)
        return joined_groups(await self._gather(lambda: calls.groups(of), of))

    async def group(self, name: str) -> GroupReport:
        """One consumer group, with its members."""
        answers = await self._gather(lambda: calls.group(name))
        return joined_group((report.at(shard) for shard, report in answers.found), answers.missing)

    async def create_group(self, name: str, topic: str) -> None:
        """Give a group a position in a topic before its first member subscribes."""
        await self._converse(calls.create_group(name, topic))

    async def delete_group(self, name: str, topic: str | None = None) -> None:
        """Delete a group, or its position in one topic."""
        of = any_name("topic", topic)
        answers = await self._gather(lambda: calls.delete_group(name, of), of)
        if answers.missing:
            raise NotConnected(
                f"group {name!r} is deleted, but not in shard {', '.join(answers.missing)}, which did not answer: "
                "delete it again when that has a leader"
            )

    async def lag(self, topic: str, group: str) -> Lag:
        """How many messages of a topic a group has not settled; of all topics it consumes if the topic is "".

        Raises:
            UnknownGroup: the group has no position in the topic.
        """
        return joined_lag(await self._gather(lambda: calls.lag(topic, group), topic))

    async def reset(
        self,
        topic: str,
        group: str,
        to: When,
        *,
        queue: int | None = None,
        dry_run: bool = False,
        shard: int | None = None,
    ) -> ShardRows[Move]:
        """Move the position of a group in a topic.

        Parameters:
            to: "earliest", "latest", an offset, a datetime, seconds since 1970 as a float, or a time back from now,
                as a timedelta or as in "2h".
            queue: move it in this queue only; in a cluster, in the queue with this number of each shard.
            dry_run: change nothing, and return what would be moved.
            shard: move it in the shard with this number only.

        Returns:
            The moves. In a cluster their `missing` names shards that did not answer: nothing was moved there.
        """
        point = calls.parse_point(to)
        if shard is not None:
            found = await self._converse_in(shard, calls.reset(topic, group, point, queue, dry_run=dry_run))
            return ShardRows(replace(move, shard=shard) for move in found)
        return (await self._gather(lambda: calls.reset(topic, group, point, queue, dry_run=dry_run), topic)).rows()

    async def find(
        self, topic: str | None = None, *, key: str | None = None, id: MessageId | str | None = None, limit: int = 100
    ) -> ShardRows[StoredMessage]:
        """The messages of a topic that have a key, or the message with an id."""
        of = any_name("topic", topic)
        return (await self._gather(lambda: calls.find(of, key, id, limit), of)).rows(limit=limit)

    async def peek(
        self, topic: str, *, queue: int | None = None, at: When = "earliest", limit: int = 100, tags: str | None = None
    ) -> ShardRows[StoredMessage]:
        """Read messages from a place on, without consuming them."""
        point = calls.parse_point(at)
        wanted = any_name("tags", tags)
        return interleaved(
            await self._gather(lambda: calls.peek(topic, queue, point, limit, tags=wanted), topic), limit
        )

    async def read(
        self, topic: str, queue: int, offset: int, *, limit: int = 100, tags: str | None = None, shard: int = 0
    ) -> tuple[list[StoredMessage], int]:
        """Messages of one queue from an offset on, and the offset at which to read on.

        Parameters:
            shard: the number of the shard that has the queue, in a cluster.
        """
        call = calls.read(topic, queue, offset, limit, tags=any_name("tags", tags))
        if not shard:
            return await self._converse(call)
        messages, following = await self._converse_in(shard, call)
        return [replace(message, shard=shard) for message in messages], following

    async def _converse_in(self, shard: int, call: Call[T]) -> T:
        """Hold a conversation with one shard."""
        return await self._converse(call, self._router.pool_for("", place_of(0, shard)), self.timeout)

    async def offsets(self, topic: str, *, queue: int | None = None, at: When = "earliest") -> ShardRows[QueueRange]:
        """The first and the next offset of each queue, and the offset of a place in it."""
        point = calls.parse_point(at)
        return (await self._gather(lambda: calls.offsets(topic, queue, point), topic)).rows()

    async def archived(self, journal_id: int = 0, offset: int = 0) -> ArchiveReport:
        """How far the journal of the broker is archived; given an offset, record first that it is archived so far.

        Parameters:
            journal_id, offset: everything of this journal below the offset is in the archive, for good. The offset
                never goes back. Retention waits for it where `store.keep_unarchived` is on.

        Raises:
            OffsetGone: the journal has no such offset.
            InvalidRequest: the broker has another journal.
        """
        return await self._converse(calls.archived(journal_id, offset))

    async def delays(self, topic: str | None = None, *, limit: int = 1000) -> ShardRows[DelayReport]:
        """Delayed messages that are not delivered yet, the next due first; those of one topic, or of all."""
        of = any_name("topic", topic)
        answers = await self._gather(lambda: calls.delays(of, limit), of)
        return answers.rows(lambda row: row.due_at_ms, limit)

    async def cancel_delay(self, id: MessageId | str) -> None:
        """Cancel a delayed message that is not delivered yet.

        Raises:
            UnknownMessage: no delayed message has this id: it was delivered or cancelled, or was never delayed.
            NotConnected, TimedOut: a shard did not answer: it may have cancelled the message.
        """
        await self._gather(lambda: calls.cancel_delay(id), is_change=True)

    async def transactions(self, topic: str | None = None, *, limit: int = 1000) -> ShardRows[TransactionReport]:
        """Transactions that are neither committed nor rolled back, oldest first."""
        of = any_name("topic", topic)
        answers = await self._gather(lambda: calls.transactions(of, limit), of)
        return answers.rows(lambda row: row.begun_at_ms, limit)

    async def trace(self, id: MessageId | str, group: str | None = None) -> TraceReport:
        """The history of a message: when it was sent, stored, delivered, acked, retried and so on.

        Parameters:
            group: leave out what other groups did with it.

        Raises:
            UnknownMessage: the broker has no record of it.
        """
        of = any_name("group", group)
        return joined_trace(await self._gather(lambda: calls.trace(id, of)))

    async def why(self, id: MessageId | str, group: str | None = None) -> WhyReport:
        """Why a message is not consumed, in one paragraph; or, if it was, by whom and when.

        Parameters:
            group: answer for this group only.

        Raises:
            UnknownMessage: the broker has no record of it.
        """
        of = any_name("group", group)
        return chosen_why(await self._gather(lambda: calls.why(id, of)))

    async def limits(self, topic: str | None = None, app: str | None = None) -> list[LimitReport]:
        """The rate limits in force: all of them, or that of a topic, of an app, or both."""
        return await self._converse(calls.limits(any_name("topic", topic), any_name("app", app)))

    async def set_limit(
        self,
        *,
        topic: str | None = None,
        app: str | None = None,
        messages: int | None = None,
        bytes: int | None = None,
        policy: str = "refuse",
    ) -> LimitReport | None:
        """Limit the rate at which a topic takes messages, or an app sends them. The limit outlives a restart.

        Parameters:
            topic, app: what is limited; give one of them.
            messages, bytes: how many a second; None means no limit, and without both the limit is removed.
            policy: messages above the limit are refused with `RateLimited` ("refuse"), or become dead letters
                ("dead-letter").

        Returns:
            The limit in force, or None.

        Raises:
            UnknownTopic: there is no such topic.
        """
        names = any_name("topic", topic), any_name("app", app)
        return await self._converse(calls.set_limit(*names, messages, bytes, policy=policy))

    async def stats(self, *prefixes: str) -> dict[str, float]:
        """The counters of the broker: all of them, or those whose names begin with one of the prefixes."""
        return await self._converse(calls.stats(prefixes))

    async def cluster(self) -> list[BrokerReport]:
        """All brokers that are known, the connected one first."""
        return await self._converse(calls.cluster())

    async def shards(self) -> list[ShardReport]:
        """All shards of the cluster, by name, each with its members.

        Raises:
            NotInCluster: the connected broker belongs to no shard.
        """
        return await self._converse(shards.listed())

    async def shard(self, name: str = "") -> ShardReport:
        """One shard with its members, and what is wrong with it; that of the connected broker if none is named.

        Raises:
            UnknownEntry: there is no such shard.
            NotInCluster: the connected broker belongs to no shard.
        """
        return await self._converse(shards.shown(name))

    async def set_shard(
        self,
        name: str = "",
        *,
        min_in_sync: int | None = None,
        replicas: int | None = None,
        remove: str = "",
        asynchronous: bool | None = None,
        state: str = "",
        weight: int | None = None,
    ) -> ShardChange:
        """Change the record of a shard; what is left out stays as it is.

        Parameters:
            min_in_sync: so many members must have a message before it is acknowledged; with fewer, sends are refused.
            replicas: how many members the shard may have.
            remove: a member that is gone for good. It must not run.
            asynchronous: acknowledge what the leader alone has on disk. If it dies, another member leads only by
                `promote` with `accept_loss`, and what had not reached it is lost.
            state: open, read-only or leaving; only an open shard takes messages.
            weight: its share of the messages that may go to any shard; 100 is usual.

        Raises:
            InvalidSettings: the values do not go together.
            ShardConflict: the state of the shard forbids it; nothing was changed.
            UnknownEntry: there is no such shard.
        """
        asked = ShardSet(name, min_in_sync, replicas, remove, is_asynchronous=asynchronous, state=state, weight=weight)
        return await self._converse(shards.changed(asked))

    async def create_shard(self, name: str, *, replicas: int = 3, min_in_sync: int = 2) -> ShardChange:
        """Make the record of a shard before its members are started; the first member would make it as well.

        Raises:
            ShardConflict: there is such a shard.
        """
        return await self._converse(shards.created(name, replicas, min_in_sync))

    async def add_member(self, member: str, *, shard: str = "") -> ShardChange:
        """Have a place for one more broker in a shard, or for one that was removed; it joins when it is started."""
        return await self._converse(shards.added(member, shard))

    async def remove_member(self, member: str, *, shard: str = "") -> ShardChange:
        """Take a member out of its shard, whether it runs or not; a leader hands over first.

        Raises:
            ShardConflict: fewer than `min_in_sync` would be left in sync, or nobody takes over; nothing was changed.
            UnknownEntry: no shard has such a member.
        """
        return await self._converse(shards.removed(member, shard))

    async def drain_member(self, member: str, *, shard: str = "", undo: bool = False) -> ShardChange:
        """Let a member lead no more until that is undone; if it leads, it hands over.

        Raises:
            ShardConflict: nobody else could lead; nothing was changed.
            UnknownEntry: no shard has such a member.
        """
        return await self._converse(shards.drained(member, shard, undo=undo))

    async def promote(self, member: str, *, shard: str = "", accept_loss: bool = False) -> ShardChange:
        """Let a member lead that may lack what was acknowledged, when no member of the in-sync set comes back.

        Parameters:
            accept_loss: without it nothing is done, and the error says what would be lost.

        Raises:
            ShardConflict: the loss is not accepted, the shard has a leader, or the member does not run.
        """
        return await self._converse(shards.promoted(member, shard, accept_loss=accept_loss))

    async def hand_over(self, shard: str = "", *, to: str = "") -> ShardChange:
        """Let another member lead: the one that is named, or the best follower. Nothing is lost.

        Raises:
            NotLeader: the connected broker does not lead the shard; `detail["leader"]` has the address of who does.
            ShardConflict: there is no leader, or the member cannot take over; nothing has changed.
        """
        numbers = [number for number, name in self.shard_names.items() if name == shard]
        at = self._router.pool_for("", place_of(0, numbers[0])) if numbers else None
        return await self._converse(shards.handed_over(shard, to), at, self.timeout)

    async def repair(self) -> RepairReport:
        """Look through the journal of the connected broker, and mend what is damaged from its shard."""
        return await self._converse(shards.repaired())

    async def cluster_report(self) -> ClusterReport:
        """The cluster of the connected member: its brokers, and what is wrong or risky beyond single shards.

        Raises:
            RegistryDown: the registry does not answer.
        """
        return await self._converse(cluster.shown())

    async def balance_plan(self) -> BalancePlan:
        """What is to be moved so that leaders are spread over the hosts, and topics over the shards. Nothing is moved:
        `hand_over` and `place_topic` do that.

        Raises:
            NotInCluster: the connected broker belongs to no shard.
        """
        topics = await self.topics()
        plan = balanced(await self.shards(), topics)
        missing = tuple(f"shard {name} did not answer: dmq shard show {name} says why" for name in topics.missing)
        return plan if plan.obstacles or not missing else replace(plan, obstacles=missing)

    async def finalize_cluster(self) -> str:
        """Raise the format of the cluster to what all its members know; returns in words what was done.

        Raises:
            ShardConflict: a member does not run.
        """
        return await self._converse(cluster.finalized())

    async def export_cluster(self) -> dict[str, Any]:
        """What the registry keeps of the cluster: records of shards, topics, limits and keys; ready for JSON."""
        return await self._converse(cluster.exported())

    async def import_cluster(
        self, document: Mapping[str, Any], *, dry_run: bool = False, foreign: bool = False
    ) -> list[ImportOutcome]:
        """Put what an export has and the registry lacks, or has in an older revision.

        Parameters:
            dry_run: only say what would be done.
            foreign: it may be another cluster's; then topics, limits and keys are taken, and no shards.

        Raises:
            InvalidSettings: it is not an export, or another cluster's.
        """
        return await self._converse(cluster.imported(document, dry_run=dry_run, foreign=foreign))

    async def member_state(self) -> MemberState:
        """What the directory of the connected member says of itself, also while it cannot join its shard."""
        return await self._converse(cluster.state())

    async def rebuild_records(
        self, states: Sequence[MemberState], *, dry_run: bool = False, accept_loss: bool = False
    ) -> list[ImportOutcome]:
        """Build the records of shards anew from what their members say (`member_state` of each).

        For a registry that was restored from an old backup, or lost.

        Raises:
            ShardConflict: members are missing that may have acknowledged messages, and the loss is not accepted.
        """
        return await self._converse(cluster.rebuilt(states, dry_run=dry_run, accept_loss=accept_loss))

    async def drain(self, grace: float = 5.0, reason: str = "") -> DrainReport:
        """Drain the connected broker: it takes no messages and delivers none, but still takes acks.

        Parameters:
            grace: seconds within which clients are asked to leave.
            reason: what the clients are told.
        """
        return await self._converse(calls.drain(DrainAction.BEGIN, grace, reason))

    async def undrain(self) -> DrainReport:
        """Put a drained broker back in use."""
        return await self._converse(calls.drain(DrainAction.END, 0.0, ""))

    async def drain_progress(self) -> DrainReport:
        """How far the draining of the broker is."""
        return await self._converse(calls.drain(DrainAction.SHOW, 0.0, ""))

    async def stop_broker(self, grace: float = 5.0, reason: str = "") -> DrainReport:
        """Stop the process of the connected broker, as SIGTERM does."""
        return await self._converse(calls.drain(DrainAction.STOP, grace, reason))

    async def dead_letters(
        self,
        topic: str | None = None,
        group: str | None = None,
        reason: str | None = None,
        *,
        state: str = "waiting",
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        ids: Iterable[LetterName] | None = None,
        bodies: bool = True,
    ) -> list[DeadLetter]:
        """Messages that could not be consumed or stored, the oldest first.

        Parameters:
            topic, group, reason: only letters of these; reason is RETRIES_EXHAUSTED, EXPIRED, RATE_LIMITED,
                STORE_FAILED, REJECTED or CORRUPT.
            state: waiting, resent or deleted; "" for any.
            since, until: the time at which they became dead letters.
            limit: how many at most.
            ids: only these letters: letters, their numbers, or ids of messages.
            bodies: False leaves the bodies empty, so that a long list is quick.

        Raises:
            DatabaseDown: the database of the dead letters cannot be used now.
        """
        wanted = dead_letters.letter_filter(topic, group, reason, state=state, since=since, until=until)
        return await self._converse(dead_letters.listed(wanted, limit, ids, bodies=bodies))

    async def resend_dead_letters(
        self,
        ids: Iterable[LetterName] | None = None,
        *,
        topic: str | None = None,
        group: str | None = None,
        reason: str | None = None,
        rate: float | None = None,
    ) -> list[DeadLetterOutcome]:
        """Send dead letters again, each under its own id, to its group alone; one that was never stored, to its topic.

        Parameters:
            ids: letters, their numbers, or ids of messages; an id means all waiting letters of the message. Without
                ids, all waiting letters that match the other parameters.
            rate: how many a second at most; the broker has a cap of its own.

        Returns:
            An outcome for each letter.

        Raises:
            DatabaseDown: the database of the dead letters cannot be used now. Some letters may have been resent; they
                are not resent again.
        """
        return await self._settle_letters(dead_letters.named(ids, topic, group, reason), rate, delete=False)

    async def delete_dead_letters(
        self,
        ids: Iterable[LetterName] | None = None,
        *,
        topic: str | None = None,
        group: str | None = None,
        reason: str | None = None,
        rate: float | None = None,
    ) -> list[DeadLetterOutcome]:
        """Mark dead letters deleted and drop their content; parameters and errors as of `resend_dead_letters`."""
        return await self._settle_letters(dead_letters.named(ids, topic, group, reason), rate, delete=True)

    async def _settle_letters(
        self, call: Call[list[int]], rate: float | None, *, delete: bool
    ) -> list[DeadLetterOutcome]:
        outcomes: list[DeadLetterOutcome] = []
        numbers = await self._converse(call)
        for part, seconds in dead_letters.steps(numbers, rate):
            began = time.monotonic()
            outcomes += await self._settle_part(part, delete=delete)
            left = seconds - (time.monotonic() - began)
            if left > 0 and len(outcomes) < len(numbers):
                await asyncio.sleep(left)
        return outcomes

    async def _settle_part(self, numbers: list[int], *, delete: bool) -> list[DeadLetterOutcome]:
        """Settle some letters; if the shard that was asked has not the topic of a letter, one that has it does."""
        outcomes = {one.number: one for one in await self._converse(dead_letters.settle(numbers, delete=delete))}
        for shard in self.shard_names:
            homeless = [number for number, one in outcomes.items() if isinstance(one.error, UnknownTopic)]
            if homeless:
                try:
                    found = await self._converse_in(shard, dead_letters.settle(homeless, delete=delete))
                except DMQError as error:  # it may have resent some, so no other is asked
                    found = [DeadLetterOutcome(number, error) for number in homeless]
                outcomes |= {one.number: one for one in found}
        return [*outcomes.values()]
