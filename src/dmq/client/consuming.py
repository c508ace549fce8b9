"""The core of a consumer: what it has in hand, what the broker is told of it, and when. No sockets, no event loop.

Both consumers, the blocking one and the asyncio one, hand it what they receive and send what it gives.

What always holds:
- What is said of a message is reported once, in the order of the leases; nothing is reported of what the broker took
  back.
- Untouched messages of a consumer that makes no progress go back before their lease is over, so that others get them
  and no attempt is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from dmq.client.delivery import TAKEN, Delivery
from dmq.client.holding import Holding
from dmq.client.settlements import settlements_of
from dmq.client.subscribing import ConsumerOptions
from dmq.clock import Clock
from dmq.protocol.consuming import LeaseRef, Outcome, Settle, Settlement, SubscribeReply

__all__ = ["ConsumerCore"]


class ConsumerCore(Holding):
    """See the module."""

    def __init__(self, options: ConsumerOptions, clock: Clock, extend: Callable[[Delivery, float], object]) -> None:
        super().__init__(options, clock, extend)
        self._unsent: list[Settlement] = []

    # --- reports ----------------------------------------------------------------------------------------------------

    @property
    def has_reports(self) -> bool:
        """Whether there is something to tell the broker."""
        return bool(self._unsent) or self._settlements.count > 0

    def reports(self) -> list[Settle]:
        """What to tell the broker now."""
        with self.lock:
            settlements, self._unsent = self._unsent, []
            while dirty := self._settlements.take():
                for delivery in dirty:
                    for twin, index, outcome, delay_ms, reason in self._screening.conclude(delivery):
                        self._settle(twin, index, outcome, delay_ms, reason)
                    settlements += settlements_of(delivery)
                    if not delivery.left:
                        self._put_down(delivery)
            frames = self._settlements.frames(settlements, self.member) if settlements else []
        self._tell_free()
        return frames

    def _tell_free(self) -> None:
        """Call whoever waits for what had to wait for an earlier lease."""
        if self._is_freed:
            self._is_freed = False
            self.on_free()

    def not_sent(self, frames: Sequence[Settle]) -> None:
        """There was no connection for them: they go with the next ones."""
        with self.lock:
            self._unsent = [settlement for frame in frames for settlement in frame.settlements] + self._unsent

    # --- the subscription -------------------------------------------------------------------------------------------

    def holding(self) -> list[LeaseRef]:
        """The leases we still have something of, or something to say about."""
        with self.lock:
            topic = self.options.topic
            return [
                LeaseRef(lease.topic or topic, lease.queue, lease.epoch, lease.lease)
                for lease in (d.lease for d in self._held.values() if not d.is_pulled)
            ]

    def subscribed(self, reply: SubscribeReply) -> None:
        """We are subscribed, again: what was lost meanwhile is not handed to anybody here any more."""
        topic = self.options.topic
        lost = {(ref.topic, ref.queue, ref.epoch, ref.lease) for ref in reply.lost}
        with self.lock:
            for delivery in [*self._held.values()]:
                lease = delivery.lease
                if (lease.topic or topic, lease.queue, lease.epoch, lease.lease) in lost:
                    self._drop(delivery)
        self._tell_free()

    def sought(self) -> None:
        """The position was set: what is here is not what comes next."""
        with self.lock:
            for delivery in [*self._held.values()]:
                if not delivery.is_pulled:
                    self._drop(delivery)
            self._screening.begin_anew()

    def release_waiting(self) -> None:
        """Give all back that nobody has touched."""
        with self.lock:
            for delivery in [*self._held.values()]:
                if not delivery.is_pulled:
                    self._release(delivery)
        self.on_reports(True)

    def release_queues(self, queues: Container[int]) -> None:
        """Give back what nobody has touched of some queues."""
        with self.lock:
            for delivery in [*self._held.values()]:
                if not delivery.is_pulled and delivery.lease.queue in queues:
                    self._release(delivery)
        self.on_reports(True)

    def release_all(self) -> None:
        """Give everything back that is not settled."""
        with self.lock:
            for delivery in [*self._held.values()]:
                self._release(delivery)
                for index, state in enumerate(delivery.states):
                    if state == TAKEN:
                        self._settle(delivery, index, Outcome.RELEASE, -1, "")

    def _release(self, delivery: Delivery) -> None:
        gone = self._prefetch.drop(delivery)
        if gone:
            delivery.others.extend((index, Outcome.RELEASE, -1, "") for index in gone)
            self._settlements.add(delivery, len(gone))

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> list[Settle]:
        """To be called four times per lease: extend what is worked on, give back what is not."""
        with self.lock:
            now = self._clock.monotonic()
            lease = self.options.lease
            has_progress, self._has_progress = self._has_progress and not self.is_paused, False
            extended: list[Settlement] = []
            for delivery in [*self._held.values()]:
                left = delivery.deadline - now
                if left <= 0:
                    self._drop(delivery)
                    if left < -lease:
                        self._forget(delivery)
                elif left <= lease / 2 and delivery.left and not delivery.is_pulled:
                    is_handled = self.is_running and delivery.left > delivery.waiting
                    if is_handled or (delivery.waiting and has_progress):
                        extended.append(extension(delivery, lease))
                        delivery.deadline = now + lease
                    else:
                        self._release(delivery)
            must_report = self._settlements.count > 0
            frames = self._settlements.frames(extended, self.member) if extended else []
        self._tell_free()
        if must_report:
            self.on_reports(True)
        return frames

    def _forget(self, delivery: Delivery) -> None:
        """A lease that was over long ago is nothing to remember, whatever its messages' user still says of them."""
        taken = [index for index, state in enumerate(delivery.states) if state == TAKEN]
        self._let_go(delivery, taken)
        self._put_down(delivery)


def extension(delivery: Delivery, seconds: float) -> Settlement:
    """The wish to keep a lease for so long from now."""
    lease = delivery.lease
    delay_ms = max(1, round(seconds * 1000))
    return Settlement(lease.queue, lease.epoch, lease.lease, Outcome.EXTEND, delay_ms=delay_ms, topic=lease.topic)
