"""The view of a shard: what the registry says of it, kept up to date, and the one door for a member's writes.

What always holds: reads and writes of one member never overlap, so what is read after a write was answered has it; what
was known stays known while the registry does not answer; a member that leaves waits for it a few seconds in all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, TypeVar

from dmq.errors import DMQError, RegistryConflict, RegistryDown, WriteUnknown, WrongFormat
from dmq.event_log import EventLog
from dmq.registry.contents import (
    ClusterContent,
    Content,
    LeaderContent,
    NodeContent,
    ShardContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.paths import Paths, name_of
from dmq.registry.registry import UNAVAILABLE, Entry, Operation, Put, Registry
from dmq.registry.watch import Watch

__all__ = ["ShardView"]

log = EventLog(__name__)

C = TypeVar("C", bound=Content)

_AGAIN_SECONDS: Final = 0.5
_LEAVE_SECONDS: Final = 5.0  # of these, a hand-over may need three before it writes
_LAST_WORD_SECONDS: Final = 2.0  # for one read or write of a member that leaves; the next is not tried after that
_LEAVE_DOWN_SECONDS: Final = 1.0  # of a registry that did not answer before either
_REREAD_SECONDS: Final = 10.0  # a watch may be told late; nothing waits longer than this


class ShardView:
    """One shard, as one member sees it.

    Attributes:
        cluster: of the registry; None if it has none.
        record, version: of the shard, and the version of its entry; None if there is none.
        leader, leader_entry: who holds `/leader`; None if nobody does.
        nodes: members of the record that run, by name.
        down: why the registry did not answer the last time; None if it did.
        trouble: what is wrong with our entries, though it answers, and what to do; empty if nothing is.
    """

    def __init__(self, registry: Registry, shard: str, paths: Paths | None = None) -> None:
        self.registry = registry
        self.paths = paths or Paths()
        self.shard = shard
        self.cluster: ClusterContent | None = None
        self.record: ShardContent | None = None
        self.version = 0
        self.leader: LeaderContent | None = None
        self.leader_entry: Entry | None = None
        self.nodes: dict[str, NodeContent] = {}
        self.down: RegistryDown | None = None
        self.trouble = ""
        self._read_at = float("-inf")  # everything, on the loop's clock
        self._members: list[str] = []  # by name, of the last record that was there
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_wanted = asyncio.Event()
        self._ends_at: float | None = None  # on the loop's clock: nothing is waited for any longer
        self._limits: set[asyncio.Timeout] = set()  # of what is under way

    # --- what it says -----------------------------------------------------------------------------------------------

    @property
    def is_down(self) -> bool:
        """The registry did not answer the last time."""
        return self.down is not None

    def node_of(self, replica: str | None) -> tuple[str, NodeContent] | None:
        """The broker that has a replica, if it is registered."""
        return next(((name, node) for name, node in self.nodes.items() if node.replica == replica), None)

    def name_of(self, replica: int) -> str:
        """How to call a replica in a sentence: by its broker's name if that is known."""
        own = hex_id(replica)
        members = {} if self.record is None else self.record.members
        return next((name for name, one in members.items() if one == own), own)

    def names_of(self, replicas: Iterable[int]) -> str:
        """The same of several, as a log line has them."""
        return ",".join(sorted(map(self.name_of, replicas)))

    @property
    def winner(self) -> str:
        """The same of who won the record's epoch."""
        record = self.record
        return "another member" if record is None or record.leader is None else self.name_of(int(record.leader, 16))

    @property
    def leader_address(self) -> str:
        """Where clients reach the leader; empty if that is not known."""
        found = None if self.leader is None else self.node_of(self.leader.replica)
        return "" if found is None else found[1].address

    @property
    def registered(self) -> set[int]:
        """Replica ids of this shard's members that are registered."""
        return {int(node.replica, 16) for node in self.nodes.values() if node.replica and node.shard == self.shard}

    # --- changes ----------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Wake everybody that waits for something to change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, seconds: float) -> None:
        """Until something has changed, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def ask(self) -> None:
        """Have everything read again soon: somebody knows more than we do."""
        self._is_wanted.set()

    async def keep(self) -> None:
        """Read what changes; for ever."""
        registry, paths = self.registry, self.paths
        with registry.watch(paths.shard(self.shard)) as ours, registry.watch(paths.nodes) as nodes:
            is_beat = False
            while True:
                try:
                    await self._refresh(is_beat=is_beat)
                except UNAVAILABLE as error:
                    log.debug("registry not read", shard=self.shard, error=error)
                    is_beat = False
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                is_beat = await self._something(ours, nodes)

    async def _something(self, ours: Watch, nodes: Watch) -> bool:
        """Wait until there is something to read; whether that is no more than a sign of life of the leader."""
        heard = asyncio.ensure_future(ours.next())
        tasks: list[asyncio.Future[Any]] = [
            heard,
            asyncio.ensure_future(self._members_of(nodes)),
            asyncio.ensure_future(self._is_wanted.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, timeout=_REREAD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._is_wanted.clear()
        is_beat = done == {heard} and heard.result().paths == (self.paths.leader(self.shard),)
        return is_beat and self._read_at + _REREAD_SECONDS > asyncio.get_running_loop().time()

    async def _members_of(self, nodes: Watch) -> None:
        """Wait until a member's entry has changed; those of a thousand other brokers change every 30 seconds."""
        while True:
            changes = await nodes.next()
            if changes.is_all or not {*map(name_of, changes.paths)}.isdisjoint(self._members):
                return

    def leave(self) -> None:
        """This member leaves: from now on a registry that does not answer is waited for a few seconds in all."""
        now = asyncio.get_running_loop().time()
        self._ends_at = now + (_LEAVE_DOWN_SECONDS if self.is_down else _LEAVE_SECONDS)
        for limit in self._limits:
            limit.reschedule(min(self._ends_at, now + _LAST_WORD_SECONDS))

    # --- reading and writing ----------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read everything.

        Raises:
            RegistryDown, WrongFormat: what was known stays known.
        """
        await self._refresh()

    async def _refresh(self, *, is_beat: bool = False) -> None:
        async with self._exchange():
            if not (is_beat and await self._is_same_leader()):
                await self._read()
        self.tell()

    async def _is_same_leader(self) -> bool:
        """Whether `/leader`, which its holder writes every second, says what it said before."""
        entry, known = await self.registry.read(self.paths.leader(self.shard)), self.leader_entry
        if entry is None or known is None or (entry.session, entry.value) != (known.session, known.value):
            return False
        self.leader_entry = entry
        return True

    async def _read(self) -> None:
        paths = self.paths
        began_at = asyncio.get_running_loop().time()
        known = self._members
        cluster, record, leader, *nodes = await self._read_all(
            [paths.cluster, paths.shard(self.shard), paths.leader(self.shard), *map(paths.node, known)]
        )
        found_cluster, found_record = _decoded(ClusterContent, cluster), _decoded(ShardContent, record)
        if found_record is not None:
            self._members = [*found_record.members]
        # Of members alone: a cluster may have a thousand brokers more.
        named = dict(zip(known, nodes, strict=True))
        new = [name for name in self._members if name not in named]
        named |= zip(new, await self._read_all([*map(paths.node, new)]), strict=True)
        gone = _gone(self.cluster, found_cluster, paths.cluster) or _gone(
            self.record, found_record, paths.shard(self.shard)
        )
        self.cluster, self.record = found_cluster, found_record
        self.version = 0 if record is None else record.version
        self.leader_entry = leader
        self.leader, unread = _leader_of(leader)
        self.nodes = dict(_nodes_of(entry for name in self._members if (entry := named[name]) is not None))
        is_still_gone = found_cluster is None or found_record is None
        self._found(gone or (self.trouble if is_still_gone else unread))
        self._read_at = began_at

    async def _read_all(self, paths: Sequence[str]) -> list[Entry | None]:
        """Entries, asked for at once: on a busy machine each round trip takes long, and an election needs several."""
        found = await asyncio.gather(*map(self.registry.read, paths), return_exceptions=True)
        entries = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            entries.append(one)
        return entries

    def _found(self, trouble: str) -> None:
        """Tell what is wrong with our entries, once, and when it is not any more."""
        if trouble and trouble != self.trouble:
            log.error("the registry's entries are not right", shard=self.shard, why=trouble)
        elif self.trouble and not trouble:
            log.info("the registry's entries are right again", shard=self.shard)
        self.trouble = trouble

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """As `Registry.write`. After a conflict everything has been read again."""
        async with self._exchange(late=WriteUnknown):
            try:
                return await self.registry.write(operations)
            except RegistryConflict:
                await self._read()
                self.tell()
                raise

    async def read(self, path: str) -> Entry | None:
        """As `Registry.read`."""
        async with self._exchange():
            return await self.registry.read(path)

    def put_record(self, record: ShardContent, version: int) -> Put:
        """The operation that puts another record in the place of the one that has this version."""
        return Put(self.paths.shard(self.shard), encode_content(record), version)

    def wrote_record(self, record: ShardContent, version: int | None) -> None:
        """A write of the record was answered with success."""
        assert version is not None
        self.record, self.version = record, version
        self.tell()

    @contextlib.asynccontextmanager
    async def _exchange(self, *, late: type[RegistryDown | WriteUnknown] = RegistryDown) -> AsyncIterator[None]:
        """One at a time.

        Parameters:
            late: what it is when this member leaves and waits no longer.
        """
        try:
            async with self._limit(), self._lock:
                try:
                    yield
                except RegistryDown as error:
                    self._is_there(error)
                    raise
                except WrongFormat as error:
                    self._is_there(None)
                    self._found(str(error))
                    raise
                except DMQError:
                    raise
                else:
                    self._is_there(None)
        except TimeoutError:
            self._ends_at = asyncio.get_running_loop().time()
            raise late("this member leaves, and the registry did not answer in time") from None

    @contextlib.asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        ends_at = self._ends_at
        if ends_at is not None:
            ends_at = min(ends_at, asyncio.get_running_loop().time() + _LAST_WORD_SECONDS)
        async with asyncio.timeout_at(ends_at) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def _is_there(self, error: RegistryDown | None) -> None:
        if self.is_down and error is None:
            log.info("registry answers again", shard=self.shard)
        elif not self.is_down and error is not None:
            log.warning("registry does not answer: no elections and no changes until it does", shard=self.shard)
        self.down = error


def _decoded(kind: type[C], entry: Entry | None) -> C | None:
    return None if entry is None else decode_content(kind, entry.value, entry.path)


def _gone(before: Content | None, now: Content | None, path: str) -> str:
    """The sentence for an entry that was there, and is not; an absent entry deletes nothing."""
    if before is None or now is not None:
        return ""
    return (
        f"{path} is gone from the registry, somebody must have deleted it: members that reach each other go on, and "
        "nobody can be elected; put it back with 'dmq cluster import --from-members', or from an export"
    )


def _leader_of(entry: Entry | None) -> tuple[LeaderContent | None, str]:
    """Who holds `/leader`, and what is wrong with it. One that cannot be read is held by somebody, all the same."""
    if entry is None:
        return None, ""
    if not entry.is_ephemeral:
        why = f"{entry.path} was not created by a broker, and keeps all of them from being elected: delete it"
    else:
        why = ""
    try:
        return decode_content(LeaderContent, entry.value, entry.path), why
    except WrongFormat as error:
        return None, why or f"{error.message}; the leader writes it again"


def _nodes_of(entries: Iterable[Entry]) -> Iterable[tuple[str, NodeContent]]:
    for entry in entries:
        try:
            yield name_of(entry.path), decode_content(NodeContent, entry.value, entry.path)
        except WrongFormat as error:
            log.error("the entry of a broker cannot be read", once_for=entry.path, error=error)
