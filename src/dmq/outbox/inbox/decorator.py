"""`consumes_messages` for those who need no inbox at hand: one that goes by the engine it is given.

What always holds: an asyncio engine takes coroutine functions and an asyncio client, any other plain functions and a
plain client; a mixture is refused when the handler is made, not when the first message comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from dmq.client.client import Client
from dmq.clock import Clock
from dmq.errors import InvalidSettings
from dmq.outbox.alerts import OnAlert
from dmq.outbox.inbox.consumption import GapPolicy
from dmq.outbox.inbox.inbox import Inbox
from dmq.outbox.repair.confirm_service import ConfirmOptions
from dmq.outbox.schema import OutboxTables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

    from dmq.client.aio.client import AioClient

__all__ = ["InboxOptions", "consumes_messages"]


class InboxOptions(TypedDict, total=False):
    """Options that `Inbox` and `AioInbox` share."""

    tables: OutboxTables | None
    gaps: GapPolicy | None
    confirm: ConfirmOptions | None
    on_alert: OnAlert | None
    clock: Clock | None


def consumes_messages(
    database: Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[AsyncSession],
    client: Client | AioClient | None,
    *,
    sync_engine: Engine | None = None,
    **options: Unpack[InboxOptions],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make functions handlers, in an inbox of their own: `@consumes_messages(engine, client)`.

    Parameters:
        sync_engine: with an asyncio engine, an engine that blocks, for background work, if it cannot be had from it.
        options: as of `Inbox` and `AioInbox`.

    Raises:
        InvalidSettings: an engine and a client that do not go together.
    """
    if isinstance(database, Engine | sessionmaker):
        if client is not None and not isinstance(client, Client):
            raise InvalidSettings("a plain engine goes with dmq.connect(), an asyncio engine with dmq.aio.connect()")
        if sync_engine is not None:
            raise InvalidSettings("sync_engine goes with an asyncio engine: leave it out")
        return Inbox(database, client, **options).consumes_messages
    from dmq.client.aio.client import AioClient
    from dmq.outbox.inbox.aio_inbox import AioInbox

    if client is not None and not isinstance(client, AioClient):
        raise InvalidSettings("an asyncio engine goes with dmq.aio.connect(), a plain engine with dmq.connect()")
    return AioInbox(database, client, sync_engine=sync_engine, **options).consumes_messages
