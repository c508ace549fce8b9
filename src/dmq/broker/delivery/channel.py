"""Consumption: one group at one topic, with its cursors, its members and whoever waits.

It joins the pure parts (group, cursors, selection) with the store: it decides what is handed to whom, and reads it. It
sends nothing itself: members have sinks, waiting pulls have callbacks. Reading is in `fetching`; here is who is served,
and what is said of messages.

The group's retry topic belongs to it as well: its queues stand beside those of the topic, `RETRY` numbers higher, and
queue `n` of it has what failed in queue `n`. What holds for a queue (turns, credit, filter, priority) holds for both.

What always holds: what is leased was read and handed to a sink or a pull in the same step, but for what must not go
out, which goes to the dead letters; an event for everything settled goes to the writer; a queue is marked whenever it
may have something to hand out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from dmq.broker.delivery.bitmap import full
from dmq.broker.delivery.group import Group, Member
from dmq.broker.delivery.hand_out import LOOK, LOOK_TURN, PUSH_BYTES, RETRY, Doomed, Fetching
from dmq.broker.delivery.lease import Lease
from dmq.broker.delivery.queue_selection import with_retries
from dmq.broker.delivery.waiters import ConsumedWatch, Sink, WaitingPull, Watches
from dmq.broker.retry.record_copy import read_origins
from dmq.errors import Busy
from dmq.offset_runs import mask_runs
from dmq.storage.queries import Queries
from dmq.storage.state.events import Outcome, Settled
from dmq.storage.state.state import Topic

__all__ = ["RETRY", "Consumption", "Doomed"]

Bury = Callable[["Consumption", int, Lease, Doomed, int], None]


class Consumption(Fetching):
    """See the module.

    Parameters:
        lease_numbers: one counter for all cursors of the broker.
        write: takes events for the journal.
        bury: takes messages of a lease for the dead letters.
        pump_soon: has `pump` called in another turn of the loop.
        look: how many index entries a filter looks at for one hand-out.
        look_turn: so many in one turn of the loop; then others have theirs.
    """

    def __init__(
        self,
        topic: Topic,
        group: Group,
        queries: Queries,
        lease_numbers: Iterator[int],
        write: Callable[[list[Settled]], None],
        pulls_waiting_max: int,
        bury: Bury,
        pump_soon: Callable[[Consumption], None],
        *,
        look: int = LOOK,
        look_turn: int = LOOK_TURN,
    ) -> None:
        super().__init__(topic, group, queries, lease_numbers, write, look, look_turn)
        self._bury = bury
        self._pump_soon = pump_soon
        self._pulls_waiting_max = pulls_waiting_max
        self.sinks: dict[str, Sink] = {}
        self._pulls: deque[WaitingPull] = deque()
        self.watches = Watches(pulls_waiting_max)
        self.idle_since_ms: int | None = None
        self.acked = 0
        self.retried = 0
        self.dead = 0

    def _bury_doomed(self, queue: int, lease: Lease, doomed: Doomed, now_ms: int) -> None:
        self._bury(self, queue, lease, doomed, now_ms)

    def _look_on_soon(self) -> None:
        self._pump_soon(self)

    # --- pumping ----------------------------------------------------------------------------------------------------

    def pump(self, now_ms: int) -> None:
        """Serve everybody who waits as long as there is something for them."""
        self.begin_turn()
        self._serve_pulls(now_ms)
        misses = 0
        while (
            self.selection.has_any
            and not self.is_looking
            and misses <= len(self.group.members)
            and (member := self.group.next_taker(now_ms)) is not None
        ):
            sink = self.sinks.get(member.name)
            if sink is None or not sink.is_ready:
                misses += 1
                continue
            limit = min(sink.batch, member.credit(now_ms))
            room = min(max(1, member.prefetch_bytes - member.bytes_out), PUSH_BYTES)
            handed = self.hand_out(member, limit, room, sink.lease_ms, now_ms, sink.allowed)
            if handed is None:
                misses += 1
            else:
                misses = 0
                sink.push(handed)

    def _serve_pulls(self, now_ms: int) -> None:
        for _ in range(len(self._pulls)):
            pull = self._pulls.popleft()
            if pull.is_done:
                continue
            try:
                is_served = self.try_pull(pull, now_ms)
            except BaseException:
                self._pulls.append(pull)
                raise
            if not is_served:
                self._pulls.append(pull)

    def try_pull(self, pull: WaitingPull, now_ms: int) -> bool:
        """Answer a pull if there is something for it."""
        if not pull.member.may_pull:
            pull.is_done = True
            pull.answer(None)
            return True
        allowed = -1 if pull.queue is None else with_retries(1 << pull.queue)
        handed = self.hand_out(pull.member, pull.limit, pull.max_bytes, pull.lease_ms, now_ms, allowed)
        if handed is None:
            return False
        pull.is_done = True
        pull.answer(handed)
        return True

    def wait(self, pull: WaitingPull) -> None:
        """Let a pull wait for messages.

        Raises:
            Busy: too many wait already.
        """
        if len(self._pulls) >= self._pulls_waiting_max:
            raise Busy(
                f"{len(self._pulls)} pulls of group {self.group.name!r} wait already: try again shortly",
                retry_after_ms=100,
            )
        self._pulls.append(pull)

    def cancel_pulls(self, owner: object) -> None:
        """Whoever waited is gone."""
        self._pulls = deque(pull for pull in self._pulls if pull.owner is not owner)

    def end_pulls(self, owner: object, member: Member) -> None:
        """A member pulls no more: what it still waits for is answered."""
        for pull in self._pulls:
            if pull.owner is owner and pull.member is member and not pull.is_done:
                pull.is_done = True
                pull.answer(None)

    # --- settling ---------------------------------------------------------------------------------------------------

    def settled(self, queue: int, events: list[Settled]) -> None:
        """Something was settled: write it, tell who waited for it, and let the next be handed out."""
        self._write(events)
        for event in events:
            count = int.from_bytes(event.bitmap, "little").bit_count() if event.bitmap else event.count
            if event.outcome == Outcome.ACKED:
                self.acked += count
            elif event.outcome == Outcome.DEAD:
                self.dead += count
        self.selection.mark(queue)
        if self.watches:
            self._tell_watches(queue, events)

    def _tell_watches(self, queue: int, events: list[Settled]) -> None:
        if queue < RETRY:
            self.watches.settled(queue, events)
            return
        # Whoever waits knows the message by the place it had before it failed.
        topic, number = self.place(queue)
        for event in events:
            bits = int.from_bytes(event.bitmap, "little") if event.bitmap else full(event.count)
            if event.outcome == Outcome.ACKED:
                origins, _ = read_origins(
                    self._queries, topic, number, list(mask_runs(event.start, bits)), is_retry=True
                )
                for origin in origins:
                    self.watches.acked(number, origin.first_offset)

    def watch(self, watch: ConsumedWatch, was_moved: Callable[[int], bool]) -> None:
        """Tell a producer when the group has acked its messages, which may have been long ago if it sent them again.

        Parameters:
            was_moved: whether the message at an offset was settled by being moved, which is not being consumed.
        """
        position = self.cursor(watch.queue).position
        offsets = range(watch.first, watch.first + watch.count)
        if all(position.is_settled(offset) for offset in offsets) and not any(map(was_moved, offsets)):
            watch.answer(True)
        else:
            self.watches.add(watch)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> bool:
        """What time did: leases and delays that are over, members that are gone, pulls that waited long enough.

        Returns whether anything may be handed out now that could not before.
        """
        woken = False
        for queue, cursor in self.cursors.items():
            deadline = cursor.next_deadline()
            if deadline is not None and deadline <= now_ms:
                for entry in cursor.expire(now_ms):
                    if (holder := self.group.members.get(entry.member)) is not None:
                        self.group.wake(holder)  # what was out with it is so no more
                self.selection.mark(queue)
                woken = True
        deadline = self.group.next_deadline()
        if deadline is not None and deadline <= now_ms:
            due = self.group.due(now_ms)
            for member in due.gone:
                self.forget(member, now_ms, is_clean=False)
            woken = True
        if not self.is_looking:  # else there may be something for them after all
            self._expire_pulls(now_ms)
        while self._pulls and self._pulls[0].is_done:
            self._pulls.popleft()
        if self.watches:
            self.watches.expire(now_ms)
        return woken

    def _expire_pulls(self, now_ms: int) -> None:
        for pull in self._pulls:
            if not pull.is_done and pull.deadline_ms <= now_ms:
                pull.is_done = True
                pull.answer(None)

    def forget(self, member: Member, now_ms: int, *, is_clean: bool) -> None:
        """A member will not come back: what it had goes to others."""
        self.sinks.pop(member.name, None)
        for queue, cursor in self.cursors.items():
            if cursor.member_gone(member, now_ms, is_clean=is_clean):
                self.selection.mark(queue)

    @property
    def counts(self) -> dict[str, int]:
        """What happened to messages so far."""
        return {"delivered": self.delivered, "acked": self.acked, "retried": self.retried, "dead": self.dead}

    @property
    def is_idle(self) -> bool:
        """Nobody is there, nothing is out, nobody waits."""
        return not (
            self.group.members
            or self._pulls
            or self.watches
            or any(cursor.out or cursor.redelivering for cursor in self.cursors.values())
        )

    @property
    def may_be_forgotten(self) -> bool:
        """It is idle, and everything it knows is durable: a filter's version is not."""
        subscription = self.group.subscription
        return self.is_idle and (subscription is None or not (subscription.version or subscription.filter))

    def close(self) -> None:
        """The group or the topic is no more: nobody waits for it any longer."""
        pulls, self._pulls = self._pulls, deque()
        for pull in pulls:
            if not pull.is_done:
                pull.is_done = True
                pull.answer(None)
        self.watches.expire()
