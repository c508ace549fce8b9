"""How a follower takes frames: what is flushed by whom, what is confirmed when, and what is applied after that."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import pytest

from dmq.errors import NotConnected
from dmq.model import TopicConfig
from dmq.protocol.cluster.replication import Confirm, FollowReply, Handover, Journal
from dmq.shard.follower import Follower
from dmq.shard.in_sync import InSyncSet
from dmq.shard.leader import Leader
from dmq.shard.place import Directory, MemberSettings, Place
from dmq.shard.roles.intake import Intake, IntakeEnd
from dmq.shard.roles.post import Post
from dmq.shard.serving_right import Promise
from dmq.storage.files import Buffer
from dmq.storage.replica import Replica, join
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import PATIENCE_S

T = TypeVar("T")
QUICK_FLUSHES = 40  # after so many a disk has shown that it is quick


class ScriptedFollowing:
    """Frames that the test pushes, and what is confirmed of them."""

    def __init__(self, on_confirm: Callable[[Confirm], None]) -> None:
        self._frames: asyncio.Queue[tuple[Journal | Handover, Buffer] | None] = asyncio.Queue()
        self.on_confirm = on_confirm
        self.reply = FollowReply(1, None, 0, 0)

    @property
    def has_next(self) -> bool:
        return not self._frames.empty()

    def push(self, frame: Journal | Handover, body: Buffer = b"") -> None:
        self._frames.put_nowait((frame, body))

    async def next(self) -> tuple[Journal | Handover, Buffer]:
        found = await self._frames.get()
        if found is None:
            raise NotConnected("closed")
        return found

    def confirm(self, confirm: Confirm) -> None:
        self.on_confirm(confirm)

    def close(self) -> None:
        self._frames.put_nowait(None)


class IntakeRig:
    """A leader's journal, which a replica follows through an intake.

    Attributes:
        by_threads: how many flushes went the way of a thread.
        confirmed: what was confirmed, and how much was applied and flushed at that moment.
    """

    def __init__(self, flush_seconds: float = 0.0) -> None:
        self.clock = FakeClock()
        files = MemoryFiles(rng=random.Random(1))
        journal_id = join(files, cluster="c", shard="s").journal_id
        leading = Replica(files, clock=self.clock)
        own = leading.membership
        self.store = MessageStore(Leading(leading, 1), clock=self.clock, checkpoint_inline=False)
        in_sync = InSyncSet(
            own.replica_id, [], epoch_end=self.store.queries.end, began_at=0.0, min_in_sync=1, lag_seconds=10.0
        )
        self.leader = Leader(self.store, own, in_sync)
        files = MemoryFiles(rng=random.Random(2))
        join(files, cluster="c", shard="s", journal_id=journal_id)
        self.replica = Replica(files, clock=self.clock)
        self.flush_seconds = flush_seconds
        self._written = 0
        self.by_threads = 0
        self.confirmed: list[tuple[Confirm, int, int]] = []
        self.following = ScriptedFollowing(self._confirmed)
        follower = self.follower = Follower(self.replica, Promise(0.0), 1)
        follower.begin(self.leader.follow(follower.request()))
        directory = Directory(files, self.replica.settings, self.clock, on_disk=self._on_disk)
        place = Place(broker="b", shard="s", address="h:1", replication_address="h:2")
        parts: dict[str, Any] = dict.fromkeys(Post._fields)
        parts |= {"place": place, "settings": MemberSettings(promise_seconds=4.0), "directory": directory}
        post = Post(**parts | {"notes": asyncio.Lock()})
        self.intake = Intake(post, self.replica, follower, cast(Any, self.following), lambda: False)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        self.by_threads += 1
        await asyncio.sleep(0)
        return work()

    def _confirmed(self, confirm: Confirm) -> None:
        self.confirmed.append((confirm, self.replica.applied, self.replica.flushed))
        self.leader.confirmed(self.replica.membership.replica_id, confirm, 1.0)

    def write(self, topics: int = 1) -> None:
        """A unit of the leader, which is committed at once, since the follower is not in sync."""
        numbers = range(self._written, self._written + topics)
        self._written += topics
        self.store.append([self.store.creation(f"t{number}", TopicConfig(queues=1)) for number in numbers])
        self.store.flush()
        self.leader.commit()

    def push(self) -> int:
        """Send what there is; returns how many frames."""
        frames = [*self.leader.frames(self.replica.membership.replica_id, 1.0)]
        for frame, body in frames:
            self.following.push(frame, body)
        return len(frames)

    async def follow(self, units: int) -> None:
        """Some units, one after the other, each confirmed before the next."""
        for _ in range(units):
            self.write()
            self.push()
            await until_taken(self)


class SlowFiles:
    """Time passes with each flush of a replica's journal."""

    def __init__(self, rig: IntakeRig) -> None:
        journal, clock = rig.replica.journal, rig.clock
        target = journal.flush_target

        class SlowFile:
            def __init__(self, file: Any) -> None:
                self._file = file

            def sync(self) -> None:
                self._file.sync()
                clock.advance(rig.flush_seconds)

        def slow_target() -> tuple[Any, int]:
            file, end = target()
            return SlowFile(file), end

        journal.flush_target = slow_target  # type: ignore[method-assign]


def run(work: Callable[[IntakeRig], Any], flush_seconds: float = 0.0) -> IntakeEnd:
    async def test() -> IntakeEnd:
        rig = IntakeRig(flush_seconds)
        SlowFiles(rig)
        task = asyncio.ensure_future(rig.intake.run())
        try:
            await work(rig)
        finally:
            rig.following.close()
        return await task

    return asyncio.run(test())


