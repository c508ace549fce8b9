"""The confirm service of an inbox on an event loop: a `ConfirmService` whose address a task publishes.

What always holds: the service has threads of its own and an engine that blocks, so that a question is answered while
the loop is busy; the address is in the registry while the task runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from dmq.client.aio.registry import AioRegistry
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.outbox.engines import sync_engine as engine_of
from dmq.outbox.inbox.recorder import Recorder
from dmq.outbox.repair.confirm_service import NAMESPACE, RENEW_SECONDS, TTL_SECONDS, ConfirmOptions, ConfirmService

__all__ = ["AioConfirmService"]

log = EventLog(__name__)


class AioConfirmService:
    """A service, and the task that publishes it.

    Parameters:
        engine: of the inbox; one that blocks is made beside it.
        sync_engine: an engine that blocks, to be used instead.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        recorder: Recorder,
        registry: AioRegistry,
        options: ConfirmOptions,
        *,
        sync_engine: Engine | None = None,
    ) -> None:
        self._engine = sync_engine or engine_of(engine)
        self._owns_engine = sync_engine is None
        self._registry = registry
        self._publisher: asyncio.Task[None] | None = None
        self.service: Final = ConfirmService(self._engine, recorder, None, options)

    def begin(self, group: str) -> None:
        """Answer for a group, and publish the address for it at once if the group is new."""
        if self.service.begin(group):
            if self._publisher is not None:
                self._publisher.cancel()
            self._publisher = asyncio.get_running_loop().create_task(self._publish())

    async def _publish(self) -> None:
        """Keep the address in the registry."""
        while True:
            try:
                for key in self.service.keys:
                    await self._registry.put(NAMESPACE, key, self.service.address, ttl=TTL_SECONDS)
            except DMQError as error:
                log.warning("the confirm service could not be published", once_for=(), error=error)
            await asyncio.sleep(RENEW_SECONDS)

    async def close(self) -> None:
        """Answer nothing more, and take the address out of the registry."""
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.wait([self._publisher])
        with contextlib.suppress(DMQError):
            for key in self.service.keys:
                await self._registry.delete(NAMESPACE, key)
        await asyncio.to_thread(self.service.close)
        if self._owns_engine:
            await asyncio.to_thread(self._engine.dispose)
