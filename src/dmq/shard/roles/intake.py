"""The intake: a follower takes its leader's journal over one connection, flushes it and confirms it.

All frames that have come are taken together, then flushed and confirmed, for which the leader waits. What is committed
by them is applied after that, some units together: one after the other they cost less than each does by itself,
between frames. A quick disk is flushed on the loop: the way to a thread and back would cost as much as
the flush (`FlushPolicy`). A slow one is flushed by a thread, and frames are taken meanwhile.

What always holds: one flush at a time; nothing is confirmed as durable before its flush is done; nothing of the disk is
under way any more when `run` returns; a leader that says nothing for half a promise is not followed any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from dmq.errors import Damaged, DiskFull, DMQError, NotConnected, ProtocolError, RecordCorrupt, StaleEpoch, StorageError
from dmq.event_log import EventLog
from dmq.protocol.cluster.replication import Handover
from dmq.shard.feed import IDLE_SECONDS
from dmq.shard.follower import Follower
from dmq.shard.peers import Following
from dmq.shard.roles.post import Post
from dmq.storage.journal.journal import FlushPolicy
from dmq.storage.replica import Replica

__all__ = ["Intake", "IntakeEnd"]

log = EventLog(__name__)

_CONFIRM_SECONDS: Final = 0.1  # while the disk is flushed, a confirmation need not come more often
_CONFIRM_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 1.0
_TURN_BYTES: Final = 1 << 20  # taken before the next flush, however much is there
_LOOP_BYTES: Final = 2 << 20  # that the loop flushes at most: more takes a quick disk long, too
_APPLY_BYTES: Final = 1 << 20  # that were taken and are not applied: no more wait
_APPLY_SECONDS: Final = 0.05  # since the last time: nothing waits longer, if a frame comes
# Between flushes of a follower for which nobody waits. Of a leader that writes it gets at most 128 MiB a second: one
# flush of much keeps others on the same disk waiting, and a leader whose loop has waited for 20 ms has threads flush
# for some time (`FlushPolicy`). One that gets more disturbs nobody, and a few large flushes cost it less.
_FAR_SECONDS: Final = 0.05
_FAST_SECONDS: Final = 0.25
_FAST_BYTES: Final = 8 << 20  # in `_FAR_SECONDS`


class IntakeEnd(StrEnum):
    """Why a leader is not followed any longer."""

    CLOSED = "its connection ended"
    SILENT = "it said nothing"
    OUTDATED = "the registry has another leader"
    HANDED_OVER = "it handed over to this member"
    REFUSED = "what it sent does not go on here"
    NO_SPACE = "the disk is full here"
    DAMAGED = "what was taken cannot be read back"
    STOPPED = "this member stops"


class Intake:
    """One connection to one leader.

    Parameters:
        is_outdated: whether the registry has a newer leader by now.
    """

    def __init__(
        self, post: Post, replica: Replica, follower: Follower, following: Following, is_outdated: Callable[[], bool]
    ) -> None:
        self._post = post
        self._replica = replica
        self._follower = follower
        self._following = following
        self._is_outdated = is_outdated
        self._wanted = asyncio.Event()  # a thread is to flush
        self._flush_policy = FlushPolicy()
        self._is_flushing = False  # a thread does
        self._is_stopped = False
        self._is_silent = False
        self._heard_at = self._applied_at = 0.0  # on the loop's clock
        self._confirmed_at = self._looked_at = float("-inf")
        self._confirmed_end = 0
        self._watch: asyncio.TimerHandle | None = None
        self._checkpoint: asyncio.Future[None] | None = None

    @property
    def epoch(self) -> int:
        return self._follower.epoch

    def stop(self) -> None:
        """End it soon."""
        self._is_stopped = True
        self._following.close()

    async def run(self) -> IntakeEnd:
        """Follow until that ends.

        Raises:
            StoreFailed: the disk failed; nothing more can be taken.
        """
        self._heard_at = asyncio.get_running_loop().time()
        self._watch_silence()
        flusher = asyncio.ensure_future(self._flush_all())
        taker = asyncio.ensure_future(self._take_all())
        try:
            await asyncio.wait((flusher, taker), return_when=asyncio.FIRST_COMPLETED)
            if not taker.done():
                taker.cancel()
            end = (await asyncio.gather(taker, return_exceptions=True))[0]
        finally:
            taker.cancel()
            self._following.close()
            if self._watch is not None:
                self._watch.cancel()
            self._is_stopped = True
            self._wanted.set()
            # The disk is not left in the middle of something.
            await asyncio.gather(flusher, *(() if self._checkpoint is None else (self._checkpoint,)))
        if isinstance(end, BaseException):
            raise end
        return end

    # --- frames -----------------------------------------------------------------------------------------------------

    def _watch_silence(self) -> None:
        """End it when the leader has said nothing for too long."""
        loop = asyncio.get_running_loop()
        limit = max(self._post.settings.promise_seconds / 2, 3 * IDLE_SECONDS)
        left = self._heard_at + limit - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._watch_silence)
        else:
            self._is_silent = True
            self._following.close()

    def _look(self) -> None:
        """Now and then, see that what is confirmed stands in a file that has a name; the leader's signs bring us here.

        Raises:
            StoreFailed: the directory is gone.
        """
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._replica.look()

    async def _take_all(self) -> IntakeEnd:
        try:
            while True:
                self._look()
                end = await self._take_turn()
                if end is not None:
                    return end
        except NotConnected:
            end = self._apply_rest()
            if end is not None:
                return end
            if self._is_silent:
                return IntakeEnd.SILENT
            return IntakeEnd.STOPPED if self._is_stopped else IntakeEnd.CLOSED
        except (StaleEpoch, ProtocolError, RecordCorrupt) as error:
            log.warning("a leader's frame was refused", shard=self._post.place.shard, epoch=self.epoch, error=error)
            return IntakeEnd.REFUSED
        except DiskFull as error:
            log.error("no space for the leader's journal", once_for=(), shard=self._post.place.shard, error=error)
            return IntakeEnd.NO_SPACE
        except Damaged as error:
            return self._not_read_back(error)

    def _apply_rest(self) -> IntakeEnd | None:
        """Nothing more comes: what is committed by then is applied."""
        try:
            self._follower.apply()
        except Damaged as error:
            return self._not_read_back(error)
        return None

    def _not_read_back(self, error: Damaged) -> IntakeEnd:
        log.error("the tail of the journal cannot be read back", shard=self._post.place.shard, error=error)
        return IntakeEnd.DAMAGED

    async def _take_turn(self) -> IntakeEnd | None:
        """Wait for frames and take those that are there; why it is to end, if it is."""
        following, follower = self._following, self._follower
        size = 0
        end: IntakeEnd | None = None
        while end is None and size <= _TURN_BYTES:
            frame, body = await following.next()
            if self._is_outdated():
                end = IntakeEnd.OUTDATED
            elif isinstance(frame, Handover):
                if frame.epoch == self.epoch:
                    end = IntakeEnd.HANDED_OVER
            else:
                follower.take(frame, body)
                size += len(body)
            if not following.has_next:
                break
        now = self._heard_at = asyncio.get_running_loop().time()
        if end is None:
            self._answer()
            if now - self._applied_at < _APPLY_SECONDS and self._replica.end - self._replica.applied < _APPLY_BYTES:
                return None
        self._applied_at = now
        follower.apply()
        if self._checkpoint is None and self._replica.is_checkpoint_due(is_far_behind=follower.is_far_behind):
            self._checkpoint = asyncio.ensure_future(self._write_checkpoint())
        return end

    def _answer(self) -> None:
        """Flush and confirm what was taken, or have a thread do so; nothing else is done before that."""
        follower = self._follower
        if follower.must_flush and self._may_flush_here():
            self._flush_here()
        if follower.must_flush or self._must_clear:
            self._wanted.set()
        # What a flush is about to confirm is confirmed by that.
        if follower.must_confirm and not self._is_soon_confirmed():
            self._confirm()

    def _is_soon_confirmed(self) -> bool:
        if not (self._is_flushing or self._follower.must_flush):
            return False
        is_fresh = self._post.now() - self._confirmed_at < _CONFIRM_SECONDS
        return is_fresh and self._replica.end - self._confirmed_end < _CONFIRM_BYTES

    def _confirm(self) -> None:
        if self._is_stopped:
            return
        self._confirmed_at, self._confirmed_end = self._post.now(), self._replica.end
        now_ms = self._post.directory.clock.now_ms()
        self._following.confirm(self._follower.confirm(self._confirmed_at, now_ms))

    # --- the disk ---------------------------------------------------------------------------------------------------

    @property
    def _must_clear(self) -> bool:
        return self._replica.membership.doubtful and self._follower.is_level

    def _may_flush_here(self) -> bool:
        replica = self._replica
        return (
            not (self._is_flushing or self._is_stopped)
            and self._checkpoint is None
            and replica.end - replica.flushed <= _LOOP_BYTES
            and self._flush_policy.is_for_loop(self._post.directory.clock.monotonic())
        )

    def _flush_here(self) -> None:
        """Flush on the loop, and confirm.

        Raises:
            StoreFailed: nothing more can be taken.
        """
        replica, clock = self._replica, self._post.directory.clock
        began = clock.monotonic()
        replica.flush()
        now = clock.monotonic()
        self._flush_policy.flushed(now - began, now, on_loop=True)
        self._confirm()

    async def _flush_all(self) -> None:
        """Flush by a thread what was taken, and clear doubts; until stopped."""
        while not self._is_stopped:
            await self._wanted.wait()
            self._wanted.clear()
            while self._follower.must_flush:
                await self._gather()
                await self._flush_there()
                self._confirm()
            if self._must_clear:
                await self._post.note(self._replica.caught_up)
                shard, end = self._post.place.shard, self._replica.end
                log.info("caught up: nothing is in doubt any more", shard=shard, end=end)

    async def _gather(self) -> None:
        """While nobody waits for a flush, let some more come."""
        if self._follower.is_far_behind and not self._is_stopped:
            await asyncio.sleep(_FAR_SECONDS)
            if self._replica.end - self._replica.flushed > _FAST_BYTES:
                await asyncio.sleep(_FAST_SECONDS - _FAR_SECONDS)

    async def _flush_there(self) -> None:
        """Flush by a thread."""
        replica, clock = self._replica, self._post.directory.clock
        ticket = replica.begin_flush()
        seconds = 0.0

        def run() -> None:
            nonlocal seconds
            began = clock.monotonic()
            ticket.run()
            seconds = clock.monotonic() - began

        self._is_flushing = True
        failure: StorageError | None = None
        try:
            await self._post.directory.on_disk(run)
        except StorageError as error:
            failure = error
        finally:
            self._is_flushing = False
        self._flush_policy.flushed(seconds, clock.monotonic(), on_loop=False)
        replica.finish_flush(ticket, failure)

    async def _write_checkpoint(self) -> None:
        """Frames are taken and flushed meanwhile."""
        plan = self._replica.begin_checkpoint()
        if plan is None:
            self._checkpoint = None
            return
        failure: DMQError | None = None
        try:
            await self._post.directory.on_disk(plan.write)
        except DMQError as error:
            failure = error
            log.error("checkpoint failed", once_for=(), shard=self._post.place.shard, error=error)
        self._replica.finish_checkpoint(plan, failure)
        self._checkpoint = None
