"""The drainer: takes batches from the spool to a broker, in order, until it has acknowledged every one.

What always holds:
- A place (a queue of a broker) has at most one batch under way, the oldest; the next leaves when that one is
  acknowledged. So the numbers of the spool's producer rise within each queue, whatever breaks.
- No batch is given up: it is sent again until it is acknowledged. One exception: a batch that a broker refuses for
  good, while whoever sent it still waits for the outcome, ends with that error and leaves the spool.
- At most five batches of a place may have to be recognised by the broker after a power cut, which is what it remembers.
- Batches in memory stay within the window; the others are read from the disk when there is room.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dmq.client.accumulator import Batch
from dmq.client.futures import Spooled
from dmq.client.parcels import Kept, Parcel, Place
from dmq.client.sender import Lines, Link
from dmq.client.spool import UNPROVEN_MAX, Spool
from dmq.clock import Clock
from dmq.errors import Busy, DeadLettered, DMQError, NotConnected, ServerError, StorageError, StoreClosed
from dmq.protocol import Command, Flag, Frame, decode_response
from dmq.protocol.producing import Durability, Produce, ProduceFlag, ProduceReply

__all__ = ["Drainer"]

log = logging.getLogger(__name__)

SCAN_SECONDS: Final = 1.0
PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 5.0
PAUSE_REFUSED: Final = 30.0  # of what cannot succeed before somebody does something about it

Finish = Callable[[Batch, ProduceReply | Spooled | None, DMQError | None], None]


class Drainer:
    """See the module. Thread-safe.

    Parameters:
        window_bytes: how much may be in memory.
        resend_seconds: an unanswered batch is sent again after so long.
        finish: tells whoever waits for a batch.
        refused: told the topic and the error of a refusal, and the topic of every batch that leaves, with None.
    """

    def __init__(
        self,
        spool: Spool,
        lines: Lines,
        clock: Clock,
        window_bytes: int,
        resend_seconds: float,
        finish: Finish,
        on_topic: Callable[[str, Link, DMQError | None], None],
    ) -> None:
        self._spool = spool
        self._lines = lines
        self._clock = clock
        self._window_bytes = window_bytes
        self._resend_seconds = resend_seconds
        self._finish = finish
        self._on_topic = on_topic
        self._changed = threading.Condition()  # guards all below
        self._places: dict[tuple[str, int], Place] = {}
        self._ready: deque[Place] = deque()
        self._unproven: dict[int, Place] = {}
        self._bytes = 0
        self._loaded = spool.floor  # all before are settled or in memory
        self.announced = spool.next  # the number of the next batch to come
        self._has_work = True
        self._wants_flush = False
        self._is_closing = False
        self._scanned_at = clock.monotonic()
        spool.on_proven = self._proven
        self._thread: threading.Thread | None = None

    # --- in ---------------------------------------------------------------------------------------------------------

    def announce(self, kept: Kept, batch: Batch) -> None:
        """The spool has a batch. Called in order, by the spool's thread."""
        with self._changed:
            self.announced = kept.offset + 1
            has_room = not self._bytes or self._bytes + kept.size <= self._window_bytes
            is_followed = self._loaded == kept.offset and has_room and self._lines.current() is not None
            if is_followed:
                self._loaded += 1
                self._enter(kept, batch, False)
            if batch.is_attended or not is_followed:  # else whoever waits for it sends it
                self._wake()
        if not is_followed:
            self._finish(batch, Spooled(batch.queue), None)

    def _enter(self, kept: Kept, batch: Batch | None, is_resent: bool) -> None:
        place = self._places.setdefault(kept.head.place, Place())
        place.parcels.append(Parcel(kept, place, batch, is_resent))
        self._bytes += kept.size
        self._line_up(place)

    def _line_up(self, place: Place) -> None:
        if place.parcels and not place.is_busy and not place.is_ready:
            place.is_ready = True
            self._ready.append(place)

    def _wake(self) -> None:
        self._has_work = True
        self._changed.notify_all()
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run, name="dmq-spool", daemon=True)
            self._thread.start()

    # --- out --------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what is ready to go."""
        while (link := self._lines.current()) is not None:
            with self._changed:
                parcel = self._take(link)
            if parcel is None or not self._send(parcel, link):
                return

    def _take(self, link: Link) -> Parcel | None:
        while self._ready:
            place = self._ready.popleft()
            place.is_ready = False
            if place.is_busy or not place.parcels:
                continue
            if place.unproven >= UNPROVEN_MAX:
                self._wants_flush = True
                self._wake()
                continue
            parcel = place.parcels[0]
            # What may be stored at one broker, and is bound to its queue, waits for that one.
            if parcel.is_resent and parcel.kept.head.is_pinned and parcel.broker not in ("", str(link.address)):
                continue
            place.is_busy = True
            return parcel
        return None

    def _send(self, parcel: Parcel, link: Link) -> bool:
        """Send a batch; False if this link takes nothing any more."""
        kept, fate = parcel.kept, parcel.fate
        head = kept.head
        header = Produce(
            head.topic,
            head.queue,
            head.count,
            head.keys,
            self._spool.producer_id,
            0,
            self._spool.first_sequence(kept.offset),
            Durability(head.durability),
            ProduceFlag.NAMED | (ProduceFlag.DUES if head.is_delayed else 0),
        )
        parcel.broker, parcel.link, parcel.pending = str(link.address), link, None
        parcel.sent_at = self._clock.monotonic()
        self._on_topic(head.topic, link, None)
        try:
            parcel.pending = link.submit(
                Command.PRODUCE,
                header,
                kept.body,
                on_answer=lambda answer: self._answered(parcel, link, answer),
                flags=Flag.RESEND if parcel.is_resent else 0,
                attended=fate is None or fate.is_attended or fate.is_done,
            )
        except NotConnected:
            self._free(parcel.place, is_next=self._lines.current() is not link)
            return self._lines.current() is not link
        except Busy as error:
            self._lines.call_later(error.retry_after or PAUSE_MIN, lambda: self._free(parcel.place))
        except DMQError as error:
            self._refused(parcel, link, error)
        return True

    def _free(self, place: Place, *, is_next: bool = True) -> None:
        """The first of a place is not under way any more."""
        with self._changed:
            place.is_busy = False
            if is_next:
                self._line_up(place)
                self._wake()

    # --- back -------------------------------------------------------------------------------------------------------

    def _answered(self, parcel: Parcel, link: Link, answer: Frame | DMQError) -> None:
        if isinstance(answer, DMQError):
            parcel.is_resent = True
            self._free(parcel.place)
            return
        try:
            reply: ProduceReply = decode_response(answer)
        except DMQError as error:
            self._refused(parcel, link, error)
            return
        self._leave(parcel)
        if parcel.fate is not None:
            self._finish(parcel.fate, reply, None)
        self.pump()

    def _leave(self, parcel: Parcel) -> None:
        """Nothing more is to be done for a batch."""
        place, offset = parcel.place, parcel.kept.offset
        with self._changed:
            first = place.parcels.popleft()
            assert first is parcel
            self._bytes -= parcel.kept.size
            place.is_busy = False
            place.unproven += 1
            self._unproven[offset] = place
            self._line_up(place)
            if self._loaded < self.announced:
                self._wake()
        self._spool.settle(offset)

    def _refused(self, parcel: Parcel, link: Link, error: DMQError) -> None:
        head, fate = parcel.kept.head, parcel.fate
        self._on_topic(head.topic, link, error)
        if isinstance(error, ServerError):
            parcel.is_resent = True  # it may be stored after all
        if not error.retriable:
            if fate is not None:
                self._finish(fate, None, error)
            # Who has been told that the spool has it must not be told otherwise.
            if isinstance(error, DeadLettered) or (fate is not None and fate.error is error):
                self._leave(parcel)
                self.pump()
                return
            log.error(
                "a spooled batch is refused, and tried again",
                extra={"topic": head.topic, "queue": head.queue, "count": head.count, "error": str(error)},
            )
        pause = error.retry_after
        if pause is None:
            pause = min(PAUSE_MIN * 2**parcel.refusals, PAUSE_MAX if error.retriable else PAUSE_REFUSED)
            parcel.refusals = min(parcel.refusals + 1, 30)
        self._lines.call_later(pause, lambda: self._free(parcel.place))

    def _proven(self, offsets: Sequence[int]) -> None:
        with self._changed:
            for offset in offsets:
                place = self._unproven.pop(offset, None)
                if place is not None:
                    place.unproven -= 1
                    self._line_up(place)

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """A link is in use: everything may go."""
        with self._changed:
            for place in self._places.values():
                self._line_up(place)
            self._wake()

    def let_go(self) -> None:
        """There is no link: whoever waits is told that the spool has it."""
        with self._changed:
            fates = [parcel.fate for place in self._places.values() for parcel in place.parcels]
        for fate in fates:
            if fate is not None and not fate.is_done:
                self._finish(fate, Spooled(fate.queue), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._has_work:
                    self._changed.wait(SCAN_SECONDS)
                if self._is_closing:
                    return
                self._has_work = False
                wants_flush, self._wants_flush = self._wants_flush, False
            try:
                self._scan()
                if wants_flush:
                    self._spool.flush()
                self._load()
                self.pump()
            except StoreClosed:
                return
            except StorageError as error:
                log.error("the spool cannot be read or written", extra={"error": str(error)})

    def _load(self) -> None:
        """Read on from the disk, as far as there is room."""
        while self._lines.current() is not None:
            with self._changed:
                start, stop, room = self._loaded, self.announced, self._window_bytes - self._bytes
                if start >= stop or (self._bytes and room <= 0):
                    return
            found, after = self._spool.read(start, stop, max(1, min(room, 1 << 20)))
            with self._changed:
                for kept in found:
                    self._enter(kept, None, kept.offset < self._spool.next)
                self._loaded = after
            self.pump()

    def _scan(self) -> None:
        """Once a second: what stays unanswered goes again, and what was missed is made up for."""
        now = self._clock.monotonic()
        if now - self._scanned_at < SCAN_SECONDS:
            return
        self._scanned_at = now
        self._spool.settle_again()
        with self._changed:
            heads = [place.parcels[0] for place in self._places.values() if place.parcels]
            for parcel in heads:
                self._line_up(parcel.place)
        for parcel in heads:
            if not parcel.place.is_busy or parcel.pending is None or now - parcel.sent_at < self._resend_seconds:
                continue
            if parcel.link is None or not parcel.link.forget(parcel.pending):  # type: ignore[arg-type]
                continue  # its answer is being handed over
            parcel.is_resent = True
            self._free(parcel.place)
            if parcel.fate is not None and parcel.fate.is_attended:
                self._finish(parcel.fate, Spooled(parcel.fate.queue), None)

    def close(self) -> None:
        """Send no more, and tell those who wait that the spool has it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.let_go()
