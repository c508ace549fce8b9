"""`consumes_messages` for those who need no inbox at hand: one that goes by the engine it is given.

What always holds: an asyncio engine takes coroutine functions and an asyncio client, any other plain functions and a
plain client; a mixture is refused when the handler is made, not when the first message comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from dmq.client.client import Client
from dmq.errors import InvalidSettings
from dmq.outbox.inbox.inbox import Inbox

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

    from dmq.client.aio.client import AioClient

__all__ = ["consumes_messages"]


def consumes_messages(
    database: Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[AsyncSession],
    client: Client | AioClient | None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make functions handlers, in an inbox of their own: `@consumes_messages(engine, client)`.

    Parameters:
        options: as of `Inbox` or `AioInbox`.

    Raises:
        InvalidSettings: an engine and a client that do not go together.
    """
    if isinstance(database, Engine | sessionmaker):
        if client is not None and not isinstance(client, Client):
            raise InvalidSettings("a plain engine goes with dmq.connect(), an asyncio engine with dmq.aio.connect()")
        return Inbox(database, client, **options).consumes_messages
    from dmq.client.aio.client import AioClient
    from dmq.outbox.inbox.aio_inbox import AioInbox

    if client is not None and not isinstance(client, AioClient):
        raise InvalidSettings("an asyncio engine goes with dmq.aio.connect(), a plain engine with dmq.connect()")
    return AioInbox(database, client, **options).consumes_messages
