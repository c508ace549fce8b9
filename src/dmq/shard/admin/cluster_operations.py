"""What can be done to a cluster as a whole: look, raise its format, take its registry out and put it back. No wire.

What always holds: no revision of a record, no format and no count of shards gets lower; an entry that is there and not
older stays as it is; nothing of another cluster is taken but metadata, and only if a person says so; what was begun and
not ended may be begun again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from dmq.errors import InvalidSettings, ShardConflict, UnknownEntry
from dmq.event_log import EventLog
from dmq.protocol.cluster.cluster import ENTRIES_MAX, PAGE_BYTES_MAX
from dmq.protocol.cluster.member import MemberState
from dmq.registry.contents import (
    CLUSTER_FORMAT,
    ClusterContent,
    Content,
    ShardContent,
    ShardsContent,
    TopicState,
    decode_content,
    encode_content,
)
from dmq.registry.metadata import Metadata
from dmq.registry.paths import name_of
from dmq.registry.registry import Create, Delete, Entry, Operation, Put, needs_registry
from dmq.registry.url import registry_troubles
from dmq.shard.admin.cluster_overview import ClusterOverview, ClusterSighting
from dmq.shard.admin.operations import Operations
from dmq.shard.admin.rebuilt_record import rebuilt_record
from dmq.shard.record.enrolment import create_cluster

__all__ = ["ClusterOperations", "Outcome"]

log = EventLog(__name__)

_LEADER: Final = "leader"
_METADATA: Final = ("topic", "limit", "kv")


class Outcome(NamedTuple):
    """What became of an entry, or would."""

    path: str
    what: str
    is_written: bool = False


class ClusterOperations:
    """A cluster, as a member or a visitor reaches it."""

    def __init__(self, shards: Operations) -> None:
        self._shards = shards
        self._view = shards.view
        self._registry = shards.view.registry
        self._paths = shards.view.paths
        self._metadata = Metadata(self._registry, self._paths, self._view.write)

    # --- looking --------------------------------------------------------------------------------------------------

    async def show(self) -> ClusterOverview:
        """
        Raises:
            RegistryDown: the registry does not answer.
            UnknownEntry: it holds no cluster.
        """
        with needs_registry():
            cluster = await self._shards.cluster()
            nodes = await self._shards.nodes()
            return ClusterOverview(
                ClusterSighting(
                    cluster=cluster,
                    shards=await self._shards.all_shards(nodes),
                    nodes=nodes,
                    session_seconds=self._registry.session_seconds,
                    topics=await self._topic_count(),
                    troubles=await registry_troubles(self._registry),
                    own_obstacle=self._shards.own_obstacle,
                )
            )

    async def _topic_count(self) -> int:
        view = self._shards.cluster_view
        if view is not None and view.is_known:  # counting them in the registry reads them all
            return sum(topic.state is TopicState.OPEN for topic in view.topics.values())
        return len(await self._children(self._paths.topics))

    async def _children(self, path: str) -> list[Entry]:
        try:
            return await self._registry.children(path)
        except UnknownEntry:
            return []

    # --- the format -----------------------------------------------------------------------------------------------

    async def finalize(self, *, by: str) -> tuple[int, str]:
        """Raise the format to what all members know; returns it, and in words what was done.

        Raises:
            ShardConflict: a member does not run, so nobody knows what it knows.
        """
        with needs_registry():
            entry = await self._registry.read(self._paths.cluster)
            nodes, records = await self._shards.nodes(), await self._children(self._paths.shards)
        if entry is None:
            raise UnknownEntry("the registry has no cluster: check that it is the one of these brokers")
        cluster = decode_content(ClusterContent, entry.value, entry.path)
        for shard in records:
            for member in decode_content(ShardContent, shard.value, shard.path).members:
                if member not in nodes:
                    raise ShardConflict(
                        f"{member} of shard {name_of(shard.path)} does not run, so its newest format is not known: "
                        "start it, or remove it with dmq shard remove",
                        member=member,
                    )
        known = min((node.format for node in nodes.values()), default=CLUSTER_FORMAT)
        wanted = min(known, CLUSTER_FORMAT)
        if wanted <= cluster.format:
            older = [name for name, node in sorted(nodes.items()) if node.format < CLUSTER_FORMAT]
            rest = f"; {', '.join(older)} know no newer one" if older and cluster.format < CLUSTER_FORMAT else ""
            return cluster.format, f"the cluster has format {cluster.format} already{rest}"
        raised = encode_content(msgspec.structs.replace(cluster, format=wanted))
        with needs_registry():
            await self._view.write([Put(entry.path, raised, entry.version)])
        log.warning("format of the cluster raised", format=wanted, before=cluster.format, by=by)
        return wanted, f"the cluster has format {wanted}, before {cluster.format}: older brokers cannot join any more"

    # --- out ------------------------------------------------------------------------------------------------------

    async def export(self, after: str = "") -> tuple[list[tuple[str, bytes]], str]:
        """Entries below the root, parents first, from a path on; and where to go on after them, "" if these are all.

        Those that brokers hold for as long as they run are left out.
        """
        with needs_registry():
            await self._shards.cluster()
            rows = sorted([row async for row in self._walk()], key=lambda row: row[0].split("/"))
        rest = [row for row in rows if row[0].split("/") > after.split("/")] if after else rows
        page: list[tuple[str, bytes]] = []
        size = 0
        for row in rest:
            if len(page) == ENTRIES_MAX or (page and size + len(row[1]) > PAGE_BYTES_MAX):
                return page, page[-1][0]
            page.append(row)
            size += len(row[0]) + len(row[1])
        return page, ""

    async def _walk(self) -> AsyncIterator[tuple[str, bytes]]:
        paths = self._paths
        for top in (paths.cluster, paths.shards, paths.topics, paths.limits, paths.key_values):
            entry = await self._registry.read(top)
            if entry is not None:
                yield self._short(top), entry.value
                async for row in self._below(top):
                    yield row

    async def _below(self, path: str) -> AsyncIterator[tuple[str, bytes]]:
        for entry in await self._children(path):
            if entry.is_ephemeral:
                continue
            yield self._short(entry.path), entry.value
            if path != self._paths.shards:
                async for row in self._below(entry.path):
                    yield row

    def _short(self, path: str) -> str:
        return path.removeprefix(f"{self._paths.root}/")

    # --- in -------------------------------------------------------------------------------------------------------

    async def take_in(
        self, cluster: str, entries: Sequence[tuple[str, bytes]], *, dry_run: bool, foreign: bool, by: str
    ) -> list[Outcome]:
        """Put what is not in the registry, or older there; parents come first.

        Parameters:
            cluster: whose entries they are.
            foreign: they may be another cluster's; then only metadata is taken.

        Raises:
            InvalidSettings: they are another cluster's, or no entries of a cluster.
            RegistryDown: the registry does not answer.
        """
        with needs_registry():
            entry = await self._registry.read(self._paths.cluster)
            own = "" if entry is None else decode_content(ClusterContent, entry.value, entry.path).id
            if own and own != cluster and not foreign:
                raise InvalidSettings(
                    f"the registry is that of cluster {own}, and these entries are of cluster {cluster}: nothing was "
                    "written; with --foreign topics, limits and keys are taken, and no shards",
                    cluster=own,
                )
            if not own and foreign and own != cluster:
                raise InvalidSettings(
                    "the registry has no cluster yet: start its brokers first, then import with --foreign"
                )
            if not own and not dry_run:
                await create_cluster(self._view, cluster)
            outcomes = []
            for path, value in entries:
                is_foreign = own not in ("", cluster)
                outcome, operations = await self._decide(path, value, is_foreign=is_foreign)
                if operations and not dry_run:
                    await self._metadata.write(operations, f"{self._paths.root}/{path}")
                outcomes.append(outcome)
        if not dry_run:
            log.warning("registry imported", by=by, written=sum(outcome.is_written for outcome in outcomes))
        return outcomes

    async def _decide(self, path: str, value: bytes, *, is_foreign: bool) -> tuple[Outcome, list[Operation]]:
        """What is to be done with one entry."""
        kind, _, rest = path.partition("/")
        full = f"{self._paths.root}/{path}"
        if (
            kind not in ("cluster", "shard", *_METADATA)
            or (kind == "shard" and "/" in rest)
            or (kind == "cluster" and rest)
        ):
            raise InvalidSettings(f"{path!r} is not an entry of a cluster: dmq cluster export did not write the file")
        if is_foreign and kind not in _METADATA:
            return Outcome(path, "not taken: it is another cluster's"), []
        found = await self._registry.read(full)
        if kind == "shard" and rest:
            return await self._decide_record(path, decode_content(ShardContent, value, path), found)
        if found is None:
            return Outcome(path, "created", is_written=True), [Create(full, value)]
        if not value or _is_same(found.value, value):
            return Outcome(path, "it exists already"), []
        if kind in ("cluster", "shard"):
            return _raised(path, value, found)
        return Outcome(path, "kept: it exists, and is another one"), []

    async def _decide_record(
        self, path: str, record: ShardContent, found: Entry | None
    ) -> tuple[Outcome, list[Operation]]:
        full = f"{self._paths.root}/{path}"
        value = encode_content(record)
        if found is None:
            what = f"created with revision {record.revision}"
            return Outcome(path, what, is_written=True), [*await self._counted(record.number), Create(full, value)]
        there = decode_content(ShardContent, found.value, full)
        if there.revision >= record.revision:
            return Outcome(path, f"kept: the registry has revision {there.revision}, the file {record.revision}"), []
        leader = f"{full}/{_LEADER}"
        if await self._registry.read(leader) is not None:
            return Outcome(path, "kept: the shard has a leader; stop its members first"), []
        what = f"revision {record.revision} in the place of {there.revision}"
        # The record is put only while nobody leads.
        absence: list[Operation] = [Create(leader, b"{}"), Delete(leader, None)]
        return Outcome(path, what, is_written=True), [*absence, Put(full, value, found.version)]

    async def _counted(self, number: int) -> list[Operation]:
        """Have a number never given again."""
        entry = await self._registry.read(self._paths.shards)
        if entry is None:
            return []
        numbers = decode_content(ShardsContent, entry.value, entry.path) if entry.value else ShardsContent()
        if numbers.numbers >= number:
            return []
        counted = msgspec.structs.replace(numbers, numbers=number)
        return [Put(entry.path, encode_content(counted), entry.version)]

    # --- from members ---------------------------------------------------------------------------------------------

    async def rebuild(
        self, states: Iterable[MemberState], *, dry_run: bool, accept_loss: bool, by: str
    ) -> list[Outcome]:
        """Build the records of shards anew from what their members say.

        Raises:
            InvalidSettings: the members are another cluster's.
            ShardConflict: something may be lost, and that is not accepted.
            RegistryDown: the registry does not answer.
        """
        by_shard: dict[str, list[MemberState]] = defaultdict(list)
        for state in states:
            by_shard[state.shard].append(state)
        if not by_shard:
            raise InvalidSettings("no member has answered: name them with --url, each at its port for clients")
        clusters = {state.cluster for some in by_shard.values() for state in some}
        if len(clusters) > 1:
            raise InvalidSettings(f"these members are of several clusters ({', '.join(sorted(clusters))}): name one's")
        (cluster,) = clusters
        with needs_registry():
            entry = await self._registry.read(self._paths.cluster)
            own = "" if entry is None else decode_content(ClusterContent, entry.value, entry.path).id
            if own not in ("", cluster):
                raise InvalidSettings(
                    f"the registry is that of cluster {own}, and the members are of {cluster}: check --registry"
                )
            if not own and not dry_run:
                await create_cluster(self._view, cluster)
            outcomes = [
                await self._rebuild(name, some, dry_run=dry_run, accept_loss=accept_loss)
                for name, some in sorted(by_shard.items())
            ]
        if not dry_run:
            log.warning("records rebuilt from members", by=by, shards=",".join(by_shard))
        return outcomes

    async def _rebuild(self, shard: str, states: list[MemberState], *, dry_run: bool, accept_loss: bool) -> Outcome:
        full = self._paths.shard(shard)
        entry = await self._registry.read(full)
        found = None if entry is None else decode_content(ShardContent, entry.value, full)
        record = rebuilt_record(shard, states, found, accept_loss=accept_loss)
        path = self._short(full)
        if record is None:
            return Outcome(path, "kept: no member has seen a newer one")
        operations: list[Operation] = []
        if not record.number:
            numbers = await self._registry.read(self._paths.shards)
            last = decode_content(ShardsContent, numbers.value, full).numbers if numbers and numbers.value else 0
            record = msgspec.structs.replace(record, number=last + 1)
        if not dry_run:
            operations += await self._counted(record.number)
            value = encode_content(record)
            operations.append(Create(full, value) if entry is None else Put(full, value, entry.version))
            await self._metadata.write(operations, full)
        names = {replica: name for name, replica in record.members.items()}
        in_sync = ", ".join(names.get(one, one) for one in record.in_sync)
        what = f"rebuilt with revision {record.revision}, epoch {record.epoch}, in sync: {in_sync}"
        return Outcome(path, f"{what}{' (unsafe)' if record.unsafe > record.epoch else ''}", is_written=True)


def _is_same(one: bytes, other: bytes) -> bool:
    """Whether two values say the same, however they are written."""
    try:
        return one == other or bool(msgspec.json.decode(one) == msgspec.json.decode(other))
    except msgspec.MsgspecError:
        return False


def _raised(path: str, value: bytes, found: Entry) -> tuple[Outcome, list[Operation]]:
    """The cluster's format, or the count of shards: the higher one counts."""
    kind: type[Content] = ClusterContent if path == "cluster" else ShardsContent
    field = "format" if path == "cluster" else "numbers"
    new, old = decode_content(kind, value, path), decode_content(kind, found.value, path) if found.value else None
    wanted, there = getattr(new, field), 0 if old is None else getattr(old, field)
    if wanted <= there:
        return Outcome(path, f"kept: its {field} is {there}"), []
    raised = new if old is None else msgspec.structs.replace(old, **{field: wanted})
    what = f"its {field} is {wanted}, before {there}"
    return Outcome(path, what, is_written=True), [Put(found.path, encode_content(raised), found.version)]
