"""The scrubber: looks through a broker's journal again and again while it works, so that bits that turned in what
nobody reads are found while another member still has them. A broker by itself has one as well.

What always holds: one piece at a time, read and checked outside of the event loop, which only plans it; between two
pieces it rests for nine times as long as the first one took, so that it gives way to whatever else keeps disk and
processor busy, and never reads more than the settings allow; what it finds is noted as a read would note it, once it
was found twice. It writes nothing but its place, at most once a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dmq.clock import Clock
from dmq.errors import DMQError, StorageError
from dmq.event_log import EventLog
from dmq.settings import StoreSettings
from dmq.shard.place import OnDisk
from dmq.storage.files import Files
from dmq.storage.upkeep.damage import Damage
from dmq.storage.upkeep.scrub import Range, Scrub, ScrubPlace, ScrubSchedule, Seen

__all__ = ["ScrubWays", "ScrubbedJournal", "Scrubber"]

log = EventLog(__name__)

_START_SECONDS: Final = 10.0  # a start has other things to do
_START_SHARE: Final = 0.01  # of a round, if that is less
_LOOK_SECONDS: Final = 600.0  # the journal may have grown, and clocks been set
_AWAY_SECONDS: Final = 5.0
_FAILED_SECONDS: Final = 60.0
_KEEP_SECONDS: Final = 60.0


class ScrubbedJournal(NamedTuple):
    """The journal as it is at the moment, on the event loop's thread.

    Attributes:
        end: everything below is durable, and part of the journal for good.
    """

    damage: Damage
    start: int
    end: int


class ScrubWays(NamedTuple):
    """What a scrubber works with.

    Attributes:
        on_disk: where pieces are read.
    """

    files: Files
    settings: StoreSettings
    clock: Clock
    on_disk: OnDisk


class Scrubber:
    """That of one broker or member.

    Parameters:
        journal: asked before each piece; None while there is none to be looked at.
        remedy: what becomes of damage, for the log.
        on_found: called when some was added to what is known, and once a round while any is left; again in a moment if
            it returns False.

    Attributes:
        rounds, size, found: whole rounds, bytes that were looked at, and damaged ranges that nobody knew of before,
            since the start.
    """

    def __init__(
        self,
        ways: ScrubWays,
        journal: Callable[[], ScrubbedJournal | None],
        *,
        remedy: str,
        on_found: Callable[[], bool] = lambda: True,
    ) -> None:
        self._files, settings, self._clock, self._on_disk = ways
        self._journal = journal
        self._remedy = remedy
        self._on_found = on_found
        self._round_seconds = settings.scrub_hours * 3600
        self._schedule = ScrubSchedule(self._round_seconds, settings.scrub_bytes_per_second)
        self._place: ScrubPlace | None = None
        self._scrub: Scrub | None = None
        self._damage: Damage | None = None  # of the journal that it looks through
        self._kept_at = self._clock.monotonic()
        self._is_kept = True
        self._is_told = True  # the owner mends what was found
        self.rounds = self.size = self.found = 0

    async def run(self) -> None:
        """Go round and round, for ever; only wait if the settings say so."""
        if not self._round_seconds:
            await asyncio.Event().wait()
        seconds = min(_START_SECONDS, self._round_seconds * _START_SHARE)
        while True:
            await asyncio.sleep(seconds)
            try:
                seconds = await self.step()
            except Exception as error:  # it is not a reason to stop serving
                log.error("the scrub cannot go on", once_for=(), error=error, exc_info=_unexpected(error))
                seconds = _FAILED_SECONDS

    async def step(self) -> float:
        """Do what is due; returns how many seconds later something may be due again.

        Raises:
            DMQError: the journal cannot be looked at.
        """
        wait = await self._step()
        self._is_told = self._is_told or self._on_found()
        return wait if self._is_told else min(wait, _AWAY_SECONDS)

    async def _step(self) -> float:
        now_ms = self._clock.now_ms()
        if self._place is None:
            self._place = await self._on_disk(lambda: ScrubPlace.read(self._files))
        place, journal = self._place, self._journal()
        if journal is None or journal.end <= journal.start:
            self._scrub = None
            return _AWAY_SECONDS
        if self._scrub is None or journal.damage is not self._damage:  # it may be the journal of another role
            self._scrub, self._damage = journal.damage.scrub(place.at), journal.damage
            self._schedule.resume(place, journal.start, journal.end, now_ms)
        elif place.began_ms > now_ms:
            self._schedule.resume(place, journal.start, journal.end, now_ms)
        wait = self._schedule.wait_seconds(place, journal.start, journal.end, now_ms)
        if wait > 0:
            await self._keep()
            return min(wait, _LOOK_SECONDS)
        began = self._clock.monotonic()
        scrub = self._scrub
        size = await self._look(scrub, journal)
        if self._scrub is scrub and scrub.at >= journal.end and self._schedule.is_over(place, now_ms):
            self._end_round(place, now_ms)
        await self._keep()
        rest = self._schedule.rest_seconds(size, self._clock.monotonic() - began)
        wait = self._schedule.wait_seconds(place, journal.start, journal.end, self._clock.now_ms())
        return max(rest, min(wait, _LOOK_SECONDS))

    async def _look(self, scrub: Scrub, journal: ScrubbedJournal) -> int:
        """Look at the next piece; returns its size."""
        assert self._place is not None
        size, is_second = 0, False
        while (piece := scrub.next(journal.end)) is not None:
            seen = await self._on_disk(piece.run)
            size += seen.size
            now = self._journal()
            if now is None or now.damage is not journal.damage:
                self._scrub = None  # it went into other hands meanwhile
                break
            if seen.first_damaged not in (None, piece.open_from) and not is_second:
                is_second = True  # somebody may have written there, or retention taken it
                continue
            if damaged := scrub.saw(piece, seen):
                self._note(now.damage, damaged, seen)
            break
        self.size += size
        self._place.at = scrub.place
        self._is_kept = False
        return size

    def _note(self, damage: Damage, damaged: Sequence[Range], seen: Seen) -> None:
        before = damage.ranges
        topics = ",".join(damage.topics(seen.topic_ids)) or None
        new = [(a, b) for a, b in damaged if not any(first <= a and b <= last for first, last in before)]
        for start, end in damaged:
            segment = self._files.describe(damage.segment_of(start))
            log.error(
                f"the scrub found damage: {self._remedy}",
                once_for=segment,
                segment=segment,
                start=start,
                end=end,
                topics=topics,
            )
        for start, end in new:
            damage.add(start, end)
        self.found += len(new)
        self._is_told = self._is_told and not new

    def _end_round(self, place: ScrubPlace, now_ms: int) -> None:
        self.rounds += 1
        self._scrub = None
        place.at = 0
        place.began_ms = place.ended_ms = now_ms
        log.info("scrub round ended", rounds=self.rounds, found=self.found)
        journal = self._journal()
        self._is_told = journal is None or not journal.damage.ranges

    async def _keep(self) -> None:
        """Keep the place, if that was not done a moment ago."""
        now, place = self._clock.monotonic(), self._place
        if self._is_kept or place is None or now - self._kept_at < min(_KEEP_SECONDS, self._round_seconds):
            return
        self._kept_at, self._is_kept = now, True
        copy = ScrubPlace(at=place.at, began_ms=place.began_ms, ended_ms=place.ended_ms)
        try:
            await self._on_disk(lambda: copy.write(self._files))
        except (StorageError, FileNotFoundError) as error:
            log.debug("the place of the scrub was not kept", error=error)

    def figures(self) -> dict[str, float]:
        """See `dmq.broker.diagnostics.metrics`."""
        place, journal, progress = self._place, self._journal(), 0.0
        if place is not None and journal is not None:
            progress = self._schedule.progress(place, journal.start, journal.end)
        return {
            "scrub_rounds": self.rounds,
            "scrub_bytes": self.size,
            "scrub_found": self.found,
            "scrub_progress": progress,
            "scrub_ended": 0.0 if place is None else place.ended_ms / 1000,
        }


def _unexpected(error: Exception) -> Exception | None:
    """What only a programmer can mend."""
    return None if isinstance(error, DMQError) else error