def test_a_quick_disk_is_flushed_without_a_thread_once_it_has_shown_that_it_is() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(QUICK_FLUSHES)
        threads = rig.by_threads
        assert 0 < threads < QUICK_FLUSHES
        await rig.follow(20)
        assert rig.by_threads == threads

    assert run(test) is IntakeEnd.CLOSED


def test_a_slow_disk_is_left_to_threads() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(QUICK_FLUSHES)
        assert rig.by_threads == QUICK_FLUSHES

    run(test, flush_seconds=0.005)


@pytest.mark.parametrize("flush_seconds", [0.0, 0.005])
def test_nothing_is_confirmed_before_its_flush(flush_seconds: float) -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(QUICK_FLUSHES + 20)
        assert all(confirm.flushed <= flushed for confirm, _, flushed in rig.confirmed)

    run(test, flush_seconds)


async def until_applied(rig: IntakeRig, offset: int) -> None:
    deadline = time.monotonic() + PATIENCE_S  # the loop's clock may stand still
    while rig.replica.applied < offset:
        assert time.monotonic() < deadline, "what was committed is not applied"
        await asyncio.sleep(0)


async def until_taken(rig: IntakeRig) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not rig.confirmed or rig.confirmed[-1][0].flushed < rig.store.queries.end:
            await asyncio.sleep(0)


def hold_time() -> Callable[[float], None]:
    """Stop the loop's clock, as an intake sees it; returns what moves it on."""
    loop = asyncio.get_running_loop()
    at = loop.time()
    loop.time = lambda: at  # type: ignore[method-assign]

    def advance(seconds: float) -> None:
        nonlocal at
        at += seconds

    return advance


def test_what_is_committed_is_applied_after_the_confirmation() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(QUICK_FLUSHES + 20)
        for confirm, applied, _ in rig.confirmed[-10:]:
            assert applied < confirm.end

    run(test)


def test_units_are_applied_together_and_none_waits_past_the_next_frame_after_a_moment() -> None:
    async def test(rig: IntakeRig) -> None:
        advance = hold_time()
        await rig.follow(1)
        applied = rig.replica.applied
        await rig.follow(30)
        assert rig.replica.applied == applied
        end = rig.store.queries.end
        advance(0.06)  # not the moment itself, which the loop's clock may miss by a rounding
        await rig.follow(1)
        await until_applied(rig, end)

    run(test)


def test_units_are_applied_when_they_come_to_a_megabyte() -> None:
    async def test(rig: IntakeRig) -> None:
        hold_time()
        await rig.follow(1)
        waiting = 0
        while rig.replica.end < 3 << 20:
            rig.write(topics=2000)
            await rig.follow(1)
            waiting = max(waiting, rig.replica.end - rig.replica.applied)
        assert 1 << 19 < waiting < 3 << 19

    run(test)


def test_checkpoints_are_rarer_while_much_of_what_is_committed_is_still_to_come() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(1)
        replica, is_there = rig.replica, []
        replica.settings = msgspec.structs.replace(replica.settings, checkpoint_bytes=1 << 20)
        for to_come in (1 << 40, 0):
            end = replica.end + (3 << 20)
            while rig.store.queries.end < end:
                rig.write(topics=4000)
            for frame, body in rig.leader.frames(replica.membership.replica_id, 1.0):
                rig.following.push(msgspec.structs.replace(frame, committed=frame.committed + to_come), body)
            await until_taken(rig)
            await until_applied(rig, end - (1 << 20))
            is_there.append(replica.files.exists("checkpoint"))
            rig.follower._committed = 0  # as if the rest had come
        assert is_there == [False, True]

    run(test)


def test_what_is_committed_is_applied_when_the_connection_ends() -> None:
    async def test(rig: IntakeRig) -> None:
        hold_time()
        await rig.follow(20)
        end = rig.confirmed[-2][0].flushed
        assert rig.replica.applied < end
        rig.following.close()
        await until_applied(rig, end)
        assert rig.replica.derived.state.topics.keys() >= {f"t{number}" for number in range(19)}

    run(test)


def test_frames_that_are_there_are_flushed_and_confirmed_together() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(QUICK_FLUSHES)
        before = len(rig.confirmed)
        for _ in range(10):
            rig.write()
            assert rig.push() == 1
        while rig.confirmed[-1][0].flushed < rig.store.queries.end:
            await asyncio.sleep(0)
        assert len(rig.confirmed) == before + 1

    run(test)


def test_a_leader_that_says_nothing_for_half_a_promise_is_not_followed_any_longer() -> None:
    async def test() -> IntakeEnd:
        rig = IntakeRig()
        loop = asyncio.get_running_loop()
        began, real = loop.time(), loop.time
        task = asyncio.ensure_future(rig.intake.run())
        await rig.follow(3)
        loop.time = lambda: real() + (1.9 if real() - began < 0.05 else 2.1)  # type: ignore[method-assign]
        return await task

    assert asyncio.run(test()) is IntakeEnd.SILENT


def test_a_handover_ends_it_after_what_came_before() -> None:
    async def test(rig: IntakeRig) -> None:
        await rig.follow(3)
        rig.write()
        rig.push()
        rig.following.push(Handover(1))
        while rig.replica.end < rig.store.queries.end:
            await asyncio.sleep(0)

    assert run(test) is IntakeEnd.HANDED_OVER
