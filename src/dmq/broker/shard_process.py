"""A broker's process as a member of a shard: its registry, its port for other members, its place, and its clients.

The order of a start: the port for clients (they are told who leads), the port for members, the registry, the directory.
A registry that does not answer is waited for. A stop hands the shard over first if this member leads it.

What always holds: there is one member in a process; what cannot be mended (the directory belongs elsewhere, the shard
is full, the disk fails) ends it with that error.

`ShardService` makes the Broker when the member leads, and drops it when it ceases to.

What always holds: there is a Broker only between `begin` and `drop`, on the store that `begin` was given; connections
outlive it, and are told where the leader is. A Broker that was dropped touches the store no more.

`LeaderLinks` go to the leaders of other shards; over them this one asks those leaders to follow a change of metadata.

What always holds: there is at most one link to an address, and at most `LINKS_MAX` of them; one that fails is closed
and made anew by the next question.

`Watchdog` is a thread that sees when the event loop, or a leader's flush, stands still, and says so.

A member whose loop stands still must lose its session in the registry, so that another one can lead. The beats of a
name server's client are made by the loop, so they end with it; a registry whose client has a thread of its own is to be
told by `on_still`.

What always holds: it only looks, takes no lock that the loop holds, and logs once for each time that it stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_access import ClusterAccess, GroupChange
from dmq.broker.diagnostics.metrics import NodeLoad
from dmq.broker.journal.disk import DiskThreads
from dmq.broker.journal.shard_writer import ShardWriter
from dmq.broker.journal.unit_fetch import fetch_units
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.clock import Clock, SystemClock
from dmq.errors import BrokerStopping, Busy, DatabaseDown, DMQError, InvalidSettings, NotConnected, RegistryDown
from dmq.event_log import EventLog
from dmq.model import check_name
from dmq.net.address import ServerAddress, check_address, parse_address
from dmq.net.link import Link, LinkLost
from dmq.protocol.admin import GroupCreate, GroupDelete, TopicSync, TopicSyncReply
from dmq.protocol.cluster.route import RouteReply, ShardRoute
from dmq.protocol.commands import Command
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.protocol.read import Fetch, FetchReply
from dmq.protocol.session import BrokerInfo, ShardInfo
from dmq.registry.cluster_view import ClusterView, ViewChange
from dmq.registry.contents import NodeContent
from dmq.registry.metadata import Metadata
from dmq.registry.paths import DEFAULT_ROOT
from dmq.registry.registry import Registry
from dmq.registry.topic_entries import TopicEntries
from dmq.registry.url import check_registry_url, open_registry, shown_url
from dmq.settings import BrokerSettings, Settings
from dmq.shard.admin.operations import Operations
from dmq.shard.committed_reader import CommittedUnits
from dmq.shard.member import Directory, Member, MemberReport, MemberSettings, Place, Role
from dmq.shard.network import Network
from dmq.shard.service import Leadership
from dmq.shard.serving_right import Right
from dmq.storage.files import Buffer, Files
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["ShardProcess", "ShardService", "ShardWays", "Watchdog"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 0.5
_AGAIN_MS: Final = 100
_ROUTES_SECONDS: Final = 1.0  # that a question for routes waits until the registry was read
_LOOK_SECONDS: Final = 1.0
_FETCH_BYTES: Final = 4 << 20  # in one answer to FETCH
_ARRIVAL_SECONDS: Final = 0.05  # until a FETCH that waits looks again
_NAMELESS: Final = BrokerSettings().name
_ADDRESSES_MAX: Final = 64
# A flush, a checkpoint, and what is read for followers that are far behind or for a repair; none waits for another.
_DISK_THREADS: Final = 8


class ShardWays(NamedTuple):
    """What a member is given from outside.

    Attributes:
        files: its directory.
        letters: as of `ShardService`.
        open_registry: a client of the registry, with its session, for an owner's name; by the settings' URL if None.
        insecure: other addresses than loopback are meant.
    """

    files: Files
    letters: Callable[[], DeadLetterStore] | None = None
    open_registry: Callable[[str], Awaitable[Registry]] | None = None
    insecure: bool = False


class ShardProcess:
    """The member that one server is.

    Parameters:
        settings: with a registry and a shard.

    Attributes:
        member: None until the registry has answered for the first time.
        cluster: the view of the whole cluster, from then on.
        failed: set when the store of a leader failed.
        stop_asked: set when an operator wants the process to stop.

    Raises:
        InvalidSettings: it can never be a member.
    """

    def __init__(self, settings: Settings, dispatcher: Dispatcher, ways: ShardWays) -> None:
        shard = settings.shard
        assert shard.name is not None
        assert shard.registry_url is not None
        self._settings = settings
        self._dispatcher = dispatcher
        self._ways = ways
        self._root = DEFAULT_ROOT if ways.open_registry is not None else check_registry_url(shard.registry_url)
        self.shard = check_name(shard.name, "shard")
        self.broker = check_name(_name_of(settings), "broker")
        host = shard.replication_host or settings.broker.host
        check_address(host, ways.insecure)
        self.network = Network(
            self.broker, host=host, port=shard.replication_port, clock=dispatcher.clock, insecure=ways.insecure
        )
        self.service = ShardService(dispatcher, ways.letters)
        self.failed, self.stop_asked = self.service.failed, self.service.stop_asked
        self.member: Member | None = None
        self.cluster: ClusterView | None = None
        self._registry: Registry | None = None
        self._links = LeaderLinks(self.broker, dispatcher.clock)
        self._watchdog: Watchdog | None = None
        self._disk: DiskThreads | None = None
        self._task: asyncio.Task[None] | None = None
        dispatcher.face = self

    # --- starting and stopping --------------------------------------------------------------------------------------

    async def start(self, listening: ServerAddress) -> None:
        """Listen for other members and begin to take part.

        Parameters:
            listening: where the server listens for clients.

        Raises:
            PortTaken, CannotListen, InvalidSettings: nothing was begun.
        """
        shard = self._settings.shard
        address = _advertised(shard.address, listening, "shard.address")
        await self.network.start()
        try:
            where = parse_address(self.network.address)
            replication = _advertised(shard.replication_address, where, "shard.replication_address")
        except InvalidSettings:
            await self.network.stop()
            raise
        self._dispatcher.address = address
        place = Place(
            broker=self.broker,
            shard=self.shard,
            address=address,
            replication_address=replication,
            zone=shard.zone or "",
            weight=shard.weight,
            root=self._root,
        )
        self._task = asyncio.create_task(self._run(place))

    @property
    def ended(self) -> asyncio.Task[None]:
        """Over when the member is: with its error, if it has one."""
        assert self._task is not None, "it was not started"
        return self._task

    async def _run(self, place: Place) -> None:
        registry = self._registry = await self._open_registry()
        shard, clock = self._settings.shard, self._dispatcher.clock
        settings = MemberSettings(
            replicas=shard.replicas,
            min_in_sync=shard.min_in_sync,
            promise_seconds=shard.promise_seconds,
            lag_seconds=shard.lag_seconds,
            uncommitted_bytes_max=shard.uncommitted_bytes_max,
        )
        self._disk = DiskThreads(asyncio.get_running_loop(), _DISK_THREADS)
        directory = Directory(self._ways.files, self._settings.store, clock, on_disk=self._disk.wait_for)
        member = Member(directory, place, registry, self.network, service=self.service, settings=settings)
        self.member = self.network.hearing = member
        load = NodeLoad(self._dispatcher, clock)
        member.load = lambda: load.take(self._dispatcher.broker)
        self._dispatcher.shards = Operations(member, self.network, clock, self.broker)
        self._watchdog = Watchdog(lambda: member.heart.is_beating)
        self._watchdog.start()
        self.cluster = cluster = ClusterView(registry, member.view.paths, clock)
        self._dispatcher.shards.cluster_view = cluster
        cluster.listeners.append(self._routes_changed)
        metadata = Metadata(registry, member.view.paths, member.view.write)
        self.service.access = ClusterAccess(
            self.shard, cluster, TopicEntries(metadata, cluster), self._ask_sync, ask_group=self._ask_group
        )
        works = [cluster.keep(), self._tell_own(member), self._announce(metadata)]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await member.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _open_registry(self) -> Registry:
        """A client of the registry, however long that takes: a member that starts waits for it."""
        url, given = self._settings.shard.registry_url, self._ways.open_registry
        assert url is not None
        is_told = False
        while True:
            try:
                if given is not None:
                    return await given(self.broker)
                return await open_registry(url, self.broker, clock=self._dispatcher.clock)
            except RegistryDown as error:
                if not is_told:
                    log.warning(
                        "the registry does not answer: this member waits for it", url=shown_url(url), error=error
                    )
                is_told = True
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _ask_sync(self, address: str, topic: str) -> int:
        """Have the leader at an address bring its slot of a topic in line with the registry."""
        reply: TopicSyncReply = await self._links.ask(address, Command.TOPIC_SYNC, TopicSync(topic))
        return reply.behind

    async def _ask_group(self, address: str, change: GroupChange) -> None:
        """Have the leader at an address create or delete a group in its own slots."""
        if change.is_deleted:
            asked: Header = GroupDelete(change.group, change.topic, is_local=True)
            await self._links.ask(address, Command.GROUP_DELETE, asked)
        else:
            asked = GroupCreate(change.group, change.topic, is_local=True)
            await self._links.ask(address, Command.GROUP_CREATE, asked)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _routes_changed(self, change: ViewChange) -> None:
        if change.is_all or change.has_shards:
            self._dispatcher.tell_routes()
        if change.topics and not change.is_all:
            self._dispatcher.tell_routes(change.topics)

    async def _tell_own(self, member: Member) -> None:
        """Tell clients when our shard has another leader; for ever."""
        before = self.info()
        while True:
            await member.view.wait(_LOOK_SECONDS)
            if (now := self.info()) != before:
                before = now
                self._dispatcher.tell_routes()

    async def _announce(self, metadata: Metadata) -> None:
        """Have the other shards read our record whenever this member begins to lead; for ever."""
        while True:
            await self.service.began.wait()
            self.service.began.clear()
            while True:
                try:
                    await metadata.touch(metadata.paths.shard(self.shard))
                    break
                except (DMQError, TimeoutError) as error:
                    log.debug("leader not announced", error=error)
                    await asyncio.sleep(_AGAIN_SECONDS)

    async def routes(self, topics: Sequence[str]) -> RouteReply:
        """The shards of the cluster, and where these topics are.

        Raises:
            Busy: the registry was not read in time. Who asks must not take this shard for the whole cluster.
        """
        deadline = self._dispatcher.clock.monotonic() + _ROUTES_SECONDS
        while not (self.cluster and self.cluster.is_known) and self._dispatcher.clock.monotonic() < deadline:
            await asyncio.sleep(_ARRIVAL_SECONDS)
        if self.cluster is None or not self.cluster.is_known:
            raise Busy("this broker has not read the registry yet: ask again, or another one", retry_after_ms=_AGAIN_MS)
        info, broker = self.info(), self._dispatcher.broker
        own = ShardRoute(info.number, info.shard, info.epoch, leader=info.leader, members=info.members)
        reply = self.cluster.reply(topics, own if info.number else None)
        if broker is not None:  # a topic that is only in our journal yet
            known = {row.topic for row in reply.topics}
            rows = [broker.catalog.route(name, info.number) for name in topics if name not in known]
            reply.topics.extend(row for row in rows if row is not None)
        return reply

    async def committed_units(self, asked: Fetch) -> tuple[FetchReply, list[Buffer]]:
        """Units that this member knows to be committed; waits for some if asked to.

        Raises:
            NotLeader: it is not a follower that is open now.
            OffsetGone, Damaged: it does not have them.
        """
        size = min(asked.max_bytes or _FETCH_BYTES, _FETCH_BYTES, self._settings.broker.frame_bytes_max // 2)
        clock = self._dispatcher.clock
        deadline = clock.monotonic() + asked.wait_ms / 1000
        known = CommittedUnits(0, 0, 0, 0, journal_id=0, raw=b"")

        async def read(offset: int, room: int) -> tuple[Buffer, int]:
            nonlocal known
            if self.member is None or self._dispatcher.broker is not None:
                raise self._dispatcher.no_broker()
            try:
                known = await self.member.committed_units(offset, room)
            except BrokerStopping as error:
                raise self._dispatcher.no_broker() from error
            return known.raw, known.end

        while True:
            # How far it may read, the follower itself says with each answer.
            found = await fetch_units(asked, size, 1 << 63, read)
            if found.end > asked.journal_offset or clock.monotonic() >= deadline:
                return FetchReply(
                    found.start,
                    found.end,
                    known.first,
                    known.committed,
                    epoch=self.info().epoch,
                    journal_id=known.journal_id,
                ), found.pieces
            await asyncio.sleep(_ARRIVAL_SECONDS)

    async def stop(self, *, hand_over: bool = True) -> None:
        """Hand over if this member leads, leave the shard, and close everything but the clients' connections."""
        if self.member is not None:
            await self.member.stop(hand_over=hand_over)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._disk is not None:
            self._disk.end()  # a disk that hangs must not keep the process
        self._links.close()
        await self._dispatcher.finish()
        await self.network.stop()
        if self._registry is not None:
            with contextlib.suppress(RegistryDown):
                await self._registry.close()

    # --- what is told of it -----------------------------------------------------------------------------------------

    def report(self) -> MemberReport:
        """How the member stands."""
        if self.member is None:
            return MemberReport(
                broker=self.broker,
                shard=self.shard,
                role=Role.STARTING,
                obstacle="the registry has not answered yet",
                is_registry_down=True,
            )
        return self.member.report()

    def info(self) -> ShardInfo:
        """What clients are told with a hello."""
        member = self.member
        if member is None:
            return ShardInfo(self.shard)
        report = member.report()
        record = member.view.record
        return ShardInfo(
            self.shard,
            report.epoch,
            is_leader=report.is_serving and report.right != Right.NONE,
            leader=report.leader_address,
            members=[node.address for node in self._nodes(member).values()][:_ADDRESSES_MAX],
            number=0 if record is None else record.number,
        )

    def brokers(self) -> list[BrokerInfo]:
        """The other brokers of the cluster that run, those of our shard first."""
        member = self.member
        if member is None:
            return []
        report = member.report()
        others = [] if self.cluster is None else self.cluster.brokers(apart_from=self.shard)
        return [
            BrokerInfo(
                name,
                node.address,
                shard=self.shard,
                is_leader=name == report.leader,
                is_writable=name == report.leader,
                epoch=report.epoch,
            )
            for name, node in self._nodes(member).items()
            if name != self.broker
        ] + others

    def figures(self) -> dict[str, float]:
        """See `dmq.broker.diagnostics.metrics`."""
        report, broker = self.report(), self._dispatcher.broker
        followers = [one for one in report.followers if one.is_connected or one.is_in_sync]
        found = {
            "leading": report.is_serving and broker is not None and broker.readiness.is_running,
            "following": report.role is Role.FOLLOWING,
            "epoch": report.epoch,
            "members": len(report.members),
            "in_sync": len(report.in_sync),
            "min_in_sync": report.min_in_sync,
            "uncommitted": max(0, report.end - report.committed),
            "lag": max((max(0, report.end - one.flushed) for one in followers), default=0),
            "behind": max((one.seconds_behind for one in followers), default=0.0),
            "skew": max((abs(one.skew_seconds) for one in followers if one.is_connected), default=0.0),
            "terms": self.service.begun,
            "cuts": report.cuts,
            "doubtful": report.doubtful,
            "parked": report.role is Role.PARKED,
            "registry_down": report.is_registry_down,
        }
        figures: dict[str, float] = {f"shard_{name}": value for name, value in found.items()}
        if self.member is not None:
            figures |= self.member.scrubber.figures()
        return figures | {"store_damage": report.damaged, "store_mended": report.mended}

    def _nodes(self, member: Member) -> dict[str, NodeContent]:
        """The members of our shard that are registered, by name."""
        return {name: node for name, node in sorted(member.view.nodes.items()) if node.shard == self.shard}

    @property
    def readiness(self) -> tuple[bool, str]:
        """Whether this member does its part, and in words what it does: follow a leader, or lead and serve."""
        report = self.report()
        if report.role is Role.FOLLOWING:
            return True, f"follows in epoch {report.epoch}"
        if report.role is Role.LEADING and self._dispatcher.broker is not None:
            if self._dispatcher.broker.readiness.is_running:
                return True, f"leads epoch {report.epoch}"
            return False, f"leads epoch {report.epoch} and may not serve now"
        return False, f"{report.role}: {report.obstacle}" if report.obstacle else str(report.role)


