"""The drain: from the dead-letter topics of the journal into SQL (D-16).

It reads `%DLQ%` topics as the group `%DRAIN%`, puts batches into the database, and settles what was put. Retention
carries along what that group has not settled.

What always holds: a letter is settled after it was put, and putting it again changes nothing, so none is lost and none
is doubled wherever the broker dies; a database that is down delays this and blocks nothing else; a letter that the
database refuses for good stays in the journal, unsettled and counted, and is offered again every hour and after a
restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.broker.dead_letters.letter_thread import LetterThread
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Damaged, DMQError, OffsetGone, RecordCorrupt, StorageError, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import DLQ_PREFIX, DRAIN_GROUP
from dmq.offset_runs import offset_runs
from dmq.storage.state.events import Event, Outcome, Settled

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore
    from dmq.storage.state.state import Topic

__all__ = ["SqlDrain"]

log = EventLog(__name__)

_BATCH: Final = 256
_BATCH_BYTES: Final = 2 << 20
_PAUSE_SECONDS: Final = 0.25
_PAUSE_MAX_SECONDS: Final = 5.0
_REFUSED_AGAIN_SECONDS: Final = 3600.0


class _Read(NamedTuple):
    """Records of one queue on their way into the database."""

    topic: Topic
    queue: int
    offsets: list[int]
    records: list[bytes]
    following: int  # where to read on


class SqlDrain:
    """The drain of one broker.

    Parameters:
        name: the broker's.
    """

    def __init__(self, journal: Journal, runtime: Runtime, thread: LetterThread, name: str) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._clock = runtime.clock.wall
        self._name = name
        self._thread = thread
        self._woken = asyncio.Event()
        self._waiting: dict[str, None] = {}  # topics that may have something, in turn
        self._next: dict[tuple[int, int], int] = {}  # by topic id and queue: below this everything was offered
        self._refused: dict[tuple[int, int], set[int]] = {}
        self._task: asyncio.Task[None] | None = None
        self.drained = 0

    @property
    def refused(self) -> int:
        """How many letters the database does not take."""
        return sum(map(len, self._refused.values()))

    def start(self) -> None:
        """Begin with what is there."""
        self._look_again()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def drop(self) -> None:
        """Stop without waiting."""
        if self._task is not None:
            self._task.cancel()

    def wake(self, topic: str) -> None:
        """A dead-letter topic has something new."""
        self._waiting[topic] = None
        self._woken.set()

    def _look_again(self) -> None:
        self._next.clear()
        self._refused.clear()
        for topic in self._queries.topics():
            if topic.name.startswith(DLQ_PREFIX):
                self.wake(topic.name)

    async def _run(self) -> None:
        pause = _PAUSE_SECONDS
        clock = self._clock
        looked_at = clock.monotonic()
        while True:
            try:
                if not await self._step():
                    await self._sleep(None if not self.refused else _REFUSED_AGAIN_SECONDS)
                pause = _PAUSE_SECONDS
            except DMQError as error:
                if isinstance(error, StorageError):
                    log.error("dead letters cannot be read", once_for=error.message, error=error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MAX_SECONDS)
            except Exception:  # a defect must not stop the draining for good
                log.exception("draining dead letters failed", once_for=())
                await asyncio.sleep(_PAUSE_MAX_SECONDS)
            if self.refused and clock.monotonic() - looked_at >= _REFUSED_AGAIN_SECONDS:
                looked_at = clock.monotonic()
                self._look_again()

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _step(self) -> bool:
        """Put one batch into the database; False if there is nothing."""
        self._woken.clear()
        while self._waiting:
            name = next(iter(self._waiting))
            del self._waiting[name]
            try:
                read = await self._read(name)
                if read is not None:
                    await self._put(read)
            except DMQError:
                self._waiting[name] = None
                raise
            if read is not None:
                self._waiting[name] = None  # there may be more
                return True
        return False

    async def _read(self, name: str) -> _Read | None:
        queries = self._queries
        try:
            topic = queries.topic(name)
        except UnknownTopic:
            return None
        try:
            for queue in range(topic.config.queues):
                at, following = self._place(topic, queue)
                if at >= following:
                    continue
                return await self._records(topic, queue, at)
        except UnknownTopic:  # deleted meanwhile
            return None
        return None

    def _place(self, topic: Topic, queue: int) -> tuple[int, int]:
        """The first offset that was not offered yet, and the one after the last there is."""
        queries = self._queries
        first, following = queries.bounds(topic.name, queue)
        position = queries.position(DRAIN_GROUP, topic.name, queue)
        at = max(first, self._next.get((topic.id, queue), 0))
        if position is not None:
            at = max(at, position.floor)
            for start, end in position.ranges:
                if start <= at < end:
                    at = end
        return at, following

    async def _records(self, topic: Topic, queue: int, at: int) -> _Read | None:
        queries = self._queries
        try:
            found = await self._reads.ask(lambda: queries.read(topic.name, queue, at, _BATCH, max_bytes=_BATCH_BYTES))
        except (OffsetGone, Damaged) as error:
            is_gone = isinstance(error, OffsetGone)
            resume = max(at + 1, int(error.detail["first"] if is_gone else error.detail["next"]))
            if not is_gone:
                log.error("dead letters are damaged", once_for=topic.name, topic=topic.name, error=error.message)
                self._refused.setdefault((topic.id, queue), set()).update(range(at, resume))
            self._next[topic.id, queue] = resume
            return _Read(topic, queue, [], [], following=resume)
        position = queries.position(DRAIN_GROUP, topic.name, queue)
        offsets, records = [], []
        for offset, record in zip(found.offsets.tolist(), found.records(), strict=True):
            if position is None or not position.is_settled(offset):
                offsets.append(offset)
                records.append(bytes(record.buffer[record.start : record.start + record.length]))
        return _Read(topic, queue, offsets, records, following=found.next_offset)

    async def _put(self, read: _Read) -> None:
        refused: dict[int, str] = {}
        if read.records:
            refused = await self._thread.call(lambda store: put_records(store, read.records, self._name))
        key = (read.topic.id, read.queue)
        self._next[key] = max(self._next.get(key, 0), read.following)
        for index, error in refused.items():
            self._refused.setdefault(key, set()).add(read.offsets[index])
            log.error(
                "a dead letter is refused by the database and stays in the journal",
                topic=read.topic.name,
                offset=read.offsets[index],
                error=error,
            )
        kept = [offset for index, offset in enumerate(read.offsets) if index not in refused]
        now_ms = self._clock.now_ms()
        events: list[Event] = [
            Settled(
                DRAIN_GROUP,
                read.topic.id,
                read.queue,
                start,
                count=stop - start,
                outcome=Outcome.ACKED,
                settled_at_ms=now_ms,
            )
            for start, stop in offset_runs(kept)
        ]
        self._writer.write_soon(events)
        self.drained += len(kept)


def put_records(store: DeadLetterStore, records: Sequence[bytes], broker: str) -> dict[int, str]:
    """Put records of dead-letter topics; returns those that were refused for good, by index, and why."""
    from dmq.deadletters.letter import letter_of
    from dmq.records import Attributes, DeadReason, RecordView, stand_in
    from dmq.records.move import STORED_DAMAGED

    refused: dict[int, str] = {}
    letters, indexes = [], []
    for index, raw in enumerate(records):
        try:
            try:
                letter = letter_of(RecordView(raw), broker)
            except RecordCorrupt as error:
                why = Attributes(reason=f"{STORED_DAMAGED}: {error}", reason_code=DeadReason.CORRUPT)
                letter = letter_of(RecordView(stand_in(raw, why)), broker)
            letters.append(letter)
            indexes.append(index)
        except DMQError as error:
            refused[index] = error.message
    return refused | {indexes[problem.place]: problem.error for problem in store.put(letters)}
