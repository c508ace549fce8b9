"""The entries of topics in the registry: read, and rewritten one at a time, by the leader of any shard.

What always holds: an entry is written in the version that was read, together with `/dmq/change`; a write that was not
answered is settled by a later one that is, and then decided anew. An entry goes only when it is a tombstone and no
shard has data of the topic any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from dmq.errors import Busy, DMQError, RegistryConflict, SessionExpired, UnknownEntry, WriteUnknown
from dmq.registry.cluster_view import ClusterView
from dmq.registry.contents import (
    ConsumerContent,
    LimitContent,
    TopicContent,
    TopicState,
    decode_content,
    encode_content,
)
from dmq.registry.metadata import Metadata
from dmq.registry.paths import name_of
from dmq.registry.registry import Check, Create, Delete, Operation, Put, needs_registry

__all__ = ["TopicEntries"]

_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.1
_DELETED_MAX: Final = 100  # entries of groups that go in one write

Decide = Callable[[TopicContent | None], TopicContent | None]


class _Read(NamedTuple):
    content: TopicContent | None
    version: int


class TopicEntries:
    """The topics of one cluster.

    Parameters:
        view: is told what was read and written.
    """

    def __init__(self, metadata: Metadata, view: ClusterView) -> None:
        self.metadata = self._metadata = metadata
        self._registry = metadata.registry
        self._paths = metadata.paths
        self.view = view

    async def read(self, name: str) -> TopicContent | None:
        """The entry as it is now; None if there is none.

        Raises:
            RegistryDown: the registry does not answer.
        """
        with needs_registry():
            return (await self._read(name)).content

    async def _read(self, name: str) -> _Read:
        path = self._paths.topic(name)
        entry = await self._registry.read(path)
        content = None if entry is None else decode_content(TopicContent, entry.value, path)
        self.view.saw_topic(name, content)
        return _Read(content, 0 if entry is None else entry.version)

    async def rewrite(self, name: str, decide: Decide) -> TopicContent | None:
        """Put an entry as it should be; returns it as it is then.

        Parameters:
            decide: what it should be, for what it is; None if it is to stay. It may be asked several times, and may
                find its own work done. What it raises is raised.

        Raises:
            RegistryDown: the registry does not answer; nothing was changed.
            WriteUnknown: it went away before it was clear whether the entry was changed.
            Busy: others write it all the time.
        """
        path = self._paths.topic(name)
        for _ in range(_ATTEMPTS):
            with needs_registry():
                content, version = await self._read(name)
                wanted = decide(content)
                if wanted is None or wanted == content:
                    return content
                value = encode_content(wanted)
                operation = Create(path, value) if content is None else Put(path, value, version)
                if await self._write([operation], path):
                    self.view.saw_topic(name, wanted)
                    return wanted
        raise Busy(f"the entry of topic {name!r} is written all the time: try again", retry_after_ms=100)

    async def _write(self, operations: list[Operation], path: str) -> bool:
        """Whether it was carried out; if not, it is to be decided anew."""
        try:
            await self._metadata.write(operations, path)
        except (RegistryConflict, SessionExpired):
            await asyncio.sleep(_PAUSE_SECONDS)
            return False
        except WriteUnknown:
            await self._settle()
            return False
        return True

    async def _settle(self) -> None:
        """Wait until a write that was not answered is carried out, or never will be."""
        for _ in range(_ATTEMPTS):
            try:
                await self._metadata.settle()
            except WriteUnknown:
                await asyncio.sleep(_PAUSE_SECONDS)
            except (RegistryConflict, SessionExpired):
                return
            except DMQError as error:
                raise WriteUnknown(
                    f"whether the change took place is not known: {error.message}; look with dmq topic show once the "
                    "registry answers"
                ) from error
            else:
                return
        raise WriteUnknown(
            "whether the change took place is not known: the registry does not answer writes; look with dmq topic show"
        )

    async def put_limit(self, app: str, content: LimitContent | None) -> None:
        """Write the limit of an app; None takes it away.

        Raises:
            RegistryDown, WriteUnknown, Busy: as of `rewrite`.
        """
        path = self._paths.limit(app)
        for _ in range(_ATTEMPTS):
            entry = await self._registry.read(path)
            if content is None:
                operation: Operation | None = None if entry is None else Delete(path, entry.version)
            else:
                value = encode_content(content)
                operation = Create(path, value) if entry is None else Put(path, value, entry.version)
            if operation is None or await self._write([operation], path):
                await self.view.refresh()
                return
        raise Busy(f"the limit of app {app!r} is written all the time: try again", retry_after_ms=100)

    async def note_group(self, topic: str, group: str, *, is_gone: bool = False) -> None:
        """Write that a group may consume a topic, or that it does not any more (D-01).

        Raises:
            RegistryDown, WriteUnknown, Busy: as of `rewrite`.
        """
        path = self._paths.consumer(topic, group)
        for _ in range(_ATTEMPTS):
            entry, above = await self._registry.read(path), await self._registry.read(self._paths.topic(topic))
            if above is None or (entry is None and is_gone):
                return
            incarnation = decode_content(TopicContent, above.value, above.path).incarnation
            before = ConsumerContent() if entry is None else decode_content(ConsumerContent, entry.value, path)
            noted = encode_content(msgspec.structs.replace(before, incarnation=incarnation))
            if entry is None:
                operation: Operation = Create(path, noted)
            elif is_gone:
                operation = Delete(path, None)
            elif before.incarnation == incarnation:
                return
            else:
                operation = Put(path, noted, entry.version)
            if await self._write([operation], path):
                return

    async def groups(self, topic: str, incarnation: str) -> list[str]:
        """The groups that have positions in an incarnation of a topic, as far as the registry names them.

        Raises:
            RegistryDown: the registry does not answer.
        """
        try:
            with needs_registry():
                entries = await self._registry.children(self._paths.topic(topic))
        except UnknownEntry:
            return []
        found = [(entry.path, decode_content(ConsumerContent, entry.value, entry.path)) for entry in entries]
        return [name_of(path) for path, content in found if content.incarnation == incarnation]

    async def forget(self, name: str, shard: str) -> None:
        """A shard has nothing of a deleted topic any more; the last one takes the tombstone away.

        Raises:
            RegistryDown, WriteUnknown, Busy: as of `rewrite`; it is to be tried again.
        """

        def decide(content: TopicContent | None) -> TopicContent | None:
            if content is None or content.state is not TopicState.DELETED:
                return None
            slots = [slot for slot in content.slots if slot[0] != shard and slot[0] in self.view.shards]
            return msgspec.structs.replace(content, slots=slots)

        left = await self.rewrite(name, decide)
        if left is not None and left.state is TopicState.DELETED and not left.slots:
            with needs_registry():
                await self._take_away(name)

    async def _take_away(self, name: str) -> None:
        path = self._paths.topic(name)
        for _ in range(_ATTEMPTS):
            content, version = await self._read(name)
            if content is None or content.state is not TopicState.DELETED or content.slots:
                return
            below = await self._registry.children(path)
            for at in range(0, len(below), _DELETED_MAX):
                gone: list[Operation] = [Delete(one.path, None) for one in below[at : at + _DELETED_MAX]]
                await self._write([Check(path, version), *gone], path)
            if await self._write([Delete(path, version)], path):
                self.view.saw_topic(name, None)
                return
