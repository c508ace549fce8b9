"""Some members of a shard on disks in memory: one store that leads and replicas that follow it, moved by hand.

Who leads, what is committed and who is in sync is the rig's word here; the rules by which members find that out are
tested elsewhere. What is checked: whatever was committed stays, byte for byte, on every member; members are equal as
far as they go; and what is derived is what the journal says.
"""

from __future__ import annotations

import random
from typing import Any

from dmq.errors import StorageError
from dmq.model import Durability, Message, TopicConfig
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.shard.divergence import common_end
from dmq.storage.journal.journal import Journal
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.replica import Replica, join
from dmq.storage.state.events import Settled
from dmq.storage.state.producers import REMEMBERED
from dmq.storage.state.state import EpochRow
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles

SMALL = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=32 << 10,
    body_bytes_max=16 << 10,
    retention_hours=1.0,
    keep_unconsumed=False,
    ballast_bytes=0,
)
MEMBERS = 3


def in_order(positions: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    return sorted((group, sorted(rows)) for group, rows in positions)


def remembered(replica: Replica) -> dict[int, Any]:
    """The last batches of each producer by queue, as far as they must be known."""
    return {
        pid: {key: places[-REMEMBERED:] for key, places in queues}
        for pid, _, _, _, queues in replica.derived.state.producers.dump(replica.applied)
    }


def keys_of(replica: Replica) -> list[tuple[str, int]]:
    """The queues that a member knows."""
    return [(f"{key >> 8}/{key & 255}", key) for key in sorted(replica.derived.state.next)]


class ShardRig:
    """Members by number; `leader` is one of them, or None."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.files = [MemoryFiles(rng=random.Random(seed * 7 + n)) for n in range(MEMBERS)]
        first = join(self.files[0], cluster="c", shard="s")
        for files in self.files[1:]:
            join(files, cluster="c", shard="s", journal_id=first.journal_id)
        self.replicas: list[Replica | None] = [None] * MEMBERS
        self.store: MessageStore | None = None
        self.leader: int | None = None
        self.epoch = 0
        self.sequence = 0
        self.committed = 0
        self.history: dict[int, bytes] = {}  # committed bytes by where they were read from
        self.acknowledged: list[tuple[int, bytes]] = []  # queue and body of messages in committed units
        self.waiting: list[tuple[int, int, bytes]] = []  # unit end, queue, body: not committed yet
        for number in range(MEMBERS):
            self.start(number)

    # --- members ----------------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        assert self.replicas[number] is None
        self.replicas[number] = Replica(self.files[number], SMALL, self.clock)

    def crash(self, number: int, *, power: bool) -> None:
        """A member dies; a power loss takes what was not flushed."""
        files = self.files[number]
        if number == self.leader:
            self.store = self.leader = None
            self.waiting.clear()
        self.replicas[number] = None
        self.files[number] = files.crash(self.rng) if power else files.kill()
        self.start(number)

    def wipe(self, number: int) -> None:
        """The disk of a follower is replaced."""
        replica = self.replicas[number]
        assert replica is not None
        journal_id = replica.journal_id
        replica.close()
        self.files[number] = MemoryFiles(rng=random.Random(self.rng.random()))
        join(self.files[number], cluster="c", shard="s", journal_id=journal_id)
        self.replicas[number] = None
        self.start(number)

    def depose(self) -> None:
        """The leader ceases to be one."""
        assert self.store is not None
        assert self.leader is not None
        self.store.abandon()
        number, self.store, self.leader = self.leader, None, None
        self.waiting.clear()
        self.start(number)

    def elect(self) -> None:
        """The member that has most of the newest epoch leads; the committed part is the whole set's, so it has that."""
        best = max(
            range(MEMBERS),
            key=lambda n: (self.rows(n)[-1].epoch if self.rows(n) else 0, self.end(n)),
        )
        replica = self.replicas[best]
        assert replica is not None
        assert replica.end >= self.committed
        replica.flush() if replica.journal.segments else None
        self.epoch += 1
        self.replicas[best] = None
        self.store = MessageStore(Leading(replica, self.epoch), SMALL, self.clock, checkpoint_inline=False)
        self.leader = best

    def rows(self, number: int) -> list[EpochRow]:
        replica = self.replicas[number]
        if replica is not None:
            return [*replica.epochs]
        assert self.store is not None
        return [*self.store.epochs]

    def end(self, number: int) -> int:
        replica = self.replicas[number]
        if replica is not None:
            return replica.end
        assert self.store is not None
        return self.store.queries.end

    # --- the leader -------------------------------------------------------------------------------------------------

    def append(self, count: int) -> None:
        store = self.store
        assert store is not None
        if store.wants_quiet:
            return
        if "t" not in {topic.name for topic in store.queries.topics()}:
            if not any(self.is_creating):
                store.append([store.creation("t", TopicConfig(queues=2))])
            return
        queue = self.rng.randrange(2)
        numbers = range(self.sequence, self.sequence + count)
        bodies = [b"%d " % number + self.rng.randbytes(self.rng.randrange(400)) for number in numbers]
        encoded = encode_batch("t", "app", [Message(body) for body in bodies], sent_at_ms=self.clock.now_ms())
        batch = Batch(
            topic="t",
            queue=queue,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
            producer_id=7,
            first_sequence=self.sequence,
        )
        self.sequence += count
        (placement,) = store.append([batch], self.rng.choice((Durability.STORED, Durability.FLUSHED)))
        self.waiting += [(placement.unit_end, queue, body) for body in bodies]

    @property
    def is_creating(self) -> list[bool]:
        assert self.store is not None
        return [self.store.queries.visible < self.store.queries.end]

    def settle(self) -> None:
        store = self.store
        assert store is not None
        topic = store.queries.find_topic("t")
        if topic is None or store.wants_quiet:
            return
        queue = self.rng.randrange(2)
        first, end = store.queries.bounds("t", queue)
        if end > first:
            start = self.rng.randrange(first, end)
            store.append([Settled("g", topic.id, queue, start, min(5, end - start))], Durability.STORED)

    def replicate(self, number: int, *, size: int = 1 << 20, flush: bool = True) -> None:
        """Ship some of the leader's journal to a follower, as FOLLOW and JOURNAL do."""
        store, replica = self.store, self.replicas[number]
        assert store is not None
        assert self.leader is not None
        if replica is None:
            return
        mine, theirs = self.rows(number), self.rows(self.leader)
        start = store.queries.start
        common = common_end(mine, replica.end, theirs, store.queries.end)
        if common is None or common < start:
            if replica.end != start or replica.journal.segments:
                replica.start_over(start)
            common = replica.end
        replica.cut(common)
        raw = store.journal_bytes(replica.end, size)
        if raw:
            replica.take(raw)
        if flush and replica.journal.segments:
            replica.flush()
        replica.commit(self.committed)
        replica.drop_before(start)

    def replicate_all(self) -> None:
        for number in range(MEMBERS):
            self.replicate(number)

    def commit(self) -> None:
        """Everything that all members have flushed is committed."""
        store = self.store
        assert store is not None
        assert self.leader is not None
        store.flush()
        flushed = [store.queries.flushed]
        for replica in self.replicas:
            if replica is not None:
                if [*replica.epochs][-1:] != self.rows(self.leader)[-1:]:
                    return  # it does not follow this epoch yet
                flushed.append(replica.flushed)
        before = self.committed
        self.committed = max(before, min(flushed))
        store.confirm_replicated(self.committed)
        self.remember(before)
        done = [row for row in self.waiting if row[0] <= self.committed]
        self.acknowledged += [(queue, body) for _, queue, body in done]
        self.waiting = [row for row in self.waiting if row[0] > self.committed]

    def remember(self, before: int) -> None:
        """Keep the bytes that were committed."""
        store = self.store
        assert store is not None
        at = before
        while at < self.committed:
            raw = bytes(store.journal_bytes(at, self.committed - at))
            raw = raw[: self.committed - at]
            self.history[at] = raw
            at += len(raw)

    def quiet(self) -> None:
        """With everything committed, what waits for that happens: a segment ends, old ones go."""
        store = self.store
        assert store is not None
        if store.queries.visible == store.queries.end:
            store.retain()

    def checkpoint(self, number: int) -> None:
        replica = self.replicas[number]
        if replica is not None:
            replica.checkpoint()
        else:
            assert self.store is not None
            self.store.checkpoint()

    def wipe_one(self) -> None:
        """Replace the disk of a follower, while the others have everything that is committed."""
        followers = [number for number in range(MEMBERS) if number != self.leader]
        self.wipe(self.rng.choice(followers))

    def settle_down(self) -> None:
        """No more faults: everybody gets everything."""
        for _ in range(200):
            self.replicate_all()
            self.commit()
        assert self.store is not None
        assert self.store.queries.visible == self.store.queries.end == self.committed
        for number in range(MEMBERS):
            self.replicate(number)
            assert self.end(number) == self.committed

    # --- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every member has what is committed as far as it goes."""
        for number in range(MEMBERS):
            replica = self.replicas[number]
            journal = replica.journal if replica is not None else self.leading_journal
            applied = replica.applied if replica is not None else self.visible
            assert applied <= self.committed
            for at, raw in self.history.items():
                have = journal.read_available(at, len(raw)) if at >= journal.start else raw
                if number == self.leader or at + len(raw) <= applied:
                    assert have == raw, f"member {number} differs at {at}"

    @property
    def leading_journal(self) -> Journal:
        assert self.store is not None
        return self.store._journal

    def check_messages(self) -> None:
        """Everything acknowledged is there, in order, but for what retention took from the front; nothing is twice."""
        for queue in range(2):
            shown = self.bodies(queue)
            assert len({*shown}) == len(shown)
            there = {*shown}
            kept = [body in there for at, body in self.acknowledged if at == queue]
            assert kept == sorted(kept), "a hole among acknowledged messages"
            in_order = [body for at, body in self.acknowledged if at == queue and body in there]
            positions = [shown.index(body) for body in in_order]
            assert positions == sorted(positions)

    @property
    def visible(self) -> int:
        assert self.store is not None
        return self.store.queries.visible

    def check_derived(self) -> None:
        """What a member has derived is what a member that reads the same journal anew derives."""
        for replica in self.replicas:
            if replica is None or not replica.journal.segments:
                continue
            state = replica.derived.state
            anew = self._anew(replica)
            try:
                theirs = anew.derived.state
                assert state.next == theirs.next
                assert state.topics == theirs.topics
                assert in_order(state.positions.dump()) == in_order(theirs.positions.dump())
                assert [*state.epochs] == [*theirs.epochs]
                assert remembered(replica) == remembered(anew)
                assert {name: replica.derived.first_kept(key) for name, key in keys_of(replica)} == {
                    name: anew.derived.first_kept(key) for name, key in keys_of(anew)
                }
            finally:
                anew.close()

    def _anew(self, replica: Replica) -> Replica:
        files = MemoryFiles(rng=random.Random(1))
        source = replica.files
        assert isinstance(source, MemoryFiles)
        files.mkdir("journal")
        for path in source.paths():
            if path.startswith("journal/") or path == "STORE":
                files.write_file(path, source.read_file(path))
        anew = Replica(files, SMALL, self.clock)
        anew.commit(replica.applied)
        return anew

    def bodies(self, queue: int) -> list[bytes]:
        """What the leader shows of a queue, as far as it is kept."""
        store = self.store
        assert store is not None
        first, end = store.queries.bounds("t", queue)
        found: list[bytes] = []
        while first < end:
            piece = store.queries.read("t", queue, first, max_messages=100)
            records = [*piece.records()]
            found += [bytes(record.body) for record in records]
            first = piece.next_offset
        return found

    def close(self) -> None:
        if self.store is not None:
            self.store.abandon()
        for replica in self.replicas:
            if replica is not None:
                try:
                    replica.close()
                except StorageError:
                    pass
