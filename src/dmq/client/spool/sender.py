"""The sender through a spool: from a lane to the producer's own disk, and from there to a broker.

The accumulator gathers as ever, but a batch leaves it for the spool. While the disk works on one, the next gathers, so
many threads share a flush and a batch grows with the load. Once flushed, a batch is the drain's.

What always holds:
- A message is accepted once its batch is flushed in the spool; before that, it fails with the error of the disk.
- An accepted message ends with the broker's receipt, or with one that says `spooled`: no broker is connected, none
  answered in time, or too much waits before it. It then will be sent, and must not be sent again by anybody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from dmq.client.connection.link import Link, Links
from dmq.client.connection.route_book import priority_queue
from dmq.client.producer.accumulator import Accumulator, Lane, LaneKey, SendBatch, Stream
from dmq.client.producer.core import Core, ProducerOptions
from dmq.client.producer.encoder import BatchEncoder
from dmq.client.producer.outcome import Spooled
from dmq.client.producer.retry_policy import RetryPolicy
from dmq.client.producer.routes import FRESH_SECONDS, Route, Routes
from dmq.client.producer.sender import Sender
from dmq.client.spool.drain import Drain
from dmq.client.spool.parcel import Head, Kept
from dmq.client.spool.spool import Spool
from dmq.clock import Clock
from dmq.errors import DMQError, InvalidMessage, TimedOut, UnknownTopic
from dmq.model import Durability, TopicConfig, place_queue
from dmq.protocol import Frame
from dmq.protocol.produce import ProduceReply

__all__ = ["SpoolAccumulator", "SpoolSender", "make_core"]

_RESEND_SECONDS: Final = 30.0


class SpoolAccumulator(Accumulator):
    """An accumulator whose room is the spool's as well, and whose batches get their numbers there."""

    def __init__(self, window_bytes: int, window_messages: int, spool: Spool) -> None:
        super().__init__(window_bytes, window_messages)
        self.spool: Final = spool

    def has_room(self, size: int, count: int) -> bool:
        if not super().has_room(size, count):
            return False
        used = self.spool.used + self.bytes
        return used == 0 or used + size <= self.spool.bytes_max

    def reserve(self, batch: SendBatch) -> None:
        pass  # each message asks for its room in the spool

    def why_full(self) -> str:
        if self.spool.used + self.bytes < self.spool.bytes_max / 2:
            return super().why_full()
        return (
            f"the spool {self.spool.directory} is full: {self.spool.used} bytes wait for a broker; find out why none "
            "takes them, or raise spool_bytes_max"
        )

    def lane(self, key: LaneKey) -> Lane:
        if key.durability in (Durability.NONE, Durability.CONSUMED):
            raise InvalidMessage(
                f"durability={key.durability.name.lower()!r} does not go with a spool, which keeps a message until a "
                "broker has stored it: use 'flushed', or a producer without spool"
            )
        # The spool forgets what a broker acknowledged, so it has to be safe there.
        return super().lane(key._replace(durability=max(key.durability, Durability.FLUSHED), slots_version=0))

    def _number(self, batch: SendBatch, stream: Stream) -> None:
        pass  # its place in the spool is its number


