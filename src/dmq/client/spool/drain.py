"""The drain of a spool: takes batches from the disk to a broker, in order, until it has acknowledged every one.

What always holds:
- A place (a queue of a broker) has at most one batch under way, the oldest; the next leaves when that one is
  acknowledged. So the numbers of the spool's producer rise within each queue, whatever breaks.
- No batch is given up: it is sent again until it is acknowledged. One exception: a batch that a broker refuses for
  good. It ends with that error and leaves the spool if its sender still waits for the outcome; else it is tried for a
  while, and then set aside (`dmq.client.spool.spool`), so that those behind it can go.
- At most five batches of a place may have to be recognised by the broker after a power cut, which is what it remembers.
- Batches in memory stay within the window; the others are read from the disk when there is room.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Protocol

from dmq.client.connection.link import Link, Links
from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.numbered_sender import NumberedSender
from dmq.client.producer.outcome import Spooled
from dmq.client.producer.retry_policy import pause_after
from dmq.client.producer.routes import Route
from dmq.client.spool.parcel import Kept, Parcel, Place, Places
from dmq.client.spool.spool import Spool
from dmq.clock import Clock
from dmq.errors import Busy, DeadLettered, DMQError, NotConnected, StaleRoute, StorageError, StoreClosed
from dmq.event_log import EventLog
from dmq.model import Durability, place_queue, place_shard
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply

__all__ = ["Drain", "DrainListener"]

log = EventLog(__name__)

SCAN_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
PAUSE_REFUSED: Final = 30.0  # of what cannot even be set aside
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
REFUSALS_MAX: Final = 8  # for good, before a batch is set aside: some 13 seconds, in which somebody may make a topic


class DrainListener(Protocol):
    """Who is told what becomes of batches."""

    def sending(self, topic: str, link: Link) -> None:
        """A batch of a topic leaves."""
        ...

    def refused_by_broker(self, topic: str, error: DMQError) -> None:
        """A broker refused a batch of a topic."""
        ...

    def finish(self, batch: SendBatch, reply: ProduceReply | Spooled | None, error: DMQError | None) -> None:
        """The outcome of a batch is known to those who wait for it."""
        ...


class Drain:
    """The batches of a spool on their way to a broker. Thread-safe.

    Parameters:
        window_bytes: how much may be in memory.
        resend_seconds: an unanswered batch is sent again after so long.
    """

    def __init__(
        self,
        spool: Spool,
        links: Links,
        clock: Clock,
        window_bytes: int,
        resend_seconds: float,
        listener: DrainListener,
    ) -> None:
        self._spool = spool
        self._links = links
        self._clock = clock
        self._window_bytes = window_bytes
        self._resend_seconds = resend_seconds
        self._listener = listener
        self._finish = listener.finish
        self._attempts: NumberedSender[Parcel] = NumberedSender(self)
        self._changed = threading.Condition()  # guards all below
        self._places = Places()
        self._loaded = spool.floor  # all before are settled or in memory
        self.announced = spool.next  # the number of the next batch to come
        self._has_work = True
        self._is_closing = False
        self._scanned_at = clock.monotonic()
        spool.on_proven = self._proven
        self._thread: threading.Thread | None = None

    # --- in ---------------------------------------------------------------------------------------------------------

    def announce(self, kept: Kept, batch: SendBatch) -> None:
        """The spool has a batch. Called in order, by the spool's thread."""
        with self._changed:
            self.announced = kept.offset + 1
            in_memory = self._places.bytes
            has_room = not in_memory or in_memory + kept.size <= self._window_bytes
            is_next = self._loaded == kept.offset and not self._is_closing
            queue = self._place_of(kept)
            is_followed = (
                is_next and has_room and queue is not None and self._links.link_for(kept.head.topic, queue) is not None
            )
            if is_followed:
                self._loaded += 1
                self._places.enter(kept, batch, False, queue)
            if batch.is_attended or batch.is_large or not is_followed:  # else the thread that waits for it sends it
                self._wake()
        if not is_followed:
            self._finish(batch, Spooled(batch.queue), None)

    def _place_of(self, kept: Kept) -> int | None:
        """The place of a batch. In a cluster, one that has none yet gets it by its number, so that it is the same one
        after a restart; None if the topic's slots have to be asked for first."""
        head = kept.head
        if self._links.is_single or place_shard(head.queue):
            return head.queue
        places = self._slots(head.topic)
        return places[(head.queue if head.is_pinned else kept.offset) % len(places)] if places else None

    def _slots(self, topic: str) -> Sequence[int]:
        """The places of a topic in a cluster; none if they have to be asked for, as is done then."""
        row = self._links.topic_route(topic)
        places = None if row is None else Route.of_slots(row).places
        if not places:
            self._links.stale(topic)
        return places or ()

    def _wake(self) -> None:
        self._has_work = True
        self._changed.notify_all()
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run, name="dmq-spool", daemon=True)
            self._thread.start()

    # --- out --------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what is ready to go."""
        while True:
            with self._changed:
                taken = self._places.take(self._links)
                if self._places.is_stalled:
                    self._wake()
            if taken is None:
                return
            self._send(*taken)

    def _send(self, parcel: Parcel, link: Link) -> None:
        """Send a batch; if its link takes nothing any more, it waits for another one."""
        head, batch = parcel.kept.head, parcel.batch
        producer_id = self._spool.producer_id
        if parcel.origin >= 0:
            producer_id = (producer_id + 1 + parcel.origin) & _U64 or 1
        if batch is not None:
            batch.queue, batch.producer_id = parcel.queue, producer_id
        header = Produce(
            topic=head.topic,
            queue=place_queue(parcel.queue),
            count=head.count,
            keys=head.keys,
            producer_id=producer_id,
            producer_epoch=0,
            first_sequence=self._spool.first_sequence(parcel.kept.offset),
            durability=Durability(head.durability),
            flags=ProduceFlag.NAMED
            | (ProduceFlag.DUES if head.is_delayed else 0)
            | (ProduceFlag.EXPIRING if head.is_expiring else 0),
        )
        parcel.link = link
        parcel.sent_at = self._clock.monotonic()
        self._listener.sending(head.topic, link)
        is_attended = batch is None or batch.is_attended or batch.is_done
        try:
            self._attempts.send(parcel, header, link, attended=is_attended)
        except NotConnected:
            self._free(parcel.place, is_next=self._links.link_for(head.topic, parcel.queue) is not link)
        except Busy as error:
            self._links.call_later(pause_after(error, 0), lambda: self._free(parcel.place))
        except DMQError as error:
            self.refused(parcel, link, error)

    def _free(self, place: Place, *, is_next: bool = True) -> None:
        """The first of a place is not under way any more."""
        with self._changed:
            place.is_busy = False
            if is_next:
                self._places.line_up(place)
                self._wake()

    # --- back -------------------------------------------------------------------------------------------------------

    def stored(self, parcel: Parcel, reply: ProduceReply) -> None:
        """A broker has a batch: it leaves the spool, and the next of its place goes."""
        self._leave(parcel)
        if parcel.batch is not None:
            self._finish(parcel.batch, reply, None)
        self.pump()

    def unanswered(self, parcel: Parcel, error: DMQError) -> None:
        """The connection broke: the batch goes out again over the next one."""
        self._free(parcel.place)

    def _leave(self, parcel: Parcel) -> None:
        """Nothing more is to be done for a batch."""
        with self._changed:
            self._places.leave(parcel)
            if self._loaded < self.announced:
                self._wake()
        self._spool.settle(parcel.kept.offset)

    def refused(self, parcel: Parcel, link: Link, error: DMQError) -> None:
        """A broker refused a batch: it goes out again later, or is set aside if that does not help."""
        head, batch = parcel.kept.head, parcel.batch
        self._listener.refused_by_broker(head.topic, error)
        if isinstance(error, StaleRoute) and not self._links.is_single:
            places = self._slots(head.topic)
            if places and parcel.queue not in places:
                with self._changed:
                    self._places.move(parcel, places[parcel.queue % len(places)])
                    self._wake()
                return
            self._links.stale(head.topic)
        if not error.retriable:
            if batch is not None:
                self._finish(batch, None, error)
            # A sender that was told that the spool has the batch must not be told otherwise.
            if isinstance(error, DeadLettered) or (batch is not None and batch.error is error):
                self._leave(parcel)
                self.pump()
                return
            log.error(
                "a spooled batch is refused",
                once_for=(head.topic, head.queue),
                topic=head.topic,
                queue=head.queue,
                count=head.count,
                error=str(error),
            )
            parcel.rejections += 1
            if parcel.rejections >= REFUSALS_MAX:
                self._spool.set_aside(parcel.kept, error, lambda failure: self._set_aside(parcel, error, failure))
                return
        pause = pause_after(error, parcel.refusals)
        parcel.refusals += error.retry_after is None
        self._links.call_later(pause, lambda: self._free(parcel.place))

    def _set_aside(self, parcel: Parcel, error: DMQError, failure: DMQError | None) -> None:
        """A batch that is refused for good was kept apart, or could not be. Called by the spool's thread."""
        head = parcel.kept.head
        if failure is not None:
            log.error("a refused batch cannot be set aside, and is tried again", once_for=(), error=failure)
            self._links.call_later(PAUSE_REFUSED, lambda: self._free(parcel.place))
            return
        told = type(error)(
            f"{head.count} messages for topic {head.topic!r} that the spool had accepted were refused for good "
            f"({error.message}), and set aside: `dmq spool list {self._spool.directory}` shows them",
            **error.detail,
        )
        log.error(
            "a spooled batch is set aside",
            once_for=(head.topic, str(error)),
            topic=head.topic,
            count=head.count,
            error=error,
        )
        self._leave(parcel)
        self._spool.on_refused(told)
        self._links.call_later(0.0, self.pump)

    def _proven(self, offsets: Sequence[int]) -> None:
        with self._changed:
            self._places.proven(offsets)

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """A link is in use: everything may go."""
        with self._changed:
            self._places.line_up_all()
            self._wake()

    def let_go(self) -> None:
        """There is no link: those who wait are told that the spool has it."""
        with self._changed:
            batches = [parcel.batch for parcel in self._places.parcels()]
        for batch in batches:
            if batch is not None and not batch.is_done:
                self._finish(batch, Spooled(batch.queue), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._has_work:
                    self._changed.wait(SCAN_SECONDS)
                if self._is_closing:
                    return
                self._has_work = False
                is_stalled, self._places.is_stalled = self._places.is_stalled, False
            try:
                self._scan()
                if is_stalled:
                    self._spool.flush()
                self._load()
                self.pump()
            except StoreClosed:
                return
            except StorageError as error:
                log.error("the spool cannot be read or written", once_for=(), error=error)

    def _load(self) -> None:
        """Read on from the disk, as far as there is room."""
        while self._links.is_connected:
            with self._changed:
                start, stop, room = self._loaded, self.announced, self._window_bytes - self._places.bytes
                if start >= stop or (self._places.bytes and room <= 0):
                    return
            found, after = self._spool.read(start, stop, max(1, min(room, 1 << 20)))
            with self._changed:
                for kept in found:
                    queue = self._place_of(kept)
                    if queue is None:
                        after = kept.offset
                        break
                    self._places.enter(kept, None, kept.offset < self._spool.next, queue)
                self._loaded = after
            self.pump()
            if after == start:
                return  # until the slots are known

    def _scan(self) -> None:
        """Once a second: what stays unanswered goes again, and what was missed is made up for."""
        now = self._clock.monotonic()
        if now - self._scanned_at < SCAN_SECONDS:
            return
        self._scanned_at = now
        self._spool.settle_again()
        with self._changed:
            self._places.line_up_all()
            under_way = self._places.under_way()
        for parcel in under_way:
            if parcel.link is None or now - parcel.sent_at < self._resend_seconds:
                continue
            if not self._attempts.take_back(parcel, parcel.link):
                continue  # its answer is being handed over
            self._free(parcel.place)
            if parcel.batch is not None and parcel.batch.is_attended:
                self._finish(parcel.batch, Spooled(parcel.batch.queue), None)

    def close(self) -> None:
        """Send no more, and tell those who wait that the spool has it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)
        self.let_go()
