"""The mirror: copies the metadata of a registry that is elsewhere into SQL, as it changes (J-07).

Metadata are entries that are nobody's: the cluster, shards, topics and their groups, limits, the key-value space.
Brokers that run are not. Everything is read at the start, once an hour, and whenever a watch says that anything may
have changed; between, what watches name. Records of shards change with every election, and have no watch of their own,
since leaders write below them every second: they are read when `/dmq/change` does, and every 30 seconds.

What always holds: the registry is read and never written; what is gone there goes here; a restart goes on where the
mirror is, and writes what differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from dmq.clock import Clock
from dmq.errors import DMQError, UnknownEntry
from dmq.event_log import EventLog
from dmq.registry.name_server.mirror_store import MirrorStore
from dmq.registry.paths import DEFAULT_ROOT, Paths
from dmq.registry.registry import Entry, Registry, unknown_entry
from dmq.registry.watch import Watch, wait_for_first

__all__ = ["Mirror"]

log = EventLog(__name__)

T = TypeVar("T")

_PULL_SECONDS: Final = 3600.0
_SHARDS_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 1.0
_READS_MAX: Final = 64  # at a time
_BEHIND_SECONDS: Final = 30.0  # of which is told


class Mirror:
    """One mirror.

    Parameters:
        url: of the registry, without passwords.
        in_thread: runs what the store does.

    Attributes:
        is_writer: this name server writes it; another does if not.
        rows: that were written.
        trouble: why it does not go on; empty if it does.
    """

    def __init__(
        self,
        registry: Registry,
        paths: Paths,
        store: MirrorStore,
        clock: Clock,
        *,
        url: str,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._registry = registry
        self._paths = paths
        self._store = store
        self._clock = clock
        self._url = url
        self._in_thread = in_thread
        self._change = -1  # version of /dmq/change that is mirrored
        self._seen = -1  # and the newest that is known
        self._even_at = clock.monotonic()  # when the mirror was last as the registry
        self._pulled_at = self._shards_at = float("-inf")
        self._is_told = False
        self.is_writer = False
        self.rows = 0
        self.trouble = ""

    @property
    def behind_seconds(self) -> float:
        """How long ago the mirror was as the registry."""
        return self._clock.monotonic() - self._even_at

    @property
    def behind_changes(self) -> int:
        """Writes of metadata that are not mirrored, as far as is known."""
        return max(0, self._seen - self._change)

    async def keep(self) -> None:
        """Mirror what changes; for ever."""
        paths = self._paths
        with ExitStack() as opened:
            prefixes = (paths.topics, paths.limits, paths.key_values, paths.cluster, paths.change)
            watches = [opened.enter_context(self._registry.watch(prefix)) for prefix in prefixes]
            stale: set[str] = set()
            while True:
                is_all = self._gather(watches, stale)
                try:
                    self.is_writer = await self._in_thread(self._store.is_ours)
                    if self.is_writer:
                        await self._copy(stale, is_all=is_all)
                        stale.clear()
                    else:
                        self._pulled_at = float("-inf")  # who takes over reads everything
                    self.trouble = ""
                except DMQError as error:
                    self.trouble = error.message
                    if is_all:
                        self._pulled_at = float("-inf")
                    await asyncio.sleep(_AGAIN_SECONDS)
                    self._say()
                    continue
                self._say()
                await wait_for_first([watch.wait() for watch in watches], _LOOK_SECONDS)

    def _gather(self, watches: Iterable[Watch], stale: set[str]) -> bool:
        taken = [changes for watch in watches if (changes := watch.take()) is not None]
        for changes in taken:
            stale.update(changes.paths)
        return any(changes.is_all for changes in taken)

    async def _copy(self, stale: set[str], *, is_all: bool) -> None:
        """Read what has changed, and write it."""
        now = self._clock.monotonic()
        change = await self._registry.read(self._paths.change)
        self._seen = -1 if change is None else change.version
        if is_all or now - self._pulled_at >= _PULL_SECONDS:
            await self._copy_all()
            self._pulled_at = self._shards_at = now
        else:
            if self._seen != self._change or now - self._shards_at >= _SHARDS_SECONDS:
                await self._write(await self._lasting(self._paths.shards), ())
                self._shards_at = now
            await self._copy_paths(stale - {self._paths.change})
        await self._in_thread(lambda: self._store.mark(self._seen, self._url))
        self._change, self._even_at = self._seen, self._clock.monotonic()

    async def _copy_all(self) -> None:
        known = await self._in_thread(self._store.paths)
        entries = [Entry(self._paths.root, b"", 0)]
        folders = [
            entry
            for entry in await self._lasting(self._paths.root)
            if entry.path not in (self._paths.nodes, self._paths.change)
        ]
        if not any(folder.path == self._paths.cluster for folder in folders):
            raise unknown_entry(self._paths.cluster)  # what is missing deletes nothing
        entries += folders
        for folder in folders:
            if folder.path == self._paths.cluster:
                continue
            items = await self._lasting(folder.path)
            entries += items
            if folder.path != self._paths.shards:
                entries += await self._below(items)
        there = {self._place(entry.path) for entry in entries}
        written = await self._write(entries, known.keys() - there)
        log.info("mirror read in whole", entries=len(entries), rows_written=written, database=self._store.shown)

    async def _below(self, items: list[Entry]) -> list[Entry]:
        found: list[Entry] = []
        for start in range(0, len(items), _READS_MAX):
            asked = [self._lasting(item.path) for item in items[start : start + _READS_MAX]]
            for entries in await asyncio.gather(*asked):
                found += entries
        return found

    async def _lasting(self, path: str) -> list[Entry]:
        """The entries right below a path that are nobody's; none if it does not exist."""
        try:
            return [entry for entry in await self._registry.children(path) if not entry.is_ephemeral]
        except UnknownEntry:
            return []

    async def _copy_paths(self, paths: set[str]) -> None:
        found: list[Entry] = []
        gone: list[str] = []
        for path in sorted(paths):
            entry = await self._registry.read(path)
            if entry is None:
                gone.append(self._place(path))
            elif not entry.is_ephemeral:
                found.append(entry)
        await self._write(found, gone)

    async def _write(self, entries: list[Entry], gone: Iterable[str]) -> int:
        placed = [Entry(self._place(entry.path), entry.value, entry.version) for entry in entries]
        written: int = await self._in_thread(lambda: self._store.put(placed, gone)) if placed or gone else 0
        self.rows += written
        return written

    def _place(self, path: str) -> str:
        """Where an entry stands in the mirror: below /dmq, wherever the cluster is in its registry."""
        return DEFAULT_ROOT + path.removeprefix(self._paths.root)

    def _say(self) -> None:
        is_behind = self.is_writer and self.behind_seconds > _BEHIND_SECONDS
        if is_behind and not self._is_told:
            seconds = round(self.behind_seconds)
            log.warning("mirror is behind", seconds=seconds, changes=self.behind_changes, reason=self.trouble)
        elif self._is_told and not is_behind:
            log.info("mirror has caught up", database=self._store.shown)
        self._is_told = is_behind
