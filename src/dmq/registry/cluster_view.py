"""The view of a cluster: its brokers, shards and topics as the registry has them, and the routes that follow from that.

Every member of a cluster keeps one, and so may a name server or a client that reads the registry itself. Brokers are
watched: one that comes is read at once, those that rewrite their entries are read together, a second later.
`/dmq/change` is watched, and read every 3 seconds in case a watch is told late: it names what was written last, so that
one read says what else to read. The records of shards are also read when a broker of theirs comes, goes or moves, and
32 of them in turn every 30 seconds. Everything is read at the start, once an hour, and whenever the names in
`/dmq/change` do not reach back far enough. `/dmq/shard/<shard>/leader`, which every leader writes every second, is not
looked at.

What always holds: what was known stays known while the registry does not answer; an entry that cannot be read stays as
it was known. A shard's leader is who won the epoch of its record, as long as that broker is registered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from dmq.clock import Clock
from dmq.errors import RegistryDown, WrongFormat
from dmq.event_log import EventLog
from dmq.model import topic_of_results
from dmq.protocol.cluster.route import SLOTS_MAX, RouteReply, ShardRoute, SlotRoute, TopicRoute
from dmq.protocol.session import BrokerInfo
from dmq.registry.contents import (
    ChangeContent,
    ClusterContent,
    Content,
    LimitContent,
    NodeContent,
    ShardContent,
    ShardState,
    TopicContent,
    TopicState,
    decode_content,
)
from dmq.registry.paths import Paths, name_of
from dmq.registry.registry import UNAVAILABLE, Entry, Registry
from dmq.registry.watch import Changes, Watch, wait_for_first

__all__ = ["ClusterView", "ViewChange"]

log = EventLog(__name__)

C = TypeVar("C", bound=Content)

_READ_SECONDS: Final = 3.0
_SHARDS_SECONDS: Final = 30.0
_SHARDS_AT_A_TIME: Final = 32
_PULL_SECONDS: Final = 3600.0
_AGAIN_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 1.0
_ADDRESSES_MAX: Final = 64


class ViewChange(NamedTuple):
    """What has become another route.

    Attributes:
        topics: those whose entry has changed.
        has_shards: some shard has another leader, other members, another state or weight.
        is_all: any topic may have changed.
        has_limits: some app has another limit.
    """

    topics: frozenset[str] = frozenset()
    has_shards: bool = False
    is_all: bool = False
    has_limits: bool = False


class ClusterView:
    """One cluster, as one process sees it.

    Attributes:
        cluster: its id; 0 while that is not known.
        nodes: brokers that run, by name.
        shards: records, by name.
        topics: by name, with the tombstones of deleted ones.
        limits: of apps, by name.
        is_known: everything was read at least once.
        is_down: the registry did not answer the last time.
        listeners: told of each change, after it.
    """

    def __init__(self, registry: Registry, paths: Paths, clock: Clock) -> None:
        self._registry = registry
        self._paths = paths
        self._clock = clock
        self.cluster = 0
        self.nodes: dict[str, NodeContent] = {}
        self.shards: dict[str, ShardContent] = {}
        self.topics: dict[str, TopicContent] = {}
        self.limits: dict[str, LimitContent] = {}
        self.is_known = False
        self.is_down = False
        self.listeners: list[Callable[[ViewChange], None]] = []
        self._seen: tuple[int, int] | None = None  # version and count of /dmq/change
        self._pulled_at = self._shards_at = float("-inf")
        self._stale_nodes: set[str] | None = None  # paths of brokers to be read; None: all of them
        self._rows: list[ShardRoute] = []  # of all shards, as they follow from what is known
        # What has changed and was not told yet: reading may break off in the middle.
        self._told_rows = self._rows
        self._concerned: set[str] = set()  # shards to be read
        self._last_shard = ""  # of those that are read in turn
        self._new_topics: set[str] = set()
        self._has_new_limits = False
        self._lock = asyncio.Lock()
        self._is_wanted = asyncio.Event()

    # --- keeping it -------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Read what changes; for ever."""
        registry, paths = self._registry, self._paths
        with registry.watch(paths.nodes) as nodes, registry.watch(paths.change) as change:
            while True:
                self._take(nodes.take())
                try:
                    await self.refresh()
                except UNAVAILABLE as error:
                    log.debug("cluster not read", error=error)
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                await self._something(nodes, change)

    def _take(self, changes: Changes | None) -> bool:
        """Note which brokers are to be read; whether one of them is not known yet."""
        if changes is None:
            return False
        if changes.is_all:
            self._stale_nodes = None
        elif self._stale_nodes is not None:
            self._stale_nodes.update(changes.paths)
        return changes.is_all or any(name_of(path) not in self.nodes for path in changes.paths)

    async def _brokers_of(self, nodes: Watch) -> None:
        """Wait until brokers are to be read. In a large cluster some rewrite their entries all the time."""
        if not self._take(await nodes.next()):
            await asyncio.sleep(_GATHER_SECONDS)

    async def _something(self, nodes: Watch, change: Watch) -> None:
        await wait_for_first((self._brokers_of(nodes), change.wait(), self._is_wanted.wait()), _READ_SECONDS)
        change.take()
        self._is_wanted.clear()

    def ask(self) -> None:
        """Have what has changed read soon: somebody knows more than we do."""
        self._is_wanted.set()

    async def refresh(self) -> None:
        """Read what has changed since the last time.

        Raises:
            RegistryDown, …: what was known stays known.
        """
        async with self._lock:
            try:
                found = await self._read()
            except RegistryDown:
                self.is_down = True
                raise
            self.is_down = False
        if found != ViewChange():
            for listener in self.listeners:
                listener(found)

    async def _read(self) -> ViewChange:
        now = self._clock.monotonic()
        if not self.cluster:
            await self._read_cluster()
        await self._read_nodes()
        entry = await self._registry.read(self._paths.change)
        change = ChangeContent() if entry is None else _decoded(ChangeContent, entry) or ChangeContent()
        seen = (-1 if entry is None else entry.version, change.count)
        paths = self._news(seen, change)
        is_all = paths is None or now - self._pulled_at >= _PULL_SECONDS
        if is_all:
            await self._pull()
            self._pulled_at = self._shards_at = now
        else:
            is_due = now - self._shards_at >= _SHARDS_SECONDS
            if is_due:
                await self._read_next_shards()
                self._shards_at = now
            concerned = () if is_due else map(self._paths.shard, self._concerned)
            for path in dict.fromkeys([*concerned, *(paths or ())]):
                await self._read_path(path)
        is_first, self.is_known, self._seen = not self.is_known, True, seen
        found = ViewChange(
            frozenset(self._new_topics),
            self._rows != self._told_rows or is_first,
            is_first,
            has_limits=self._has_new_limits,
        )
        self._told_rows, self._concerned, self._new_topics, self._has_new_limits = self._rows, set(), set(), False
        return found

    def _news(self, seen: tuple[int, int], change: ChangeContent) -> Iterable[str] | None:
        """The paths that were written since the last time; None if that cannot be told."""
        if self._seen is None:
            return None
        versions, counts = seen[0] - self._seen[0], seen[1] - self._seen[1]
        if versions == 0 and counts == 0:
            return ()
        if versions != counts or not 0 < counts <= len(change.paths):
            return None
        return change.paths[-counts:]

    async def _read_cluster(self) -> None:
        entry = await self._registry.read(self._paths.cluster)
        found = None if entry is None else _decoded(ClusterContent, entry)
        self.cluster = 0 if found is None else int(found.id, 16)

    async def _read_nodes(self) -> None:
        """Read the brokers that have changed, and note the shards whose routes may be others by that."""
        stale, before = self._stale_nodes, self.nodes
        self._stale_nodes = set()  # what is told from now on is read the next time
        try:
            if stale is None:
                entries = await self._registry.children(self._paths.nodes)
                nodes = _all_decoded(NodeContent, entries, before)
            else:
                nodes = dict(before)
                for path in stale - {self._paths.nodes}:
                    await self._read_one(NodeContent, path, nodes)
        except BaseException:
            self._stale_nodes = None if stale is None or self._stale_nodes is None else self._stale_nodes | stale
            raise
        self.nodes = nodes
        names = before.keys() | nodes.keys() if stale is None else set(map(name_of, stale))
        changed = {name for name in names if _routed(before.get(name)) != _routed(nodes.get(name))}
        if changed:
            self._make_rows()
        known = [node for name in changed for node in (before.get(name), nodes.get(name)) if node is not None]
        self._concerned |= {node.shard for node in known if node.shard}

    async def _read_shards(self) -> None:
        entries = await self._registry.children(self._paths.shards)
        self.shards = _all_decoded(ShardContent, entries, self.shards)
        self._make_rows()

    async def _read_next_shards(self) -> None:
        """Read shards in turn, in case a write of one was not mentioned; of a few, all."""
        names = sorted(self.shards)
        if len(names) <= _SHARDS_AT_A_TIME:
            await self._read_shards()
            return
        start = next((at for at, name in enumerate(names) if name > self._last_shard), 0)
        for name in names[start : start + _SHARDS_AT_A_TIME]:
            await self._read_path(self._paths.shard(name))
            self._last_shard = name

    async def _pull(self) -> None:
        """Read all shards, topics and limits."""
        before = self.topics
        await self._read_shards()
        topics = await self._registry.children(self._paths.topics)
        self.topics = _all_decoded(TopicContent, topics, self.topics)
        self._new_topics |= {
            name for name in before.keys() | self.topics.keys() if before.get(name) != self.topics.get(name)
        }
        limits = _all_decoded(LimitContent, await self._registry.children(self._paths.limits), self.limits)
        self._has_new_limits |= limits != self.limits
        self.limits = limits

    async def _read_path(self, path: str) -> None:
        """Read what was written at a path."""
        folder, _, _ = path.rpartition("/")
        if folder == self._paths.shards:
            if await self._read_one(ShardContent, path, self.shards):
                self._make_rows()
        elif folder == self._paths.limits:
            self._has_new_limits |= await self._read_one(LimitContent, path, self.limits)
        elif folder == self._paths.topics and await self._read_one(TopicContent, path, self.topics):
            self._new_topics.add(name_of(path))

    async def _read_one(self, kind: type[C], path: str, known: dict[str, C]) -> bool:
        """Take one entry over; returns whether it was another."""
        entry, name = await self._registry.read(path), name_of(path)
        before = known.get(name)
        if entry is None:
            known.pop(name, None)
        elif (found := _decoded(kind, entry)) is not None:
            known[name] = found
        return known.get(name) != before

    def saw_topic(self, name: str, content: TopicContent | None) -> None:
        """Somebody in this process has written a topic, or read it."""
        before = self.topics.get(name)
        if content is None:
            self.topics.pop(name, None)
        else:
            self.topics[name] = content
        if content != before:
            for listener in self.listeners:
                listener(ViewChange(frozenset({name})))

    # --- routes -----------------------------------------------------------------------------------------------------

    def leader_of(self, shard: str) -> tuple[str, NodeContent] | None:
        """The broker that leads a shard, as far as is known."""
        record = self.shards.get(shard)
        if record is None or record.leader is None:
            return None
        for name, node in self.nodes.items():
            if node.shard == shard and node.replica == record.leader:
                return name, node
        return None

    def brokers(self, *, apart_from: str) -> list[BrokerInfo]:
        """The brokers that run, but for those of one shard."""
        leaders = {record.leader for record in self.shards.values()} - {None}
        return [
            BrokerInfo(
                name,
                node.address,
                shard=node.shard,
                is_leader=node.replica in leaders,
                is_writable=node.replica in leaders,
                epoch=self.shards[node.shard].epoch if node.shard in self.shards else 0,
            )
            for name, node in sorted(self.nodes.items(), key=lambda row: (row[1].shard, row[0]))
            if node.shard != apart_from
        ]

    def reply(self, topics: Iterable[str], own: ShardRoute | None = None) -> RouteReply:
        """The routes of these topics, those that there are, and all shards.

        Parameters:
            own: the shard of the member that answers, which knows more of it than this view.
        """
        shards = self._rows
        if own is not None:
            before = next((row for row in shards if row.number == own.number), None)
            if before is None or own.epoch >= before.epoch:
                weight = 100 if before is None else before.weight
                shards = [row for row in shards if row is not before]
                shards.append(_merged(own, weight, is_writable=before is None or before.is_writable))
        rows = [row for name in topics if (row := self.topic_route(name)) is not None]
        return RouteReply(self.cluster, sorted(shards, key=_number)[:SLOTS_MAX], rows)

    def topic_route(self, name: str) -> TopicRoute | None:
        """The route of a topic; that of a topic's results has one queue in each of its shards."""
        of = topic_of_results(name)
        content = self.topics.get(name if of is None else of)
        if content is None or content.state is not TopicState.OPEN:
            return None
        slots = [
            SlotRoute(record.number, queues if of is None else 1, is_writable=shard not in content.removed)
            for shard, queues in content.slots
            if (record := self.shards.get(shard)) is not None
        ]
        return TopicRoute(
            name,
            int(content.incarnation, 16),
            slots[:SLOTS_MAX],
            slots_version=content.slots_version,
            is_priority=of is None and bool(content.settings.get("priority", False)),
        )

    def _make_rows(self) -> None:
        members: dict[str, list[NodeContent]] = {}
        for _, node in sorted(self.nodes.items()):
            members.setdefault(node.shard, []).append(node)
        self._rows = [_shard_row(name, record, members.get(name, [])) for name, record in self.shards.items()]


