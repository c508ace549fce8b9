"""The sender of a producer: takes batches from the accumulator to a broker, and sees them through to their end. No
sockets, no threads.

It works through two seams. `Links` tells which link leads to a queue, finds another address, and calls things later
(`dmq.client.connection.link`). `NumberedSender` begins each attempt and says how it ended; what follows from that is
decided by the `RetryPolicy`, and done here.

What always holds:
- A batch under way is in exactly one place: written and unanswered, parked until a connection is back, due to be sent
  again at a known time, or held until those before it in its queue have ended. It leaves that place only by its end,
  and it ends once.
- What is sent again goes out as the first of its queue, and then names no predecessor: so a broker that has forgotten
  the producer takes it, and one that refuses it as out of order refuses it once.
- The producer's lock is never held while anything is encoded, written or called back.
- A batch that may be stored keeps its queue, its numbers and its count.
- A batch that has callbacks keeps its room in the window until they have run, so that slow ones push back.
- A topic that is asked for anew stays known meanwhile; one that is gone is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from threading import get_ident
from typing import Any, Final

from dmq.client.connection.link import Link, Links
from dmq.client.connection.threads import FOREVER
from dmq.client.producer.accumulator import Accumulator, Lane, SendBatch
from dmq.client.producer.encoder import BatchEncoder, header_of
from dmq.client.producer.numbered_sender import NumberedSender
from dmq.client.producer.retry_policy import RetryPolicy, Step
from dmq.client.producer.routes import ROUTES_MAX, Route, Routes, choose_queue
from dmq.clock import Clock
from dmq.errors import (
    Busy,
    DMQError,
    NotConnected,
    NotLeader,
    OutOfOrder,
    OutOfRetries,
    RateLimited,
    RegistryDown,
    StaleRoute,
    UnknownTopic,
)
from dmq.event_log import EventLog
from dmq.model import Durability, place_shard
from dmq.protocol import FRAME_BYTES_MAX, Command, Frame, decode_response
from dmq.protocol.admin import TopicDescribe, TopicDescribeReply
from dmq.protocol.batch import plain_batch
from dmq.protocol.produce import ProduceReply
from dmq.protocol.session import BLOCKS, OVERLAP

__all__ = ["Sender"]

log = EventLog(__name__)

SCAN_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 0.5  # a sender that asks again and again has its batch sent again no sooner
ROUTE_SECONDS: Final = 0.3  # that a new route of a topic has to come, before a batch is sent again
LEADER_SECONDS: Final = 1.0  # that a shard has to find a leader, before another one takes its messages
MOVES_MAX: Final = 3  # to other shards, and within how many seconds
MOVES_SECONDS: Final = 5.0
_BODY_BYTES_MAX: Final = 4 << 20  # before a broker has told its own


class Sender:
    """What sends one producer's batches. Thread-safe."""

    def __init__(
        self,
        accumulator: Accumulator,
        encoder: BatchEncoder,
        policy: RetryPolicy,
        routes: Routes,
        links: Links,
        clock: Clock,
    ) -> None:
        self.lock: Final = threading.Lock()  # guards the accumulator and what is here
        self.accumulator: Final = accumulator
        self.encoder: Final = encoder
        self._policy = policy
        self.give_up_after: Final = policy.give_up_after
        self._routes = routes
        self._links = links
        self._clock = clock
        self._is_single = links.is_single
        self._attempts: NumberedSender[SendBatch] = NumberedSender(self)
        self.answered: Final = self._attempts.answered
        self._under_way: dict[SendBatch, Link] = {}
        self._parked: list[SendBatch] = []
        self._is_scanning = False
        self._divisions: dict[str, Route] = {}  # by which ordered messages of a topic were divided last
        self._changing: set[str] = set()  # topics that wait for answers before they are divided by newer slots
        self._stale: dict[SendBatch, None] = {}  # refused because they were divided by old slots
        self._due: dict[SendBatch, None] = {}  # to be seen to again at a known time
        self._scans = 0
        self._given_up: dict[SendBatch, None] = {}  # given up, with their bytes, the oldest first
        self._given_up_bytes = 0
        self.closed_by: DMQError | None = None
        self.body_bytes_max = _BODY_BYTES_MAX
        """What the broker in use takes as a body, after compression."""
        self.frame_bytes_max = FRAME_BYTES_MAX
        """And as a request."""
        self.takes_blocks = False
        """Whether it takes bodies that were compressed together."""
        self.pump_after: Callable[[Lane], None] = self.pump
        """Pumps a lane after a batch of several messages, whose senders may have more to send in a moment."""

    # --- out --------------------------------------------------------------------------------------------------------

    def pump(self, lane: Lane) -> None:
        """Send what is ready to go in a lane."""
        topic, links = lane.key.topic, self._links
        if lane.is_closed:
            self._switch(topic, lane)
            return
        while (link := links.link_for(topic, lane.key.queue)) is not None:
            route = self._routes.get(topic)
            queues = links.reachable(topic, route.queues if route else 1, lane.key.queue)
            if not queues and lane.key.queue < 0 and (closed := links.closed(topic)) is not None:
                self._refuse(lane, closed)
                return
            overlaps = OVERLAP in link.features
            with self.lock:
                batch = self.accumulator.next_batch(lane, queues, overlaps=overlaps)
            if batch is None:
                return
            self.dispatch(batch, links.link_for(topic, batch.queue))
            if lane.is_idle:
                return

    def encode(self, batch: SendBatch) -> None:
        """Turn a batch's messages into the body of its request.

        Raises:
            InvalidMessage, MessageTooLarge: a message cannot be sent.
        """
        self.encoder.encode(batch, self.body_bytes_max, blocks=self.takes_blocks)

    def dispatch(self, batch: SendBatch, link: Link | None) -> None:
        """Send a batch that has left its lane; whatever prevents that, it is seen to. Without a link it waits."""
        try:
            if batch.body is None:
                self.encode(batch)
            if link is None:
                self._park(batch)
                return
            with self.lock:
                may_go = self.accumulator.may_go(batch, overlaps=OVERLAP in link.features)
            if may_go:
                self._send(batch, link)
            elif not self._is_single:
                self._move_later(batch)  # what it is held behind may wait for a leader for long
        except DMQError as error:
            self.unsent(batch, error)

    def unsent(self, batch: SendBatch, error: DMQError) -> None:
        """A batch could not be sent: it waits for a connection or for its turn, or ends."""
        if isinstance(error, NotConnected):
            batch.last_error = error
            self._park(batch)
        elif isinstance(error, Busy):
            batch.last_error = error
            self._later(error.retry_after or 0.05, batch, self._again)
        else:
            self._end(batch, error=error)

    def _send(self, batch: SendBatch, link: Link) -> None:
        key = batch.lane.key
        now = self._clock.monotonic()
        if batch.block_bytes and BLOCKS not in link.features:  # encoded for another broker
            assert batch.body is not None
            batch.body, batch.block_bytes = plain_batch(batch.body, batch.count, batch.key_count), 0
        header = header_of(batch, now)
        if key.durability == Durability.NONE:
            assert batch.body is not None
            link.tell(Command.PRODUCE, header, batch.body)
            sent = ProduceReply(header.queue, 0, 0, Durability.NONE, shard=place_shard(batch.queue))
            self._end(batch, sent, is_alone=True)
            return
        is_first, batch.is_tried = not batch.is_tried, True
        self.note_sending(batch, link, now)
        if self._routes.begin_refresh(key.topic, now):
            self._ask_for(key.topic, link)
        self.watch(batch, link)
        try:
            self._attempts.send(batch, header, link, attended=batch.is_attended)
        except DMQError:
            with self.lock:
                self._under_way.pop(batch, None)
            raise
        if is_first:
            with self.lock:  # unless its answer is here already
                batch.is_out = batch in self._under_way and not batch.is_unanswered

    def note_sending(self, batch: SendBatch, link: Link, now: float) -> None:
        """Note when a batch goes out for the first time, and where it goes now."""
        if batch.sent_at is None:
            batch.sent_at = now
            if batch.deadline is None:
                batch.deadline = now + self._policy.give_up_after
        batch.broker = link.address

    def watch(self, batch: SendBatch, link: Link) -> None:
        """Look after a batch from now on: send it again if it is not answered, give it up in the end."""
        with self.lock:
            self._under_way[batch] = link
            must_scan, self._is_scanning = not self._is_scanning, True
        if must_scan:
            self._links.call_later(SCAN_SECONDS, self._scan)

    # --- back: how an attempt ended ---------------------------------------------------------------------------------

    def unanswered(self, batch: SendBatch, error: DMQError) -> None:
        """The connection broke: the batch goes out again over the next one."""
        if not self._is_single:
            self._links.health.failed(batch.shard, self._clock.monotonic())
        self._disturbed(batch)
        self._park(batch)

    def refused(self, batch: SendBatch, link: Link, error: DMQError) -> None:
        """The broker answered with an error: the policy decides whether, when and where the batch goes out again."""
        self._disturbed(batch)
        if isinstance(error, OutOfOrder) and batch.previous_sequence is not None:
            with self.lock:
                first = self.accumulator.first_under_way(batch)
            # To tell its sender, should it give up meanwhile: why those before it are not stored.
            batch.last_error = None if first is batch else first.last_error
            batch.is_attended = True
            self._send_anew(batch)
            return
        if not self._is_single and self._refused_by_shard(batch, error):
            return
        if isinstance(error, NotLeader) and self._links.link_for(batch.topic, batch.queue) is not link:
            batch.is_attended = True
            self._send_anew(batch)  # to the leader, once it is found
            return
        decision = self._policy.after_refusal(
            batch.history, error, self._clock.monotonic(), self._links.has_other(link)
        )
        if decision.step is Step.FAIL:
            self._end(batch, error=error)
            return
        batch.is_attended = True  # from now on things happen while nobody may be waiting
        batch.refusals += error.retry_after is None
        if decision.step is Step.REFRESH:
            batch.is_refreshed = True
            self._refresh(batch, link)
        elif decision.step is Step.ELSEWHERE:
            batch.moves += 1
            self._links.find_other(
                link, lambda other: self._again(batch) if other is None else self.dispatch(batch, other)
            )
        else:
            self._later(decision.pause, batch, self._again)

    def _refused_by_shard(self, batch: SendBatch, error: DMQError) -> bool:
        """A shard of a cluster refused a batch: whether it goes to another shard instead, or its topic is asked for."""
        if isinstance(error, UnknownTopic | StaleRoute):
            if batch.is_refreshed and isinstance(error, UnknownTopic):
                return False
            batch.is_refreshed = batch.is_attended = True
            if isinstance(error, StaleRoute):
                batch.is_unanswered = False  # a broker that has it says so
                if batch.lane.key.slots_version:
                    with self.lock:
                        self._stale[batch] = None
                else:
                    self._links.health.failed(batch.shard, self._clock.monotonic())
            self._links.stale(batch.topic)
            self._routed(batch)
            return True
        if not error.retriable or isinstance(error, RateLimited | RegistryDown):  # all shards share the registry
            return False
        self._links.health.failed(batch.shard, self._clock.monotonic(), error.retry_after)
        return self._move(batch)

    def _later(self, seconds: float, batch: SendBatch, function: Callable[[SendBatch], None]) -> None:
        """Do something for a batch after so long, unless it got another place meanwhile."""
        turns = batch.turns

        def be_due() -> None:
            if batch.turns == turns:
                batch.carrier = get_ident()
                self._due.pop(batch, None)
                function(batch)

        self._links.call_later(seconds, be_due)
        self._due[batch] = None

    def _routed(self, batch: SendBatch) -> None:
        """Send a batch again whose topic had to be asked for, as soon as that has helped."""
        if (is_stale := batch in self._stale) and self._switch(batch.topic) and batch not in self._stale:
            return
        if batch.deadline is not None and self._clock.monotonic() >= batch.deadline:
            assert batch.last_error is not None
            self._end(batch, error=batch.last_error)
            return
        if is_stale:
            self._links.stale(batch.topic)
        elif self._move(batch):
            return
        if batch.refusals and (not is_stale or self._routes.has_newest(batch.lane.key, batch.last_error)):
            batch.refusals = 0
            self._again(batch)
            return
        batch.refusals += 1
        self._later(ROUTE_SECONDS, batch, self._routed)

    # --- other slots ------------------------------------------------------------------------------------------------

    def division(self, topic: str, route: Route) -> Route:
        """By which slots of a topic this producer divides ordered messages now.

        That is the route that is given, or an older one, as long as messages that went by the older one are not
        answered: others with the same business id must not overtake them.
        """
        used = self._divisions.get(topic)
        if used is None or used.slots_version == route.slots_version:
            if len(self._divisions) >= ROUTES_MAX:
                self._divisions.clear()
            self._divisions[topic] = route
            return route
        return route if self._switch(topic) else used

    def _switch(self, topic: str, closed: Lane | None = None) -> bool:
        """Divide ordered messages by the newest slots of their topic from now on, and what waits anew, in order.

        False as long as something is under way by the older ones; nothing else leaves by these meanwhile.

        Parameters:
            closed: one more lane with older slots: one that was forgotten, and got something after that.
        """
        route = self._routes.get(topic)
        if route is None or route.places is None:
            return False
        problems: list[tuple[SendBatch, DMQError]] = []
        with self.lock:
            accumulator = self.accumulator
            old = accumulator.lanes_by(topic, route.slots_version)
            if closed is not None and closed not in old:
                old.append(closed)
            left = [(lane, accumulator.left(lane)) for lane in old]
            for lane in old:
                lane.is_closed = True
            if any(batch.is_unanswered or batch in self._under_way for _, batches in left for batch in batches):
                self._changing.add(topic)
                return False
            self._changing.discard(topic)
            self._divisions[topic] = route
            lanes: dict[Lane, None] = {}
            for lane, batches in left:
                for batch in (*batches, *accumulator.take_waiting(lane)):
                    self._stale.pop(batch, None)
                    if batch in self._parked:
                        self._parked.remove(batch)
                    try:
                        lanes |= dict.fromkeys(self._divide(batch, route))
                    except DMQError as error:
                        problems.append((batch, error))
                accumulator.drop_lane(lane)
        for batch, problem in problems:
            self._end(batch, error=problem)
        for lane in lanes:
            self.pump(lane)
        return True

    def _divide(self, batch: SendBatch, route: Route) -> list[Lane]:
        """Have the messages of a batch that is stored nowhere take their places anew; the lanes they are in then."""
        accumulator, key = self.accumulator, batch.lane.key._replace(slots_version=route.slots_version)
        assert batch.messages
        places = [choose_queue(route, message) for message in batch.messages]
        lanes = [accumulator.lane(key._replace(queue=place)) for place in places]
        if len({*places}) == 1:
            accumulator.move(batch, lanes[0])
        else:
            accumulator.finished(batch)
            for part in batch.divided(lanes):
                accumulator.add(part)
        return lanes

    def _part_ended(self, parent: SendBatch) -> None:
        """A part of a batch that was divided anew has ended: with the last one, so does the batch."""
        parts = {part: None for part, _ in parent.parts}
        if all(part.is_done for part in parts):
            error = next((part.error for part in parts if part.error is not None), None)
            self._end(parent, next(iter(parts)).reply if error is None else None, error)  # type: ignore[arg-type]

    def routes_changed(self, topics: Iterable[str]) -> None:
        """A cluster has other routes: those of topics that are known here are taken over."""
        for topic in topics:
            if self._routes.get(topic) is None:
                continue
            row = self._links.topic_route(topic)
            if row is None:
                self._routes.drop(topic)
                continue
            self._routes.put(topic, Route.of_slots(row))
            with self.lock:
                has_older = bool(self.accumulator.lanes_by(topic, row.slots_version))
            if has_older:
                self._switch(topic)
        with self.lock:
            lanes = self.accumulator.waiting_lanes()
        for lane in lanes:
            self.pump(lane)

    def _move(self, batch: SendBatch) -> bool:
        """Have another shard take a batch that no broker has stored, if it may go to any, and there is another."""
        if batch.is_done or batch.is_unanswered or batch.lane.key.queue >= 0 or batch.moves >= MOVES_MAX:
            return False
        now, route = self._clock.monotonic(), self._routes.get(batch.topic)
        if batch.moves and now - batch.moved_at > MOVES_SECONDS:
            return False
        places = self._links.reachable(batch.topic, route.queues if route else 1, batch.lane.key.queue)
        if not any(place_shard(place) != batch.shard for place in places):
            return False
        batch.moved_at = batch.moved_at if batch.moves else now
        batch.moves += 1
        batch.is_attended = True
        with self.lock:
            if batch in self._parked:
                self._parked.remove(batch)
            lanes, released = self.accumulator.put_back(batch)
        if released is not None:
            self._again(released)
        for lane in lanes:
            self.pump(lane)
        return True

    def _send_anew(self, batch: SendBatch) -> None:
        """Send a batch of which nothing was looked at: unless it went out before, it is as good as never sent."""
        if not batch.is_unanswered:
            batch.sent_at = None
        self._again(batch)

    def _disturbed(self, batch: SendBatch) -> None:
        """A batch is not written and unanswered any more, and may have to go out again."""
        with self.lock:
            batch.carrier = get_ident()
            self._under_way.pop(batch, None)
            batch.is_out = False

    def _again(self, batch: SendBatch) -> None:
        if batch.is_done:
            return
        link = self._links.link_for(batch.topic, batch.queue)
        if link is None or not self._policy.may_move(batch.history, batch.broker == link.address or link.is_member):
            self._park(batch)
        else:
            self.dispatch(batch, link)

    def _refresh(self, batch: SendBatch, link: Link) -> None:
        """Ask whether the topic is there, and with how many queues; then send again, or give up."""

        def learned(answer: Frame | DMQError) -> None:
            self.learn(batch.topic, answer)
            route = self._routes.get(batch.topic)
            if isinstance(answer, Frame) and (route is None or batch.queue >= route.queues):
                assert isinstance(batch.last_error, DMQError)
                self._end(batch, error=batch.last_error)
            else:
                self._again(batch)

        try:
            link.submit(Command.TOPIC_DESCRIBE, TopicDescribe(batch.topic), on_answer=learned)
        except DMQError:
            self._park(batch)

    def _park(self, batch: SendBatch) -> None:
        """Keep a batch until a connection is back; if one is there already, it goes at once."""
        batch.is_attended = True
        with self.lock:
            closed_by = self.closed_by
            if closed_by is None:
                self._parked.append(batch)
        if closed_by is not None:
            self._end(batch, error=closed_by)
        elif (link := self._links.link_for(batch.topic, batch.queue)) is not None:
            self.connected(link)
        elif not self._is_single:
            self._move_later(batch)
            self._pass_by(batch)

    def _pass_by(self, batch: SendBatch) -> None:
        """Have what may go to other shards not wait for a batch whose own one does not answer."""
        with self.lock:
            self.accumulator.stall(batch)
        self.pump(batch.lane)

    def _move_later(self, batch: SendBatch) -> None:
        """Have another shard take a batch that may go there, if it waits for its own one for long."""
        if not batch.is_unanswered and batch.lane.key.queue < 0:
            self._later(LEADER_SECONDS, batch, self._move_waiting)

    def _move_waiting(self, batch: SendBatch) -> None:
        """A shard has had no leader for a while: another one takes what waits for it, or is held behind that."""
        with self.lock:
            is_waiting = batch in self._parked or batch.is_held
        if is_waiting:
            if self._links.link_for(batch.topic, batch.queue) is None:
                self._links.health.failed(batch.shard, self._clock.monotonic())
            if not self._move(batch):
                self._move_later(batch)

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        """A link is in use: what was parked goes out, as far as its brokers are connected, then what has gathered."""
        self.body_bytes_max, self.frame_bytes_max = link.limits.body_bytes_max, link.limits.frame_bytes_max
        self.takes_blocks = BLOCKS in link.features
        with self.lock:
            parked, me = self._parked, get_ident()
            if self.accumulator.gatherer is not None:
                self.accumulator.gatherer.close()  # it knows the limit of the broker before
            for batch in parked:
                batch.carrier = me
            self._parked = []
        held = []
        for batch in parked:
            if batch.is_done:
                continue
            own = self._links.link_for(batch.topic, batch.queue)
            is_same = own is not None and (batch.broker in (None, own.address) or own.is_member)
            if own is not None and self._policy.may_move(batch.history, is_same):
                self.dispatch(batch, own)
            else:
                held.append(batch)
        with self.lock:
            self._parked += held
            lanes = self.accumulator.waiting_lanes()
            must_scan = bool(held) and not self._is_scanning
            self._is_scanning = self._is_scanning or must_scan
        if must_scan:
            self._links.call_later(SCAN_SECONDS, self._scan)
        for lane in lanes:
            self.pump(lane)

    def _scan(self) -> None:
        """Once a second while anything is under way: send again what stays unanswered, give up what did too long."""
        now, scans = self._clock.monotonic(), self._scans
        with self.lock:
            under_way = [*self._under_way.items()]
            parked = [batch for batch in self._parked if batch.sent_at is not None]
            must_go_on = self._is_scanning = bool(under_way or parked)
        for batch, link in under_way:
            if batch.sent_at is None or batch.is_done or batch.lane.key.durability == Durability.CONSUMED:
                continue
            if not self._is_single and now - batch.sent_at >= LEADER_SECONDS:
                self._links.health.failed(batch.shard, now, 2 * SCAN_SECONDS)  # until the next look
                self._pass_by(batch)
            is_given_up = self._policy.is_given_up(batch.sent_at, now)
            if not is_given_up and not self._policy.is_resend_due(batch.resends, batch.sent_at, now):
                continue
            if not self._attempts.take_back(batch, link):
                continue  # its answer is being handed over
            self._disturbed(batch)
            if is_given_up:
                self._end(batch, error=self._out_of_retries(batch))
                continue
            batch.resends += 1
            batch.is_attended = True
            self.dispatch(batch, link)
        for batch in parked:
            assert batch.sent_at is not None
            if self._policy.is_given_up(batch.sent_at, now):
                self._end(batch, error=self._out_of_retries(batch))
        if must_go_on and scans == self._scans:  # else others have begun
            self._links.call_later(SCAN_SECONDS, self._scan)

    def _out_of_retries(self, batch: SendBatch) -> OutOfRetries:
        return OutOfRetries(
            f"sent {batch.resends + 1} times within {self._policy.give_up_after:g} s and never answered; whether the "
            "message is stored is not known",
            resends=batch.resends,
        )

    def withdraw(self, batch: SendBatch, error: DMQError) -> bool:
        """Take back a batch that was never sent; False if it was, or may be any moment."""
        with self.lock:
            if batch.sent_at is not None or batch.is_done:
                return False
            is_waiting = self.accumulator.withdraw(batch)
            if not is_waiting and not batch.is_held:
                if batch not in self._parked:
                    return False
                self._parked.remove(batch)
        self._end(batch, error=error)
        return True

    # --- once more, because the outcome is not known -----------------------------------------------------------------

    def resume(self, batch: SendBatch, deadline: float | None) -> SendBatch:
        """A sender repeats a message whose outcome it does not know: see that the outcome becomes known.

        A batch that is under way goes out again now. One that was given up takes its queue's turn once more, with the
        numbers it had, so that the broker answers with the first place if it has it.

        Returns:
            The batch to wait for: this one, or what stands for it.
        """
        while batch.again is not None:
            batch = batch.again
        if batch.is_done:
            if batch.body is None or not batch.is_unknown:
                return batch
            with self.lock:
                if batch.again is None:
                    if batch in self._given_up:
                        del self._given_up[batch]
                        self._given_up_bytes -= batch.bytes
                    self.accumulator.add(batch.reopened())
                again: SendBatch | None = batch.again
            assert again is not None
            again.deadline = deadline
            self.pump(again.lane)
            return again
        now = self._clock.monotonic()
        with self.lock:
            if deadline is None or batch.deadline is None or deadline > batch.deadline:
                batch.deadline = deadline
            link = self._under_way.get(batch)
            is_due = batch.sent_at is not None and now - max(batch.sent_at, batch.asked_again_at) >= AGAIN_SECONDS
        if link is not None and is_due and self._attempts.take_back(batch, link):
            self._disturbed(batch)
            batch.asked_again_at = now
            batch.is_attended = True
            self.dispatch(batch, link)
        return batch

    def _keep_bytes(self, batch: SendBatch) -> None:
        """Keep the bytes of a batch that was given up, for a sender that asks again; the oldest make room."""
        with self.lock:
            if batch in self._given_up:
                return
            self._given_up[batch] = None
            self._given_up_bytes += batch.bytes
            while self._given_up_bytes > self.accumulator.window_bytes // 2 and len(self._given_up) > 1:
                oldest = next(iter(self._given_up))
                del self._given_up[oldest]
                oldest.body = None
                self._given_up_bytes -= oldest.bytes

    def unreachable(self, error: DMQError) -> None:
        """A broker was not reached for as long as the client waits: what was to go there and was never sent fails."""
        with self.lock:
            batches = [batch for batch in self.accumulator.unsettled() if batch.sent_at is None]
        for batch in batches:
            queue = batch.lane.key.queue if batch.queue < 0 else batch.queue
            if self._links.link_for(batch.topic, queue) is None:
                self.withdraw(batch, error)

    def _refuse(self, lane: Lane, error: DMQError) -> None:
        """Nothing of a lane can be sent, now or soon."""
        with self.lock:
            batches = [batch for batch in self.accumulator.unsettled() if batch.lane is lane and batch.sent_at is None]
        for batch in batches:
            self.withdraw(batch, error)

    def close(self, error: DMQError) -> None:
        """End everything that is not settled with this error."""
        with self.lock:
            self.closed_by = self.closed_by or error
            self._parked.clear()
            batches = [*self.accumulator.unsettled()]
            for batch in batches:
                self.accumulator.withdraw(batch)
        for batch in batches:
            self._end(batch, error=error)

    def too_late(self, batch: SendBatch, *timeouts: float | None) -> DMQError:
        """What a send raises whose time, the shortest of these, is over."""
        patience = min(limit for limit in (*timeouts, FOREVER) if limit is not None)
        away = self._links.away(batch.topic, batch.lane.key.queue)
        return self._policy.too_late(batch.history, batch.last_error, batch.sent_at is not None, patience, away=away)

    # --- topics -----------------------------------------------------------------------------------------------------

    def _ask_for(self, topic: str, link: Link) -> None:
        """Ask for a topic anew, and go on with what is known of it meanwhile."""
        try:
            link.submit(
                Command.TOPIC_DESCRIBE, TopicDescribe(topic), on_answer=lambda answer: self.learn(topic, answer)
            )
        except DMQError:
            self._routes.end_refresh(topic)

    def learn(self, topic: str, answer: Frame | DMQError) -> None:
        """Remember what a broker said of a topic."""
        try:
            if isinstance(answer, DMQError):
                raise answer
            described: TopicDescribeReply = decode_response(answer)
        except UnknownTopic:
            self._routes.drop(topic)
        except DMQError:
            self._routes.end_refresh(topic)
        else:
            self._routes.put(topic, Route.of(described.info.config, self._clock.monotonic()))

    # --- the end of batches -----------------------------------------------------------------------------------------

    def _end(
        self,
        batch: SendBatch,
        reply: ProduceReply | None = None,
        error: DMQError | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        """Tell those who wait, make room in the window, and send what waited for its queue.

        Parameters:
            is_alone: nothing waited for its queue, and its sender sends the next one itself.
        """
        if batch.is_done:
            with self.lock:
                self._under_way.pop(batch, None)
            return
        batch.end(reply, error)
        self._settle(batch, is_alone=is_alone)

    def _settle(self, batch: SendBatch, *, is_alone: bool = False) -> None:
        """Do what follows from the end of a batch. Does no harm a second time, after an interrupted first one."""
        if batch.is_kept and batch.is_unknown and self.closed_by is None:
            self._keep_bytes(batch)
        else:
            batch.body = None
            if batch.messages:
                batch.drop_messages()
        has_callbacks = batch.has_callbacks  # before the queue is free: later ones are called by who adds them
        with self.lock:
            self._under_way.pop(batch, None)
            self._stale.pop(batch, None)
            lanes = self.accumulator.finished(batch)
            released = self.accumulator.released(batch) if self.closed_by is None else None
            waiters = [] if has_callbacks else self.accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()
        if has_callbacks:
            self._links.notify(self._call_back, batch)
        if batch.parent is not None:
            self._part_ended(batch.parent)
        if released is not None:
            self._again(released)
        if self._changing and batch.topic in self._changing:
            self._switch(batch.topic)
        if not is_alone:
            batch.hold_lane(self.pump)
            pump = self.pump if batch.count == 1 else self.pump_after
            for lane in lanes:
                pump(lane)

    def stored(self, batch: SendBatch, reply: ProduceReply) -> None:
        """A broker has a batch."""
        if not self._is_single and batch.sent_at and not batch.is_unanswered:
            now = self._clock.monotonic()
            self._links.health.answered(batch.shard, now - batch.sent_at, now)
        self._end(batch, reply)

    def _call_back(self, batch: SendBatch) -> Awaitable[None] | None:
        """Run a batch's callbacks; its room in the window is free afterwards, so that slow callbacks push back.

        Returns what is still to be awaited, where callbacks are coroutine functions.
        """
        waiting = []
        for callback in batch.take_callbacks():
            try:
                result = callback()
            except Exception:
                log.exception("a delivery callback raised", once_for=batch.topic, topic=batch.topic)
            else:
                if result is not None and isawaitable(result):
                    waiting.append(result)
        if waiting:
            return self._await_callbacks(batch, waiting)
        self._release(batch)
        return None

    async def _await_callbacks(self, batch: SendBatch, waiting: list[Awaitable[Any]]) -> None:
        for awaitable in waiting:
            try:
                await awaitable
            except Exception:
                log.exception("a delivery callback raised", once_for=batch.topic, topic=batch.topic)
        self._release(batch)

    def _release(self, batch: SendBatch) -> None:
        with self.lock:
            waiters = self.accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()