def _name_of(settings: Settings) -> str:
    """What the member is called; by its host and port if nobody said, since every member needs a name of its own."""
    broker = settings.broker
    if broker.name != _NAMELESS:
        return broker.name
    if not broker.port:
        raise InvalidSettings(
            "a member of a shard that takes any free port needs a name by which it is known after a restart: give "
            "--name, another one for each member",
            keys=["broker.name", "broker.port"],
        )
    return f"{socket.gethostname()}-{broker.port}"


def _advertised(said: str | None, listening: ServerAddress, key: str) -> str:
    """Where others reach a port: where it listens, if nobody said otherwise.

    Raises:
        InvalidSettings: it listens everywhere, which is not an address to connect to; or what was said is none.
    """
    if said is not None:
        try:
            return str(parse_address(said))
        except InvalidSettings as error:
            raise InvalidSettings(f"{key} = {said!r} is not an address: write host:port", keys=[key]) from error
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(listening.host).is_unspecified:
            raise InvalidSettings(
                f"this member listens on every address of its machine: say in {key} by which one the others reach it",
                keys=[key],
            )
    return str(listening)


LINKS_MAX: Final = 64
_ANSWER_SECONDS: Final = 5.0


class LeaderLinks:
    """The links of one member.

    Parameters:
        owner: our name.
    """

    def __init__(self, owner: str, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock
        self._links: dict[str, Link] = {}  # used longest ago first
        self._opening: dict[str, asyncio.Lock] = {}

    async def ask(self, address: str, command: int, header: Header) -> Any:
        """The header of a broker's answer.

        Raises:
            NotConnected: it does not answer.
            DMQError: what it answered.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                link = await self._link(address)
                return await link.request(command, header)
        except (OSError, TimeoutError, LinkLost, InvalidSettings) as error:
            self._drop(address)
            raise NotConnected(f"the broker at {address} does not answer: {error}", address=address) from error

    async def _link(self, address: str) -> Link:
        lock = self._opening.setdefault(address, asyncio.Lock())
        async with lock:
            link = self._links.pop(address, None)
            if link is None or link.closed.done():
                link = await Link.open(
                    parse_address(address), self._owner, clock=self._clock, peer="broker", on_push=_ignore
                )
            self._links[address] = link
        if not lock.locked():
            self._opening.pop(address, None)
        while len(self._links) > LINKS_MAX:
            self._drop(next(iter(self._links)))
        return link

    def _drop(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.close(NotConnected("it is not needed any more"))

    def close(self) -> None:
        """End all of them."""
        for address in [*self._links]:
            self._drop(address)


def _ignore(frame: Frame) -> None:
    """Nothing that a broker says by itself is of interest here."""


_WATCH_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 2.0  # that a look comes late: not the loop, the whole process stood still
_FRAMES_MAX: Final = 12


class Watchdog:
    """Watches one event loop; made on its thread.

    Parameters:
        is_alive: asked several times a second, in another thread.
        on_still: called there each time that it is not alive any more.
        boottime: reads a clock that counts suspended time; the machine's if None.
    """

    def __init__(
        self,
        is_alive: Callable[[], bool],
        on_still: Callable[[], None] = lambda: None,
        *,
        look_seconds: float = _WATCH_SECONDS,
        boottime: Callable[[], float] | None = None,
    ) -> None:
        self._boottime = boottime or SystemClock().boottime
        self._is_alive = is_alive
        self._on_still = on_still
        self._look_seconds = look_seconds
        self._watched = threading.get_ident()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dmq-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        was_alive, alive_at = True, self._boottime()
        looked_at = alive_at
        while not self._stopping.wait(self._look_seconds):
            is_alive, now = self._is_alive(), self._boottime()
            late = now - looked_at - self._look_seconds
            if late > _PAUSE_SECONDS:
                log.warning(
                    "this process stood still: it was stopped, or its machine was suspended or had no time for it; if "
                    "it led, another member may lead now",
                    seconds=round(late, 1),
                )
            if was_alive and not is_alive:
                if late <= _PAUSE_SECONDS:
                    log.error(
                        "the event loop, or a flush of the journal, stands still: if this member leads, another one "
                        "will",
                        where=self._where(),
                    )
                self._on_still()
            elif is_alive and not was_alive:
                log.warning("the event loop goes on", seconds=round(now - alive_at, 1))
            was_alive, looked_at = is_alive, now
            if is_alive:
                alive_at = now

    def _where(self) -> str:
        """What the loop's thread is doing, innermost last."""
        frame = sys._current_frames().get(self._watched)
        found = traceback.extract_stack(frame)[-_FRAMES_MAX:] if frame is not None else []
        return " > ".join(f"{one.name}:{one.lineno}" for one in found)


class ShardService:
    """Serves the clients of one server while its member leads.

    Parameters:
        letters: makes the store of dead letters; None if they wait in the journal, since no database of theirs can be
            reached by every member.

    Attributes:
        failed: set when the store of a Broker failed.
        stop_asked: set when an operator wants the process to stop.
        access: the cluster, for the Brokers it makes.
        begun: how many Brokers it has made.
        began: set whenever it has made one.
    """

    def __init__(self, dispatcher: Dispatcher, letters: Callable[[], DeadLetterStore] | None) -> None:
        self._dispatcher = dispatcher
        self._letters = letters
        self.failed, self.stop_asked = asyncio.Event(), asyncio.Event()
        self._writer: ShardWriter | None = None
        self.access: ClusterAccess | None = None
        self.begun = 0
        self.began = asyncio.Event()

    async def begin(self, store: MessageStore, leadership: Leadership) -> None:
        """The start of our epoch is committed: serve clients with this store."""
        dispatcher = self._dispatcher
        broker = Broker(
            store,
            dispatcher.settings.broker,
            dispatcher.clock,
            dispatcher,
            letters=self._letters or no_letters,
            leadership=leadership,
        )
        assert isinstance(broker.writer, ShardWriter)
        broker.failed, broker.stop_asked = self.failed, self.stop_asked
        self._writer = broker.writer
        if self.access is not None:
            broker.enter_cluster(self.access)
        dispatcher.attach(broker)
        self.begun += 1
        self.began.set()
        if self._letters is not None:
            broker.dead_letters.start(at_once=True)

    def committed(self) -> None:
        """More of the store is visible because followers have it: answer what waited for that."""
        if self._writer is not None:
            self._writer.committed()

    async def hold(self) -> None:
        """Take no more writes, and let those that are under way be flushed here: a hand-over begins."""
        if self._writer is not None:
            await self._writer.hold()

    def resume(self) -> None:
        """The hand-over does not take place: take writes again."""
        if self._writer is not None:
            self._writer.resume()

    async def drop(self) -> None:
        """We do not lead any more: nothing is answered, handed out or written from this call on."""
        broker = self._dispatcher.detach()
        self._writer = None
        if broker is not None:
            await broker.drop(self._dispatcher.no_broker())


def no_letters() -> DeadLetterStore:
    """There is no database that every member could use."""
    raise DatabaseDown(
        "dead letters of a shard wait in its journal until there is a database that every member reaches: set "
        "broker.dead_letters_url to a server's, such as postgresql://… or mysql://…"
    )