def _routed(node: NodeContent | None) -> object:
    """What routes depend on of a broker's entry."""
    return None if node is None else (node.address, node.shard, node.replica, node.weight)


def _shard_row(name: str, record: ShardContent, nodes: list[NodeContent]) -> ShardRoute:
    leader = next((node for node in nodes if record.leader is not None and node.replica == record.leader), None)
    addresses = [node.address for node in nodes]
    if leader is not None:
        addresses = [leader.address, *(one for one in addresses if one != leader.address)]
    return ShardRoute(
        record.number,
        name,
        record.epoch,
        leader="" if leader is None else leader.address,
        members=addresses[:_ADDRESSES_MAX],
        is_writable=record.state is ShardState.OPEN,
        weight=record.weight * (100 if leader is None else leader.weight) // 100,
    )


def _merged(own: ShardRoute, weight: int, *, is_writable: bool) -> ShardRoute:
    return ShardRoute(
        own.number,
        own.name,
        own.epoch,
        leader=own.leader,
        members=own.members,
        is_writable=is_writable,
        weight=weight,
    )


def _number(row: ShardRoute) -> int:
    return row.number


def _decoded(kind: type[C], entry: Entry) -> C | None:
    """What an entry holds; None if it cannot be read, which is logged."""
    try:
        return decode_content(kind, entry.value, entry.path)
    except WrongFormat as error:
        log.error("an entry of the registry cannot be read: what was known stays", once_for=entry.path, error=error)
        return None


def _all_decoded(kind: type[C], entries: Iterable[Entry], known: dict[str, C]) -> dict[str, C]:
    found: dict[str, C] = {}
    for entry in entries:
        name = name_of(entry.path)
        content = _decoded(kind, entry) or known.get(name)
        if content is not None:
            found[name] = content
    return found
