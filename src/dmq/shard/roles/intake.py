"""The intake: a follower takes its leader's journal over one connection, flushes it and confirms it.

What always holds: one flush at a time, and frames are taken meanwhile; nothing of the disk is under way any more when
`run` returns; a leader that says nothing for half a promise is not followed any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from dmq.errors import Damaged, DiskFull, DMQError, NotConnected, ProtocolError, RecordCorrupt, StaleEpoch, StorageError
from dmq.event_log import EventLog
from dmq.protocol.cluster.replication import Handover, Journal
from dmq.shard.feed import IDLE_SECONDS
from dmq.shard.follower import Follower
from dmq.shard.peers import Following
from dmq.shard.roles.post import Post
from dmq.storage.files import Buffer
from dmq.storage.replica import Replica

__all__ = ["Intake", "IntakeEnd"]

log = EventLog(__name__)

_CONFIRM_SECONDS: Final = 0.1  # while the disk is flushed, a confirmation need not come more often
_CONFIRM_BYTES: Final = 1 << 20
_FAR_SECONDS: Final = 0.25  # between flushes of a follower for which nobody waits: a few large ones disturb others less


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
        self._wanted = asyncio.Event()  # something is to be flushed
        self._is_flushing = False
        self._is_stopped = False
        self._confirmed_at = float("-inf")
        self._confirmed_end = 0
        self._turn: asyncio.Handle | None = None
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
            if self._turn is not None:
                self._turn.cancel()
            self._is_stopped = True
            self._wanted.set()
            # The disk is not left in the middle of something.
            await asyncio.gather(flusher, *(() if self._checkpoint is None else (self._checkpoint,)))
        if isinstance(end, BaseException):
            raise end
        return end

    # --- frames -----------------------------------------------------------------------------------------------------

    async def _take_all(self) -> IntakeEnd:
        try:
            while True:
                async with asyncio.timeout(max(self._post.settings.promise_seconds / 2, 3 * IDLE_SECONDS)):
                    frame, body = await self._following.next()
                if self._is_outdated():
                    return IntakeEnd.OUTDATED
                if isinstance(frame, Handover):
                    if frame.epoch == self.epoch:
                        return IntakeEnd.HANDED_OVER
                else:
                    self._take(frame, body)
        except NotConnected:
            return IntakeEnd.STOPPED if self._is_stopped else IntakeEnd.CLOSED
        except TimeoutError:
            return IntakeEnd.SILENT
        except (StaleEpoch, ProtocolError, RecordCorrupt) as error:
            log.warning("a leader's frame was refused", shard=self._post.place.shard, epoch=self.epoch, error=error)
            return IntakeEnd.REFUSED
        except DiskFull as error:
            log.error("no space for the leader's journal", once_for=(), shard=self._post.place.shard, error=error)
            return IntakeEnd.NO_SPACE
        except Damaged as error:
            log.error("the tail of the journal cannot be read back", shard=self._post.place.shard, error=error)
            return IntakeEnd.DAMAGED

    def _take(self, frame: Journal, body: Buffer) -> None:
        follower = self._follower
        follower.take(frame, body)
        if follower.must_flush or self._must_clear:
            self._wanted.set()
        if self._checkpoint is None and self._replica.checkpoint_due:
            self._checkpoint = asyncio.ensure_future(self._write_checkpoint())
        # One answer for all frames of a turn; what a flush is about to confirm is confirmed by that.
        if self._turn is None and not self._is_soon_confirmed():
            self._turn = asyncio.get_running_loop().call_soon(self._confirm_turn)

    def _is_soon_confirmed(self) -> bool:
        if not (self._is_flushing or self._follower.must_flush):
            return False
        is_fresh = self._post.now() - self._confirmed_at < _CONFIRM_SECONDS
        return is_fresh and self._replica.end - self._confirmed_end < _CONFIRM_BYTES

    def _confirm_turn(self) -> None:
        self._turn = None
        self._confirm()

    def _confirm(self) -> None:
        if self._is_stopped:
            return
        self._confirmed_at, self._confirmed_end = self._post.now(), self._replica.end
        self._following.confirm(self._follower.confirm(self._confirmed_at))

    # --- the disk ---------------------------------------------------------------------------------------------------

    @property
    def _must_clear(self) -> bool:
        return self._replica.membership.doubtful and self._follower.is_level

    async def _flush_all(self) -> None:
        """Flush what was taken, and clear doubts; until stopped."""
        replica, on_disk = self._replica, self._post.directory.on_disk
        while not self._is_stopped:
            await self._wanted.wait()
            self._wanted.clear()
            while self._follower.must_flush:
                if self._follower.is_far_behind and not self._is_stopped:
                    await asyncio.sleep(_FAR_SECONDS)
                ticket = replica.begin_flush()
                self._is_flushing = True
                failure: StorageError | None = None
                try:
                    await on_disk(ticket.run)
                except StorageError as error:
                    failure = error
                finally:
                    self._is_flushing = False
                replica.finish_flush(ticket, failure)
                self._confirm()
            if self._must_clear:
                await self._post.note(replica.caught_up)
                log.info("caught up: nothing is in doubt any more", shard=self._post.place.shard, end=replica.end)

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
