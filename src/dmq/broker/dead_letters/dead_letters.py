"""The broker's dead letters: drained into SQL, listed, resent, deleted, and taken straight from producers (D-16).

What always holds: nothing here makes the loop wait; what producers bring goes into the database or is refused, within
a bound on bytes and on how many come in a second.

The thread that talks to the database of dead letters, behind an interface of coroutines.

SQLAlchemy is heavy, so it is imported in that thread, and when it is first needed: a broker without dead letters never
loads it.

What always holds: one call at a time reaches the database; the loop never waits for it; no more than `waiting_max`
calls wait, and beyond that they are refused with `Busy`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from dmq.broker.dead_letters.resend import Resends
from dmq.broker.dead_letters.sql_drain import Drainer, put_records
from dmq.errors import BrokerStopping, Busy, DatabaseDown, DeadLettered, DMQError
from dmq.model import DLQ_PREFIX, DRAIN_GROUP, MessageId
from dmq.records import DeadReason, RecordView, moved_record
from dmq.storage.journal.unit_draft import Batch
from dmq.token_bucket import TokenBucket

if TYPE_CHECKING:
    from dmq.broker.broker import Broker
    from dmq.deadletters.letter import LetterFilter
    from dmq.deadletters.store import DeadLetterStore, Page

__all__ = ["DeadLetters", "LetterThread", "open_letters"]

log = logging.getLogger(__name__)


_WAITING_MAX: Final = 256
_AGAIN_MS: Final = 100

T = TypeVar("T")


def open_letters(url: str) -> DeadLetterStore:
    """The store at a URL; not connected yet."""
    from dmq.deadletters.store import DeadLetterStore

    return DeadLetterStore(url)


class LetterThread:
    """See the module.

    Parameters:
        make: makes the store; called in the thread, and again if it failed.
        on_back: called on the loop when the database answers again, or for the first time.
    """

    def __init__(
        self,
        make: Callable[[], DeadLetterStore],
        on_back: Callable[[], None] = lambda: None,
        *,
        waiting_max: int = _WAITING_MAX,
    ) -> None:
        self._make = make
        self._on_back = on_back
        self._waiting_max = waiting_max
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="dmq-sql")
        self._store: DeadLetterStore | None = None
        self._was_up = False
        self._is_closed = False
        self.waiting = 0
        self.error: DMQError | None = None  # why it is down
        self.failures = 0

    @property
    def is_down(self) -> bool:
        return self.error is not None

    async def call(self, work: Callable[[DeadLetterStore], T]) -> T:
        """Do something with the store.

        Raises:
            DatabaseDown: the database cannot be used; nothing was done.
            Busy: too many calls wait.
        """
        if self._is_closed:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")
        if self.waiting >= self._waiting_max:
            raise Busy(f"{self.waiting} calls wait for the database of dead letters", retry_after_ms=_AGAIN_MS)
        self.waiting += 1
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        except DMQError as error:
            if isinstance(error, DatabaseDown) or self._store is None:
                self._went_down(error)
            raise
        finally:
            self.waiting -= 1
        self._came_back()
        return result

    def _run(self, work: Callable[[DeadLetterStore], T]) -> T:
        if self._store is None:
            store = self._make()
            store.open()
            self._store = store
        return work(self._store)

    def _went_down(self, error: DMQError) -> None:
        self.failures += 1
        if self.error is None:
            log.error("dead letters wait in the journal", extra={"error": error.message})
        self.error = error

    def _came_back(self) -> None:
        if self.error is not None:
            log.warning("the database of dead letters is back", extra={"failures": self.failures})
        if self.error is not None or not self._was_up:
            self.error, self._was_up = None, True
            self._on_back()

    async def close(self) -> None:
        """End what is under way, and let go of the database."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()

        def end() -> None:
            if self._store is not None:
                self._store.close()

        await loop.run_in_executor(self._threads, end)
        self._threads.shutdown(wait=False)


_WAITING_BYTES_MAX: Final = 32 << 20
_DOWN_SECONDS: Final = 1.0


