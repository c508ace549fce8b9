"""The broker's dead letters: drained into SQL, listed, resent, deleted, and taken straight from producers (D-16).

What always holds: nothing here makes the loop wait; a batch that a producer brings goes into the database or is
refused, within a bound on bytes and on how many come in a second.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.dead_letters.letter_thread import LetterThread
from dmq.broker.dead_letters.resend import Resend
from dmq.broker.dead_letters.sql_drain import SqlDrain, put_records
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Busy, DatabaseDown, DeadLettered, DMQError, InvalidRequest
from dmq.event_log import EventLog
from dmq.model import DLQ_PREFIX, DRAIN_GROUP, MessageId, dead_letter_topic_name
from dmq.records import DeadReason, RecordView, moved_record
from dmq.records.attributes import Attributes
from dmq.records.block import plain_records
from dmq.settings import BrokerSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import TopicDropped
from dmq.storage.state.positions import Pair
from dmq.storage.state.state import Topic
from dmq.storage.store import MessageStore
from dmq.token_bucket import TokenBucket

if TYPE_CHECKING:
    from dmq.deadletters.letter import LetterFilter
    from dmq.deadletters.store import DeadLetterStore, Page

__all__ = ["DeadLetters", "drop_spent_topics"]

log = EventLog(__name__)


_WAITING_BYTES_MAX: Final = 32 << 20
_DOWN_SECONDS: Final = 1.0
_REASONS: Final = [reason.name for reason in DeadReason]


class _Refused(NamedTuple):
    """Messages that are not stored."""

    data: bytes
    lengths: list[int]
    first_id: MessageId
    reason: DeadReason
    error: str


def drop_spent_topics(store: MessageStore) -> None:
    """Take away dead-letter topics of groups that are no more, and of apps, whose letters are all past the retention.

    There is one for every group and every app that ever had a dead letter, and they would stay for good. One that a
    group consumes stays. To be called before anything else is written: the next letter makes its topic anew.
    """
    queries = store.queries
    groups = [group for group in queries.groups() if group != DRAIN_GROUP]
    owned = set(map(dead_letter_topic_name, groups))
    consumed = {place[0] for group in groups for place in queries.positions_of(group)}
    spent = []
    for topic in queries.topics():
        if topic.name.startswith(DLQ_PREFIX) and topic.name not in owned and topic.id not in consumed:
            bounds = [queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
            if all(first == following for first, following in bounds):
                spent.append(topic)
    if not spent:
        return
    try:
        store.append([TopicDropped(topic.id) for topic in spent])
        store.flush()
    except DMQError as error:
        log.warning("empty dead-letter topics stay until the next start", count=len(spent), error=error)
    else:
        log.info("empty dead-letter topics dropped", count=len(spent), topics=[topic.name for topic in spent[:8]])


class DeadLetters:
    """The dead letters of one broker.

    Parameters:
        make: makes the database's store, in the thread that uses it.
    """

    def __init__(
        self,
        journal: Journal,
        runtime: Runtime,
        catalog: Catalog,
        settings: BrokerSettings,
        make: Callable[[], DeadLetterStore],
    ) -> None:
        self._queries = journal.queries
        self._runtime = runtime
        self._name = settings.name
        self._thread = LetterThread(make, self._is_back)
        per_second, now = settings.dead_letters_per_second, runtime.clock.wall.monotonic()
        self._intake = TokenBucket(per_second, now)
        self.drain = SqlDrain(journal, runtime, self._thread, settings.name)
        bucket = TokenBucket(per_second, now)
        self.resend = Resend(journal, runtime, catalog, self._thread, bucket=bucket, name=settings.name)
        self._waiting_bytes = 0
        self._down_at = 0.0
        self._is_closing = False
        self.taken = 0
        self._looked_at: object = None
        self._found: list[Topic] = []
        self.turned_away = 0

    def start(self, *, at_once: bool) -> None:
        """Begin to drain.

        Parameters:
            at_once: ask the database now, so that the log says at once if it is not there.
        """
        self.drain.start()
        if at_once:
            self._runtime.tasks.run(self._thread.call(lambda _: None), lambda _: None)

    def _is_back(self) -> None:
        if not self._is_closing:
            self._runtime.tasks.run(self.resend.recover(), lambda error: log.error("claims wait", error=error))

    async def close(self) -> None:
        """Stop draining, finish what was taken, let go of the database."""
        self._is_closing = True
        await self.drain.stop()
        await self._thread.close()

    def drop(self) -> None:
        """Stop at once; what is under way in the database ends by itself, and touches nothing here."""
        self._is_closing = True
        self.drain.drop()
        self._thread.drop()

    async def page(self, wanted: LetterFilter, after: int, limit: int, with_bodies: bool) -> Page:
        """Some letters, by number.

        Raises:
            InvalidRequest: there is no such reason or state.
            DatabaseDown: the database cannot be used.
        """
        from dmq.deadletters.letter import LetterState

        if wanted.reason and wanted.reason not in _REASONS:
            raise InvalidRequest(f"{wanted.reason!r} is no reason of a dead letter: there are {', '.join(_REASONS)}")
        if wanted.state and wanted.state not in tuple(LetterState):
            raise InvalidRequest(f"{wanted.state!r} is no state of a dead letter: there are {', '.join(LetterState)}")
        return await self._thread.call(lambda store: store.page(wanted, after, limit, with_bodies=with_bodies))

    # --- from producers ---------------------------------------------------------------------------------------------

    def instead(self, batch: Batch, reason: DeadReason, error: DMQError, refuse: Callable[[DMQError], None]) -> None:
        """Keep a producer's batch that is refused among the dead letters, and tell the producer what became of it.

        It goes into the database, without the journal. A producer without an id gets one.

        Parameters:
            batch: as it came, verified.
            reason: RATE_LIMITED or STORE_FAILED.
            error: what the producer is told if this fails too.
            refuse: called once, on the loop, with `DeadLettered` or with `error`.
        """
        now = self._runtime.clock.wall.monotonic()
        size, count = len(batch.data), len(batch.lengths)
        if self._waiting_bytes + size > _WAITING_BYTES_MAX or not self._intake.take(count, now):
            self.turned_away += count
            too_many = Busy("dead letters come faster than broker.dead_letters_per_second allows")
            _turn_away(reason, too_many)
            refuse(error)
            return
        if self._thread.error is not None and now - self._down_at < _DOWN_SECONDS:
            self.turned_away += count
            _turn_away(reason, self._thread.error)
            refuse(error)
            return
        self._waiting_bytes += size
        # Copied: the frame's buffer is used again.
        refused = _Refused(
            bytes(batch.data),
            [*map(int, batch.lengths)],
            MessageId(batch.producer_id, batch.first_sequence),
            reason,
            error=error.message,
        )

        async def keep() -> None:
            await self._keep(refused)
            self._waiting_bytes -= size
            self.taken += count
            refuse(
                DeadLettered(
                    f"{count} messages are kept among the dead letters ({reason.name}: {error.message}): do not send "
                    "them again, resend them from there",
                    reason=reason.name,
                    topic=batch.topic,
                    count=count,
                )
            )

        def failed(failure: BaseException) -> None:
            self._waiting_bytes -= size
            self._down_at = self._runtime.clock.wall.monotonic()
            _turn_away(reason, failure if isinstance(failure, DMQError) else DatabaseDown(str(failure)))
            refuse(error)

        self._runtime.tasks.run(keep(), failed)

    async def _keep(self, refused: _Refused) -> None:
        at_ms = self._runtime.clock.wall.now_ms()
        first_id = refused.first_id
        producer = first_id.producer_id or secrets.randbits(63) | 1 << 62

        def put(store: DeadLetterStore) -> dict[int, str]:
            records = []
            for index, record in enumerate(plain_records(refused.data, refused.lengths)):
                records.append(
                    moved_record(
                        RecordView(record),
                        DLQ_PREFIX,
                        sent_at_ms=at_ms,
                        message_id=MessageId(producer, first_id.sequence + index),
                        says=Attributes(reason=refused.error, reason_code=refused.reason, first_error=refused.error),
                    )
                )
            return put_records(store, records, self._name)

        problems = await self._thread.call(put)
        if problems:
            raise DatabaseDown(f"the database of dead letters does not take it: {next(iter(problems.values()))}")

    # --- figures ----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Counters and gauges, by name."""
        return {
            "dead_letters_drained": self.drain.drained,
            "dead_letters_taken": self.taken,
            "dead_letters_turned_away": self.turned_away,
            "dead_letters_resent": self.resend.resent,
            "dead_letters_deleted": self.resend.deleted,
            "dead_letters_failures": self._thread.failures,
            "dead_letters_waiting": self._waiting(),
            "dead_letters_refused": self.drain.refused,
            "dead_letters_database_down": float(self._thread.is_down),
        }

    def _waiting(self) -> int:
        """How many of the journal's are not in the database yet."""
        queries = self._queries
        lags, total = queries.lags, 0
        for topic in self._letter_topics():
            pair = Pair(topic.id, DRAIN_GROUP)
            if pair in lags:
                total += lags.of(pair)
            else:
                bounds = [queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
                total += sum(following - first for first, following in bounds)
        return total

    def _letter_topics(self) -> list[Topic]:
        """The topics of dead letters, looked for anew when topics came or went."""
        there = self._queries.topics_version
        if self._looked_at != there:
            found = self._queries.derived.state.topics.items()
            self._found = [topic for name, topic in found if name.startswith(DLQ_PREFIX)]
            self._looked_at = there
        return self._found


def _turn_away(reason: DeadReason, failure: DMQError) -> None:
    log.warning("messages cannot be dead letters", once_for=reason.name, reason=reason.name, error=failure.message)
