"""The member: one broker process of a shard, with one journal. It owns the role: it follows, waits, stands and leads.

The registry says who belongs to the shard and who leads it; the member finds its place in that, and changes roles in
one task, so it never has two at a time. The Broker exists on the leader only: `Service` makes it and drops it.

What always holds:
- It leads only epochs that it has won in this life of the process.
- When it ceases to lead, its broker is dropped whole and its directory opened again as a replica, before it does
  anything else.
- A promise given outlives the connection and the role in which it was given.
- A member that has diverged, or whose registry is another one or an old copy, does nothing until that changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from dmq.errors import (
    BrokerStopping,
    DiskFull,
    Diverged,
    DMQError,
    InvalidRequest,
    NotInCluster,
    NotLeader,
    OffsetGone,
    RegistryConflict,
    StaleEpoch,
    StorageError,
)
from dmq.event_log import EventLog
from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.replication import (
    Confirm,
    Follow,
    FollowReply,
    Repair,
    RepairReply,
    Standing,
    StandingReply,
)
from dmq.registry.contents import CLUSTER_FORMAT, NodeContent, encode_content, hex_id
from dmq.registry.paths import Paths
from dmq.registry.registry import UNAVAILABLE, Registry
from dmq.shard.committed_reader import CommittedReader, CommittedUnits
from dmq.shard.election import Obstacle
from dmq.shard.follower import Follower
from dmq.shard.heart import Heart
from dmq.shard.peers import Peers, Seat
from dmq.shard.place import Directory, MemberSettings, Place
from dmq.shard.record.enrolment import Enrolment, exclusion, newest_record, said_by
from dmq.shard.record.registration import Registration
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.answer import CommittedJournal, answer_repair
from dmq.shard.repair.mender import Mended
from dmq.shard.repair.repairs import Repairs
from dmq.shard.repair.scrubber import ScrubbedJournal, Scrubber, ScrubWays
from dmq.shard.report import MemberReport, Role
from dmq.shard.roles.candidacy import Candidacy, Victory
from dmq.shard.roles.intake import Intake, IntakeEnd
from dmq.shard.roles.leader_report import led
from dmq.shard.roles.post import Post
from dmq.shard.roles.term import Term
from dmq.shard.service import Service
from dmq.shard.serving_right import Promise
from dmq.storage.files import Buffer
from dmq.storage.replica import Replica
from dmq.storage.store import Leading, MessageStore
from dmq.storage.upkeep.identity import read_record
from dmq.version import __version__

__all__ = ["Directory", "Member", "MemberReport", "MemberSettings", "Place", "Role"]

log = EventLog(__name__)

T = TypeVar("T")

_BEAT_SECONDS: Final = 0.25
_AGAIN_SECONDS: Final = 0.2
_FULL_SECONDS: Final = 2.0  # a full disk, or a leader's damaged one, is not tried, and logged, at every chance


class _Target(NamedTuple):
    """A leader to follow."""

    broker: str
    address: str
    epoch: int


class Member:
    """One member of one shard; what others hear of it is `dmq.shard.peers.Hearing`.

    Attributes:
        role: what it is doing.
        heart: what a thread beside the event loop asks whether this member is alive.
        scrubber: looks for damage while it leads or follows. `load`: of the broker, for its entry in the registry.
    """

    def __init__(
        self,
        directory: Directory,
        place: Place,
        registry: Registry,
        peers: Peers,
        service: Service,
        settings: MemberSettings | None = None,
    ) -> None:
        self._directory = directory
        self._place = place
        self._service = service
        settings = settings or MemberSettings()
        clock = directory.clock
        self._view = ShardView(registry, place.shard, Paths(place.root))
        self.heart = Heart(clock, registry.session_seconds / 2)
        self._post = Post(
            place=place,
            settings=settings,
            directory=directory,
            view=self._view,
            peers=peers,
            promise=Promise(clock.boottime(), settings.promise_seconds),
            heart=self.heart,
            repairs=Repairs(directory, self._view, peers),
            notes=asyncio.Lock(),
            mark=hex_id(directory.draw()),
        )
        self._enrolment = Enrolment(directory, place, settings, self._view, mark=self._post.mark)
        self._candidacy = Candidacy(self._post)
        self._committed_reader = CommittedReader(directory.on_disk)
        self._replica: Replica | None = None
        self._intake: Intake | None = None
        self._term: Term | None = None
        self._registration: Registration | None = None
        self._diverged: tuple[int, int] | None = None  # the epoch, and the last promotion with loss, when it did
        self._obstacle = ""
        self._cuts = 0
        self._is_full = False  # as the last leader that was followed found
        self._told = ""  # the last one that was logged
        self._mending: asyncio.Future[Mended] | None = None  # somebody asked for a repair of all
        self.scrubber = Scrubber(
            ScrubWays(directory.files, directory.settings, clock, directory.on_disk),
            self._scrubbed,
            remedy="it is mended from another member",
            on_found=self._found_damage,
        )
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_begun = False
        self.role = Role.STARTING
        self.load: Callable[[], dict[str, float]] = dict

    # --- for its owner ----------------------------------------------------------------------------------------------

    @property
    def leader_address(self) -> str:
        """Where clients reach the leader; empty if that is not known."""
        if self._term is not None and not self._term.is_over:
            return self._place.address if self._term.may_serve() else ""
        return self._view.leader_address

    @property
    def view(self) -> ShardView:
        """What the registry says of the shard."""
        return self._view

    @property
    def term(self) -> Term | None:
        """The epoch that it leads; None if it does not."""
        return self._term

    async def run(self) -> None:
        """Take part in the shard until `stop`.

        Raises:
            InvalidSettings: the directory belongs elsewhere, or the shard is full.
            StorageError: the disk failed, or the directory cannot be opened.
        """
        self._is_begun = True
        works = [self._beat(), self._view.keep(), self._note_revisions(), self.scrubber.run(), self._take_part()]
        tasks = {asyncio.ensure_future(work) for work in works}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.role = Role.STOPPED
            self.heart.rest()
            if self._mending is not None and not self._mending.done():
                self._mending.cancel()
            self._stopped.set()

    async def stop(self, *, hand_over: bool = True) -> None:
        """Leave: hand over if it leads, and close the directory; it waits seconds for a registry that does not answer.

        Parameters:
            hand_over: let a follower lead first, if one can.
        """
        registration = self._registration
        self._view.leave()
        if hand_over and registration is not None and self._term is not None and self._term.is_serving:
            registration.stop()  # who is not registered is not in the set that the next leader begins with
            with contextlib.suppress(DMQError):
                await self._term.hand_over(None, *registration.deletion())
        self._stopping.set()
        if self._term is not None:
            self._term.cease("this member stops")
        if self._intake is not None:
            self._intake.stop()
        self._view.tell()
        if self._is_begun:
            await self._stopped.wait()

    async def hand_over(self, to: str | None = None) -> str:
        """Let a follower lead: the best one, or that of a broker's name; returns the name.

        Raises:
            NotLeader: this member does not lead.
            InvalidRequest: no follower has that name.
            NotEnoughReplicas: no follower is near enough, or the registry does not answer; this member leads on.
        """
        if self._term is None:
            raise self._not_leader()
        if to == self._place.broker:
            raise InvalidRequest(f"{to!r} leads already: name another member, or none", member=to)
        return await self._term.hand_over(to)

    async def mend(self) -> Mended:
        """Look through what is committed, and fetch what is damaged of it from the others.

        A follower does not follow meanwhile.

        Raises:
            BrokerStopping: this member is not open, or stops.
            StorageError: the disk does not take what was fetched.
        """
        if self._term is not None:
            return await self._term.mend()
        if self._replica is None or self._stopping.is_set():
            raise BrokerStopping("this member is not open: ask again in a moment")
        if self._mending is None:
            self._mending = asyncio.get_running_loop().create_future()
        if self._intake is not None:
            self._intake.stop()
        self._view.tell()
        mending = self._mending
        await asyncio.wait([mending])  # who asked may go away, and another may have asked as well
        if mending.cancelled():
            raise BrokerStopping("this member stops")
        return mending.result()

    # --- upkeep -----------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self.heart.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    async def _note_revisions(self) -> None:
        """Keep the highest revision of the record that was seen in the directory; for ever."""
        while True:
            replica, record = self._replica, self._view.record
            if replica is not None and record is not None and record.revision > replica.membership.revision:
                try:
                    await self._post.note(self._note_revision)
                except DiskFull as error:  # a full disk ends no member: it is noted when there is space
                    log.error("no space to note a revision", once_for=(), shard=self._place.shard, error=error)
            await self._view.wait(1.0)

    def _note_revision(self) -> None:
        replica, record = self._replica, self._view.record  # which may be others by now
        if replica is not None and record is not None:
            replica.saw_record(record.revision, encode_content(record))

    def _scrubbed(self) -> ScrubbedJournal | None:
        """What of the journal is to be looked at: what is committed, while this thread owns it."""
        replica, term = self._replica, self._term
        if term is not None and not term.is_over:
            queries = term.store.queries
            return ScrubbedJournal(term.store.damage, queries.start, min(queries.visible, queries.flushed))
        if replica is not None and self._intake is not None:
            return ScrubbedJournal(replica.damage, replica.start, min(replica.applied, replica.flushed))
        return None

    def _found_damage(self) -> bool:
        """A leader sees it by itself; a follower stops following, to mend it. Returns whether it is being mended."""
        intake, replica = self._intake, self._replica
        if intake is not None and replica is not None and self._post.repairs.is_due(replica.damage):
            intake.stop()
            self._view.tell()
            return True
        return self._term is not None or replica is None or not replica.damage.ranges

    async def _until_stop(self, work: Awaitable[T]) -> T:
        """Wait for something that may be given up.

        Raises:
            BrokerStopping: this member stops.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise BrokerStopping("this member stops")
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _while_leads(self, target: _Target, work: Awaitable[T]) -> T:
        """Wait for a leader to answer, but only while it is the leader: who is gone may take long to say nothing.

        Raises:
            BrokerStopping: this member stops, or another one leads, or nobody.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._stopping.is_set() or self._target() != target:
                    raise BrokerStopping(f"{target.broker} does not lead any more, or this member stops")
                changed = asyncio.ensure_future(self._view.wait(_AGAIN_SECONDS))
                await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- roles ------------------------------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        try:
            replica = await self._until_stop(self._enrolment.run())
        except BrokerStopping:
            return
        self._replica = replica
        if self._enrolment.is_new:
            self._post.promise.release()  # nobody can have heard one from a replica that was not there
        else:
            self._post.promise.give(self._post.now())  # the process before this one may have, until it left the lock
        content = NodeContent(
            address=self._place.address,
            replication_address=self._place.replication_address,
            shard=self._place.shard,
            replica=hex_id(replica.membership.replica_id),
            zone=self._place.zone,
            weight=self._place.weight,
            version=__version__,
            format=CLUSTER_FORMAT,
        )
        clock, broker = self._directory.clock, self._place.broker
        self._registration = registration = Registration(self._view, broker, content, clock, load=self.load)
        keeper = asyncio.ensure_future(registration.keep())
        try:
            while not self._stopping.is_set():
                await self._next_role()
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self._leave(registration)

    async def _leave(self, registration: Registration) -> None:
        if self._candidacy.is_unsettled and self._replica is not None:
            with contextlib.suppress(RegistryConflict, *UNAVAILABLE):
                await self._candidacy.settle(self._replica)
        await registration.end()
        replica = self._replica
        if replica is not None:
            self._replica = None
            await self._directory.on_disk(lambda: _close(replica))

    async def _next_role(self) -> None:
        """Do what is to be done now, until that changes."""
        assert self._replica is not None
        if self._is_parked():
            self.role = Role.PARKED
            await self._view.wait(_AGAIN_SECONDS)
            return
        if self._is_missing():
            self.role = Role.WAITING
            self._tell_obstacle(await self._enrolment.again(self._replica))
            await self._view.wait(_AGAIN_SECONDS)
            return
        if self._mending is not None or self._post.repairs.is_due(self._replica.damage):
            self.role = Role.WAITING
            await self._mend(self._replica)
            return
        target = self._target()
        if target is not None:
            await self._follow(target)
            return
        self.role = Role.WAITING
        if self._candidacy.is_unsettled:
            await self._settle()
            return
        why = self._candidacy.obstacle(self._replica)
        if why is Obstacle.NONE:
            await self._stand()
            return
        self._tell_obstacle(
            self._view.trouble or ("the registry has no record of the shard" if why is None else str(why))
        )
        promised = self._post.promise.until - self._post.now()
        await self._view.wait(min(_AGAIN_SECONDS, promised) if promised > 0 else _AGAIN_SECONDS)

    async def _mend(self, replica: Replica) -> None:
        """Fetch from others what the disk lost; everything is looked at if somebody asked for that."""
        asked = self._mending

        def journal() -> CommittedJournal:
            if self._stopping.is_set():
                raise BrokerStopping("this member stops")
            return CommittedJournal.of_follower(replica)

        try:
            mended = await self._post.repairs.run(journal, scrub=asked is not None)
        except DMQError as error:
            if not isinstance(error, BrokerStopping):
                log.error("not mended", shard=self._place.shard, error=error)
            if asked is not None:
                asked.set_exception(error)
                asked.exception()  # retrieved, though nobody may wait for it any more
        else:
            if asked is not None:
                asked.set_result(mended)
        self._mending = None

    def _is_parked(self) -> bool:
        """Whether a person has to decide, as far as is known."""
        record, cluster, replica = self._view.record, self._view.cluster, self._replica
        assert replica is not None
        if cluster is not None and cluster.id != replica.membership.cluster:
            self._tell_obstacle(
                f"the registry is that of cluster {cluster.id}, not of {replica.membership.cluster}: give this member "
                "its own registry"
            )
            return True
        if record is not None and (why := exclusion(record, replica.membership, self._place, self._post.mark)):
            self._tell_obstacle(why)
            return True
        if self._diverged is not None and record is not None:
            if (record.epoch, record.unsafe) == self._diverged:
                return True
            self._diverged = None
        return False

    def _is_missing(self) -> bool:
        """Whether the record has this member no more: it was removed, and somebody took that back."""
        record, replica = self._view.record, self._replica
        if record is None or replica is None or record.revision < replica.membership.revision:
            return False
        return hex_id(replica.membership.replica_id) not in record.members.values()

    def _tell_obstacle(self, why: str) -> None:
        self._obstacle = why
        is_usual = why in ("", Obstacle.LED, Obstacle.PROMISED, Obstacle.FOLLOWING)
        if why != self._told and not is_usual:
            self._told = why
            log.warning("does not stand", shard=self._place.shard, broker=self._place.broker, why=why)

    async def _settle(self) -> None:
        assert self._replica is not None
        try:
            await self._candidacy.settle(self._replica)
        except (RegistryConflict, *UNAVAILABLE) as error:
            self._tell_obstacle(str(Obstacle.UNSETTLED))
            log.debug("not settled", shard=self._place.shard, error=error)
            await self._view.wait(_AGAIN_SECONDS)

    # --- following --------------------------------------------------------------------------------------------------

    def _target(self) -> _Target | None:
        """The leader to follow, if its address is known."""
        leader, replica = self._view.leader, self._replica
        if leader is None or replica is None or leader.replica == hex_id(replica.membership.replica_id):
            return None
        found = self._view.node_of(leader.replica)
        if found is None or not found[1].replication_address:
            return None
        return _Target(found[0], found[1].replication_address, leader.epoch)

    def _is_outdated(self, epoch: int) -> bool:
        record, replica = self._view.record, self._replica
        assert replica is not None
        if record is None or record.revision < replica.membership.revision:
            return False
        return record.epoch > epoch

    async def _follow(self, target: _Target) -> None:
        replica = self._replica
        assert replica is not None
        follower = Follower(replica, self._post.promise, target.epoch)
        try:
            following = await self._while_leads(target, self._post.peers.follow(target.address, follower.request()))
        except BrokerStopping:
            return
        except (DMQError, TimeoutError) as error:
            log.info("cannot follow", once_for=target, shard=self._place.shard, leader=target.broker, why=error)
            if is_damaged := isinstance(error, StorageError):
                self._tell_obstacle(str(Obstacle.LEADER_DAMAGED))
            await self._wait_again(_FULL_SECONDS if is_damaged else _AGAIN_SECONDS)
            return
        end = replica.end
        try:
            await self._post.note(lambda: follower.begin(following.reply))
        except (Diverged, StaleEpoch) as error:
            following.close()
            self._refuse(target, error)
            await self._wait_again()
            return
        self.role, self._told = Role.FOLLOWING, ""
        self._tell_obstacle(str(Obstacle.FOLLOWING))
        self._cuts += replica.end < end
        log.info(
            "follows",
            shard=self._place.shard,
            leader=target.broker,
            epoch=target.epoch,
            start=replica.end,
            bytes_cut=max(0, end - replica.end),
        )
        self._intake = Intake(
            self._post, replica, follower, following, is_outdated=lambda: self._is_outdated(target.epoch)
        )
        try:
            ended = IntakeEnd.STOPPED if self._stopping.is_set() else await self._intake.run()
        finally:
            self._intake = None
            following.close()
        await self._followed(target, ended)

    def _refuse(self, target: _Target, error: DMQError) -> None:
        record = self._view.record
        if isinstance(error, Diverged) and record is not None:
            self._diverged = (record.epoch, record.unsafe)
            self._tell_obstacle(str(error))
            log.error("diverged", shard=self._place.shard, leader=target.broker, epoch=target.epoch, error=error)

    async def _followed(self, target: _Target, ended: IntakeEnd) -> None:
        """A leader is not followed any more."""
        replica = self._replica
        assert replica is not None
        self.role = Role.WAITING
        self._is_full = ended is IntakeEnd.NO_SPACE
        if ended is not IntakeEnd.STOPPED:
            log.info("follows no more", shard=self._place.shard, leader=target.broker, epoch=target.epoch, why=ended)
        if ended is IntakeEnd.DAMAGED:
            self._cuts += replica.applied < replica.end
            await self._post.note(replica.distrust_tail)
        if ended is IntakeEnd.HANDED_OVER:
            await self._take_over(replica, target.epoch)
            return
        self._view.ask()
        if ended is not IntakeEnd.OUTDATED:
            await self._wait_again(_FULL_SECONDS if self._is_full else _AGAIN_SECONDS)

    async def _take_over(self, replica: Replica, epoch: int) -> None:
        """The leader of an epoch has handed over to us: stand now, if that is still the last epoch."""
        try:
            await self._view.refresh()
            if self._is_outdated(epoch):
                return
            self._post.promise.release()
            await self._candidacy.settle(replica)
        except (RegistryConflict, *UNAVAILABLE) as error:
            log.info("cannot take over at once", shard=self._place.shard, epoch=epoch, why=error)
            return
        await self._stand(at_once=True)

    async def _wait_again(self, seconds: float = _AGAIN_SECONDS) -> None:
        self._view.ask()
        if not self._stopping.is_set():
            await asyncio.sleep(seconds)

    # --- leading ----------------------------------------------------------------------------------------------------

    async def _stand(self, *, at_once: bool = False) -> None:
        replica = self._replica
        assert replica is not None
        self.role = Role.STANDING
        victory = await self._candidacy.stand(replica, at_once=at_once)
        if victory is None:
            self.role = Role.WAITING
            self._tell_obstacle(str(Obstacle.DOUBTFUL) if replica.membership.doubtful else "")
            await self._view.wait(_AGAIN_SECONDS)
            return
        await self._lead(replica, victory)

    async def _lead(self, replica: Replica, victory: Victory) -> None:
        directory, epoch = self._directory, victory.record.epoch
        self._tell_obstacle("")
        log.info(
            "elected",
            shard=self._place.shard,
            broker=self._place.broker,
            epoch=epoch,
            end=replica.end,
            in_sync=self._view.names_of(int(one, 16) for one in victory.record.in_sync),
        )

        def take_over() -> MessageStore:
            if replica.flushed < replica.end:
                replica.flush()
            return MessageStore(
                Leading(replica, epoch),
                directory.settings,
                directory.clock,
                server=directory.server,
                checkpoint_inline=False,
            )

        why = "it failed"
        try:
            store = await directory.on_disk(take_over)
            self._term = Term(self._post, self._service, victory, store=store, replica=replica)
            self.role = Role.LEADING
            if self._stopping.is_set():
                self._term.cease("this member stops")
            why = await self._term.run()
        except DiskFull as error:
            why = str(error)
        finally:
            self._term = None
            self._candidacy.is_unsettled = True
            self._post.promise.give(self._post.now())  # the others stand first
            log.warning("ceased to lead", shard=self._place.shard, epoch=epoch, why=why)
            self.role = Role.WAITING
        async with self._post.notes:
            self._replica = await directory.on_disk(
                lambda: Replica(directory.files, directory.settings, directory.clock, new_life=False)
            )

    # --- what others hear of it -------------------------------------------------------------------------------------

    def _not_leader(self) -> NotLeader:
        address = self._view.leader_address
        return NotLeader(
            f"this member of shard {self._place.shard!r} does not lead it"
            + (f": ask {address}" if address else ", and no leader is known: ask again in a moment"),
            leader=address,
        )

    def follow(self, request: Follow, seat: Seat) -> FollowReply:
        if self._term is None or self._term.is_over:
            self._view.ask()
            raise self._not_leader()
        return self._term.follow(request, seat)

    def confirmed(self, seat: Seat, confirm: Confirm) -> None:
        if self._term is not None:
            self._term.confirmed(seat, confirm)

    def writable(self, seat: Seat) -> None:
        if self._term is not None:
            self._term.writable(seat)

    def left(self, seat: Seat) -> None:
        if self._term is not None:
            self._term.left(seat)

    def standing(self, asked: Standing) -> StandingReply:
        replica = self._replica
        if replica is None:
            raise BrokerStopping("this member is not open: ask again in a moment")
        member = replica.membership
        if (asked.cluster, asked.shard) != (member.cluster, member.shard):
            raise NotInCluster(
                f"this is a member of shard {member.shard!r} of cluster {member.cluster}, not of {asked.shard!r} of "
                f"{asked.cluster}: check the addresses in the registry"
            )
        term, promise, now = self._term, self._post.promise, self._post.now()
        last_epoch, end = 0 if replica.last is None else replica.last.epoch, replica.end
        if term is not None:
            last_epoch, end = term.epoch, term.store.queries.end
        record = self._view.record
        return StandingReply(
            replica=member.replica_id,
            last_epoch=last_epoch,
            end=end,
            now_ms=max(0, self._directory.clock.now_ms()),
            is_in_sync=record is not None and hex_id(member.replica_id) in record.in_sync,
            role=str(self.role),
            committed=replica.applied if term is None else term.in_sync.committed,
            promise_ms=round(max(0.0, promise.until - now) * 1000),
            revision=member.revision,
            right="" if term is None else str(term.right),
            obstacle="" if term is not None else self._obstacle,
            damaged=len((replica if term is None else term.store).damage.ranges),
            is_doubtful=member.doubtful,
            is_full=self._is_full and self.role is Role.WAITING if term is None else term.store.space.is_refusing,
            silent_ms=0 if term is not None else round(promise.silent_seconds(now) * 1000),
            stalled_ms=0 if term is None else round(term.in_sync.seconds_uncommitted(now) * 1000),
            keeping_up=[] if term is None else term.in_sync.keeping_up(term.followers, now),
        )

    async def state(self) -> MemberState:
        """What its directory and its process say of themselves, also while it cannot join.

        Raises:
            BrokerStopping: it is not open, and is not to be.
        """
        replica, files = self._replica, self._directory.files
        if replica is None:
            said = await self._enrolment.look()
        else:
            kept, said = await self._directory.on_disk(lambda: read_record(files)), said_by(replica)
            said = msgspec.structs.replace(said, record=newest_record(kept, self._view.record))
        term = self._term
        if term is not None:
            queries = term.store.queries
            said = msgspec.structs.replace(
                said, last_epoch=term.epoch, end=queries.end, committed=term.in_sync.committed
            )
        mark = "" if replica is None else self._post.mark
        return msgspec.structs.replace(
            said,
            broker=self._place.broker,
            role=str(self.role),
            mark=mark,
            right="" if term is None else str(term.right),
        )

    async def repair(self, asked: Repair) -> tuple[RepairReply, Buffer]:
        replica = self._replica
        if replica is None:
            raise BrokerStopping("this member is not open: ask again in a moment")
        if self._diverged is not None:
            raise OffsetGone("this member has diverged from the others: ask another one", first=0, next=0)
        if self._term is not None:
            journal = CommittedJournal.of_leader(self._term.store, replica.membership)
        else:
            journal = CommittedJournal.of_follower(replica)
        return await answer_repair(journal, asked, self._directory.on_disk)

    async def committed_units(self, offset: int, max_bytes: int) -> CommittedUnits:
        """Units of the journal that this member knows to be committed, while it follows.

        Raises:
            BrokerStopping: it is not open, or does not follow now.
            OffsetGone, Damaged: as of `CommittedReader.read`.
        """
        replica = self._replica
        if replica is None or self._term is not None or self._diverged is not None:
            raise BrokerStopping("this member does not follow now: ask another one, or again in a moment")
        return await self._committed_reader.read(replica, offset, max_bytes)

    # --- for people -------------------------------------------------------------------------------------------------

    def report(self) -> MemberReport:
        """Where it stands."""
        view, replica, term = self._view, self._replica, self._term
        record, leader = view.record, None if view.leader is None else view.leader.replica
        named = {} if record is None else {one: name for name, one in record.members.items()}
        base = MemberReport(
            broker=self._place.broker,
            shard=self._place.shard,
            role=self.role,
            replica=0 if replica is None else replica.membership.replica_id,
            epoch=0 if record is None else record.epoch,
            leader="" if leader is None else named.get(leader, leader),
            leader_address=self.leader_address,
            members=() if record is None else tuple(sorted(record.members)),
            in_sync=() if record is None else tuple(named.get(one, one) for one in record.in_sync),
            min_in_sync=0 if record is None else record.min_in_sync,
            revision=0 if record is None else record.revision,
            doubtful=replica is not None and replica.membership.doubtful,
            obstacle=self._enrolment.obstacle if replica is None else "" if term is not None else self._obstacle,
            is_registry_down=view.is_down,
            cuts=self._cuts,
            damaged=len((replica if term is None else term.store).damage.ranges) if replica is not None else 0,
            mended=self._post.repairs.mended,
        )
        if term is not None:
            return msgspec.structs.replace(base, **led(self._post, replica, term))
        if replica is not None:
            epoch, committed = base.epoch if self._intake is None else self._intake.epoch, replica.applied
            return msgspec.structs.replace(
                base, epoch=epoch, start=replica.start, committed=committed, end=replica.end, flushed=replica.flushed
            )
        return base


def _close(replica: Replica) -> None:
    """The next start has less to read."""
    with contextlib.suppress(StorageError):
        replica.checkpoint()
    replica.end_life()