class SpoolSender(Sender):
    """The sender of a producer with a spool. `SendBatch.sent_at` says since when the spool has a batch."""

    def __init__(
        self,
        accumulator: SpoolAccumulator,
        encoder: BatchEncoder,
        policy: RetryPolicy,
        routes: Routes,
        links: Links,
        clock: Clock,
    ) -> None:
        super().__init__(accumulator, encoder, policy, routes=routes, links=links, clock=clock)
        self._spool = spool = accumulator.spool
        self._changed = threading.Condition()  # a batch was accepted or settled, or a link was lost
        spool.on_settled = self._settled
        for topic, config in spool.topics().items() if links.is_single else ():  # a cluster's slots are asked for
            if routes.get(topic) is None:
                routes.put(topic, Route.of(config, -FRESH_SECONDS))  # and asked for anew when something is sent there
        self._drain = Drain(
            spool,
            links,
            clock,
            # Half of the window waits for a broker, the other half for the disk: neither can stop the other.
            window_bytes=accumulator.window_bytes // 2,
            resend_seconds=next(iter(policy.resend_after), _RESEND_SECONDS),
            listener=self,
        )

    # --- into the spool ---------------------------------------------------------------------------------------------

    def pump(self, lane: Lane) -> None:
        """Hand what is ready to go in a lane to the spool."""
        while True:
            with self.lock:
                batch = self.accumulator.next_batch(lane, self._choice(lane.key))
            if batch is None:
                return
            self._keep(batch)
            if lane.is_idle:
                return

    def _choice(self, key: LaneKey) -> Sequence[int]:
        """The places that a batch may be kept for. In a cluster they are those of shards that are connected, else any;
        one of shard 0 if none is known, which is chosen when the batch is sent."""
        route = self._routes.get(key.topic)
        if route is None or not route.queues:
            return (0,)
        if self._is_single or route.places is None:
            return range(route.queues)
        return self._links.reachable(key.topic, route.queues, key.queue) or _own(route.places, key.queue) or (0,)

    def _keep(self, batch: SendBatch) -> None:
        key = batch.lane.key
        try:
            if batch.body is None:
                self.encode(batch)
            assert batch.body is not None
            head = Head(
                key.topic,
                batch.queue,
                batch.count,
                batch.key_count,
                durability=key.durability,
                is_delayed=key.is_delayed,
                is_pinned=key.queue >= 0,
                is_expiring=batch.has_extras,
            )
            self._spool.append(head, batch.body, lambda offset, error: self._kept(batch, head, offset, error))
        except DMQError as error:
            self._fail(batch, error)

    def _kept(self, batch: SendBatch, head: Head, offset: int, error: DMQError | None) -> None:
        """The spool has a batch, or could not take it. Called by its thread, in order."""
        if error is not None:
            self._fail(batch, error)
            return
        assert batch.body is not None
        kept = Kept(offset, head, batch.body, batch.bytes)  # as the window counts it
        batch.body = None
        batch.producer_id = self._spool.producer_id
        batch.first_sequence = self._spool.first_sequence(offset)
        with self.lock:
            lanes = self.accumulator.finished(batch)
            # One that has a future leaves the window with its end, so that slow callbacks push back.
            waiters = [] if batch.is_attended else self.accumulator.release(batch)
        self._drain.announce(kept, batch)
        with self._changed:
            batch.sent_at = self._clock.monotonic()
            self._changed.notify_all()
        for waiter in waiters:
            waiter.wake()
        for lane in lanes:
            self.pump(lane)

    def _fail(self, batch: SendBatch, error: DMQError) -> None:
        self._end(batch, error=error)
        with self._changed:
            self._changed.notify_all()

    # --- what becomes of it -----------------------------------------------------------------------------------------

    def finish(self, batch: SendBatch, reply: ProduceReply | Spooled | None, error: DMQError | None) -> None:
        """An accepted batch comes to its end, for those who wait."""
        if batch.is_done:
            return
        batch.end(reply, error)
        if batch.has_callbacks:
            self._links.notify(self._call_back, batch)
        elif batch.is_attended:
            self._release(batch)

    def _settled(self) -> None:
        with self.lock:
            waiters = [*self.accumulator.waiters]
            self.accumulator.waiters.clear()
        for waiter in waiters:
            waiter.wake()
        with self._changed:
            self._changed.notify_all()

    def remember(self, topic: str) -> None:
        """Keep what is known of a topic for the next start."""
        route = self._routes.get(topic)
        if route is not None:
            self._spool.remember(topic, TopicConfig(queues=route.queues, priority=route.is_priority))

    def learn(self, topic: str, answer: Frame | DMQError) -> None:
        super().learn(topic, answer)
        self.remember(topic)

    def sending(self, topic: str, link: Link) -> None:
        """A batch of a topic leaves: ask for the topic anew if it was not for long."""
        if self._routes.begin_refresh(topic, self._clock.monotonic()):
            self._ask_for(topic, link)

    def refused_by_broker(self, topic: str, error: DMQError) -> None:
        """A broker refused a batch of a topic."""
        if isinstance(error, UnknownTopic):
            self._routes.drop(topic)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait_kept(self, batch: SendBatch, deadline: float) -> None:
        """Wait until the spool has a batch, at most until a moment of `time.monotonic`; then see it off."""
        with self._changed:
            while not batch.is_done and batch.sent_at is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        self._drain.pump()

    def give_up(self, batch: SendBatch, timeout: float) -> None:
        """The time of a synchronous send is over: if the spool has it, that is its outcome.

        Raises:
            TimedOut: the spool does not have it, as far as is known.
        """
        if batch.sent_at is not None:
            self.finish(batch, Spooled(batch.queue), None)
            return
        error = TimedOut(f"the spool {self._spool.directory} did not take the message within {timeout:g} s")
        is_alone = batch.count == 1  # else others wait for it, too
        if not (is_alone and self.withdraw(batch, error)) and not batch.is_done:
            raise TimedOut(f"{error.message}; whether it will is not known")

    def wait_drained(self, deadline: float, *, while_connected: bool = False) -> bool:
        """Wait until a broker has acknowledged everything the spool has now; whether it has."""
        wanted = self._drain.announced
        with self._changed:
            while self._spool.floor < wanted:
                left = deadline - time.monotonic()
                if left <= 0 or (while_connected and not self._links.is_connected):
                    return False
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return True

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        self.body_bytes_max, self.frame_bytes_max = link.limits.body_bytes_max, link.limits.frame_bytes_max
        self._drain.connected()

    def routes_changed(self, topics: Iterable[str]) -> None:
        super().routes_changed(topics)
        self._drain.connected()  # what waited for its slots may go

    def lost(self) -> None:
        """A link broke."""
        if not self._links.is_connected:
            self._drain.let_go()
            with self._changed:
                self._changed.notify_all()

    def unreachable(self, error: DMQError) -> None:
        """Nothing fails for that: it is what a spool is for."""

    def close(self, error: DMQError) -> None:
        """Take no more; what has not left for the spool ends with this error, and what the spool has stays there."""
        with self.lock:
            self.closed_by = self.closed_by or error
            batches = [batch for batch in self.accumulator.unsettled() if self.accumulator.withdraw(batch)]
        for batch in batches:
            self._fail(batch, error)
        self._drain.let_go()

    def leave(self) -> None:
        """Let the spool go. Call `close` first."""
        self._drain.close()
        self._spool.close()


def _own(places: Sequence[int], wanted: int) -> Sequence[int]:
    """Those of the places that have the queue which is wanted in whichever shard."""
    queue = priority_queue(wanted)
    return places if queue < 0 else [place for place in places if place_queue(place) == queue]


def make_core(spool: Spool, app: str, options: ProducerOptions, routes: Routes, links: Links, clock: Clock) -> Core:
    """The core of a producer with a spool.

    Raises:
        InvalidName: the app cannot be called that.
    """
    accumulator = SpoolAccumulator(options.window_bytes, options.window_messages, spool)
    encoder, policy = options.make_encoder(app, clock), options.make_policy()
    sender = SpoolSender(accumulator, encoder, policy, routes=routes, links=links, clock=clock)
    return Core(options, sender, routes, links, clock=clock, spooling=sender)
