"""The inbox on an event loop: the twin of `dmq.outbox.inbox.inbox`, for asyncio sessions and handlers.

What always holds: as there; one inbox belongs to the loop of its client. The confirm service has threads of its own,
and a connection of its own to the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.util import await_only

from dmq.client.aio.client import AioClient
from dmq.client.aio.producer import AioProducer
from dmq.client.consumer.handler import Retry
from dmq.client.consumer.message import ReceivedMessage
from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, InvalidSettings, UnknownTopic
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.engines import sync_engine as engine_of
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
from dmq.outbox.inbox.inbox import CONTENTION_TRIES, LOOK_SECONDS, pause_after
from dmq.outbox.inbox.prepared import Prepared
from dmq.outbox.inbox.recorder import Earlier, Gap, Recorder, aio_run, is_contention
from dmq.outbox.inbox.sequence_lock import AioTurns
from dmq.outbox.metrics import Counts
from dmq.outbox.repair.confirm_service import NAMESPACE, RENEW_SECONDS, TTL_SECONDS, ConfirmOptions, ConfirmService
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.relay import make_owner
from dmq.outbox.states import BusinessState

__all__ = ["AioInbox"]

log = logging.getLogger(__name__)

Business = Callable[[AsyncSession], Awaitable[Any]]


class AioInbox:
    """The consumer side of a database.

    Parameters:
        database: an asyncio engine, or an async_sessionmaker of the user's own.
        client: of `dmq.aio.connect`; sends results, and publishes the confirm service. Without it there is neither.
        sync_engine: an engine that blocks, for the confirm service, if it cannot be had from the asyncio one.
        others: as of `dmq.outbox.inbox.inbox.Inbox`.
    """

    def __init__(
        self,
        database: AsyncEngine | async_sessionmaker[AsyncSession],
        client: AioClient | None,
        *,
        tables: OutboxTables | None = None,
        gaps: GapPolicy | None = None,
        confirm: ConfirmOptions | None = ConfirmOptions(),  # noqa: B008  frozen
        on_alert: OnAlert | None = None,
        sync_engine: Engine | None = None,
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
        self._producer: AioProducer | None = None if client is None else client.producer()
        self._is_closed = False
        self._publisher: asyncio.Task[None] | None = None
        self._given_engine = sync_engine
        self._sync_engine: Engine | None = None
        self._confirm: ConfirmService | None = None
        if client is not None:
            if confirm is not None:
                self._sync_engine = sync_engine or engine_of(self._engine)
                self._confirm = ConfirmService(self._sync_engine, self.recorder, None, confirm)
            client.adopt(self)

    @property
    def confirm(self) -> ConfirmService | None:
        """The service that is asked what messages came to; it starts with the first consumer."""
        return self._confirm

    # --- the decorator ----------------------------------------------------------------------------------------------

    def consumes_messages(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
        """Make the coroutine function `function(session, message)` a handler for `consumer.run`.

        As `dmq.outbox.inbox.inbox.Inbox.consumes_messages`.

        Raises:
            InvalidSettings: it is a plain function.
        """
        if not inspect.iscoroutinefunction(function):
            raise InvalidSettings("a plain function needs a plain engine and client: use dmq.outbox.Inbox")

        @functools.wraps(function)
        async def handler(*arguments: Any) -> None:
            *owner, message = arguments
            await self.consume(message, lambda session: function(*owner, session, message))

        handler.consuming = self.begin  # type: ignore[attr-defined]
        return handler

    def begin(self, group: str) -> None:
        """A consumer of this group begins: have the confirm service answer for it."""
        if self._confirm is None or not self._confirm.begin(group) or self._client is None:
            return
        if self._publisher is not None:
            self._publisher.cancel()
        self._publisher = asyncio.get_running_loop().create_task(self._publish(self._confirm, self._client))

    async def consume(self, message: ReceivedMessage, business: Business) -> None:
        """Run the business of a message once, record what it came to, and tell the sender.

        Raises:
            Retry, Reject: what is to become of a message that was not consumed.
            Exception: whatever the business raised; nothing was kept.
        """
        self.begin(message.group)
        taken = consumption_of(message, self._consumer_id, self._clock.now_ms())
        await self.answer(taken, await self._record(taken, business))

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
                # Somebody else may have consumed it meanwhile: then that counts.
                steps = recorder.take(row, BusinessState.ROLLBACK, reason, jumps=jumps)
                earlier = await aio_run(steps, session.execute)
        self.counts.add("refused" if earlier is None else "duplicates")
        return earlier or Earlier(BusinessState.ROLLBACK, row.consumer_id, reason, row.at_ms)

    async def _judge(self, taken: Consumption, gap: Gap) -> None:
        """A gap stays open: returns if the message is to be consumed nevertheless."""
        try:
            judge_gap(self._gaps, taken, gap, self._clock.now_ms(), self._alert)
        except Retry:
            if gap.waiting_since_ms is None:
                async with self.sessions.begin() as session:
                    await aio_run(self.recorder.note_gap(taken.row, gap.last), session.execute)
            raise

    # --- the explicit form ------------------------------------------------------------------------------------------

    def _prepared(self, session: AsyncSession) -> Prepared:
        # The session's events run inside of its own awaiting, from where a coroutine can be awaited.
        return Prepared.of(session.sync_session, lambda taken, earlier: await_only(self.answer(taken, earlier)))

    async def prepare(self, session: AsyncSession, message: ReceivedMessage) -> ReceivedMessage | None:
        """Begin to consume a message in a transaction of one's own; as `dmq.outbox.inbox.inbox.Inbox.prepare`."""
        prepared = self._prepared(session)
        prepared.check_closed()
        self.begin(message.group)
        taken = consumption_of(message, self._consumer_id, self._clock.now_ms())
        take = self.recorder.take
        try:
            # A gap is found behind the insert, which then must not stay.
            async with session.begin_nested() if taken.is_strict else contextlib.nullcontext():
                earlier = await aio_run(take(taken.row, BusinessState.UNKNOWN), session.execute)
        except Gap as gap:
            if not self._gaps.is_passed_over(gap, self._clock.now_ms()):
                await session.rollback()  # a session that writes may keep others from writing that we wait
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
        """Say what a prepared message came to; as `dmq.outbox.inbox.inbox.Inbox.consumed`."""
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
        """Tell the sender, if one waits; returns when a broker has stored it.

        Raises:
            DMQError: no broker has; the message is to come again.
        """
        if not taken.result_to or self._producer is None:
            return
        topic, message = result_message(taken.row, taken.result_to, earlier)
        try:
            await self._producer.send(topic, message.body, key=message.key, tag=message.tag)
        except UnknownTopic:
            # Asking again would not help: the sender's compensator will ask us.
            log.warning("there is no topic for results", extra={"topic": topic})

    # --- its life ---------------------------------------------------------------------------------------------------

    async def _publish(self, confirm: ConfirmService, client: AioClient) -> None:
        """Keep the confirm service's address in the registry."""
        while True:
            try:
                for key in confirm.keys:
                    await client.registry.put(NAMESPACE, key, confirm.address, ttl=TTL_SECONDS)
            except DMQError as error:
                log.warning("the confirm service could not be published", extra={"error": str(error)})
            await asyncio.sleep(RENEW_SECONDS)

    async def close(self) -> None:
        """Stop the confirm service, and send what is to be sent. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.wait([self._publisher])
        if self._confirm is not None:
            if self._client is not None:
                with contextlib.suppress(DMQError):
                    for key in self._confirm.keys:
                        await self._client.registry.delete(NAMESPACE, key)
            await asyncio.to_thread(self._confirm.close)
        if self._sync_engine is not None and self._given_engine is None:
            await asyncio.to_thread(self._sync_engine.dispose)
        if self._producer is not None:
            await self._producer.close()
        if self._client is not None:
            self._client.release(self)


def _engine_of(sessions: async_sessionmaker[AsyncSession]) -> AsyncEngine:
    bound = sessions.kw.get("bind")
    if not isinstance(bound, AsyncEngine):
        raise InvalidSettings("the async_sessionmaker has no asyncio engine: make it with async_sessionmaker(engine)")
    return bound