class DeadLetters:
    """See the module.

    Parameters:
        make: makes the store, in the thread that uses it.
        per_second: how many are taken from producers in a second, and as many resent.
    """

    def __init__(self, broker: Broker, make: Callable[[], DeadLetterStore], per_second: float) -> None:
        self._broker = broker
        self._thread = LetterThread(make, self._is_back)
        now = broker.clock.monotonic()
        self._intake = TokenBucket(per_second, now)
        self.drainer = Drainer(broker, self._thread)
        self.resends = Resends(broker, self._thread, TokenBucket(per_second, now))
        self._waiting_bytes = 0
        self._down_at = 0.0
        self._is_closing = False
        self.taken = 0
        self.turned_away = 0

    def start(self, *, at_once: bool) -> None:
        """Begin to drain.

        Parameters:
            at_once: ask the database now, so that the log says at once if it is not there.
        """
        self.drainer.start()
        if at_once:
            self._broker.run(self._thread.call(lambda _: None), lambda _: None)

    def _is_back(self) -> None:
        if not self._is_closing:
            self._broker.run(
                self.resends.recover(), lambda error: log.error("claims wait", extra={"error": str(error)})
            )

    async def close(self) -> None:
        """Stop draining, finish what was taken, let go of the database."""
        self._is_closing = True
        await self.drainer.stop()
        await self._thread.close()

    async def page(self, wanted: LetterFilter, after: int, limit: int, with_bodies: bool) -> Page:
        """Some letters, by number.

        Raises:
            DatabaseDown: the database cannot be used.
        """
        return await self._thread.call(lambda store: store.page(wanted, after, limit, with_bodies=with_bodies))

    # --- from producers ---------------------------------------------------------------------------------------------

    def instead(self, batch: Batch, reason: DeadReason, error: DMQError, refuse: Callable[[DMQError], None]) -> None:
        """Keep a producer's batch that is refused among the dead letters, and tell the producer what became of it.

        Parameters:
            batch: as it came, verified.
            reason: RATE_LIMITED or STORE_FAILED.
            error: what the producer is told if this fails too.
            refuse: called once, with `DeadLettered` or with `error`.
        """

        def done(failure: DMQError | None) -> None:
            if failure is not None:
                log.warning("messages cannot be dead letters", extra={"reason": reason.name, "error": failure.message})
                refuse(error)
                return
            count = len(batch.lengths)
            refuse(
                DeadLettered(
                    f"{count} messages are kept among the dead letters ({reason.name}: {error.message}): do not send "
                    "them again, resend them from there",
                    reason=reason.name,
                    topic=batch.topic,
                    count=count,
                )
            )

        first_id = MessageId(batch.producer_id, batch.first_sequence)
        self.put_now(batch.data, [*map(int, batch.lengths)], first_id, reason, error.message, done)

    def put_now(
        self,
        data: bytes | bytearray | memoryview,
        lengths: Sequence[int],
        first_id: MessageId,
        reason: DeadReason,
        error: str,
        done: Callable[[DMQError | None], None],
    ) -> None:
        """Keep a batch of messages that is not stored: in the database, without the journal.

        Parameters:
            data: the records as the client sent them, verified.
            first_id: of the first one; the others follow. A producer without an id gets one.
            reason: RATE_LIMITED or STORE_FAILED.
            error: why, in words.
            done: called once, on the loop, with None when all are in the database: the producer is told DeadLettered.
                With an error they are not, and the producer is told what it would have been told without this.
        """
        now = self._broker.clock.monotonic()
        size = len(data)
        if self._waiting_bytes + size > _WAITING_BYTES_MAX or not self._intake.take(len(lengths), now):
            self.turned_away += len(lengths)
            done(Busy("dead letters come faster than broker.dead_letters_per_second allows"))
            return
        if self._thread.error is not None and now - self._down_at < _DOWN_SECONDS:
            self.turned_away += len(lengths)
            done(self._thread.error)
            return
        self._waiting_bytes += size
        copied = bytes(data)  # the frame's buffer is used again
        self._broker.run(
            self._put_now(copied, [*map(int, lengths)], first_id, reason, error, done),
            lambda failure: self._put_failed(failure, size, done),
        )

    async def _put_now(
        self,
        data: bytes,
        lengths: list[int],
        first_id: MessageId,
        reason: DeadReason,
        error: str,
        done: Callable[[DMQError | None], None],
    ) -> None:
        name, at_ms = self._broker.settings.name, self._broker.clock.now_ms()
        producer = first_id.producer_id or secrets.randbits(63) | 1 << 62

        def put(store: DeadLetterStore) -> dict[int, str]:
            records, at = [], 0
            for index, length in enumerate(lengths):
                message_id = MessageId(producer, first_id.sequence + index)
                record = RecordView(data, at, at + length)
                at += length
                records.append(
                    moved_record(
                        record,
                        DLQ_PREFIX,
                        sent_at_ms=at_ms,
                        message_id=message_id,
                        reason=error,
                        reason_code=reason,
                        first_error=error,
                    )
                )
            return put_records(store, records, name)

        refused = await self._thread.call(put)
        if refused:
            raise DatabaseDown(f"the database of dead letters does not take it: {next(iter(refused.values()))}")
        self._waiting_bytes -= len(data)
        self.taken += len(lengths)
        done(None)

    def _put_failed(self, failure: BaseException, size: int, done: Callable[[DMQError | None], None]) -> None:
        self._waiting_bytes -= size
        self._down_at = self._broker.clock.monotonic()
        done(failure if isinstance(failure, DMQError) else DatabaseDown(str(failure)))

    # --- figures ----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Counters and gauges, by name."""
        return {
            "dead_letters_drained": self.drainer.drained,
            "dead_letters_taken": self.taken,
            "dead_letters_turned_away": self.turned_away,
            "dead_letters_resent": self.resends.resent,
            "dead_letters_deleted": self.resends.deleted,
            "dead_letters_failures": self._thread.failures,
            "dead_letters_waiting": self._waiting(),
            "dead_letters_refused": self.drainer.refused,
            "dead_letters_database_down": float(self._thread.is_down),
        }

    def _waiting(self) -> int:
        """How many of the journal's are not in the database yet."""
        queries = self._broker.store.queries
        total = 0
        for topic in queries.topics():
            if not topic.name.startswith(DLQ_PREFIX):
                continue
            for queue in range(topic.config.queues):
                first, following = queries.bounds(topic.name, queue)
                position = queries.position(DRAIN_GROUP, topic.name, queue)
                floor = first if position is None else max(first, position.floor)
                settled = (
                    0
                    if position is None
                    else sum(end - max(start, first) for start, end in position.ranges if end > first)
                )
                total += max(0, following - floor - settled)
        return total
