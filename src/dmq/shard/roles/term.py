"""The term: a member leads one epoch that it has won, from the election until it ceases.

It takes its journal over as a store, has the start of its epoch committed, and then has its broker serve. Meanwhile it
sends its journal to followers, keeps `/leader` and the in-sync set in the registry, and gives way when it must.

What always holds:
- Nothing is served before the start of the epoch is committed, nor after the term is over; in between only with a right
  to (`serving_right`), which is asked before each answer.
- The session is a right only while `/leader` is ours in that very session, by a write that was answered.
- A set is written only with the version of the record that was read, and counts from before the write is sent; see
  `in_sync`.
- When the term is over, nothing is written to the journal any more, and who has waited is never answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from dmq.errors import (
    DMQError,
    InvalidRequest,
    NotEnoughReplicas,
    NotInCluster,
    NotLeader,
    RegistryConflict,
    RegistryDown,
    SessionExpired,
    ShardConflict,
    StaleEpoch,
    StorageError,
)
from dmq.event_log import EventLog
from dmq.protocol.cluster.replication import Confirm, Follow, FollowReply, Handover
from dmq.registry.contents import LeaderContent, ShardState, encode_content, hex_id
from dmq.registry.registry import NO_DEADLINE, UNAVAILABLE, Check, Create, Delete, Operation, Put
from dmq.shard.feed import Feed, Reading
from dmq.shard.in_sync import InSyncSet
from dmq.shard.leader import Leader
from dmq.shard.peers import Seat
from dmq.shard.repair.answer import CommittedJournal
from dmq.shard.repair.mender import Mended
from dmq.shard.roles.candidacy import Victory
from dmq.shard.roles.post import Post
from dmq.shard.service import Service
from dmq.shard.serving_right import Right
from dmq.storage.replica import Replica
from dmq.storage.store import MessageStore

__all__ = ["Term"]

log = EventLog(__name__)

_TICK_SECONDS: Final = 0.25
_RENEW_SECONDS: Final = 1.0
_ABSENT_SECONDS: Final = 2.0  # that a follower may be without a connection before it leaves the set
_MEND_SECONDS: Final = 1.0
_BEHIND_SECONDS: Final = 1.0  # a follower further behind does not take over
_LOOK_SECONDS: Final = 0.02
_LEVEL_SECONDS: Final = 3.0  # that writes are held for a hand-over
_DRAIN_SECONDS: Final = 5.0  # between the tries of a drained leader to hand over


class Term:
    """One leader in one epoch. It is the `Leadership` of its broker.

    Parameters:
        store: the member's journal, taken over in this epoch; what began the epoch is its last unit.
        replica: what it was taken over from.

    Attributes:
        is_over: it does not lead any more.
    """

    def __init__(self, post: Post, service: Service, victory: Victory, store: MessageStore, replica: Replica) -> None:
        member = replica.membership
        self._post = post
        self._boottime = post.directory.clock.boottime
        self._view = post.view
        self._registry = post.view.registry
        self._service = service
        self._store = store
        store.damage.expect_mending()
        self._replica = replica  # its journal is the store's now; it still keeps what the directory notes of itself
        self._own = hex_id(member.replica_id)
        record, self._session = victory  # the session in which /leader is ours; 0 while it may not be
        self._epoch, self._number = record.epoch, record.number
        in_sync = InSyncSet(
            member.replica_id,
            [int(one, 16) for one in record.in_sync],
            epoch_end=store.queries.end,
            began_at=post.now(),
            min_in_sync=record.least,
            lag_seconds=post.settings.lag_seconds,
        )
        in_sync.is_alone = record.asynchronous
        self._state = record.state
        self._epoch_end = store.queries.end
        self._leader = Leader(
            store,
            member,
            in_sync,
            unsafe=record.unsafe,
            promise_seconds=post.settings.promise_seconds,
            reads_ahead=True,
        )
        self._in_sync = in_sync
        self._seats: dict[int, Seat] = {}
        self._left_at: dict[int, float] = {}  # when the connections of followers ended that have not caught up since
        self._readings: set[asyncio.Future[None]] = set()
        self._promised_until = NO_DEADLINE
        self._renewed_at = post.now()
        self._is_committing = in_sync.is_enough
        self._is_begun = False  # the broker was made
        self._is_held = False  # a hand-over is under way
        self._drained_at = NO_DEADLINE  # when it last tried to hand over because it is drained
        self._version = 0  # of /leader
        self._registered_since: dict[int, float] = {}
        self._flushed = 0  # of the store, when that last changed
        self._flush_since: float | None = None
        self._progress = asyncio.Event()  # something more is committed
        self._over = asyncio.Event()
        self.is_over = False
        self._why = ""
        self._reckon_promises()

    # --- for the broker -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def shard(self) -> int:
        return self._number

    def may_serve(self) -> bool:
        if self.is_over:
            return False
        now = self._boottime()
        if now < self._promised_until:
            return True
        registry = self._registry
        if now < registry.deadline and registry.session == self._session:
            return True
        self._reckon_promises()  # confirmations that came since may have moved it on
        return now < self._promised_until

    def check_serving(self) -> None:
        if not self.may_serve():
            raise NotLeader(
                f"this member cannot tell whether it still leads shard {self._view.shard!r}: ask the others",
                leader=self._post.view.leader_address if self.is_over else "",
            )

    def check_writable(self) -> None:
        if self.is_over or self._boottime() >= self._promised_until:
            self.check_serving()
        limit = self._post.settings.uncommitted_bytes_max
        if not self._is_committing:
            raise NotEnoughReplicas(
                f"shard {self._view.shard!r} has fewer than {self._in_sync.min_in_sync} members in sync: nothing was "
                "written; start the others, or wait until they have caught up"
            )
        if self._store.queries.end - self._in_sync.committed > limit:
            raise NotEnoughReplicas(
                f"more than {limit} bytes wait for the members of shard {self._view.shard!r}: nothing was written; "
                "send again when they have caught up"
            )

    def check_open(self) -> None:
        if self._state is not ShardState.OPEN:
            raise ShardConflict(
                f"shard {self._view.shard!r} is {self._state} and takes no messages: send to another one, or open it "
                f"with dmq shard set {self._view.shard} --state open",
                shard=self._view.shard,
            )

    def wrote(self) -> None:
        self._push()

    def flushed(self) -> None:
        self._commit()

    # --- for followers ------------------------------------------------------------------------------------------------

    def follow(self, request: Follow, seat: Seat) -> FollowReply:
        record = self._view.record
        if self.is_over:
            raise NotLeader(f"this member does not lead shard {self._view.shard!r} any more")
        if record is None or hex_id(request.replica) not in record.members.values():
            self._view.ask()
            raise NotInCluster(
                f"replica {hex_id(request.replica)} is not a member of shard {self._view.shard!r} as far as its leader "
                "knows: it is one when its enrolment is in the registry"
            )
        known = record.lives.get(hex_id(request.replica), 0)
        if 0 < request.life < known:
            # A clone of its disk was started since. What the older one confirms must not count for the newer one.
            raise NotInCluster(
                f"replica {hex_id(request.replica)} follows in its life {request.life}, and was started again since, "
                f"in life {known}: another copy of its directory runs; stop one of them",
                life=known,
            )
        try:
            reply = self._leader.follow(request)
        except StaleEpoch:
            self._view.ask()
            raise
        before = self._seats.get(request.replica)
        if before is not None:
            before.close()
        self._seats[request.replica] = seat
        by = self._view.name_of(request.replica)
        facts = {"common": reply.common, "end": request.end}
        log.info("followed", shard=self._view.shard, epoch=self._epoch, by=by, **facts)
        asyncio.get_running_loop().call_soon(self._push)
        return reply

    def _replica_of(self, seat: Seat) -> int | None:
        for replica, one in self._seats.items():
            if one is seat:
                return replica
        return None

    def confirmed(self, seat: Seat, confirm: Confirm) -> None:
        replica = self._replica_of(seat)
        if replica is None or self.is_over:
            return
        now = self._boottime()
        try:
            has_more = self._leader.confirmed(replica, confirm, now)
        except StaleEpoch as error:
            log.warning("a follower of another epoch", shard=self._view.shard, error=error)
            seat.close()
            return
        if self._left_at and self._in_sync.seconds_behind(replica, now) <= _BEHIND_SECONDS:
            self._left_at.pop(replica, None)  # a full disk lets it connect, but not catch up
        if has_more:
            self._committed()
        if not self._leader.is_fed(replica):
            self._push_to(replica, seat, now)

    def writable(self, seat: Seat) -> None:
        replica = self._replica_of(seat)
        if replica is not None and not self.is_over:
            self._push_to(replica, seat, self._post.now())

    def left(self, seat: Seat) -> None:
        replica = self._replica_of(seat)
        if replica is not None:
            del self._seats[replica]
            self._left_at.setdefault(replica, self._post.now())
            self._leader.leave(replica)
            by, has = self._view.name_of(replica), self._in_sync.flushed_of(replica)
            log.info("not followed any more", shard=self._view.shard, epoch=self._epoch, by=by, confirmed=has)

    def _push(self) -> None:
        """Send everybody what there is."""
        if self.is_over:
            return
        now = self._boottime()
        leader = self._leader
        leader.wrote(now)
        if not self._seats:
            return
        standpoint = leader.standpoint
        for replica, seat in [*self._seats.items()]:
            last = leader.last_frame(replica, standpoint, now) if seat.is_writable else None
            if last is not None:
                seat.send(*last)
            else:
                self._push_to(replica, seat, now)

    def _push_to(self, replica: int, seat: Seat, now: float) -> None:
        try:
            frames = self._leader.frames(replica, now)
            while seat.is_writable and (found := next(frames, None)) is not None:
                seat.send(*found)
            reading = None if self._leader.is_fed(replica) else self._leader.reading(replica, now)
        except StorageError as error:
            self._cannot_read(seat, error)
            return
        if reading is not None:
            task = asyncio.ensure_future(self._read(replica, seat, *reading))
            self._readings.add(task)
            task.add_done_callback(self._readings.discard)

    async def _read(self, replica: int, seat: Seat, feed: Feed, reading: Reading, delay: float) -> None:
        """Read for a follower what is not in memory any more."""
        if delay:
            await asyncio.sleep(delay)
        try:
            feed.was_read(await self._post.directory.on_disk(reading.run))
        except StorageError as error:
            feed.was_read([])
            self._cannot_read(seat, error)
        else:
            if self._seats.get(replica) is seat and not self.is_over:
                self._push_to(replica, seat, self._post.now())

    def _cannot_read(self, seat: Seat, error: StorageError) -> None:
        """A follower cannot go on before damage is mended, which begins as soon as it is known; or starts over, where
        retention took the segment."""
        start = error.detail.get("start", -1)
        log.error("the journal cannot be read for a follower", once_for=start, error=error)
        self._store.check_unit(start)
        replica = self._replica_of(seat)
        if replica is not None and start >= 0:
            self._leader.cannot_read(replica, start)
        seat.close()

    # --- what is committed --------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        before = self._in_sync.committed
        if self.is_over or self._leader.commit() == before:
            return
        self._progress.set()

    def _committed(self) -> None:
        """More is committed by a follower's confirmation."""
        self._progress.set()
        if self._is_begun:
            self._service.committed()

    def _reckon_promises(self) -> None:
        """A set that may be in force has changed, or the right to serve depends on it.

        In between, confirmations only move it on, so what is known is never too late.
        """
        self._promised_until = self._leader.promised_until

    def _reckon_writes(self) -> None:
        self._is_committing = self._in_sync.is_enough and self._in_sync.is_committing(self._post.now())

    # --- the term -----------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Lead until that is over; returns why.

        Raises:
            StorageError: the journal failed.
        """
        over: asyncio.Future[Any] = asyncio.ensure_future(self._over.wait())
        tasks: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(work()) for work in (self._beat, self._keep, self._mend_found)
        }
        try:
            await self._flush_start()
            tasks |= {over, asyncio.ensure_future(self._serve())}
            while not over.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for task in done:
                    task.result()
        finally:
            self.cease("it failed")
            for task in (*tasks, over):
                task.cancel()
            await asyncio.gather(*tasks, over, return_exceptions=True)
            # Others may stand at once, though our own disk may keep us here for long.
            await asyncio.gather(self._let_go(), self._end())
        return self._why

    async def _flush_start(self) -> None:
        """Make the start of the epoch durable here."""
        store = self._store
        ticket = store.begin_flush()
        failure: StorageError | None = None
        try:
            await self._post.directory.on_disk(ticket.run)
        except StorageError as error:
            failure = error
        store.finish_flush(ticket, failure)
        self._commit()
        self.wrote()

    async def _serve(self) -> None:
        """Have the start of the epoch committed, and the broker made."""
        while self._in_sync.committed < self._epoch_end:
            self._progress.clear()
            await self._progress.wait()
        log.info("epoch committed", shard=self._view.shard, epoch=self._epoch, committed=self._in_sync.committed)
        if self._replica.membership.doubtful:
            await self._post.note(self._replica.caught_up)
        self._reckon_writes()
        if not self.is_over:
            self._is_begun = True
            await self._service.begin(self._store, self)

    def cease(self, why: str) -> None:
        """Lead no longer: from now on nothing is served."""
        if not self.is_over:
            self.is_over = True
            self._why = why
            self._over.set()

    async def _end(self) -> None:
        try:
            if self._is_begun:
                await self._service.drop()
        finally:
            for reading in self._readings:
                reading.cancel()
            for seat in self._seats.values():
                seat.close()
            self._seats.clear()
            self._post.heart.flush_waits(None)
            await self._post.directory.on_disk(self._store.abandon)

    # --- time ---------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """What is due by time alone; until it is over."""
        while True:
            now = self._post.now()
            self._watch_flush(now)
            if self.is_over:
                await self._let_go()  # `run` may wait for the very flush that does not end
                return
            self._reckon_writes()
            self._push()
            await asyncio.sleep(_TICK_SECONDS)

    def _watch_flush(self, now: float) -> None:
        """A flush that does not end must not keep a leader in its place; see `_give_way`."""
        queries, heart = self._store.queries, self._post.heart
        if queries.flushed >= queries.end:
            self._flush_since = None
        elif self._flush_since is None or queries.flushed != self._flushed:
            self._flush_since = now
        self._flushed = queries.flushed
        heart.flush_waits(self._flush_since)

    async def _mend_found(self) -> None:
        """Mend what reads have found to be damaged; for ever."""
        while True:
            await asyncio.sleep(_MEND_SECONDS)
            if self._post.repairs.is_due(self._store.damage):
                try:
                    await self._post.repairs.run(self._committed_journal)
                except DMQError as error:
                    log.error("not mended", shard=self._view.shard, error=error)

    async def mend(self) -> Mended:
        """Look through what is committed, and fetch what is damaged of it from the followers.

        Raises:
            NotLeader: it does not lead any more.
            StorageError: the disk does not take what was fetched.
        """
        return await self._post.repairs.run(self._committed_journal, scrub=True)

    def _committed_journal(self) -> CommittedJournal:
        if self.is_over:
            raise NotLeader(f"this member does not lead shard {self._view.shard!r} any more")
        return CommittedJournal.of_leader(self._store, self._replica.membership)

    # --- the registry -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Keep `/leader` and the set; for ever."""
        while True:
            record = self._view.record
            is_alone = record is not None and len(record.members) == 1  # then nothing but `/leader` falls due
            await self._view.wait(_RENEW_SECONDS if is_alone else _TICK_SECONDS)
            await self._keep_once()

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        """One thing that the registry may refuse or leave unanswered: the next round tries again."""
        try:
            await step()
        except RegistryConflict as error:
            log.debug("the registry refused a write", shard=self._view.shard, error=error)
        except UNAVAILABLE as error:
            log.debug("the registry was not written", shard=self._view.shard, error=error)
            await asyncio.sleep(_TICK_SECONDS)

    async def _keep_once(self) -> None:
        now, is_known = self._post.now(), self._look()
        if self.is_over or self._is_held:
            return
        if self._post.heart.is_flush_stuck and self._has_heir():
            await self._try(self._give_way)
            return
        if not self._view.is_down and self._leader.is_deaf(now, self._registered_long(now)):
            await self._try(self._view.refresh)  # who was not let run does not know yet who leads now
            if self._look() and not self._view.is_down:
                self.cease("no in-sync member answers it, though one is registered: is the replication port blocked?")
            return
        if not is_known:
            if self._view.leader_entry is None:
                self._session = 0  # somebody took `/leader` away: no other entry of ours is a right to serve
            return
        if self._registry.session != self._session:
            await self._try(self._claim)
        elif now - self._renewed_at >= _RENEW_SECONDS:
            await self._try(self._renew)
        await self._try(self._change_set)
        await self._yield_if_drained(now)

    async def _yield_if_drained(self, now: float) -> None:
        """A drained leader hands over as soon as somebody can take over."""
        record = self._view.record
        if record is None or self._post.place.broker not in record.drained or not self.is_serving:
            return
        if now - self._drained_at >= _DRAIN_SECONDS:
            self._drained_at = now
            try:
                await self.hand_over(None)
            except DMQError as error:
                log.info("drained, and leads on", shard=self._view.shard, epoch=self._epoch, why=error)

    def _has_heir(self) -> bool:
        """Whether somebody else could be elected, as far as is known."""
        others = self._in_sync.recorded - {self._replica.membership.replica_id}
        return not others.isdisjoint(self._view.registered)

    async def _give_way(self) -> None:
        """A flush does not end: cease, if the registry answers that `/leader` is free.

        Without the registry nobody can be elected, and to cease would stop the shard for a disk that is merely slow.
        """
        await self.give_up()
        if self._post.heart.is_flush_stuck:
            self.cease("a flush of its disk does not end")

    def _registered_long(self, now: float) -> Iterator[int]:
        """Members that have had the time to follow us, if they could."""
        since = self._registered_since
        self._registered_since = {replica: since.get(replica, now) for replica in self._view.registered}
        seconds = 2 * self._post.settings.lag_seconds
        return (replica for replica, at in self._registered_since.items() if now - at >= seconds)

    def _look(self) -> bool:
        """See what the record says; False if it is another cluster's, or older than one that we have seen."""
        record, cluster, member = self._view.record, self._view.cluster, self._replica.membership
        if cluster is None or cluster.id != member.cluster:
            return False
        if record is None or record.revision < member.revision or record.epoch < self._epoch:
            return False
        if record.epoch > self._epoch or record.leader != self._own:
            self.cease(f"epoch {record.epoch} was won by {self._view.winner}")
            return False
        if self._own not in record.in_sync:
            self.cease("it was taken out of the in-sync set")
            return False
        if record.marks.get(self._own, self._post.mark) != self._post.mark:
            self.cease("another process was started with a copy of this data directory")
            return False
        self._in_sync.found(_ids(record.in_sync))
        self._reckon_promises()
        self._state = record.state
        for replica in self._seats.keys() - {*_ids(record.members.values())}:
            self._seats[replica].close()  # it was removed
        if (self._in_sync.min_in_sync, self._in_sync.is_alone) != (record.least, record.asynchronous):
            self._in_sync.min_in_sync, self._in_sync.is_alone = record.least, record.asynchronous
            self._moved()
        return True

    @property
    def _content(self) -> bytes:
        return encode_content(LeaderContent(replica=self._own, epoch=self._epoch))

    @property
    def _path(self) -> str:
        return self._view.paths.leader(self._view.shard)

    @property
    def _still_led(self) -> Check:
        """The record is the one that we know, so nobody was elected since."""
        return Check(self._view.paths.shard(self._view.shard), self._view.version)

    @property
    def _holds_entry(self) -> bool:
        leader = self._view.leader
        return leader is not None and leader.replica == self._own and leader.epoch == self._epoch

    async def _claim(self) -> None:
        """Our session is another one: hold `/leader` in it, if the record still has our epoch."""
        view = self._view
        await view.refresh()
        if not self._look() or self.is_over:
            return
        operations: list[Operation] = [self._still_led]
        if view.leader_entry is not None:
            if not self._holds_entry:
                return  # the record will say whose it is
            operations.append(Delete(self._path, view.leader_entry.version))
        session, sent_at = self._registry.session, self._post.now()
        operations.append(Create(self._path, self._content, ephemeral=True))
        await view.write(operations)
        self._session, self._version, self._renewed_at = session, 0, sent_at
        log.info("holds /leader in a new session", shard=view.shard, epoch=self._epoch, session=session)

    async def _renew(self) -> None:
        sent_at = self._post.now()
        try:
            _, version = await self._view.write([self._still_led, Put(self._path, self._content, self._version)])
        except RegistryConflict:
            entry = self._view.leader_entry
            is_ours = self._holds_entry or self._view.leader is None  # what cannot be read is written over
            if entry is not None and is_ours and entry.session == self._registry.session == self._session:
                self._version = entry.version  # our own write, whose answer was lost; or somebody wrote by hand
            else:
                self._session = 0
            raise
        assert version is not None
        self._version, self._renewed_at = version, sent_at

    async def _change_set(self) -> None:
        view, in_sync = self._view, self._in_sync
        record, version_read = view.record, view.version
        if not self._look() or record is None or self.is_over:
            return
        members = _ids(record.members.values())
        now = self._post.now()
        absent = {replica for replica, at in self._left_at.items() if now - at >= _ABSENT_SECONDS}
        gone = {*members} - self._seats.keys() - (view.registered - absent)
        wanted = in_sync.proposal(members, now, gone)
        if wanted is None:
            return
        in_sync.begin_write(wanted)
        self._reckon_promises()
        changed = msgspec.structs.replace(
            record, revision=record.revision + 1, in_sync=sorted(hex_id(one) for one in wanted)
        )
        try:
            (version,) = await view.write([view.put_record(changed, version_read)])
        except (RegistryDown, SessionExpired):
            in_sync.withdraw()
            raise
        except RegistryConflict:
            # What was sent before has been carried out or never will be, and the record was read after that.
            if view.record is not None and (view.record.epoch, view.record.leader) == (self._epoch, self._own):
                in_sync.refused(_ids(view.record.in_sync))
            raise
        finally:
            self._reckon_promises()
        before = in_sync.recorded
        in_sync.written(wanted)
        self._reckon_promises()
        view.wrote_record(changed, version)
        self._tell_set(before, wanted)
        self._moved()

    def _tell_set(self, before: frozenset[int], now: frozenset[int]) -> None:
        if before != now:
            view, moment = self._view, self._post.now()
            behind = [round(self._in_sync.seconds_behind(replica, moment), 1) for replica in before - now]
            log.info(
                "in-sync set changed",
                shard=view.shard,
                epoch=self._epoch,
                joined=view.names_of(now - before) or None,
                left=view.names_of(before - now) or None,
                seconds_behind=max(behind, default=None),
                in_sync=view.names_of(now),
                committed=self._in_sync.committed,
            )

    def _moved(self) -> None:
        """The set has changed: more may be committed by that alone."""
        self._reckon_writes()
        before = self._in_sync.committed
        if self._leader.commit() > before:
            self._committed()

    async def give_up(self, *also: Operation) -> None:
        """Delete `/leader`, in an answered write; it is not a right to serve any more, whatever the answer.

        Parameters:
            also: what is done in the same write.

        Raises:
            RegistryConflict, RegistryDown, SessionExpired, WriteUnknown.
        """
        self._session = 0
        await self._view.refresh()
        entry = self._view.leader_entry
        if entry is not None and self._holds_entry:
            await self._view.write([Delete(self._path, entry.version), *also])

    async def _let_go(self) -> None:
        """Nobody has to wait for the end of our session."""
        try:
            async with asyncio.timeout(self._registry.session_seconds):
                await self.give_up()
        except (TimeoutError, RegistryConflict, *UNAVAILABLE) as error:
            log.debug("/leader not deleted", shard=self._view.shard, epoch=self._epoch, error=error)

    # --- handing over -------------------------------------------------------------------------------------------------

    async def hand_over(self, to: str | None, *also: Operation) -> str:
        """Let a follower lead; returns its name.

        Parameters:
            also: what is done in the write that gives up `/leader`.

        Raises:
            InvalidRequest: no follower has that name.
            NotEnoughReplicas: none is near enough, or the registry does not answer; this member leads on.
            NotLeader: it does not lead.
        """
        if self.is_over or not self._is_begun or self._is_held:
            raise NotLeader("this member does not lead yet, or already hands over: dmq shard show says what for")
        replica, seat = self._successor(to)
        self._is_held = True
        try:
            await self._hold(replica)
            await self.give_up(*also)
            if self._seats.get(replica) is not seat:  # also if we have ceased meanwhile
                raise NotEnoughReplicas("the follower went away while it was handed over to: try again")
        except DMQError as error:
            self._is_held = False
            if self.is_serving:
                self._service.resume()
            log.warning("not handed over", shard=self._view.shard, epoch=self._epoch, why=error)
            if isinstance(error, (RegistryConflict, *UNAVAILABLE)):
                raise NotEnoughReplicas(f"the registry did not let go of the leader ({error}): try again") from error
            raise
        name = self._view.name_of(replica)
        seat.send(Handover(self._epoch))
        del self._seats[replica]  # it ends the connection when it has heard that
        self.cease(f"handed over to {name}")
        return name

    def _successor(self, to: str | None) -> tuple[int, Seat]:
        now, in_sync = self._post.now(), self._in_sync
        drained = () if self._view.record is None else self._view.record.drained
        found = {
            self._view.name_of(replica): (in_sync.flushed_of(replica), replica, seat)
            for replica, seat in self._seats.items()
            if replica in in_sync.recorded and self._view.name_of(replica) not in drained
        }
        if to is not None and to not in found:
            raise InvalidRequest(
                f"{to!r} does not follow in sync: choose one of {', '.join(sorted(found)) or 'none'}", member=to
            )
        near = [
            (flushed, replica, seat)
            for name, (flushed, replica, seat) in found.items()
            if to in (None, name) and in_sync.seconds_behind(replica, now) <= _BEHIND_SECONDS
        ]
        if not near:
            raise NotEnoughReplicas("no follower is in sync and within a second of the leader: try again when one is")
        _, replica, seat = max(near, key=lambda one: one[:2])
        return replica, seat

    async def _hold(self, replica: int) -> None:
        """Take no more writes, until a follower has everything and everything is committed."""
        in_sync, queries = self._in_sync, self._store.queries
        try:
            async with asyncio.timeout(_LEVEL_SECONDS):
                await self._service.hold()
                while min(in_sync.committed, in_sync.flushed_of(replica)) < queries.end and not self.is_over:
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise NotEnoughReplicas("the follower did not get level with the leader in time: try again") from None

    # --- for people ---------------------------------------------------------------------------------------------------

    @property
    def right(self) -> Right:
        """Why it may serve at this moment."""
        if self.is_over:
            return Right.NONE
        deadline = self._registry.deadline if self._registry.session == self._session else NO_DEADLINE
        return self._leader.right(self._post.now(), deadline)

    def skew_of(self, replica: int) -> float:
        """By how many seconds the wall clock of a follower is ahead of ours."""
        return self._leader.skew_of(replica, self._post.now(), self._post.directory.clock.now_ms())

    @property
    def in_sync(self) -> InSyncSet:
        return self._in_sync

    @property
    def store(self) -> MessageStore:
        return self._store

    @property
    def is_serving(self) -> bool:
        """The start of the epoch is committed, and the broker made."""
        return self._is_begun and not self.is_over

    @property
    def followers(self) -> Iterator[int]:
        """Replica ids that are connected."""
        return iter([*self._seats])


def _ids(members: Iterable[str]) -> list[int]:
    return [int(one, 16) for one in members]
