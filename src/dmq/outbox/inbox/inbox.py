"""The inbox: an effect exactly once, however often a message comes (T-02, T-03, T-08, T-11). Thread-safe.

A handler that `consumes_messages` runs in a transaction that holds the message's row of the consumer table, too. So
both are there after a commit, or neither; whoever gets the message again finds the row, runs nothing, and answers what
it came to the first time.

What always holds: a message is acked after its transaction was committed and its result was stored by a broker; a crash
anywhere between leaves a message that comes again and finds its row. What the business refused leaves its row and
nothing else. What failed, or came to UNKNOWN, leaves nothing.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.handler import Retry
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.producer.producer import Producer
from dmq.clock import Clock, SystemClock
from dmq.errors import InvalidRequest, InvalidSettings, UnknownTopic
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.inbox.batch_inbox import Batches
from dmq.outbox.inbox.consumption import (
    Consumption,
    Rollback,
    check_active,
    consumption_of,
    cut,
    result_message,
    settled,
)
from dmq.outbox.inbox.gap_policy import GapPolicy, judge_gap
from dmq.outbox.inbox.prepared import Prepared
from dmq.outbox.inbox.recorder import Earlier, Gap, Recorder, is_contention, run
from dmq.outbox.inbox.sequence_lock import Turns
from dmq.outbox.metrics import Counts
from dmq.outbox.repair.confirm_service import ConfirmOptions, ConfirmService
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.relay import make_owner
from dmq.outbox.states import BusinessState

__all__ = ["CONTENTION_TRIES", "Inbox", "pause_after"]

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

CONTENTION_TRIES: Final = 8
LOOK_SECONDS: Final = 0.02  # so often a gap is looked at again while a thread is patient


class Inbox:
    """The consumer side of a database.

    Parameters:
        database: an engine, or a sessionmaker of the user's own.
        client: sends results, and publishes the confirm service; without it there is neither.
        tables: as `dmq.outbox.tables` gave them; those of the usual names if left out.
        gaps: what becomes of a gap in a strict sequence.
        confirm: how the confirm service listens; None for no service.
        on_alert: called with an `Alert` when the policy for gaps gave up; it is logged and counted anyway.
        clock: for tests; the machine's if left out.
    """

    def __init__(
        self,
        database: Engine | sessionmaker[Session],
        client: Client | None,
        *,
        tables: OutboxTables | None = None,
        gaps: GapPolicy | None = None,
        confirm: ConfirmOptions | None = ConfirmOptions(),  # noqa: B008  frozen
        on_alert: OnAlert | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.sessions: Final = database if isinstance(database, sessionmaker) else sessionmaker(database)
        self._engine = _engine_of(self.sessions)
        self._client = client
        self.tables: Final = tables or default_tables()
        self.recorder: Final = Recorder(self.tables, self._engine.dialect.name)
        self._gaps = (gaps or GapPolicy()).check()
        self._clock = clock or SystemClock()
        self._turns = Turns()
        self._mutex = threading.Lock()
        # Made before any consumer, so that a client that closes lets consumers have their last word first.
        self._producer: Producer | None = None if client is None else client.producer()
        self._is_closed = False
        self._consumer_id = make_owner()
        self.counts: Final = Counts()
        self._alert = alert_with(on_alert, self.counts)
        self._confirm: ConfirmService | None = None
        if client is not None:
            if confirm is not None:
                self._confirm = ConfirmService(self._engine, self.recorder, client.registry, confirm)
            client.adopt(self)

    @property
    def confirm(self) -> ConfirmService | None:
        """The service that is asked what messages came to; it starts with the first consumer."""
        return self._confirm

    # --- the decorator ----------------------------------------------------------------------------------------------

    def consumes_messages(self, function: F) -> Callable[..., None]:
        """Make `function(session, message)` a handler for `consumer.run`.

        The function returns `BusinessState.SUCCESS` or `BusinessState.ROLLBACK`, or raises `Rollback("why")`; anything
        else rolls back, and the message comes again. It works on the session it is given, and leaves commit and
        rollback to the inbox. Of a method, `self` comes first.

        Raises:
            InvalidSettings: it is a coroutine function, which needs an inbox of asyncio.
        """
        if inspect.iscoroutinefunction(function):
            raise InvalidSettings("a coroutine function needs an asyncio engine and client: use dmq.outbox.AioInbox")

        @functools.wraps(function)
        def handler(*arguments: Any) -> None:
            *owner, message = arguments
            self.consume(message, lambda session: function(*owner, session, message))

        handler.consuming = self.begin  # type: ignore[attr-defined]
        return handler

    def begin(self, group: str) -> None:
        """A consumer of this group begins: have the confirm service answer for it."""
        if self._confirm is not None:
            self._confirm.begin(group)

    def consume(self, message: ReceivedMessage, business: Callable[[Session], Any]) -> None:
        """Run the business of a message once, record what it came to, and tell the sender.

        Raises:
            Retry, Reject: what is to become of a message that was not consumed.
            Exception: whatever the business raised; nothing was kept.
        """
        taken = self.open(message)
        self.answer(taken, self._record(taken, business))

    def open(self, message: ReceivedMessage) -> Consumption:
        """What the inbox knows of a message that came."""
        self.begin(message.group)
        return consumption_of(message, self._consumer_id, self._clock.now_ms())

    def _record(self, taken: Consumption, business: Callable[[Session], Any]) -> Earlier:
        patient_until = time.monotonic() + self._gaps.patience if taken.attempt == 1 else 0.0
        tries, jumps = 0, False
        while True:
            try:
                with self._turns.of(taken.turn) if taken.is_strict else nullcontext():
                    return self._once(taken, business, jumps)
            except Gap as gap:
                if time.monotonic() < patient_until:
                    time.sleep(LOOK_SECONDS)
                    continue
                self._judge(taken, gap)
                jumps = True
            except Exception as error:
                tries += 1
                if tries >= CONTENTION_TRIES or not is_contention(error):
                    raise
                self.counts.add("contended")
                time.sleep(pause_after(tries))

    def _once(self, taken: Consumption, business: Callable[[Session], Any], jumps: bool) -> Earlier:
        """One transaction; another one for the row alone if the business refuses."""
        row, recorder = taken.row, self.recorder
        with self.sessions() as session:
            try:
                with session.begin() as transaction:
                    earlier = run(recorder.take(row, BusinessState.SUCCESS, jumps=jumps), session.execute)
                    if earlier is not None:
                        self.counts.add("duplicates")
                        return earlier
                    settled(business(session))
                    check_active(transaction)
                self.counts.add("consumed")
                return Earlier(BusinessState.SUCCESS, row.consumer_id, "", row.at_ms)
            except Rollback as refused:
                reason = refused.reason
            with session.begin():
                # Somebody else may have consumed it meanwhile: then that counts.
                earlier = run(recorder.take(row, BusinessState.ROLLBACK, reason, jumps=jumps), session.execute)
        self.counts.add("refused" if earlier is None else "duplicates")
        return earlier or Earlier(BusinessState.ROLLBACK, row.consumer_id, reason, row.at_ms)

    def _judge(self, taken: Consumption, gap: Gap) -> None:
        """A gap stays open: returns if the message is to be consumed nevertheless."""
        try:
            judge_gap(self._gaps, taken, gap, self._clock.now_ms(), self._alert)
        except Retry:
            if gap.waiting_since_ms is None:
                with self.sessions.begin() as session:
                    run(self.recorder.note_gap(taken.row, gap.last), session.execute)
            raise

    # --- many at once -----------------------------------------------------------------------------------------------

    def run_batches(self, consumer: Consumer, function: Callable[..., Any], batch: int = 100) -> None:
        """Pull batches until the consumer is closed, and consume each in one transaction: for quick handlers.

        Parameters:
            consumer: one that nobody else uses.
            function: as for `consumes_messages`, or what that made of it. It is called for one message after another;
                if one fails or is refused, the batch is rolled back, and its messages are consumed one by one.
            batch: messages of one transaction at most.

        Raises:
            DMQError: why there will be no more messages.
        """
        Batches(self, getattr(function, "__wrapped__", function)).run(consumer, batch)

    # --- the explicit form ------------------------------------------------------------------------------------------

    def prepare(self, session: Session, message: ReceivedMessage) -> ReceivedMessage | None:
        """Begin to consume a message in a transaction of one's own (T-11).

        Returns:
            The message, or None if it was consumed before; its sender was told again, and it can be acked.

        Raises:
            Retry, Reject: it waits for one before it in a strict sequence; the transaction was rolled back.
            InvalidRequest: another message is prepared in this session and not consumed.
        """
        prepared = Prepared.of(session, self.answer)
        prepared.check_closed()
        taken = self.open(message)
        try:
            # A gap is found behind the insert, which then must not stay.
            with session.begin_nested() if taken.is_strict else nullcontext():
                earlier = run(self.recorder.take(taken.row, BusinessState.UNKNOWN), session.execute)
        except Gap as gap:
            if not self._gaps.is_passed_over(gap, self._clock.now_ms()):
                session.rollback()  # a session that writes may keep others from writing that we wait
            self._judge(taken, gap)
            earlier = run(self.recorder.take(taken.row, BusinessState.UNKNOWN, jumps=True), session.execute)
        if earlier is not None:
            self.counts.add("duplicates")
            self.answer(taken, earlier)
            return None
        prepared.begin(taken, session.begin_nested())
        return message

    def consumed(self, session: Session, message: ReceivedMessage, result: BusinessState, reason: str = "") -> None:
        """Say what a prepared message came to; the sender is told when the transaction is committed.

        Parameters:
            result: with ROLLBACK, what was done in the session since `prepare` is undone.
            reason: of a ROLLBACK, for the sender.

        Raises:
            Retry: it is UNKNOWN: let it pass, so that the transaction is rolled back.
            InvalidRequest: the message was not prepared in this session.
        """
        prepared = Prepared.of(session, self.answer)
        taken, savepoint = prepared.take(consumption_of(message, "", 0).row.send_id)
        try:
            settled(result)
            savepoint.commit()
        except Rollback:
            savepoint.rollback()
        run(self.recorder.end(taken.row, result, cut(reason)), session.execute)
        self.counts.add("consumed" if result is BusinessState.SUCCESS else "refused")
        prepared.said(taken, Earlier(BusinessState(result), taken.row.consumer_id, cut(reason), taken.row.at_ms))

    # --- results ----------------------------------------------------------------------------------------------------

    def answer(self, taken: Consumption, earlier: Earlier) -> None:
        """Tell the sender, if one waits; returns when a broker has stored it.

        Raises:
            DMQError: no broker has; the message is to come again.
        """
        if not taken.result_to or self._producer is None:
            return
        topic, message = result_message(taken.row, taken.result_to, earlier)
        try:
            self._producer.send(topic, message.body, key=message.key, tag=message.tag)
        except UnknownTopic:
            # Asking again would not help: the sender's compensator will ask us.
            log.warning("there is no topic for results", extra={"topic": topic})

    @property
    def has_client(self) -> bool:
        """Whether results can be sent."""
        return self._producer is not None

    @property
    def results(self) -> Producer:
        """The producer of results."""
        if self._producer is None:
            raise InvalidRequest("an inbox without a client sends no results")
        return self._producer

    def close(self) -> None:
        """Stop the confirm service, and send what is to be sent. Safe to call twice."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        if self._confirm is not None:
            self._confirm.close()
        if self._producer is not None:
            self._producer.close()
        if self._client is not None:
            self._client.release(self)


def pause_after(tries: int) -> float:
    """How long to wait before a transaction that others were in the way of is tried again."""
    return random.uniform(0.5, 1.0) * min(1.0, 0.01 * 2.0**tries)


def _engine_of(sessions: sessionmaker[Session]) -> Engine:
    bound = sessions.kw.get("bind")
    if not isinstance(bound, Engine):
        raise InvalidSettings("the sessionmaker has no engine: make it with sessionmaker(engine)")
    return bound
