"""What can be done to the shards of a cluster: look, change the record, promote, hand over, mend. Without a wire.

Any member does it, since all of it goes through the registry and the port for members; but a hand-over is the leader's,
and each member mends its own disk.

What always holds: a change is one write of the record, in the version that was read, with the next revision; a write
that is not answered is settled by a later write that is, and then decided anew; a record that is older than one that a
member has seen is not changed; no change makes the in-sync set smaller than `min_in_sync` but a promotion with loss,
which says so (`record_change`). What is answered is what is in force afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

import msgspec

from dmq.clock import Clock
from dmq.errors import (
    Busy,
    DMQError,
    InvalidRequest,
    InvalidSettings,
    NotEnoughReplicas,
    NotLeader,
    RegistryConflict,
    RegistryDown,
    SessionExpired,
    ShardConflict,
    UnknownEntry,
    WriteUnknown,
)
from dmq.event_log import EventLog
from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.replication import Standing, StandingReply
from dmq.registry.cluster_view import ClusterView
from dmq.registry.contents import (
    ClusterContent,
    LeaderContent,
    NodeContent,
    ShardContent,
    ShardsContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.metadata import Metadata
from dmq.registry.paths import name_of
from dmq.registry.registry import Check, Create, Delete, Entry, Operation, Put, needs_registry
from dmq.shard.admin.overview import Overview, Sighting, overview_of
from dmq.shard.admin.record_change import (
    RecordChange,
    changed_record,
    check_expulsion,
    difference,
    known_member,
    promoted_record,
)
from dmq.shard.peers import Peers
from dmq.shard.place import draw_id
from dmq.shard.record.enrolment import create_cluster
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.mender import Mended
from dmq.shard.report import MemberReport, Role

__all__ = ["Done", "LocalMember", "Operations"]

log = EventLog(__name__)

_ANSWER_SECONDS: Final = 1.0  # for a member to say how far it is
_ASKED_MAX: Final = 32  # members at a time
_SHARDS_AT_ONCE: Final = 100
_ATTEMPTS: Final = 20  # at a record that others write, too
_LOOKS_MAX: Final = 3  # at a shard whose record changes while its members are asked
_PAUSE_SECONDS: Final = 0.1
_REPAIR_SECONDS: Final = 10.0
_RECORD_FORMAT: Final = 2  # of the cluster, from which on members know drained, removed and asynchronous
_ELECTION_SECONDS: Final = 20.0  # that a promotion is waited for: a session, a promise, and the election itself


class Done(NamedTuple):
    """What was done, in words, and the shard as it is now."""

    what: str
    shard: Overview


class LocalMember(Protocol):
    """What is asked of the member of this process."""

    @property
    def view(self) -> ShardView: ...

    def report(self) -> MemberReport: ...

    def standing(self, asked: Standing) -> StandingReply: ...

    async def hand_over(self, to: str | None = None) -> str: ...

    async def mend(self) -> Mended: ...

    async def state(self) -> MemberState: ...


class Operations:
    """The shards, as one member reaches them.

    Parameters:
        member: our own.
        peers: the way to the others.
        broker: our own name.

    Attributes:
        cluster_view: what our process knows of the whole cluster, if it keeps a view of that.
        election_seconds: how long another leader is waited for.
        repair_seconds: how long the end of a repair is waited for.
    """

    def __init__(self, member: LocalMember, peers: Peers, clock: Clock, broker: str) -> None:
        self._member = member
        self._view = member.view
        self._registry = member.view.registry
        self._peers = peers
        self._clock = clock
        self._paths = member.view.paths
        self._metadata = Metadata(member.view.registry, member.view.paths, member.view.write)  # all members see it
        self._asking = asyncio.Semaphore(_ASKED_MAX)
        self.broker = broker
        self._shard = member.view.shard
        self._mending: asyncio.Future[Mended] | None = None
        self.cluster_view: ClusterView | None = None
        self.election_seconds = _ELECTION_SECONDS
        self.repair_seconds = _REPAIR_SECONDS

    # --- looking ----------------------------------------------------------------------------------------------------

    async def shards(self, after: str = "", limit: int = 100) -> tuple[list[Overview], str]:
        """Shards by name, from one name on, and where to go on after them; "" if these are all.

        While the registry does not answer, our own alone.
        """
        try:
            self._check_registry()
            names = [name for name in await self._names() if name > after]
            nodes = await self.nodes()
            found = await asyncio.gather(*(self._sighting(name, nodes) for name in names[:limit]))
        except RegistryDown:
            return ([] if after else [await self.shard()]), ""
        return [overview_of(one) for one in found], names[limit - 1] if len(names) > limit else ""

    async def all_shards(self, nodes: dict[str, NodeContent]) -> list[Overview]:
        """All shards by name.

        Parameters:
            nodes: the brokers that are registered.

        Raises:
            RegistryDown: it does not answer.
        """
        found: list[Overview] = []
        names = await self._names()
        for start in range(0, len(names), _SHARDS_AT_ONCE):
            some = names[start : start + _SHARDS_AT_ONCE]
            found += map(overview_of, await asyncio.gather(*(self._sighting(name, nodes) for name in some)))
        return found

    async def shard(self, name: str = "") -> Overview:
        """One shard; our own if none is named.

        Raises:
            UnknownEntry: there is no such shard.
            RegistryDown: the registry does not answer, and this member knows nothing of the shard.
        """
        name, known = name or self._shard, self._view.record
        with needs_registry():
            try:
                self._check_registry()
                return overview_of(await self._sighting(name))
            except RegistryDown as error:
                if name != self._shard or known is None:
                    raise
                down = error.message
        return overview_of(await self._remembered(known, down))

    def _check_registry(self) -> None:
        """Do not wait for a registry that our member knows to be down."""
        if self._view.down is not None:
            raise RegistryDown(self._view.down.message)

    async def _names(self) -> list[str]:
        return [name_of(entry.path) for entry in await self._registry.children(self._paths.shards)]

    @property
    def view(self) -> ShardView:
        """What our member knows of the registry, and its door for writes."""
        return self._view

    async def state(self) -> MemberState:
        """What the directory and the process of our member say of themselves."""
        return await self._member.state()

    async def nodes(self) -> dict[str, NodeContent]:
        """All brokers that are registered."""
        return _nodes_of(await self._registry.children(self._paths.nodes))

    async def _members_of(self, record: ShardContent) -> dict[str, NodeContent]:
        """The members of a shard that are registered; there may be a thousand other brokers."""
        found = await asyncio.gather(*(self._registry.read(self._paths.node(name)) for name in record.members))
        return _nodes_of(entry for entry in found if entry is not None)

    async def _sighting(self, name: str, nodes: dict[str, NodeContent] | None = None) -> Sighting:
        """See a shard; again if its record changed meanwhile: else members seem to have seen more than there is.

        Parameters:
            nodes: all brokers, if they are known.
        """
        seen = await self._seen(name, nodes)
        for _ in range(_LOOKS_MAX):
            revision = seen.record.revision
            if all(said.revision <= revision for said in seen.said.values()):
                break
            seen = await self._seen(name)
            if seen.record.revision == revision:
                break  # it is an old copy
        return seen

    async def _seen(self, name: str, nodes: dict[str, NodeContent] | None = None) -> Sighting:
        """Read a shard's entries, and ask its members."""
        entry = await self._registry.read(self._paths.shard(name))
        if entry is None:
            known = ", ".join(await self._names()) or "none"
            raise UnknownEntry(f"there is no shard {name!r}: those there are: {known}", shard=name)
        path = self._paths.leader(name)
        held = await self._registry.read(path)
        record = decode_content(ShardContent, entry.value, entry.path)
        return await self._heard(
            Sighting(
                name=name,
                record=record,
                version=entry.version,
                leader=None if held is None else decode_content(LeaderContent, held.value, path),
                nodes=await self._members_of(record) if nodes is None else nodes,
                session_seconds=self._registry.session_seconds,
                own_obstacle=self.own_obstacle if name == self._shard else "",
            ),
            (await self.cluster()).id,
        )

    async def _remembered(self, record: ShardContent, down: str) -> Sighting:
        """Our shard as our member knew it when the registry answered last, and what its members say now."""
        view = self._view
        seen = Sighting(
            name=self._shard,
            record=record,
            version=view.version,
            leader=view.leader,
            nodes=view.nodes,
            registry_down=down,
        )
        return seen if view.cluster is None else await self._heard(seen, view.cluster.id)

    @property
    def own_obstacle(self) -> str:
        """Why our own member has not joined yet."""
        report = self._member.report()
        return report.obstacle if report.role is Role.STARTING else ""

    async def _heard(self, seen: Sighting, cluster: str) -> Sighting:
        """Ask the members of a shard, all at once."""
        members = seen.record.members
        ours = {broker: node for broker, node in seen.nodes.items() if broker in members and node.shard == seen.name}
        asked = Standing(cluster, seen.name, 0, max(0, self._clock.now_ms()))
        answers = await asyncio.gather(*(self._ask(asked, broker, ours[broker], members[broker]) for broker in ours))
        heard = {broker: answer for broker, answer in zip(ours, answers, strict=True) if answer is not None}
        return msgspec.structs.replace(
            seen,
            nodes=ours,
            said={broker: said for broker, (said, _) in heard.items()},
            skews={broker: skew for broker, (_, skew) in heard.items() if broker != self.broker},
        )

    async def _ask(
        self, asked: Standing, broker: str, node: NodeContent, replica: str
    ) -> tuple[StandingReply, int] | None:
        """What a member says, and by how much its clock is ahead; None if it says nothing."""
        async with self._asking:
            sent_ms = self._clock.now_ms()
            try:
                if broker == self.broker:
                    said = self._member.standing(asked)
                else:
                    said = await self._peers.standing(node.replication_address, asked, _ANSWER_SECONDS)
            except (DMQError, TimeoutError):
                return None
        if hex_id(said.replica) != replica and said.role != str(Role.PARKED):
            return None  # a replaced disk; what it has says nothing of the one that the record knows
        return said, said.now_ms - (sent_ms + self._clock.now_ms()) // 2

    async def cluster(self) -> ClusterContent:
        entry = await self._registry.read(self._paths.cluster)
        if entry is None:
            raise UnknownEntry("the registry has no cluster: check that it is the one of this shard")
        return decode_content(ClusterContent, entry.value, entry.path)

    # --- changes ----------------------------------------------------------------------------------------------------

    async def change(self, name: str, change: RecordChange, *, by: str) -> Done:
        """Change the record of a shard.

        Parameters:
            by: on whose behalf, for the log.

        Raises:
            UnknownEntry: there is no such shard, or no such member.
            InvalidSettings: the values do not go together, or nothing is to be changed.
            ShardConflict: the state of the shard forbids it.
            WriteUnknown: the registry went away before it was clear whether the change took place.
        """
        name = name or self._shard
        if change == RecordChange():
            raise InvalidSettings(
                "there is nothing to change: name min_in_sync, replicas, weight, state, asynchronous or a member "
                "to remove"
            )
        await self._check_format(change)

        def decide(seen: Overview, is_again: bool) -> ShardContent | None:
            if change.remove and not is_again:
                known_member(seen, change.remove)
            return changed_record(seen, change)

        before, after = await self._rewrite(name, decide)
        what = difference(before.record, after.record)
        log.warning("shard changed", shard=name, by=by, change=what)
        return Done(what, after)

    async def create(self, name: str, *, replicas: int, min_in_sync: int, by: str) -> Done:
        """Make the record of a shard before its members are started.

        Raises:
            ShardConflict: there is such a shard.
            RegistryDown: the registry does not answer.
            InvalidSettings: the numbers do not go together.
        """
        if min_in_sync > replicas:
            raise InvalidSettings(f"min_in_sync {min_in_sync} is above replicas {replicas}: choose at most {replicas}")
        paths, is_again = self._paths, False
        for _ in range(_ATTEMPTS):
            with needs_registry():
                if await self._registry.read(paths.cluster) is None:
                    await create_cluster(self._view, hex_id(draw_id()))
                entry, there = await self._registry.read(paths.shards), await self._registry.read(paths.shard(name))
                if entry is None:
                    raise UnknownEntry(f"{paths.shards} is not in the registry: dmq cluster check says what to do")
            if there is not None and is_again:
                break
            if there is not None:
                raise ShardConflict(f"shard {name!r} exists already: dmq shard set changes it", shard=name)
            numbers = decode_content(ShardsContent, entry.value, entry.path) if entry.value else ShardsContent()
            number = numbers.numbers + 1
            record = ShardContent(number=number, revision=1, replicas=replicas, min_in_sync=min_in_sync)
            operations: list[Operation] = [
                Put(paths.shards, encode_content(msgspec.structs.replace(numbers, numbers=number)), entry.version),
                Create(paths.shard(name), encode_content(record)),
            ]
            try:
                with needs_registry():
                    await self._metadata.write(operations, paths.shard(name))
            except (RegistryConflict, SessionExpired):
                await asyncio.sleep(_PAUSE_SECONDS)
            except WriteUnknown:
                await self._settle(paths.shards)
                is_again = True
            else:
                break
        else:
            raise Busy("the registry's list of shards changes all the time: try again", shard=name)
        after = await self.shard(name)
        log.info("shard created", shard=name, number=after.record.number, by=by)
        return Done(f"shard {name} has number {after.record.number}: dmq broker --shard {name} adds members", after)

    async def add(self, name: str, member: str, *, by: str) -> Done:
        """Have a place for a broker in a shard; it joins when it is started."""
        name = name or self._shard
        await self._check_format(RecordChange(add=member))
        before, after = await self._rewrite(name, lambda seen, is_again: changed_record(seen, RecordChange(add=member)))
        if before.member(member) is not None:
            return Done(f"{member} is a member already", after)
        log.warning("place for a member", shard=name, member=member, by=by, replicas=after.record.replicas)
        what = f"there is a place for {member}: start it with dmq broker --registry … --shard {name} --name {member}"
        return Done(f"{what} --data DIR", after)

    async def remove(self, member: str, name: str = "", *, by: str) -> Done:
        """Take a member out of its shard, whether it runs or not; a leader hands over first.

        Raises:
            UnknownEntry: there is no such shard or member.
            ShardConflict: too few would be left in the in-sync set, or nobody takes over; nothing was changed.
        """
        name = name or await self._shard_of(member)
        await self._check_format(RecordChange(expel=member))
        check_expulsion(view := await self.shard(name), member)
        try:
            if member == view.leader:
                done = await self.drain(member, name, by=by)
                if done.shard.leader in ("", member):
                    raise ShardConflict(
                        f"{member} still leads, and no other member has taken over: {done.what}", member=member
                    )
            change = RecordChange(expel=member)
            before, after = await self._rewrite(name, lambda seen, is_again: changed_record(seen, change))
        except ShardConflict:
            if member == view.leader and member not in view.record.drained:
                await self.drain(member, name, undo=True, by=by)
            raise
        log.warning("member removed", shard=name, member=member, by=by)
        what = difference(before.record, after.record)
        return Done(f"{what}. It does not stand or follow any more: stop it", after)

    async def drain(self, member: str, name: str = "", *, undo: bool = False, by: str) -> Done:
        """Let a member lead no more, until that is undone; it hands over if it leads.

        Raises:
            UnknownEntry: there is no such shard or member.
            ShardConflict: nobody else could lead; nothing was changed.
        """
        name = name or await self._shard_of(member)
        change = RecordChange(undrain=member) if undo else RecordChange(drain=member)
        await self._check_format(change)
        known_member(await self.shard(name), member)
        _, after = await self._rewrite(name, lambda seen, is_again: changed_record(seen, change))
        log.warning("member put back in use" if undo else "member drained", shard=name, member=member, by=by)
        if undo:
            return Done(f"{member} may lead again", after)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.election_seconds):
                while (after := await self.shard(name)).leader in ("", member):
                    await asyncio.sleep(_PAUSE_SECONDS)
        if after.leader == member:
            return Done(f"{member} goes on leading until a follower has caught up, and stops leading then", after)
        return Done(f"{member} does not lead until dmq shard drain {member} --undo", after)

    async def _check_format(self, change: RecordChange) -> None:
        """Members of older versions share the registry until the cluster's format says otherwise."""
        if not (change.asynchronous or change.expel or change.drain):
            return
        with needs_registry():
            cluster = await self.cluster()
        if cluster.format < _RECORD_FORMAT:
            raise ShardConflict(
                f"this needs format {_RECORD_FORMAT} of the cluster, and it has {cluster.format}: upgrade all brokers, "
                "then dmq cluster finalize"
            )

    async def promote(self, name: str, member: str, *, accept_loss: bool, by: str) -> Done:
        """Let a member lead that may lack what was acknowledged, and wait until it does.

        Raises:
            UnknownEntry: there is no such shard or member.
            ShardConflict: there is a leader, or the member does not run; or the loss is not accepted: it says what
                would be lost. Nothing was changed.
        """
        name = name or await self._shard_of(member)

        def decide(seen: Overview, is_again: bool) -> ShardContent | None:
            if is_again and seen.leader == member:
                return None  # our write was not answered, and has taken place
            return promoted_record(seen, member, accept_loss=accept_loss)

        before, _ = await self._rewrite(name, decide, without_leader=True)
        old = before.record.leader
        former = next((one.name for one in before.members if one.replica == old), old or "nobody")
        log.warning("member promoted with loss", shard=name, member=member, by=by, leader_before=former)
        after = await self._await_leader(name, member)
        if after.leader == member:
            what = f"{member} leads in epoch {after.record.epoch}"
        else:
            found = after.member(member)
            why = found.obstacle if found is not None else ""
            what = f"{member} may lead now and does not yet{f', since {why}' if why else ''}: dmq shard show tells"
        return Done(
            f"{what}. The leader before was {former}: if it still runs cut off from the registry, alone in its set or "
            "with members that only it reaches, it may still be serving the clients that reach it. Stop it",
            after,
        )

    async def hand_over(self, name: str, to: str, *, by: str) -> Done:
        """Let another member lead.

        Parameters:
            to: which; the one that is furthest if it is "".

        Raises:
            NotLeader: we do not lead the shard; the detail has who does.
            ShardConflict: there is no leader, or `to` cannot take over; nothing has changed.
            UnknownEntry: there is no such member.
        """
        view = await self.shard(name)
        if not view.leader:
            raise ShardConflict(
                f"shard {view.name} has no leader that could hand over: {view.findings[0].what}", shard=view.name
            )
        if to:
            member = known_member(view, to)
            if to == view.leader:
                raise ShardConflict(f"{to} leads already: name another member", shard=view.name)
            if to in view.record.drained:
                raise ShardConflict(f"{to} is drained: dmq shard drain {to} --undo first", shard=view.name)
            if member.node is None or not member.is_in_sync:
                why = "is not in sync" if member.node else "is not registered" if member.runs else "does not run"
                raise ShardConflict(
                    f"{to} cannot take over: it {why}; dmq shard show says how far it is",
                    shard=view.name,
                )
        if view.leader != self.broker:
            node = next((one.node for one in view.members if one.name == view.leader), None)
            address = "" if node is None else node.address
            raise NotLeader(f"{view.leader} leads shard {view.name}, at {address}: ask it", leader=address)
        log.info("hand-over asked for", shard=view.name, by=by, to=to or None)
        try:
            taken = await self._member.hand_over(to or None)
        except (NotEnoughReplicas, InvalidRequest) as error:
            raise ShardConflict(f"{view.leader} leads on: {error.message}", shard=view.name) from error
        after = await self._await_leader(view.name, taken)
        is_done = after.leader == taken
        what = f"{taken} leads in epoch {after.record.epoch}" if is_done else f"{taken} is asked to lead"
        return Done(what, after)

    async def mend(self, *, by: str) -> Mended | None:
        """Fetch what is damaged in our journal from the other members; None if that takes longer: ask again."""
        if self._mending is None:
            log.info("repair asked for", shard=self._shard, by=by)
            self._mending = asyncio.ensure_future(self._member.mend())
            self._mending.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask again
        mending = self._mending
        await asyncio.wait([mending], timeout=self.repair_seconds)
        if not mending.done():
            return None
        self._mending = None
        return mending.result()

    # --- the way of a change ------------------------------------------------------------------------------------------

    async def _rewrite(
        self, name: str, decide: Callable[[Overview, bool], ShardContent | None], *, without_leader: bool = False
    ) -> tuple[Overview, Overview]:
        """Put the record as it should be; returns the shard before and after.

        Parameters:
            decide: what the record should be, None if it is so already; raises if it must not be changed. It is told
                whether an earlier write may have taken place.
            without_leader: write only while nobody holds `/leader`.
        """
        path, first, is_again = self._paths.shard(name), None, False
        for _ in range(_ATTEMPTS):
            with needs_registry():
                seen = await self._sighting(name)
            view = overview_of(seen)
            first = first or view
            wanted = decide(view, is_again)
            if wanted is None:
                return first, view
            put = Put(path, encode_content(wanted), seen.version)
            try:
                with needs_registry():
                    await self._metadata.write([*(self._absence(name) if without_leader else ()), put], path)
            except (RegistryConflict, SessionExpired):
                await asyncio.sleep(_PAUSE_SECONDS)
            except WriteUnknown:
                await self._settle(path)
                is_again = True
            else:
                self._view.ask()
                return first, await self.shard(name)
        raise Busy(f"the record of shard {name} changes all the time: try again", shard=name)

    def _absence(self, name: str) -> list[Operation]:
        """Operations that apply only while nobody holds `/leader`."""
        path = self._paths.leader(name)
        return [Create(path, b"{}"), Delete(path, None)]

    async def _settle(self, path: str) -> None:
        """Wait until a write that was not answered is carried out, or never will be."""
        for _ in range(_ATTEMPTS):
            try:
                await self._view.write([Check(path, None)])
            except WriteUnknown:
                await asyncio.sleep(_PAUSE_SECONDS)
            except (RegistryConflict, SessionExpired):
                return
            except DMQError as error:
                raise WriteUnknown(
                    f"whether the change took place is not known: {error.message}; look with dmq shard show once the "
                    "registry answers"
                ) from error
            else:
                return
        raise WriteUnknown(
            "whether the change took place is not known: the registry does not answer writes; look with dmq shard show"
        )

    async def _await_leader(self, name: str, member: str) -> Overview:
        """The shard, once this member leads it, or when that takes too long."""
        path = self._paths.leader(name)
        replica = known_member(await self.shard(name), member).replica
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.election_seconds):
                while await self._leader_of(path) != replica:
                    await asyncio.sleep(_PAUSE_SECONDS)
        return await self.shard(name)

    async def _leader_of(self, path: str) -> str:
        """The replica that holds an entry `/leader`; "" if nobody does, or the registry does not answer."""
        with contextlib.suppress(RegistryDown):
            held = await self._registry.read(path)
            return "" if held is None else decode_content(LeaderContent, held.value, path).replica
        return ""

    async def _shard_of(self, member: str) -> str:
        """The shard that a broker belongs to."""
        with needs_registry():
            entries = await self._registry.children(self._paths.shards)
        for entry in entries:
            if member in decode_content(ShardContent, entry.value, entry.path).members:
                return name_of(entry.path)
        raise UnknownEntry(f"no shard has a member {member!r}: dmq shard list shows those that exist", member=member)


def _nodes_of(entries: Iterable[Entry]) -> dict[str, NodeContent]:
    return {name_of(entry.path): decode_content(NodeContent, entry.value, entry.path) for entry in entries}
