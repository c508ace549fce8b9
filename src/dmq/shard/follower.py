"""The follower: takes the journal of a leader, and says what it has. Without I/O: its owner carries frames and flushes.

What always holds: nothing is taken from another epoch than the one it follows; a frame that does not go on where the
last one ended is refused, and its owner begins again with FOLLOW; a confirmation promises not to stand, and the promise
is given before it is sent; below what is committed here nothing is cut, unless the shard was promoted with loss since.
"""

from __future__ import annotations

from typing import Final

from dmq.errors import Diverged, ProtocolError, StaleEpoch
from dmq.protocol.cluster.replication import Confirm, Follow, FollowReply, Journal
from dmq.shard.serving_right import Promise
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import HEADER_BYTES, read_header, whole_units
from dmq.storage.replica import LastUnit, Replica

__all__ = ["Follower"]

_PARTIAL_MAX: Final = 256 << 20  # of one unit; the largest message and its batch are far smaller
_UNITS_MAX: Final = 1 << 20
_FAR_BYTES: Final = 16 << 20


class Follower:
    """Follows one leader in one epoch, over one connection.

    Parameters:
        replica: the member's directory.
        promise: the member's, which outlives the leaders it follows.
        epoch: the leader's, as the registry has it.

    Attributes:
        is_level: it has everything that the leader said is committed, the start of the leader's epoch included. Before
            that a leader may know less of it than the last one answered.
    """

    def __init__(self, replica: Replica, promise: Promise, epoch: int) -> None:
        self._replica = replica
        self._promise = promise
        self._epoch = epoch
        self._partial = bytearray()  # of a unit whose rest comes with later frames
        self._sent = float("-inf")  # of the last frame that was taken
        self._is_heard = False  # a frame came that is not confirmed yet
        self._committed = self._first = 0  # as the leader said last

    @property
    def epoch(self) -> int:
        return self._epoch

    def request(self) -> Follow:
        """What to ask the leader."""
        replica, member = self._replica, self._replica.membership
        return Follow(
            cluster=member.cluster,
            shard=member.shard,
            journal_id=replica.journal_id,
            replica=member.replica_id,
            epoch=self._epoch,
            end=replica.end,
            epochs=[(row.epoch, row.leader, row.start) for row in replica.epochs],
            life=member.life,
        )

    def begin(self, reply: FollowReply) -> None:
        """The leader's answer: cut what is not part of its journal, or start over where it begins.

        Raises:
            StaleEpoch: it leads in another epoch.
            Diverged: it lacks what is committed here; nothing was changed.
        """
        self._check_epoch(reply.epoch)
        replica = self._replica
        is_empty = replica.end <= replica.start
        is_foreign = reply.common is None and (replica.applied <= replica.start or self._is_bare)
        if is_empty or is_foreign or replica.end < reply.first:
            if replica.end != reply.first or not is_empty:
                replica.start_over(reply.first)
            return
        if reply.common is None or reply.common < replica.applied:
            if not self._may_lose(reply.unsafe):
                raise Diverged(
                    f"the leader of epoch {reply.epoch} shares this journal up to {reply.common or 0}, and everything "
                    f"up to {replica.applied} is committed here: nothing is cut; find out which of them is right",
                    common=reply.common,
                    committed=replica.applied,
                )
            if reply.common is None or reply.common <= replica.start:
                replica.start_over(reply.first)
                return
        replica.cut(reply.common, accept_loss=True)

    @property
    def _is_bare(self) -> bool:
        """Whether nothing was ever written by a leader here: all that there is is what a new journal opens with."""
        return not len(self._replica.epochs) and not self._replica.damage.ranges

    def _may_lose(self, unsafe: int) -> bool:
        """Whether the shard was promoted with loss after the newest epoch here."""
        last = self._replica.epochs.last
        return unsafe > (0 if last is None else last.epoch)

    def take(self, frame: Journal, body: Buffer) -> None:
        """Take what a frame brings; it is in the page cache afterwards, as far as units are whole.

        What is committed by that is applied when `apply` is called: the leader does not wait for it.

        Raises:
            StaleEpoch, ProtocolError, RecordCorrupt: it does not go on here; the connection is to be ended.
            DiskFull, StorageError: it could not be written.
        """
        self._check_epoch(frame.epoch)
        replica = self._replica
        if len(body):
            if frame.start != replica.end + len(self._partial):
                raise ProtocolError(
                    f"a frame of the journal begins at {frame.start} instead of {replica.end + len(self._partial)}"
                )
            if frame.before is not None and replica.last is not None and LastUnit(*frame.before) != replica.last:
                raise ProtocolError(f"the unit before {frame.start} is another one here")
            self._take(body)
        self._sent = max(self._sent, frame.sent)
        self._is_heard = True
        self._committed = max(self._committed, frame.committed)
        self._first = frame.first

    def apply(self) -> None:
        """Apply what is committed by the frames that were taken, and drop what the leader has dropped.

        Raises:
            Damaged: a unit cannot be read back.
            StorageError: a segment could not be removed.
        """
        self._replica.commit(self._committed)
        self._replica.drop_before(self._first)

    def _take(self, body: Buffer) -> None:
        replica, partial = self._replica, self._partial
        raw: Buffer = body
        if partial:
            if len(partial) + len(body) > _PARTIAL_MAX:
                raise ProtocolError(f"a unit at {replica.end} does not end within {_PARTIAL_MAX} bytes")
            partial += body
            raw = bytes(partial)
        whole = whole_units(raw, replica.end, _UNITS_MAX)
        view = memoryview(raw)
        if whole:
            replica.take(view[:whole])
        rest = view[whole:]
        if len(rest) >= HEADER_BYTES:
            header = read_header(rest)
            if header is None or header.start != replica.end:
                raise ProtocolError(f"what the leader sent is not a unit that begins at {replica.end}")
        self._partial = bytearray(rest)

    @property
    def must_flush(self) -> bool:
        """Whether something was taken that is not durable."""
        return self._replica.flushed < self._replica.end

    @property
    def is_far_behind(self) -> bool:
        """Whether much is committed that is not here: then nothing waits for this member's flushes."""
        return self._committed - self._replica.end > _FAR_BYTES

    @property
    def must_confirm(self) -> bool:
        """Whether a frame came that was not confirmed."""
        return self._is_heard

    @property
    def is_level(self) -> bool:
        last = self._replica.epochs.last
        is_current = last is not None and last.epoch == self._epoch and self._committed > last.start
        return is_current and self._replica.flushed >= self._committed

    def confirm(self, now: float, now_ms: int = 0) -> Confirm:
        """What to tell the leader; it is a promise from now on.

        Parameters:
            now: on the clock that counts suspended time.
            now_ms: on the wall clock, so that the leader sees how far apart theirs are.
        """
        self._promise.give(now)
        self._is_heard = False
        return Confirm(self._epoch, self._replica.flushed, self._replica.end, self._sent, now_ms=now_ms)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"this member follows epoch {self._epoch}, and epoch {epoch} speaks", epoch=epoch)
