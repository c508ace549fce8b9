"""Administration from a blocking program: `client.admin.admin`.

What always holds: every call is one conversation of `dmq.client.admin.calls`. It waits for a connection as the
client was told to, and is asked again when the connection breaks, if that does no harm
(`dmq.client.connection.request_retry`); a call that raises `TimedOut` or `NotConnected` may or may not have been
carried out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, TypeVar

from dmq.client.admin import calls, dead_letters
from dmq.client.admin.calls import Call, When, run
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
    StoredMessage,
    Topic,
    TraceReport,
    TransactionReport,
    WhyReport,
)
from dmq.client.connection.pool import Transport
from dmq.model import MessageId
from dmq.protocol import Command, Frame, Header
from dmq.protocol.session import DrainAction

__all__ = ["Admin"]

ANSWER_SECONDS: Final = 30.0  # that a broker may take for an answer

T = TypeVar("T")


class Admin:
    """What can be asked of a broker beside sending and consuming.

    Parameters:
        timeout: how long a call may take; None waits for a connection for ever, and for an answer a while.
    """

    def __init__(self, transport: Transport, timeout: float | None) -> None:
        self._transport = transport
        self.timeout = timeout

    def _run(self, call: Call[T]) -> T:
        return run(call, self._ask)

    converse = _run  # for what is asked beside administration

    def _ask(self, command: Command, header: Header) -> Frame:
        return self._transport.request(command, header, timeout=self.timeout, answer_seconds=ANSWER_SECONDS)

    def create_topic(
        self,
        name: str,
        queues: int = 4,
        *,
        priority: bool = False,
        ttl: float | None = None,
        allow_existing: bool = False,
        **settings: Any,
    ) -> Topic:
        """Make a topic.

        Parameters:
            queues: how many; messages of one queue stay in order. With `priority` there are ten, one for each.
            ttl: seconds after which its messages expire; None is never.
            allow_existing: do not mind if it is there with the same settings.
            settings: the others of a topic, by name.

        Raises:
            TopicExists: one of that name is there.
            InvalidName, InvalidSettings: the broker refused them.
        """
        return self._run(
            calls.create_topic(name, {"queues": queues, "priority": priority, "ttl": ttl, **settings}, allow_existing)
        )

    def update_topic(self, name: str, **settings: Any) -> Topic:
        """Change some settings of a topic, by name: `queues`, `ttl`, `carry_for`, `properties`, and
        `can_produce` and `can_consume`, which switch sending to it and consuming of it off and on.
        """
        return self._run(calls.update_topic(name, settings))

    def delete_topic(self, name: str) -> None:
        """Delete a topic, its messages and all positions in it."""
        self._run(calls.delete_topic(name))

    def topics(self, prefix: str = "", *, system: bool = False) -> list[Topic]:
        """All topics by name; DMQ's own only with `system`."""
        return self._run(calls.topics(prefix, system))

    def topic(self, name: str) -> Topic:
        """One topic, and the groups that consume it."""
        return self._run(calls.topic(name))

    def groups(self, topic: str = "") -> list[GroupReport]:
        """All groups, or those that consume a topic."""
        return self._run(calls.groups(topic))

    def group(self, name: str) -> GroupReport:
        """One group and its members."""
        return self._run(calls.group(name))

    def create_group(self, name: str, topic: str) -> None:
        """Give a group a position in a topic before its first member comes."""
        self._run(calls.create_group(name, topic))

    def delete_group(self, name: str, topic: str = "") -> None:
        """Forget a group, or its position in one topic."""
        self._run(calls.delete_group(name, topic))

    def lag(self, topic: str, group: str) -> Lag:
        """How much of a topic a group has not settled; of all it consumes if the topic is "".

        Raises:
            UnknownGroup: it has no position there.
        """
        return self._run(calls.lag(topic, group))

    def reset(self, topic: str, group: str, to: When, *, queue: int | None = None, dry_run: bool = False) -> list[Move]:
        """Move a group within a topic.

        Parameters:
            to: "earliest", "latest", an offset, a datetime, seconds since 1970 as a float, or a time back from now,
                as a timedelta or as in "2h".
            queue: only this one.
            dry_run: only tell what would happen.
        """
        return self._run(calls.reset(topic, group, to, queue, dry_run))

    def find(
        self, topic: str = "", *, key: str | None = None, id: MessageId | str | None = None, limit: int = 100
    ) -> list[StoredMessage]:
        """Messages with a key, or the one with an id."""
        return self._run(calls.find(topic, key, id, limit))

    def peek(
        self, topic: str, *, queue: int | None = None, at: When = "earliest", limit: int = 100, tags: str = ""
    ) -> list[StoredMessage]:
        """Look at messages from a place on, without consuming them."""
        return self._run(calls.peek(topic, queue, at, limit, tags))

    def read(
        self, topic: str, queue: int, offset: int, *, limit: int = 100, tags: str = ""
    ) -> tuple[list[StoredMessage], int]:
        """Messages of one queue from an offset on, and the offset from which to read for more."""
        return self._run(calls.read(topic, queue, offset, limit, tags))

    def offsets(self, topic: str, *, queue: int | None = None, at: When = "earliest") -> list[QueueRange]:
        """What each queue keeps, and where a place lies in it."""
        return self._run(calls.offsets(topic, queue, at))

    def archived(self, journal_id: int = 0, offset: int = 0) -> ArchiveReport:
        """How far the archive has taken the journal of the broker; with an offset, that it has come this far.

        Parameters:
            journal_id, offset: everything of this journal below the offset is in the archive, for good. It never goes
                back. Retention waits for it where `store.keep_unarchived` is on.

        Raises:
            OffsetGone: the journal has no such offset.
            InvalidRequest: the broker has another journal.
        """
        return self._run(calls.archived(journal_id, offset))

    def delays(self, topic: str = "", *, limit: int = 1000) -> list[DelayReport]:
        """Messages that wait for their time, the next due first; those of one topic, or of all."""
        return self._run(calls.delays(topic, limit))

    def cancel_delay(self, id: MessageId | str) -> None:
        """Take back a message that is not delivered yet.

        Raises:
            UnknownMessage: no message with this id waits: it was delivered, or cancelled, or never delayed.
        """
        self._run(calls.cancel_delay(id))

    def transactions(self, topic: str = "", *, limit: int = 1000) -> list[TransactionReport]:
        """Transactions that are neither committed nor rolled back, oldest first."""
        return self._run(calls.transactions(topic, limit))

    def trace(self, id: MessageId | str, group: str = "") -> TraceReport:
        """The life of a message: when it was sent, stored, delivered, acked, and whatever else became of it.

        Parameters:
            group: leave out what other groups did with it.

        Raises:
            UnknownMessage: nothing is kept of it.
        """
        return self._run(calls.trace(id, group))

    def why(self, id: MessageId | str, group: str = "") -> WhyReport:
        """Why a message is not consumed, in one paragraph; or that it was, by whom and when.

        Parameters:
            group: only this one.

        Raises:
            UnknownMessage: nothing is kept of it.
        """
        return self._run(calls.why(id, group))

    def limits(self, topic: str = "", app: str = "") -> list[LimitReport]:
        """The limits in force: all, or that of a topic, of an app, or both."""
        return self._run(calls.limits(topic, app))

    def set_limit(
        self,
        *,
        topic: str = "",
        app: str = "",
        messages: int | None = None,
        bytes: int | None = None,
        policy: str = "refuse",
    ) -> LimitReport | None:
        """Limit what a topic takes, or what an app may send, from now on; it outlives the broker.

        Parameters:
            topic, app: whose limit it is, one of them.
            messages, bytes: how many a second; None is no limit, and without both the limit is taken away.
            policy: what is over it is refused with `RateLimited`, or becomes a "dead-letter".

        Returns:
            The limit in force, or None.

        Raises:
            UnknownTopic: there is no such topic.
        """
        return self._run(calls.set_limit(topic, app, messages, bytes, policy))

    def stats(self, *prefixes: str) -> dict[str, float]:
        """The broker's counters: all, or those that begin with one of these."""
        return self._run(calls.stats(prefixes))

    def cluster(self) -> list[BrokerReport]:
        """All brokers that are known, the one we are connected to first."""
        return self._run(calls.cluster())

    def drain(self, grace: float = 5.0, reason: str = "") -> DrainReport:
        """Take the broker we are connected to out of use: it takes and hands out nothing more, but takes acks.

        Parameters:
            grace: how long clients are told they have before they should have gone.
            reason: what they are told.
        """
        return self._run(calls.drain(DrainAction.BEGIN, grace, reason))

    def undrain(self) -> DrainReport:
        """Put it back in use."""
        return self._run(calls.drain(DrainAction.END, 0.0, ""))

    def drain_progress(self) -> DrainReport:
        """How far it is with that."""
        return self._run(calls.drain(DrainAction.SHOW, 0.0, ""))

    def stop_broker(self, grace: float = 5.0, reason: str = "") -> DrainReport:
        """Stop the process of the broker we are connected to, as SIGTERM does."""
        return self._run(calls.drain(DrainAction.STOP, grace, reason))

    def dead_letters(
        self,
        topic: str = "",
        group: str = "",
        reason: str = "",
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
            topic, group, reason: only these; reason is RETRIES_EXHAUSTED, EXPIRED, RATE_LIMITED, STORE_FAILED or
                REJECTED.
            state: waiting, resent or deleted; "" for any.
            since, until: by the time they became dead letters.
            limit: at most so many.
            ids: only these: letters, their numbers, or ids of messages.
            bodies: without them the bodies are empty, and a long list is quick.

        Raises:
            DatabaseDown: their database cannot be used now.
        """
        return self._run(
            dead_letters.dead_letters(
                topic, group, reason, state=state, since=since, until=until, limit=limit, ids=ids, bodies=bodies
            )
        )

    def resend_dead_letters(
        self,
        ids: Iterable[LetterName] | None = None,
        *,
        topic: str = "",
        group: str = "",
        reason: str = "",
        rate: float | None = None,
    ) -> list[DeadLetterOutcome]:
        """Send dead letters again, each under its own id, to its group alone; one that never was stored, to its topic.

        Parameters:
            ids: letters, their numbers, or ids of messages, which mean all letters of theirs that wait. Without ids,
                all that wait and match the other parameters.
            rate: at most so many a second; the broker has a cap of its own.

        Returns:
            An outcome for each.

        Raises:
            DatabaseDown: their database cannot be used now; some may have been resent, and are not resent again.
        """
        return self._settle_letters(dead_letters.named(ids, topic, group, reason), rate, delete=False)

    def delete_dead_letters(
        self,
        ids: Iterable[LetterName] | None = None,
        *,
        topic: str = "",
        group: str = "",
        reason: str = "",
        rate: float | None = None,
    ) -> list[DeadLetterOutcome]:
        """Mark dead letters deleted, and forget what they held; see `resend_dead_letters`."""
        return self._settle_letters(dead_letters.named(ids, topic, group, reason), rate, delete=True)

    def _settle_letters(self, call: Call[list[int]], rate: float | None, *, delete: bool) -> list[DeadLetterOutcome]:
        outcomes: list[DeadLetterOutcome] = []
        numbers = self._run(call)
        for part, seconds in dead_letters.steps(numbers, rate):
            began = time.monotonic()
            outcomes += self._run(dead_letters.settle(part, delete=delete))
            left = seconds - (time.monotonic() - began)
            if left > 0 and len(outcomes) < len(numbers):
                time.sleep(left)
        return outcomes
