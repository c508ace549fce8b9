"""What waits for messages: subscribers that are pushed to, pulls, and producers that wait for an ack (D-20).

Pure code. A producer that waits counts only acks: messages that were rejected, passed over or moved away are settled
too, but no consumer has consumed them, and the producer hears so when its time is over. A message that failed may be
acked at a later attempt, which counts.

What always holds: a pull is answered once, unless its client is gone; a watch is answered exactly once, and there are
never more than `watches_max`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.broker.delivery.group import Member
from dmq.broker.delivery.lease import Lease, full
from dmq.errors import Busy, DMQError
from dmq.storage.files import Buffer
from dmq.storage.read.record_origin import IdRun
from dmq.storage.state.events import Outcome, Settled

__all__ = ["ConsumedWatch", "Demand", "Handed", "Lengths", "Sink", "Subscriber", "WaitingPull", "Watches"]


Lengths: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]


class Handed(NamedTuple):
    """A lease and its messages."""

    queue: int
    lease: Lease
    lengths: Lengths
    pieces: Sequence[Buffer]  # the records, and the blocks that bodies stand in
    size: int
    ids: list[IdRun]
    sought: int
    topic: str = ""  # the retry topic, if it is of that


class Demand(msgspec.Struct, frozen=True, gc=False):
    """What one hand-out may take.

    Attributes:
        limit: how many messages at most.
        max_bytes: how many bytes; one message always fits.
        allowed: a bit for each queue it may take from; all by default.
        takes_blocks: the client reads bodies that stand in blocks.
    """

    member: Member
    limit: int
    max_bytes: int
    lease_ms: int
    allowed: int = -1
    takes_blocks: bool = False


class Sink(Protocol):
    """Where a subscription's messages go: a connection, or whatever a gateway has."""

    @property
    def is_ready(self) -> bool:
        """Whether more may be pushed now."""
        ...

    @property
    def address(self) -> str:
        """Where its client is, for people."""
        ...

    def push(self, handed: Handed) -> None:
        """Take leased messages."""
        ...

    def tell_members(self, queues: int, names: Sequence[str]) -> None:
        """Members that divide the queues among themselves hear who they are, and how many queues there are."""
        ...

    def end(self, error: DMQError) -> None:
        """Nothing more comes, and why."""
        ...


class SubscriberOwner(Protocol):
    """The client of a subscriber."""

    def lost(self, number: int) -> None:
        """Another client has taken over one of its subscriptions."""
        ...


class Subscriber:
    """A member that gets messages pushed.

    Attributes:
        number: what its client calls the subscription.
        batch: how many messages one push has at most.
        allowed: a bit for each queue it takes.
        takes_blocks: as of a demand.
    """

    __slots__ = ("allowed", "batch", "lease_ms", "member", "number", "owner", "sink", "takes_blocks")

    def __init__(self, owner: SubscriberOwner, number: int, member: Member, sink: Sink, batch: int) -> None:
        self.owner = owner
        self.number = number
        self.member = member
        self.sink = sink
        self.batch = batch
        self.lease_ms = 0
        self.allowed = -1
        self.takes_blocks = False


class WaitingPull:
    """A pull that waits for messages.

    Parameters:
        owner: the client it came from; a member may be back as another one before its first is noticed to be gone.
    """

    __slots__ = ("answer", "deadline_ms", "demand", "is_done", "owner")

    def __init__(
        self, owner: object, demand: Demand, deadline_ms: int, answer: Callable[[Handed | None], None]
    ) -> None:
        self.owner = owner
        self.demand = demand
        self.deadline_ms = deadline_ms
        self.answer = answer
        self.is_done = False


class ConsumedWatch:
    """Messages of one queue whose acks a producer waits for.

    Parameters:
        first, count: which messages.
        answer: called with True once all are acked, with False when the time is over.
    """

    __slots__ = ("answer", "count", "deadline_ms", "first", "missing", "queue")

    def __init__(self, queue: int, first: int, count: int, deadline_ms: int, answer: Callable[[bool], None]) -> None:
        self.queue = queue
        self.first = first
        self.count = count
        self.deadline_ms = deadline_ms
        self.answer = answer
        self.missing = full(count)


class Watches:
    """The watches of one group at one topic.

    Attributes:
        count: how many wait.
    """

    def __init__(self, watches_max: int) -> None:
        self._max = watches_max
        self._by_queue: dict[int, list[ConsumedWatch]] = {}
        self.count = 0

    def check_room(self) -> None:
        """Raises Busy while there are as many as may be."""
        if self.count >= self._max:
            raise Busy(f"{self.count} sends wait to be consumed already: try again shortly", retry_after_ms=100)

    def add(self, watch: ConsumedWatch) -> None:
        self._by_queue.setdefault(watch.queue, []).append(watch)
        self.count += 1

    def settled(self, queue: int, events: Iterable[Settled]) -> None:
        """Something of the queue was settled: answer those who have all they waited for."""
        watches = self._by_queue.get(queue)
        if not watches:
            return
        for event in events:
            if event.outcome == Outcome.ACKED:
                acked = int.from_bytes(event.bitmap, "little") if event.bitmap else full(event.count)
                for watch in watches:
                    at = event.start - watch.first
                    watch.missing &= ~(acked << at if at >= 0 else acked >> -at)
        self._answer(queue)

    def _answer(self, queue: int) -> None:
        """Tell those who have all they waited for."""
        watches = self._by_queue.get(queue, [])
        done = [watch for watch in watches if not watch.missing]
        if done:
            self._keep(queue, [watch for watch in watches if watch.missing])
            for watch in done:
                watch.answer(True)

    def acked(self, queue: int, offset: int) -> None:
        """A message was acked that had failed before, by the place it had then."""
        watches = self._by_queue.get(queue, ())
        for watch in watches:
            if watch.first <= offset < watch.first + watch.count:
                watch.missing &= ~(1 << offset - watch.first)
        self._answer(queue)

    def expire(self, now_ms: int | None = None) -> None:
        """Answer those whose time is over; without a time, all."""
        for queue, watches in [*self._by_queue.items()]:
            over = [watch for watch in watches if now_ms is None or watch.deadline_ms <= now_ms]
            if over:
                self._keep(queue, [watch for watch in watches if watch not in over])
                for watch in over:
                    watch.answer(False)

    def _keep(self, queue: int, watches: list[ConsumedWatch]) -> None:
        self.count += len(watches) - len(self._by_queue[queue])
        if watches:
            self._by_queue[queue] = watches
        else:
            del self._by_queue[queue]
