"""The inbox: an effect exactly once, however often a message is delivered (T-02, T-03, T-08, T-11).

A handler that `consumes_messages` runs in a transaction that holds the message's row of the consumer table, too. So
both are there after a commit, or neither. A consumer that gets the message again finds the row, does not call the
handler, and answers with the first result.

What always holds: a message is acked after its transaction was committed and its result was stored by a broker; after
a crash anywhere between, the message is delivered again and its row is found. A message that the business refused
leaves its row and nothing else. One that failed, or whose result is UNKNOWN, leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sqlalchemy import Engine

# twin: async
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

# twin: end
from sqlalchemy.util import await_only

from dmq.client.aio.client import AioClient
from dmq.client.aio.producer import AioProducer
from dmq.client.consumer.handler import Retry
from dmq.client.consumer.message import ReceivedMessage
from dmq.clock import Clock, SystemClock
from dmq.errors import InvalidSettings, UnknownTopic
from dmq.event_log import EventLog
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.inbox.consumption import (
    LOOK_SECONDS,
    AioTurns,
    Consumption,
    GapPolicy,
    Prepared,
    Rollback,
    check_active,
    consumption_of,
    cut,
    judge_gap,
    result_message,
    settled,
)
from dmq.outbox.inbox.recorder import CONTENTION_TRIES, Earlier, Gap, Recorder, aio_run, is_contention, pause_after
from dmq.outbox.metrics import Counts
from dmq.outbox.repair.confirm_service import AioConfirmService, ConfirmOptions, ConfirmService
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.relay import make_owner
from dmq.outbox.states import BusinessState

# twin: blocking
# from sqlalchemy.orm import Session, sessionmaker
# from dmq.client.consumer.consumer import Consumer
# from dmq.errors import InvalidRequest
# from dmq.outbox.inbox.batch_inbox import BatchInbox
# twin: end

__all__ = ["AioInbox"]

log = EventLog(__name__)

Business = Callable[[AsyncSession], Awaitable[Any]]


class AioInbox:
    # twin: async
    """The consumer side of a database, on the event loop of its client.

    Parameters:
        database: an asyncio engine, or an async_sessionmaker of the user's own.
        client: of `dmq.aio.connect`; sends results, and publishes the confirm service. Without it there is neither.
        sync_engine: an engine that blocks, for the confirm service, if it cannot be made from the asyncio one.
        others: as of `dmq.outbox.inbox.inbox.Inbox`.
    """

    # twin: blocking
    # """The consumer side of a database. Thread-safe.
    #
    # Parameters:
    #     database: an engine, or a sessionmaker of the user's own.
    #     client: sends results, and publishes the confirm service. Without it there is neither.
    #     tables: as `dmq.outbox.tables` gave them; those of the usual names if left out.
    #     gaps: what becomes of a gap in a strict sequence.
    #     confirm: how the confirm service listens; None for no service.
    #     on_alert: called with an `Alert` when the policy for gaps gave up; it is logged and counted anyway.
    #     clock: for tests; the machine's if left out.
    # """
    # twin: end

    def __init__(
        self,
        database: AsyncEngine | async_sessionmaker[AsyncSession],
        client: AioClient | None,
        *,
        tables: OutboxTables | None = None,
        gaps: GapPolicy | None = None,
        confirm: ConfirmOptions | None = ConfirmOptions(),  # noqa: B008  frozen
        on_alert: OnAlert | None = None,
        # twin: async
        sync_engine: Engine | None = None,
        # twin: end
        clock: Clock | None = None,
    ) -> None:
        self.sessions: Final = database if isinstance(database, async_sessionmaker) else async_sessionmaker(database)
        self._engine = _engine_of(self.sessions)
        self._client = client
        self.tables: Final = tables or default_tables()
        self.recorder: Final = Recorder(self.tables, self._engine.dialect.name)
        self.counts: Final = Counts()
        self._alert = alert_with(on_alert, self.counts)
        self._gaps = (gaps or GapPolicy()).check()
        self._clock = clock or SystemClock()
        self._turns = AioTurns()
        self._consumer_id = make_owner()
        # Made before any consumer: a client closes what was made last first, and consumers still send results then.
        self._producer: AioProducer | None = None if client is None else client.producer()
        # twin: blocking
        # self._mutex = threading.Lock()
        # twin: end
        self._is_closed = False
        self._confirm: AioConfirmService | None = None
        if client is not None:
            if confirm is not None:
                # twin: async
                self._confirm = AioConfirmService(
                    self._engine, self.recorder, client.registry, confirm, sync_engine=sync_engine
                )
                # twin: blocking
                # self._confirm = ConfirmService(self._engine, self.recorder, client.registry, confirm)
                # twin: end
            client._adopt(self)

    @property
    def confirm(self) -> ConfirmService | None:
        """The service that is asked for results; it starts with the first consumer."""
        # twin: async
        return None if self._confirm is None else self._confirm.service
        # twin: blocking
        # return self._confirm
        # twin: end

    # --- the decorator ----------------------------------------------------------------------------------------------

    def consumes_messages(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
        """Make `async def function(session, message)` a handler for `consumer.run`.

        The function returns `BusinessState.SUCCESS` or `BusinessState.ROLLBACK`, or raises `Rollback("why")`; anything
        else rolls back, and the message is delivered again. It works on the session it is given, and leaves commit and
        rollback to the inbox. Of a method, `self` comes first.

        Raises:
            InvalidSettings: it is the wrong kind of function: an asyncio inbox takes coroutine functions, another one
                plain functions.
        """
        # twin: async
        if not inspect.iscoroutinefunction(function):
            raise InvalidSettings("a plain function needs a plain engine and client: use dmq.outbox.Inbox")
        # twin: blocking
        # if inspect.iscoroutinefunction(function):
        #     raise InvalidSettings("a coroutine function needs an asyncio engine and client: use dmq.outbox.AioInbox")
        # twin: end

        @functools.wraps(function)
        async def handler(*arguments: Any) -> None:
            *owner, message = arguments
            await self.consume(message, lambda session: function(*owner, session, message))

        handler.consuming = self.begin  # type: ignore[attr-defined]
        return handler

    def begin(self, group: str) -> None:
        """A consumer of this group begins: have the confirm service answer for it."""
        if self._confirm is not None:
            self._confirm.begin(group)

    async def consume(self, message: ReceivedMessage, business: Business) -> None:
        """Run the business of a message once, record its result, and tell the sender.

        Raises:
            Retry, Reject: what is to become of a message that was not consumed.
            Exception: an error of the business; nothing was kept.
        """
        taken = self.open(message)
        await self.answer(taken, await self._record(taken, business))

    def open(self, message: ReceivedMessage) -> Consumption:
        """Begin the consumption of a message."""
        self.begin(message.group)
        return consumption_of(message, self._consumer_id, self._clock.now_ms())

    async def _record(self, taken: Consumption, business: Business) -> Earlier:
        patient_until = time.monotonic() + self._gaps.patience if taken.attempt == 1 else 0.0
        tries, jumps = 0, False
        while True:
            try:
                async with self._turns.of(taken.turn) if taken.is_strict else contextlib.nullcontext():
                    return await self._once(taken, business, jumps)
            except Gap as gap:
                if time.monotonic() < patient_until:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                await self._judge(taken, gap)
                jumps = True
            except Exception as error:
                tries += 1
                if tries >= CONTENTION_TRIES or not is_contention(error):
                    raise
                self.counts.add("contended")
                await asyncio.sleep(pause_after(tries))

    async def _once(self, taken: Consumption, business: Business, jumps: bool) -> Earlier:
        """One transaction; another one for the row alone if the business refuses."""
        row, recorder = taken.row, self.recorder
        async with self.sessions() as session:
            try:
                async with session.begin() as transaction:
                    earlier = await aio_run(recorder.take(row, BusinessState.SUCCESS, jumps=jumps), session.execute)
                    if earlier is not None:
                        self.counts.add("duplicates")
                        return earlier
                    settled(await business(session))
                    check_active(transaction)
                self.counts.add("consumed")
                return Earlier(BusinessState.SUCCESS, row.consumer_id, "", row.at_ms)
            except Rollback as refused:
                reason = refused.reason
            async with session.begin():
                # Another consumer may have consumed it meanwhile: then its result counts.
                steps = recorder.take(row, BusinessState.ROLLBACK, reason, jumps=jumps)
                earlier = await aio_run(steps, session.execute)
        self.counts.add("refused" if earlier is None else "duplicates")
        return earlier or Earlier(BusinessState.ROLLBACK, row.consumer_id, reason, row.at_ms)

    async def _judge(self, taken: Consumption, gap: Gap) -> None:
        """A gap stays open: returns if the message is to be consumed nevertheless."""
        try:
            judge_gap(self._gaps, taken, gap, self._clock.now_ms(), alert=self._alert)
        except Retry:
            if gap.waiting_since_ms is None:
                async with self.sessions.begin() as session:
                    await aio_run(self.recorder.note_gap(taken.row, gap.last), session.execute)
            raise

    # twin: blocking
    # # --- many at once -----------------------------------------------------------------------------------------------
    #
    # def run_batches(self, consumer: Consumer, function: Callable[..., Any], batch: int = 100) -> None:
    #     """Pull batches until the consumer is closed, and consume each in one transaction: for quick handlers.
    #
    #     Parameters:
    #         consumer: one that nobody else uses.
    #         function: as for `consumes_messages`, or what that made of it. It is called for one message after another;
    #             if one fails or is refused, the batch is rolled back, and its messages are consumed one by one.
    #         batch: messages of one transaction at most.
    #
    #     Raises:
    #         DMQError: why there will be no more messages.
    #     """
    #     BatchInbox(self, getattr(function, "__wrapped__", function)).run(consumer, batch)
    #
    # @property
    # def has_client(self) -> bool:
    #     """Whether results can be sent."""
    #     return self._producer is not None
    #
    # @property
    # def results(self) -> Producer:
    #     """The producer of results."""
    #     if self._producer is None:
    #         raise InvalidRequest("an inbox without a client sends no results")
    #     return self._producer
    #
    # twin: end
    # --- the explicit form ------------------------------------------------------------------------------------------

    def _prepared(self, session: AsyncSession) -> Prepared:
        # twin: async
        # The session's events run inside of its own awaiting, from where a coroutine can be awaited.
        return Prepared.of(session.sync_session, lambda taken, earlier: await_only(self.answer(taken, earlier)))
        # twin: blocking
        # return Prepared.of(session, self.answer)
        # twin: end

    async def prepare(self, session: AsyncSession, message: ReceivedMessage) -> ReceivedMessage | None:
        """Begin to consume a message in a transaction of one's own (T-11).

        Returns:
            The message, or None if it was consumed before; its sender was told again, and it can be acked.

        Raises:
            Retry, Reject: it waits for one before it in a strict sequence; the transaction was rolled back.
            InvalidRequest: another message is prepared in this session and not consumed.
        """
        prepared = self._prepared(session)
        prepared.check_closed()
        taken = self.open(message)
        take = self.recorder.take
        try:
            # A gap is found after the insert, which then must not stay.
            async with session.begin_nested() if taken.is_strict else contextlib.nullcontext():
                earlier = await aio_run(take(taken.row, BusinessState.UNKNOWN), session.execute)
        except Gap as gap:
            if not self._gaps.is_passed_over(gap, self._clock.now_ms()):
                await session.rollback()  # its locks may hold up the transaction that closes the gap
            await self._judge(taken, gap)
            earlier = await aio_run(take(taken.row, BusinessState.UNKNOWN, jumps=True), session.execute)
        if earlier is not None:
            self.counts.add("duplicates")
            await self.answer(taken, earlier)
            return None
        prepared.begin(taken, await session.begin_nested())
        return message

    async def consumed(
        self, session: AsyncSession, message: ReceivedMessage, result: BusinessState, reason: str = ""
    ) -> None:
        """Say the result of a prepared message; the sender is told when the transaction is committed.

        Parameters:
            result: with ROLLBACK, what was done in the session since `prepare` is undone.
            reason: of a ROLLBACK, for the sender.

        Raises:
            Retry: it is UNKNOWN: let it pass, so that the transaction is rolled back.
            InvalidRequest: the message was not prepared in this session.
        """
        prepared = self._prepared(session)
        taken, savepoint = prepared.take(consumption_of(message, "", 0).row.send_id)
        try:
            settled(result)
            await savepoint.commit()
        except Rollback:
            await savepoint.rollback()
        await aio_run(self.recorder.end(taken.row, result, cut(reason)), session.execute)
        self.counts.add("consumed" if result is BusinessState.SUCCESS else "refused")
        prepared.said(taken, Earlier(BusinessState(result), taken.row.consumer_id, cut(reason), taken.row.at_ms))

    # --- results ----------------------------------------------------------------------------------------------------

    async def answer(self, taken: Consumption, earlier: Earlier) -> None:
        """Tell the sender, if one waits; returns when a broker has stored the result.

        Raises:
            DMQError: no broker has stored it; the message is to be delivered again.
        """
        if not taken.result_to or self._producer is None:
            return
        topic, message = result_message(taken.row, taken.result_to, earlier)
        try:
            await self._producer.send(topic, message.body, key=message.key, tag=message.tag)
        except UnknownTopic:
            # A redelivery would not help: the sender's compensator will ask the confirm service.
            log.warning("there is no topic for results", once_for=topic, topic=topic)

    async def close(self) -> None:
        """Stop the confirm service, and send the results that are on their way. Safe to call twice."""
        # twin: async
        if self._is_closed:
            return
        self._is_closed = True
        # twin: blocking
        # with self._mutex:
        #     if self._is_closed:
        #         return
        #     self._is_closed = True
        # twin: end
        if self._confirm is not None:
            await self._confirm.close()
        if self._producer is not None:
            await self._producer.close()
        if self._client is not None:
            self._client._release(self)


def _engine_of(sessions: async_sessionmaker[AsyncSession]) -> AsyncEngine:
    bound = sessions.kw.get("bind")
    if not isinstance(bound, AsyncEngine):
        raise InvalidSettings("the async_sessionmaker has no AsyncEngine: make it with async_sessionmaker(engine)")
    return bound
