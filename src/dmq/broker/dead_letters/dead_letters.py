"""The broker's dead letters: drained into SQL, listed, resent, deleted, and taken straight from producers (D-16).

What always holds: nothing here makes the loop wait; a batch that a producer brings goes into the database or is
refused, within a bound on bytes and on how many come in a second.

A letter is resent under the id it always had: it is sent first and marked then. A letter of a group goes to that group
alone, through its retry topic, with as many attempts as a new message gets. One that never was stored goes to its
topic. Before a letter is sent the broker claims it in the database, so that no other broker sends it too. A claim that
is found later, since the broker died or the database went away in between, is settled by what the journal says: if the
message is there it is marked, else it waits again.

What always holds: a letter that is resent is delivered once for each time somebody asked for it, wherever the broker
dies; each one asked for has an outcome.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.dead_letters.letter_thread import LetterThread
from dmq.broker.dead_letters.sql_drain import SqlDrain, put_records
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import (
    Busy,
    DatabaseDown,
    DeadLettered,
    DMQError,
    InvalidRequest,
    UnknownMessage,
    UnknownTopic,
    Unsupported,
)
from dmq.event_log import EventLog
from dmq.model import (
    DLQ_PREFIX,
    DRAIN_GROUP,
    SYSTEM_PREFIX,
    MessageId,
    TopicConfig,
    dead_letter_topic_name,
    parse_broadcast_name,
    retry_topic_name,
)
from dmq.records import DeadReason, RecordView, business_hash, id_hash, key_hash, moved_record
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
    from dmq.deadletters.letter import DeadLetter, LetterFilter
    from dmq.deadletters.store import DeadLetterStore, Page

__all__ = ["DeadLetters", "Resend", "drop_spent_topics"]

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
            at_once: ask the database now, so that the log says at once if it does not answer.
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
            raise InvalidRequest(f"{wanted.reason!r} is not a reason of a dead letter: there are {', '.join(_REASONS)}")
        if wanted.state and wanted.state not in tuple(LetterState):
            raise InvalidRequest(f"{wanted.state!r} is not a state of dead letters: there are {', '.join(LetterState)}")
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


_TOGETHER: Final = 100


class Resend:
    """The resends of one broker.

    Parameters:
        bucket: how many are sent in a second.
        name: the broker's.
    """

    def __init__(
        self,
        journal: Journal,
        runtime: Runtime,
        catalog: Catalog,
        thread: LetterThread,
        *,
        bucket: TokenBucket,
        name: str,
    ) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._runtime = runtime
        self._catalog = catalog
        self._thread = thread
        self._bucket = bucket
        # What our claims say; with the journal's id, since a name may be used twice.
        self._name = f"{name[:200]}/{journal.queries.journal_id:016x}"
        self._under_way: set[int] = set()
        self.resent = 0
        self.deleted = 0

    async def resend(self, numbers: Sequence[int], who: str) -> dict[int, DMQError | None]:
        """Send letters again.

        Parameters:
            who: the client that asks, for the record.

        Returns:
            For each what went wrong, None if nothing did.

        Raises:
            DatabaseDown: the database cannot be used; those that were sent already are marked when it is back.
        """
        self._runtime.readiness.check_running()
        outcomes: dict[int, DMQError | None] = {}
        for number in numbers:
            if number in self._under_way:
                outcomes[number] = UnknownMessage(f"letter {number} is being resent right now: look again")
        left = mine = [number for number in dict.fromkeys(numbers) if number not in outcomes]
        self._under_way.update(mine)
        try:
            while left:
                together, left = left[:_TOGETHER], left[_TOGETHER:]
                await self._keep_pace(len(together))
                skipped = await self._resend(together, who, outcomes)
                left = skipped + left
        finally:
            self._under_way.difference_update(mine)
        return outcomes

    async def delete(self, numbers: Sequence[int], who: str) -> dict[int, DMQError | None]:
        """Mark letters deleted; as `resend`."""
        await self._keep_pace(len(numbers))
        at_ms = self._runtime.clock.wall.now_ms()
        problems = await self._thread.call(lambda store: store.delete(numbers, who, at_ms))
        self.deleted += len(set(numbers)) - len(problems)
        return {n: UnknownMessage(problems[n]) if n in problems else None for n in numbers}

    async def _keep_pace(self, count: int) -> None:
        seconds = self._bucket.wait(count, self._runtime.clock.wall.monotonic())
        if seconds:
            await asyncio.sleep(seconds)

    async def _resend(self, numbers: list[int], who: str, outcomes: dict[int, DMQError | None]) -> list[int]:
        """Send some; returns those that have to wait for the next round."""
        me = self._name
        claimed = await self._thread.call(lambda store: store.claim(numbers, me, who))
        outcomes |= {number: UnknownMessage(problem) for number, problem in claimed.problems.items()}
        results = await asyncio.gather(*(self._send(letter) for letter in claimed.letters), return_exceptions=True)
        sent: list[int] = []
        unsent: list[int] = []
        for letter, result in zip(claimed.letters, results, strict=True):
            if isinstance(result, DMQError):
                outcomes[letter.number] = result
                unsent.append(letter.number)
            elif result is not None:
                raise result  # a defect; what was claimed is settled by the next look at the journal
            else:
                outcomes[letter.number] = None
                sent.append(letter.number)
        at_ms = self._runtime.clock.wall.now_ms()
        if sent:
            await self._thread.call(lambda store: store.mark_resent(sent, me, at_ms))
            self.resent += len(sent)
        if unsent:
            await self._thread.call(lambda store: store.release(unsent, me))
        return claimed.left

    async def _send(self, letter: DeadLetter) -> None:
        """Send one, unless the journal has it: then a claim of ours from before stood in the database."""
        if letter.claimed_by is not None and await self._is_sent(letter):
            return
        await self._writer.write([await self._batch(letter)])

    async def _batch(self, letter: DeadLetter) -> Batch:
        from dmq.deadletters.letter import record_of

        if letter.reason == DeadReason.CORRUPT.name:
            raise Unsupported(
                f"letter {letter.number} was stored damaged, so its message is not known: have it sent again "
                "by the program it came from; what is left of it is in the letter"
            )
        topic, queue = await self._target(letter)
        record = record_of(letter)
        # `attempts_before` is what a look at the journal recognises this sending by.
        raw = moved_record(
            record,
            topic,
            sent_at_ms=self._runtime.clock.wall.now_ms(),
            says=Attributes(
                attempt=0 if letter.group else None, group=letter.group or None, attempts_before=letter.attempts
            ),
        )
        hashes = [id_hash(letter.message_id)]
        if record.key is not None:
            hashes.append(key_hash(record.key))
        return Batch(
            topic=topic,
            queue=queue,
            data=raw,
            lengths=[len(raw)],
            hash_index=[0] * len(hashes),
            hashes=hashes,
            moved=True,
        )

    async def _target(self, letter: DeadLetter) -> tuple[str, int]:
        topic = self._queries.find_topic(letter.topic)
        if topic is None:
            raise UnknownTopic(
                f"topic {letter.topic!r} of letter {letter.number} does not exist: create it, or delete the letter"
            )
        queues = topic.config.queues
        if not letter.group:
            if topic.config.priority:
                return topic.name, min(letter.priority, queues - 1)
            if letter.business_id:
                return topic.name, business_hash(letter.business_id) % queues
            return topic.name, self._catalog.choose_queue(topic)
        if self._is_broadcast(letter.group, topic.id):
            raise Unsupported(
                f"letter {letter.number} is of the broadcast group {letter.group!r}, whose members have no retry "
                "topic: send its body anew"
            )
        name = retry_topic_name(letter.group, topic.id)
        await self._catalog.see_to_topic(name, TopicConfig(queues=queues, carry_for=letter.group))
        return name, min(letter.queue or 0, queues - 1)

    def _is_broadcast(self, group: str, topic_id: int) -> bool:
        queries = self._queries
        if any(key[0] == topic_id for key in queries.positions_of(group)):
            return False
        names = (name for name in queries.groups() if name.startswith(SYSTEM_PREFIX))
        return any((parts := parse_broadcast_name(name)) is not None and parts[0] == group for name in names)

    # --- claims of before -------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Settle claims of ours that nobody is at: those that were sent are marked, the others wait again."""
        me = self._name
        while True:
            claims = await self._thread.call(lambda store: store.claims(me))
            idle = [letter for letter in claims if letter.number not in self._under_way]
            if not idle:
                return
            sent: list[int] = []
            unsent: list[int] = []
            for letter in idle:
                (sent if await self._is_sent(letter) else unsent).append(letter.number)
            at_ms = self._runtime.clock.wall.now_ms()
            await self._thread.call(lambda store: store.mark_resent(sent, me, at_ms))  # noqa: B023
            await self._thread.call(lambda store: store.release(unsent, me))  # noqa: B023
            log.info("claims of dead letters settled", sent=len(sent), unsent=len(unsent))

    async def _is_sent(self, letter: DeadLetter) -> bool:
        """Whether the journal has what a resend of this letter writes."""
        queries = self._queries
        found = await self._reads.ask(lambda: queries.find(message_id=letter.message_id))
        for place in found:
            said = place.record.attributes
            if place.record.moved and said.attempts_before == letter.attempts and (said.group or "") == letter.group:
                return True
        return False
