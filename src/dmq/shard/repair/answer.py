"""The answer to REPAIR: committed bytes of our journal. The member that asks checks them; we only read."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dmq.errors import Damaged, NotInCluster, OffsetGone
from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX, Repair, RepairReply
from dmq.shard.place import OnDisk
from dmq.storage.files import Buffer
from dmq.storage.journal.journal import SegmentRead
from dmq.storage.replica import Replica
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.damage import Damage
from dmq.storage.upkeep.identity import Membership

__all__ = ["CommittedJournal", "answer_repair"]


class ReadsSegments(Protocol):
    """A store or a replica."""

    damage: Damage

    def plan_read(self, offset: int, size: int) -> SegmentRead | None: ...


class CommittedJournal(NamedTuple):
    """The committed part of a member's journal, as it is now.

    Attributes:
        is_led: a leader writes it.
    """

    source: ReadsSegments
    member: Membership
    journal_id: int
    start: int
    committed: int
    is_led: bool = False

    @classmethod
    def of_leader(cls, store: MessageStore, member: Membership) -> CommittedJournal:
        queries = store.queries
        return cls(store, member, queries.journal_id, queries.start, committed=queries.visible, is_led=True)

    @classmethod
    def of_follower(cls, replica: Replica) -> CommittedJournal:
        return cls(replica, replica.membership, replica.journal_id, replica.start, committed=replica.applied)


async def answer_repair(journal: CommittedJournal, asked: Repair, on_disk: OnDisk) -> tuple[RepairReply, Buffer]:
    """As much of the range that a member asks for as one frame takes.

    Raises:
        NotInCluster, OffsetGone, Damaged: it is not to be had here.
    """
    raw = await on_disk(_plan(journal, asked).run)
    return RepairReply(asked.start, asked.start + len(raw)), raw


def _plan(journal: CommittedJournal, asked: Repair) -> SegmentRead:
    """What to read, in another thread.

    Raises:
        NotInCluster: it is of another cluster, shard or journal.
        OffsetGone: we do not have that, or do not know that it is committed.
        Damaged: we cannot read it ourselves.
    """
    member, committed = journal.member, journal.committed
    if (asked.cluster, asked.shard, asked.journal_id) != (member.cluster, member.shard, journal.journal_id):
        raise NotInCluster(
            f"this is a member of shard {member.shard!r} of cluster {member.cluster!r}, with journal "
            f"{journal.journal_id:016x}: check the addresses in the registry"
        )
    end = min(asked.end, committed, asked.start + JOURNAL_BYTES_MAX)
    for start, stop in journal.source.damage.ranges:
        if start < end and asked.start < stop:
            raise Damaged(
                f"journal bytes {start}-{stop} are damaged here too: ask another member", start=start, end=stop
            )
    read = journal.source.plan_read(asked.start, end - asked.start) if journal.start <= asked.start < end else None
    if read is None:
        raise OffsetGone(
            f"this member has {journal.start} to {committed} of what is committed: ask another one",
            first=journal.start,
            next=committed,
        )
    return read
