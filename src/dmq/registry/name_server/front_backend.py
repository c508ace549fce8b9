"""What a name server serves of a registry that is elsewhere, as in ZooKeeper: reads, routes; and its mirror.

Sessions and writes belong to the registry itself: brokers go there. What always holds: nothing is written there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, InvalidSettings
from dmq.protocol.cluster import registry as headers
from dmq.protocol.commands import Command
from dmq.protocol.header import Header
from dmq.registry.contents import ClusterContent, decode_content
from dmq.registry.name_server.backend import News
from dmq.registry.name_server.mirror import Mirror
from dmq.registry.name_server.mirror_store import MirrorStore
from dmq.registry.name_server.wire import entry_header
from dmq.registry.paths import Paths
from dmq.registry.registry import Entry, Registry, check_path

__all__ = ["FrontBackend"]

_READ_SECONDS: Final = 3.0


class FrontBackend:
    """Made before the name server, which starts and stops it.

    Parameters:
        open_registry: gives a client of it.
        root: the path below which the cluster is.
        url: of the registry, without passwords.
        store: of the mirror; None for none.
    """

    commands: Final = frozenset({Command.REGISTRY_READ, Command.REGISTRY_CHILDREN})
    meanings: Final = {
        "registry_up": "1 while the registry answers.",
        "mirror_up": "1 while the mirror goes on, here or by another name server.",
        "mirror_writer": "1 if this name server writes the mirror.",
        "mirror_rows_total": "Rows of the mirror that this name server has written.",
        "mirror_behind_seconds": "How long ago the mirror was as the registry.",
        "mirror_behind_changes": "Writes of metadata that are not mirrored yet.",
    }

    def __init__(
        self,
        open_registry: Callable[[], Awaitable[Registry]],
        root: str,
        url: str,
        store: MirrorStore | None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._open = open_registry
        self._paths = Paths(root)
        self._url = url
        self._store = store
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._registry: Registry | None = None
        self._mirror: Mirror | None = None
        self._reason = ""  # why the registry cannot be read
        self._tasks: set[asyncio.Task[None]] = set()
        self._tell: Callable[[News], None] = lambda _: None

    @property
    def name(self) -> str:
        return self._url

    @property
    def root(self) -> str:
        return self._paths.root

    @property
    def trouble(self) -> str:
        return self._reason

    async def start(self, tell: Callable[[News], None]) -> None:
        """Open the registry, and the database of the mirror.

        Raises:
            RegistryDown: it does not answer.
            InvalidSettings: there is no cluster in it.
            WrongFormat, DatabaseDown: the database cannot be used.
        """
        self._tell = tell
        registry = self._registry = await self._open()
        if self._store is not None:
            cluster = await registry.read(self._paths.cluster)
            if cluster is None:
                raise InvalidSettings(
                    f"{self._url} has no cluster to mirror: start its first broker, or correct the path in the URL"
                )
            content = decode_content(ClusterContent, cluster.value, cluster.path)
            store = self._store
            await self._in_thread(lambda: store.open(self._url, content.id))
            self._mirror = Mirror(registry, self._paths, store, self._clock, url=self._url, in_thread=self._in_thread)
            self._spawn(self._mirror.keep())
        self._spawn(self._keep_looking(registry))
        self._spawn(self._keep_telling(registry))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        if self._registry is not None:
            await self._registry.close()
        if self._store is not None:
            self._store.close()

    def serve(self, command: int, asked: Any, answer: Callable[[Header | BaseException], None]) -> None:
        check_path(asked.path)
        self._spawn(self._carry_out(command, asked, answer))

    async def read(self, path: str) -> Entry | None:
        assert self._registry is not None
        return await self._registry.read(path)

    async def children(self, path: str) -> list[Entry]:
        assert self._registry is not None
        return await self._registry.children(path)

    def figures(self) -> Mapping[str, float]:
        mirror = self._mirror
        return {
            "registry_up": int(not self._reason),
            "mirror_up": int(mirror is not None and not mirror.trouble),
            "mirror_writer": int(mirror is not None and mirror.is_writer),
            "mirror_rows_total": 0 if mirror is None else mirror.rows,
            "mirror_behind_seconds": 0 if mirror is None or not mirror.is_writer else round(mirror.behind_seconds, 3),
            "mirror_behind_changes": 0 if mirror is None or not mirror.is_writer else mirror.behind_changes,
        }

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, command: int, asked: Any, answer: Callable[[Header | BaseException], None]) -> None:
        result: Header | BaseException
        try:
            if command == Command.REGISTRY_READ:
                found = await self.read(asked.path)
                result = headers.RegistryReadReply(None if found is None else entry_header(found))
            else:
                result = _page([entry for entry in await self.children(asked.path) if entry.path > asked.after], asked)
        except Exception as error:
            result = error
        answer(result)

    async def _keep_looking(self, registry: Registry) -> None:
        """Know whether the registry answers."""
        while True:
            try:
                await registry.read(self._paths.cluster)
                self._reason = ""
            except DMQError as error:
                self._reason = error.message
            await asyncio.sleep(_READ_SECONDS)

    async def _keep_telling(self, registry: Registry) -> None:
        with registry.watch(self._paths.nodes) as nodes, registry.watch(self._paths.change) as change:
            while True:
                waits = [asyncio.ensure_future(watch.wait()) for watch in (nodes, change)]
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                for changes in filter(None, (nodes.take(), change.take())):
                    self._tell(News(0, changes.paths, changes.is_all))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _page(entries: list[Entry], asked: headers.RegistryChildren) -> Header:
    """As many of them as an answer takes, one at least."""
    size, fit = 0, 0
    for entry in entries[: asked.limit]:
        size += len(entry.path) + len(entry.value)
        if fit and size > headers.PAGE_BYTES_MAX:
            break
        fit += 1
    return headers.RegistryChildrenReply([*map(entry_header, entries[:fit])], fit < len(entries))
