"""Writes of metadata: what every broker keeps a view of is written together with `/dmq/change`.

What always holds: a write of metadata and its mention in `/dmq/change` happen both or not at all, and the mentions of
two writers never replace each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from dmq.errors import Busy, RegistryConflict
from dmq.registry.contents import ChangeContent, decode_content, encode_content
from dmq.registry.paths import Paths
from dmq.registry.registry import Check, Create, Operation, Put, Registry

__all__ = ["Metadata"]

_ATTEMPTS: Final = 50

Write: TypeAlias = Callable[[Sequence[Operation]], Awaitable[tuple[int | None, ...]]]


class Metadata:
    """The door for one process's writes of metadata.

    Parameters:
        write: as of `Registry`; its own if left out.
    """

    def __init__(self, registry: Registry, paths: Paths, write: Write | None = None) -> None:
        self.registry = registry
        self.paths = paths
        self._write = write or registry.write
        self._lock = asyncio.Lock()

    async def write(self, operations: Sequence[Operation], path: str) -> tuple[int | None, ...]:
        """Carry out operations, and mention a path in `/dmq/change`; returns the versions that they have made.

        Raises:
            RegistryConflict: one of the operations does not apply.
            SessionExpired, RegistryDown, WriteUnknown: as of `Registry`.
            Busy: others write metadata all the time.
        """
        async with self._lock:
            for _ in range(_ATTEMPTS):
                mention = await self._mention(path)
                try:
                    return (await self._write([*operations, mention]))[: len(operations)]
                except RegistryConflict as error:
                    if error.detail.get("path") != self.paths.change:
                        raise
        raise Busy("others write metadata all the time: try again", retry_after_ms=100)

    async def write_unmentioned(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """Write what no broker keeps a view of."""
        return await self._write(operations)

    async def touch(self, path: str) -> None:
        """Have every broker read a path again."""
        await self.write([], path)

    async def settle(self) -> None:
        """A write that does nothing: when it is answered, those before it have been carried out or never will be."""
        await self._write([Check(self.paths.root, None)])

    async def _mention(self, path: str) -> Operation:
        entry = await self.registry.read(self.paths.change)
        if entry is None:
            return Create(self.paths.change, encode_content(ChangeContent().touched(path)))
        content = decode_content(ChangeContent, entry.value, entry.path) if entry.value else ChangeContent()
        return Put(self.paths.change, encode_content(content.touched(path)), entry.version)
