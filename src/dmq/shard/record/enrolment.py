"""The enrolment: makes a data directory a member of its shard, in its own `STORE` and in the shard's record.

What always holds:
- A directory belongs to one cluster and one shard for ever; a registry of another cluster is refused.
- Only a directory that has never been in a record creates a cluster or a shard: a registry that lacks what a member has
  seen there is an old copy or another one, and nothing is made anew in it.
- A directory that was started less often than the record says is an old copy of the member: it draws a replica id of
  its own, and what the member has promised or confirmed does not count for it. The mark, drawn at each start, tells our
  own write, whose answer was lost, from that of a copy. So does a directory that was copied in the life that the record
  knows: its files are in another place than `STORE` says, and that life had not ended.
- The record is written in the version that was read. Who joins becomes a member, and in sync only by the leader.
- A directory that was removed from the shard does not join again until an operator adds it, and a broker that does not
  know the format of the cluster does not join at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from dmq.errors import BrokerStopping, DMQError, InvalidSettings, RegistryConflict
from dmq.event_log import EventLog
from dmq.protocol.cluster.member import MemberState
from dmq.registry.contents import (
    CLUSTER_FORMAT,
    ClusterContent,
    ShardContent,
    ShardsContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.registry import UNAVAILABLE, Create, Put
from dmq.shard.place import Directory, MemberSettings, Place
from dmq.shard.record.shard_view import ShardView
from dmq.storage.journal.journal import FOLDER, list_segments
from dmq.storage.replica import Replica, join
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.identity import Identity, Membership, read_identity, read_record

__all__ = ["Enrolment", "create_cluster", "exclusion", "newest_record", "said_by"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 0.5


class Enrolment:
    """Of one data directory, at the start of its process.

    Parameters:
        mark: drawn for this start.

    Attributes:
        obstacle: why it is not done yet, for a person.
        is_new: the directory has a replica id that was drawn now, so it has promised nothing to anybody.
    """

    def __init__(
        self, directory: Directory, place: Place, settings: MemberSettings, view: ShardView, *, mark: str
    ) -> None:
        self._directory = directory
        self._place = place
        self._settings = settings
        self._view = view
        self._mark = mark
        self._replica: Replica | None = None
        self._opening = asyncio.Lock()
        self._looked: MemberState | None = None
        self.obstacle = ""
        self.is_new = False

    async def run(self) -> Replica:
        """Wait for the registry, and enrol; returns the directory, opened for this life.

        Raises:
            InvalidSettings: it belongs elsewhere, or the shard is full.
            DirectoryInUse, WrongFormat, ForeignFile, NoPermission, StorageError.
        """
        try:
            while True:
                try:
                    await self._view.refresh()
                    why = await self._try()
                    is_usual = False
                except (RegistryConflict, *UNAVAILABLE) as error:
                    why, is_usual = str(error), isinstance(error, RegistryConflict)  # another member was first
                if not why and self._replica is not None:
                    return self._replica
                if why != self.obstacle and not is_usual:
                    log.warning("not enrolled yet", shard=self._place.shard, broker=self._place.broker, why=why)
                self.obstacle = why
                await asyncio.sleep(_AGAIN_SECONDS)
        except BaseException:
            if self._replica is not None:
                self._replica.close()
            raise

    async def again(self, replica: Replica) -> str:
        """Enter the record once more: this process runs, and the record has it no more; returns why it has to wait."""
        try:
            await self._view.refresh()
            return await self._enter(replica, notes=False)  # the member that runs notes what it sees
        except (InvalidSettings, RegistryConflict, *UNAVAILABLE) as error:
            return str(error)

    async def _try(self) -> str:
        """One try; returns why it has to wait, or nothing."""
        directory = self._directory
        member = None
        if self._replica is not None:
            member = self._replica.membership
        else:
            identity = await directory.on_disk(lambda: _identity_of(directory))
            member = None if identity is None else identity.member
        self._check_place(member)
        is_known = member is not None and member.revision > 0
        if why := await self._find_cluster(member, is_known) or self._check_format():
            return why
        if why := self._check_record(member, is_known):
            return why
        if self._replica is None:
            self._replica = await self._open()
        return await self._enter(self._replica)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _check_place(self, member: Membership | None) -> None:
        cluster, shard = self._view.cluster, self._place.shard
        if member is None:
            return
        if member.shard != shard:
            raise InvalidSettings(
                f"{self._where} is a member of shard {member.shard!r}, not of {shard!r}: start it with --shard "
                f"{member.shard}, or choose an empty directory"
            )
        if cluster is not None and cluster.id != member.cluster:
            raise InvalidSettings(
                f"{self._where} is a member of cluster {member.cluster}, and the registry is that of cluster "
                f"{cluster.id}: check --registry, or choose an empty directory"
            )

    def _check_format(self) -> str:
        cluster = self._view.cluster
        if cluster is None or cluster.format <= CLUSTER_FORMAT:
            return ""
        return (
            f"the cluster has format {cluster.format}, and this version knows {CLUSTER_FORMAT}: upgrade this broker to "
            "the version of the others"
        )

    @property
    def _where(self) -> str:
        return self._directory.files.describe("")

    async def _find_cluster(self, member: Membership | None, is_known: bool) -> str:
        view = self._view
        if view.cluster is not None:
            return ""
        if is_known:
            return "the registry holds no cluster, and this directory is a member of one: give it its own registry"
        await create_cluster(view, hex_id(self._directory.draw()) if member is None else member.cluster)
        await view.refresh()
        return ""

    def _check_record(self, member: Membership | None, is_known: bool) -> str:
        record = self._view.record
        if member is None or not is_known:
            return ""
        if record is None:
            return (
                f"the registry has no record of shard {self._place.shard!r}, and this member has seen one: it is an "
                "old copy or another registry; give it its own, or have it rebuilt by dmq cluster import --from-members"
            )
        if record.revision < member.revision:
            return (
                f"the registry's record of shard {self._place.shard!r} has revision {record.revision}, and this member "
                f"has seen {member.revision}: it is an old copy; nobody stands until dmq cluster import --from-members"
            )
        return ""

    # --- the directory ----------------------------------------------------------------------------------------------

    async def _open(self) -> Replica:
        directory, view = self._directory, self._view
        assert view.cluster is not None
        cluster, record = view.cluster.id, view.record
        journal = None if record is None or record.journal is None else int(record.journal, 16)

        def work() -> tuple[Replica, bool]:
            identity = _identity_of(directory)
            is_new = identity is None or identity.member is None or _is_copy(directory, identity)
            is_other = journal is not None and identity is not None and identity.journal_id != journal
            if identity is not None and identity.member is None and _has_journal(directory):
                _close_well(directory)
            if is_new or is_other:
                join(directory.files, cluster=cluster, shard=view.shard, journal_id=journal, draw=directory.draw)
            return Replica(directory.files, directory.settings, directory.clock), is_new or is_other

        async with self._opening:
            replica, self.is_new = await directory.on_disk(work)
        return replica

    async def look(self) -> MemberState:
        """What the directory says, while it waits to be enrolled; it is opened for that, and closed again.

        Raises:
            BrokerStopping: there is nothing to tell, or the directory is being opened.
        """
        directory = self._directory

        def work() -> MemberState:
            identity = _identity_of(directory)
            if identity is None or identity.member is None:
                raise BrokerStopping("this directory has not been a member of a shard yet: there is nothing to tell")
            replica = Replica(directory.files, directory.settings, directory.clock, new_life=False)
            try:
                return msgspec.structs.replace(said_by(replica), record=read_record(directory.files))
            finally:
                replica.close()

        async with self._opening:
            if self._replica is not None:
                raise BrokerStopping("this member joins just now: ask again in a moment")
            if self._looked is None:
                self._looked = await directory.on_disk(work)
            return self._looked

    async def _begin_again(self, replica: Replica, journal_id: int) -> Replica:
        """The directory becomes another replica than it was."""
        directory, member = self._directory, replica.membership

        def work() -> Replica:
            replica.close()
            join(
                directory.files,
                cluster=member.cluster,
                shard=member.shard,
                journal_id=journal_id,
                draw=directory.draw,
            )
            return Replica(directory.files, directory.settings, directory.clock)

        self._replica = None
        self._replica = await directory.on_disk(work)
        self.is_new = True
        return self._replica

    # --- the record -------------------------------------------------------------------------------------------------

    async def _enter(self, replica: Replica, *, notes: bool = True) -> str:
        view = self._view
        record, version_read = view.record, view.version
        if record is None:
            return await self._create(replica)
        member = replica.membership
        if hex_id(member.replica_id) in record.removed:
            return removed_sentence(view.shard, self._place.broker)
        if record.journal not in (None, hex_id(replica.journal_id)) and not replica.journal.segments:
            replica = await self._begin_again(replica, int(record.journal or "", 16))  # another one was first
        elif _is_old_copy(member, record, self._mark):
            log.warning(
                "this directory is an old copy of a member: it gets a replica id of its own",
                shard=member.shard,
                replica=hex_id(member.replica_id),
                life=member.life,
            )
            replica = await self._begin_again(replica, replica.journal_id)
        own, life, broker = hex_id(replica.membership.replica_id), replica.membership.life, self._place.broker
        if record.journal not in (None, hex_id(replica.journal_id)):
            raise InvalidSettings(
                f"{self._where} holds journal {hex_id(replica.journal_id)}, and shard {view.shard!r} has "
                f"{record.journal}: choose an empty directory"
            )
        if not self._is_in(record, own, life):
            wanted = self._entered(record, own, life)
            if record.journal is None:  # a record that was made without a member
                wanted = msgspec.structs.replace(wanted, journal=hex_id(replica.journal_id), in_sync=[own])
            (version,) = await view.write([view.put_record(wanted, version_read)])
            view.wrote_record(wanted, version)
            record = wanted
        if notes:
            await self._directory.on_disk(lambda: replica.saw_record(record.revision, encode_content(record)))
        log.info(
            "joined",
            shard=view.shard,
            broker=broker,
            replica=own,
            life=life,
            end=replica.end,
            in_sync=own in record.in_sync,
            doubtful=replica.membership.doubtful,
        )
        return ""

    def _is_in(self, record: ShardContent, own: str, life: int) -> bool:
        is_member = record.members.get(self._place.broker) == own
        return is_member and record.lives.get(own) == life and record.marks.get(own) == self._mark

    def _entered(self, record: ShardContent, own: str, life: int) -> ShardContent:
        """The record with us as a member in this life."""
        broker = self._place.broker
        members = {name: one for name, one in record.members.items() if one != own} | {broker: own}
        if len(members) > record.replicas:
            raise InvalidSettings(
                f"shard {self._view.shard!r} has {len(record.members)} of {record.replicas} members already "
                f"({', '.join(sorted(record.members))}): start this broker under the name of the one that it replaces, "
                "or raise the shard's replicas"
            )
        known = {*members.values(), *record.in_sync}
        lives = {one: times for one, times in record.lives.items() if one in known} | {own: life}
        marks = {one: mark for one, mark in record.marks.items() if one in known} | {own: self._mark}
        return msgspec.structs.replace(record, revision=record.revision + 1, members=members, lives=lives, marks=marks)

    async def _create(self, replica: Replica) -> str:
        """We are the first of the shard."""
        view, settings = self._view, self._settings
        path = view.paths.shards
        entry = await view.registry.read(path)
        if entry is None:
            return f"{path} is not in the registry"
        numbers = decode_content(ShardsContent, entry.value, path) if entry.value else ShardsContent()
        own = hex_id(replica.membership.replica_id)
        record = ShardContent(
            number=numbers.numbers + 1,
            revision=1,
            journal=hex_id(replica.journal_id),
            members={self._place.broker: own},
            lives={own: replica.membership.life},
            marks={own: self._mark},
            in_sync=[own],
            min_in_sync=settings.min_in_sync,
            replicas=settings.replicas,
        )
        counted = msgspec.structs.replace(numbers, numbers=record.number)
        _, version = await view.write(
            [
                Put(path, encode_content(counted), entry.version),
                Create(view.paths.shard(view.shard), encode_content(record)),
            ]
        )
        log.info("shard created", shard=view.shard, number=record.number, journal=record.journal)
        view.wrote_record(record, version)
        return await self._enter(replica)


async def create_cluster(view: ShardView, cluster_id: str) -> None:
    """Make a registry that holds no cluster that of a new one.

    Raises:
        RegistryConflict, RegistryDown, SessionExpired, WriteUnknown.
    """
    for folder in view.paths.folders():
        if await view.registry.read(folder.path) is None:
            await view.write([folder])
    content = ClusterContent(id=cluster_id, format=CLUSTER_FORMAT)
    await view.write([Create(view.paths.cluster, encode_content(content))])
    log.info("cluster created", cluster=cluster_id)


def removed_sentence(shard: str, broker: str) -> str:
    """What a member is told that was removed."""
    return (
        f"it was removed from shard {shard!r}: dmq shard add {broker} takes it back; stop it otherwise, and dmq shard "
        "leave makes its directory one of a broker by itself"
    )


def _identity_of(directory: Directory) -> Identity | None:
    try:
        return read_identity(directory.files)
    except ValueError as error:
        raise InvalidSettings(
            f"{directory.files.describe('STORE')} cannot be used, {error}: restore it, or start with an empty "
            "directory, which the other members fill"
        ) from error


def exclusion(record: ShardContent, member: Membership, place: Place, mark: str) -> str:
    """Why the record does not let a process that has joined take part any more; nothing if it does."""
    own = hex_id(member.replica_id)
    if record.revision < member.revision:
        return ""  # an old copy says nothing
    if own in record.removed:
        return removed_sentence(place.shard, place.broker)
    if record.members.get(place.broker, own) != own:
        return (
            f"another data directory has taken the place of this one as {place.broker}: stop one of the two; each "
            "broker has a name of its own"
        )
    if record.marks.get(own, mark) != mark:
        return (
            "another process was started with a copy of this data directory, and is the member now: stop one of the "
            "two, and start this one again if it is the right one"
        )
    return ""


def newest_record(kept: bytes, record: ShardContent | None) -> bytes:
    """The newest record that is known to a member: the one that it noted, or the one that it read last."""
    if record is None:
        return kept
    with contextlib.suppress(DMQError):
        if kept and decode_content(ShardContent, kept, "RECORD").revision > record.revision:
            return kept
    return encode_content(record)


def said_by(replica: Replica) -> MemberState:
    """What a directory says of itself."""
    member = replica.membership
    return MemberState(
        broker="",
        cluster=member.cluster,
        shard=member.shard,
        journal=hex_id(replica.journal_id),
        replica=hex_id(member.replica_id),
        life=member.life,
        revision=member.revision,
        last_epoch=0 if replica.last is None else replica.last.epoch,
        end=replica.end,
        committed=replica.applied,
        is_doubtful=member.doubtful,
    )


def _is_copy(directory: Directory, identity: Identity) -> bool:
    """Whether the directory was copied while its member ran: then it may lack what that one has confirmed since.

    One that was moved or copied after its member was stopped has everything.
    """
    here, place = directory.files.place(FOLDER), identity.place
    if not (here and place.id) or here == place.id or place.closed or identity.member is None:
        return False
    log.warning(
        "this directory was copied or moved while its member ran, or after that was killed: it gets a replica id of "
        "its own, and what it has is compared with the others",
        shard=identity.member.shard,
        replica=hex_id(identity.member.replica_id),
    )
    return True


def _is_old_copy(member: Membership, record: ShardContent, mark: str) -> bool:
    own = hex_id(member.replica_id)
    return record.lives.get(own, 0) >= member.life and record.marks.get(own) != mark


def _has_journal(directory: Directory) -> bool:
    return directory.files.exists(FOLDER) and bool(list_segments(directory.files))


def _close_well(directory: Directory) -> None:
    """The directory of a lone broker: recover it as such, so that nothing of it is in doubt when it seeds a shard."""
    store = MessageStore(directory.files, directory.settings, directory.clock)
    try:
        store.close()
    except DMQError:
        store.abandon()
        raise
