"""Transactions: half messages leave for their topics, or are rolled back, many of them in one unit (R-09).

A half message is stored in `%HALF%`, where no consumer sees it, until its producer commits it or rolls it back. If the
producer says nothing for a while, a live producer of its group is asked (`TransactionChecks`).

What always holds: a half message ends once; its end and its copy in its topic are in one unit, so that it is neither
lost nor doubled wherever the broker dies; all of a transaction end with its first, in that unit, and only the first is
asked about; asking again for what has happened is answered as the first time, and asking for the opposite is refused.
What waits to be ended, and what is remembered of what ended, is bounded.

Which open transactions are asked about, and when (R-09). Pure code: events in, actions out.

A live producer of its group is asked about a half message that is neither committed nor rolled back: for the first time
a while after it was stored, then at intervals, so many times; after that the transaction is given up. Time comes in as
`now_ms`, the broker's own, which does not run backwards.

What always holds: a transaction that has ended is never asked about; an open one has exactly one next moment, except
while its giving up is under way; it is asked about `checks_max` times before it is given up, whether a producer is
there to answer or not. Counts live in memory: after a restart of the broker they begin anew, and the first check comes
no sooner than after a fresh start, so that producers have time to come back.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from typing import Final, NamedTuple, Protocol

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.broker.schedule.release_unit import ReleaseUnit
from dmq.errors import (
    Busy,
    Damaged,
    DMQError,
    InvalidRequest,
    LimitReached,
    ServerError,
    StaleEpoch,
    TransactionOver,
    UnknownMessage,
    UnknownTopic,
)
from dmq.event_log import EventLog
from dmq.model import DLQ_PREFIX, HALF_TOPIC, SYSTEM_PREFIX, MessageId, check_name
from dmq.protocol.batch import Batch as PackedBatch
from dmq.protocol.header import LIST_MAX
from dmq.protocol.produce import (
    Produce,
    ProduceFlag,
    TransactionCheck,
    TransactionEnd,
    TransactionInfo,
    TransactionOutcome,
)
from dmq.records import RecordView
from dmq.records.move import DeadReason
from dmq.settings import BrokerSettings
from dmq.storage.read.record_group import Gathered
from dmq.storage.state.events import Event, TransactionGroup, TransactionsEnded, TransactionsJoined

__all__ = [
    "COMMITTED",
    "ROLLED_BACK",
    "Action",
    "CheckTarget",
    "Ending",
    "TransactionChecks",
    "Transactions",
    "half_target",
]

log = EventLog(__name__)

_ID: Final = struct.Struct(">QQ")

COMMITTED: Final = "committed"
ROLLED_BACK: Final = "rolled back"
GIVEN_UP: Final = "given up"
_UNIT_MESSAGES: Final = 4096
_UNIT_BYTES: Final = 4 << 20
_WAITING_MAX: Final = 200_000
_REMEMBERED_MAX: Final = 100_000
_CHECKS_AT_ONCE: Final = 256
_READ_TURN: Final = 256  # half messages are read and copied in one turn of the loop
_DECIDED_TURN: Final = 2048  # are decided about in one
_LOOKED_TURN: Final = 64  # that are no longer remembered are looked up in one turn of the loop
_GROUPS_MAX: Final = 1000
_AGAIN_MS: Final = 1000


class Ending:
    """Half messages that are to end together, and who waits for that.

    `refused` has those that did not end as asked, with the reason; `done` is called once, with an error if none did.
    """

    __slots__ = ("done", "ids", "outcome", "refused")

    def __init__(self, ids: list[bytes], outcome: str, done: Callable[[Ending, DMQError | None], None]) -> None:
        self.ids = ids
        self.outcome = outcome
        self.done = done
        self.refused: dict[bytes, DMQError] = {}


class CheckTarget(Protocol):
    """A client that can be asked what became of a transaction."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked now."""
        ...

    def check(self, question: TransactionCheck, record: bytes) -> None:
        """Ask it about a half message; the answer is an `end`."""
        ...


def half_target(part: Gathered, index: int) -> str:
    """The topic of a half message."""
    record = part.record(index)
    return (record.attributes.original_topic or record.topic) if part.is_moved else record.topic


class Transactions:
    """The open transactions of a broker."""

    def __init__(self, journal: Journal, runtime: Runtime, catalog: Catalog, settings: BrokerSettings) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._open_max = journal.store.settings.transactions_max
        self._writer = journal.writer
        self._reads = journal.reads
        self._runtime = runtime
        self._catalog = catalog
        self.checks = TransactionChecks(
            int(settings.transaction_first_check_seconds * 1000),
            int(settings.transaction_check_seconds * 1000),
            settings.transaction_checks_max,
        )
        self._late: list[bytes] = []  # were stored when the first of their transaction had ended
        self.opened(message_id.to_bytes() for message_id in self._queries.transactions())
        self._members: dict[str, OrderedDict[CheckTarget, int]] = {}  # and how many producers each has
        self._waiting: deque[Ending] = deque()
        self._waiting_count = 0
        self._is_ending = False
        self._is_checking = False
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self.committed = 0
        self.rolled_back = 0
        self.given_up = 0
        self.checked = 0

    def figures(self) -> dict[str, int]:
        """What is counted."""
        return {
            "transactions_committed": self.committed,
            "transactions_rolled_back": self.rolled_back,
            "transactions_given_up": self.given_up,
            "transactions_checked": self.checked,
        }

    # --- who can be asked -------------------------------------------------------------------------------------------

    def join(self, target: CheckTarget, group: str) -> None:
        """A client can be asked about half messages of a producer group.

        Raises:
            LimitReached: it answers for too many groups already.
        """
        check_name(group, "producer group")
        members = self._members.setdefault(group, OrderedDict())
        if target not in members and sum(target in others for others in self._members.values()) >= _GROUPS_MAX:
            raise LimitReached(f"one connection answers for {_GROUPS_MAX} producer groups at most", limit=_GROUPS_MAX)
        members[target] = members.get(target, 0) + 1

    def leave(self, target: CheckTarget, group: str | None = None) -> None:
        """It cannot any more: one of its producers of a group is gone, or, without a group, it is gone itself."""
        if group is not None:
            check_name(group, "producer group")
        for name in [*self._members] if group is None else [group]:
            members = self._members.get(name, OrderedDict())
            if target in members:
                members[target] -= 1
                if group is None or not members[target]:
                    del members[target]
            if not members:
                self._members.pop(name, None)

    def _member(self, group: str) -> CheckTarget | None:
        """One of the group, in turn."""
        members: OrderedDict[CheckTarget, int] = self._members.get(group, OrderedDict())
        for target in [*members]:
            members.move_to_end(target)
            if target.is_ready:
                return target
        return None

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare(self, asked: Produce, batch: PackedBatch) -> tuple[list[bytes], list[Event]]:
        """The ids of a batch of half messages, and the events that are written before them.

        Raises:
            LimitReached: too many transactions are open.
        """
        queries = self._queries
        if queries.transaction_count + asked.count > self._open_max:
            raise LimitReached(
                f"{queries.transaction_count} transactions are open, and store.transactions_max is "
                f"{self._open_max}: end some, or raise it",
                limit=self._open_max,
            )
        ids = [_ID.pack(asked.producer_id, asked.first_sequence + index) for index in range(asked.count)]
        before: list[Event] = []
        if queries.transaction_group(asked.producer_id) != asked.group:
            before.append(TransactionGroup(asked.producer_id, asked.group))
        if asked.flags & ProduceFlag.JOINED:
            before += _joined(asked, batch, ids)
        return ids, before

    # --- ending -----------------------------------------------------------------------------------------------------

    def opened(self, ids: Iterable[bytes]) -> None:
        """Half messages were stored."""
        now_ms, queries = self._runtime.clock.now_ms, self._queries
        has_joint = queries.has_joint_transactions
        for message_id in ids:
            if not queries.is_open(message_id):
                continue
            first = queries.transaction_first(message_id) if has_joint else message_id
            if first == message_id:
                self.checks.opened(message_id, now_ms)
            elif not queries.is_open(first):
                self._late.append(message_id)

    def times_asked(self, message_id: bytes) -> int:
        """How often the transaction of a half message was asked about."""
        return self.checks.attempts(self._queries.transaction_first(message_id))

    async def page(
        self, after: tuple[int, bytes], limit: int, topic: str
    ) -> tuple[list[TransactionInfo], tuple[int, bytes]]:
        """Open transactions, oldest first, and where the next page begins; (0, b""): there is none.

        Parameters:
            after: (stored at, message id), where the page before ended.
            topic: only those of this topic; "" is all.
        """
        open_ones = self._queries.transactions().items()
        keys = ((half.stored_at_ms, mid.to_bytes(), half.journal_offset, half.group) for mid, half in open_ones)
        page = nsmallest(limit, (key for key in keys if key[:2] > after))
        parts, _ = await self._reads.ask(lambda: self._queries.gather([key[2] for key in page]))
        topics = {at: half_target(part, index) for part in parts for index, at in enumerate(part.offsets.tolist())}
        infos = [
            TransactionInfo(message_id, topics[offset], group, begun_at_ms, checks=self.times_asked(message_id))
            for begun_at_ms, message_id, offset, group in page
            if offset in topics and topic in ("", topics[offset])
        ]
        return infos, page[-1][:2] if len(page) == limit else (0, b"")

    def end(self, asked: TransactionEnd, done: Callable[[Ending, DMQError | None], None]) -> None:
        """Commit half messages, or roll them back, with the next unit.

        Parameters:
            done: called once; with an error none of them has ended.

        Raises:
            StaleEpoch: the producer was replaced by a newer one.
            InvalidRequest: too many at once.
            Busy: too many wait already.
            BrokerStopping: the broker is stopping.
        """
        self._runtime.readiness.check_open()
        newest = self._queries.producer_epoch(asked.producer_id)
        if newest is not None and asked.producer_epoch < newest:
            raise StaleEpoch(
                f"producer {asked.producer_id:016x} was replaced: epoch {newest} has written, and this end is of epoch "
                f"{asked.producer_epoch}; the new one, or a check, ends the transaction",
                producer_id=asked.producer_id,
                epoch=newest,
            )
        count = asked.count + sum(span.count for span in asked.others)
        if count > LIST_MAX:
            raise InvalidRequest(f"at most {LIST_MAX} transactions are ended at once, not {count}")
        outcome = COMMITTED if asked.outcome == TransactionOutcome.COMMIT else ROLLED_BACK
        self._end(Ending([*_ids(asked)], outcome, done))

    def _end(self, ending: Ending) -> None:
        if self._waiting_count >= _WAITING_MAX:
            raise Busy(f"{self._waiting_count} transactions wait to be ended: try again shortly", retry_after_ms=50)
        self._waiting.append(ending)
        self._waiting_count += len(ending.ids)
        self._work()

    def _work(self) -> None:
        if self._is_ending or not self._waiting:
            return
        self._is_ending = True
        together: list[Ending] = []

        def failed(error: BaseException) -> None:
            self._is_ending = False
            told = error if isinstance(error, DMQError) else ServerError(f"the transaction was not ended: {error}")
            for ending in together:
                ending.done(ending, told)
            self._work()

        self._runtime.tasks.run(self._end_all(together), failed)

    async def _end_all(self, together: list[Ending]) -> None:
        """Write one unit that ends what has gathered; the next gathers meanwhile."""
        await asyncio.sleep(0)  # what comes in this turn of the loop goes into this unit
        count = size = 0
        while self._waiting and (not together or (count < _UNIT_MESSAGES and size < _UNIT_BYTES)):
            ending = self._waiting.popleft()
            self._waiting_count -= len(ending.ids)
            together.append(ending)
            ending.ids = await self._whole(ending.ids)
            count += len(ending.ids)
            size += self._queries.half_bytes(ending.ids)
        ends: dict[bytes, str] = {}
        for ending in together:
            await self._decide(ending, ends)
        lost = await self._write(ends, {}) if ends else set()
        for ending in together:
            for message_id in lost.intersection(ending.ids):
                ending.refused[message_id] = Damaged(
                    "the prepared message cannot be read: the journal is damaged there"
                )
            ending.done(ending, None)
        together.clear()
        self._is_ending = False
        self._work()

    async def _whole(self, ids: Iterable[bytes]) -> list[bytes]:
        """Half messages, and those that end with them."""
        if not self._queries.has_joint_transactions:
            return [*dict.fromkeys(ids)]
        whole: dict[bytes, None] = {}
        for index, message_id in enumerate(ids):
            if index % _DECIDED_TURN == _DECIDED_TURN - 1:
                await asyncio.sleep(0)
            whole[message_id] = None
            whole.update(dict.fromkeys(self._queries.transaction_members(message_id)))
        return [*whole]

    async def _decide(self, ending: Ending, ends: dict[bytes, str]) -> None:
        """Which of them end now as asked, and why not the others."""
        looked = 0
        for index, message_id in enumerate(ending.ids):
            if index % _DECIDED_TURN == _DECIDED_TURN - 1:
                await asyncio.sleep(0)
            outcome = ends.get(message_id) or self._ended.get(message_id)
            if outcome is None and self._queries.is_open(message_id):
                is_alone = not self._queries.has_joint_transactions
                first = message_id if is_alone else self._queries.transaction_first(message_id)
                if first == message_id:
                    ends[message_id] = ending.outcome
                    continue
                outcome = ends[message_id] = await self._outcome_with(first, ending, ends)
            if outcome is None:
                looked += 1
                if looked % _LOOKED_TURN == 0:
                    await asyncio.sleep(0)
                outcome = await self._outcome_of(message_id)
            if outcome is None:
                ending.refused[message_id] = UnknownMessage(
                    f"there is no transaction {MessageId.from_bytes(message_id)}: check the id; retention may have "
                    "taken what is left of it"
                )
            elif outcome != ending.outcome:
                ending.refused[message_id] = TransactionOver(
                    f"transaction {MessageId.from_bytes(message_id)} was {outcome} before, so it cannot be "
                    f"{ending.outcome}",
                    outcome=outcome,
                )

    async def _outcome_with(self, first: bytes, ending: Ending, ends: dict[bytes, str]) -> str:
        """How an open half message ends now: as asked, unless the first of its transaction was over when it came.

        Its producer may still take back one alone, whose sending it has given up.
        """
        if ending.outcome == ROLLED_BACK and first not in ending.ids:
            return ending.outcome
        outcome = ends.get(first)
        if outcome is None and not self._queries.is_open(first):
            outcome = self._ended.get(first) or await self._outcome_of(first)
        return outcome if outcome in (COMMITTED, ROLLED_BACK) else ending.outcome

    async def _outcome_of(self, message_id: bytes) -> str | None:
        """How a transaction ended that is no longer remembered, by what the journal has of it."""
        queries = self._queries
        wanted = MessageId.from_bytes(message_id)
        found = await self._reads.ask(lambda: [f.topic for f in queries.find(message_id=wanted)])
        if HALF_TOPIC not in found:
            return COMMITTED if found else None
        if any(not topic.startswith(SYSTEM_PREFIX) for topic in found):
            return COMMITTED  # even if a consumer has made a dead letter of it since
        return GIVEN_UP if any(topic.startswith(DLQ_PREFIX) for topic in found) else ROLLED_BACK

    async def _write(self, ends: dict[bytes, str], groups: dict[bytes, str]) -> set[bytes]:
        """End transactions in one unit; returns those that cannot be, because they cannot be read.

        Parameters:
            groups: those of the transactions, if they are given up.
        """
        try:
            return await self._write_once(ends, groups)
        except UnknownTopic:  # deleted in between: the second time that is known
            return await self._write_once(ends, groups)

    async def _write_once(self, ends: dict[bytes, str], groups: dict[bytes, str]) -> set[bytes]:
        queries, now_ms = self._queries, self._runtime.clock.wall.now_ms()
        if groups:
            reason = "no producer said what became of its transaction"
            unit = ReleaseUnit(queries, self._catalog, now_ms, reason, code=DeadReason.RETRIES_EXHAUSTED)
        else:
            reason = "its topic was deleted before its transaction was committed"
            unit = ReleaseUnit(queries, self._catalog, now_ms, reason)
        moving = {
            half.journal_offset: message_id
            for message_id, outcome in ends.items()
            if outcome != ROLLED_BACK and (half := queries.half(message_id)) is not None
        }
        order = {offset: rank for rank, offset in enumerate(moving)}
        gone: list[int] = []
        # A turn of the loop each, and a question each: one that needs the disk is asked again from its start.
        offsets = sorted(moving)
        for start in range(0, len(offsets), _READ_TURN):
            parts, unreadable = await self._reads.ask(partial(queries.gather, offsets[start : start + _READ_TURN]))
            gone += unreadable
            for part in parts:
                if not groups:
                    unit.add(part, order)
                    continue
                for index, offset in enumerate(part.offsets.tolist()):
                    message_id = moving[offset]
                    unit.add_dead(part.record(index), part.message_id(index), order[offset], groups[message_id])
            await asyncio.sleep(0)
        if any(queries.may_be_mended(offset, offset + 1) for offset in gone):
            # Nothing is written: the messages of a transaction end together.
            raise Busy(
                "a prepared message cannot be read here for now: try again shortly",
                retry_after_ms=_AGAIN_MS,
            )
        lost = {moving[offset] for offset in gone}
        if lost:
            log.error("half messages cannot be read", once_for=(), offsets=gone[:8], count=len(gone))
            ends = {message_id: outcome for message_id, outcome in ends.items() if message_id not in lost}
        items = await unit.items()
        for outcome in (COMMITTED, ROLLED_BACK, GIVEN_UP):
            ids = [message_id for message_id, other in ends.items() if other == outcome]
            if ids:
                items.append(TransactionsEnded(b"".join(ids), outcome))
        if items:
            await self._writer.write(items, atomic=True)
        for index, (message_id, outcome) in enumerate(ends.items()):
            if index % _DECIDED_TURN == _DECIDED_TURN - 1:
                await asyncio.sleep(0)
            self.checks.ended(message_id)
            self._ended[message_id] = outcome
            if queries.has_joint_transactions:
                self._late += queries.transaction_members(message_id)  # that came while this was written
        while len(self._ended) > _REMEMBERED_MAX:
            self._ended.popitem(last=False)
        outcomes = [*ends.values()]
        self.committed += outcomes.count(COMMITTED)
        self.rolled_back += outcomes.count(ROLLED_BACK)
        self.given_up += outcomes.count(GIVEN_UP)
        return lost

    # --- checking back ----------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Time has passed: ask about what is open for long."""
        if self._late:
            late, self._late = self._late, []
            self._runtime.tasks.run(self._follow(late), lambda error: self._late.extend(late))
        if self._is_checking or self._runtime.readiness.is_stopping or self._store.has_failed:
            return
        actions = self.checks.due(now_ms, _CHECKS_AT_ONCE)
        if not actions:
            return
        self._is_checking = True

        def failed(error: BaseException) -> None:
            self._is_checking = False
            log.error("transactions could not be checked", once_for=(), count=len(actions), error=error)
            for action in actions:
                self.checks.postpone(action.message_id, self._runtime.clock.now_ms, _AGAIN_MS)

        self._runtime.tasks.run(self._check(actions), failed)

    async def _follow(self, late: list[bytes]) -> None:
        """End half messages as the first of their transaction has ended."""
        queries = self._queries
        for message_id in late:
            first = queries.transaction_first(message_id)
            outcome = self._ended.get(first) or await self._outcome_of(first)
            if outcome in (COMMITTED, ROLLED_BACK):
                self._end(Ending([message_id], outcome, lambda ending, error: None))
            else:
                self.checks.opened(message_id, self._runtime.clock.now_ms)

    async def _check(self, actions: list[Action]) -> None:
        queries = self._queries
        attempts = {action.message_id: action.attempt for action in actions}
        places = {
            half.journal_offset: action.message_id
            for action in actions
            if (half := queries.half(action.message_id)) is not None
        }
        parts, lost = await self._reads.ask(lambda: queries.gather([*places]))
        if lost:
            log.error("half messages cannot be read", once_for=(), offsets=lost[:8], count=len(lost))
        groups: dict[bytes, str] = {}  # of those that are given up
        for part in parts:
            for index, offset in enumerate(part.offsets.tolist()):
                message_id = places[offset]
                half = queries.half(message_id)
                if half is None:
                    continue
                if attempts[message_id]:
                    self._ask(part, index, message_id, half.group, attempt=attempts[message_id])
                else:
                    groups[message_id] = half.group
        if groups:
            await self._give_up(groups)
        self._is_checking = False

    def _ask(self, part: Gathered, index: int, message_id: bytes, group: str, attempt: int) -> None:
        target = self._member(group)
        if target is None:
            return
        producer_id = int.from_bytes(message_id[:8], "big")
        epoch = self._queries.producer_epoch(producer_id)
        question = TransactionCheck(
            message_id,
            group,
            half_target(part, index),
            attempt,
            producer_epoch=part.row.producer_epoch if epoch is None else epoch,
        )
        found = part.record(index)
        target.check(question, bytes(found.buffer[found.start : found.start + found.length]))
        self.checked += 1

    async def _give_up(self, groups: dict[bytes, str]) -> None:
        """Roll back what nobody answered for, and keep it as dead letters of its producer group."""
        while self._is_ending:  # an end that is under way counts
            await asyncio.sleep(0.01)
        self._is_ending = True
        try:
            still = {
                one: group
                for message_id, group in groups.items()
                if self._queries.is_open(message_id)
                for one in await self._whole([message_id])
            }
            if still:
                await self._write(dict.fromkeys(still, GIVEN_UP), still)
                log.warning("transactions were given up", count=len(still))
        finally:
            self._is_ending = False
            self._work()


def _joined(asked: Produce, batch: PackedBatch, ids: list[bytes]) -> list[Event]:
    """What the records of a batch say about transactions that began before them."""
    pairs = []
    start = 0
    for message_id, length in zip(ids, batch.lengths, strict=True):
        first = RecordView(batch.data, start, start + int(length)).attributes.transaction
        start += int(length)
        if first is not None:
            pairs += [message_id, _ID.pack(asked.producer_id, first)]
    return [TransactionsJoined(b"".join(pairs))] if pairs else []


def _ids(asked: TransactionEnd) -> Iterator[bytes]:
    for first, count in ((asked.first_sequence, asked.count), *((s.first_sequence, s.count) for s in asked.others)):
        if first + count > 1 << 64:
            raise InvalidRequest("a sequence is below 2**64")
        for sequence in range(first, first + count):
            yield _ID.pack(asked.producer_id, sequence)


_SPARE_ENTRIES: Final = 1024


class Action(NamedTuple):
    """Ask about a transaction for the `attempt`-th time; 0 is to give it up."""

    message_id: bytes
    attempt: int


class _Open:
    __slots__ = ("attempts", "due_ms")

    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        self.attempts = 0


class TransactionChecks:
    """The open transactions of one broker.

    Parameters:
        first_ms: how long after it was stored a transaction is asked about first.
        interval_ms: how long after that again, every time.
        checks_max: how often.
    """

    def __init__(self, first_ms: int, interval_ms: int, checks_max: int) -> None:
        self._first_ms = first_ms
        self._interval_ms = interval_ms
        self._checks_max = checks_max
        self._open: dict[bytes, _Open] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, message_id: bytes, now_ms: int) -> None:
        """A half message is stored, or was found stored at the start; one that is known already changes nothing."""
        if message_id not in self._open:
            due_ms = now_ms + self._first_ms
            self._open[message_id] = _Open(due_ms)
            heappush(self._heap, (due_ms, message_id))

    def ended(self, message_id: bytes) -> None:
        """It was committed, rolled back or given up."""
        if self._open.pop(message_id, None) is not None and len(self._heap) > 2 * len(self._open) + _SPARE_ENTRIES:
            # Most end long before they are due: swept out before they pile up.
            self._heap = [(due, mid) for due, mid in self._heap if self._is_current(due, mid)]
            heapify(self._heap)

    def attempts(self, message_id: bytes) -> int:
        """How often it was asked about."""
        found = self._open.get(message_id)
        return 0 if found is None else found.attempts

    def due(self, now_ms: int, limit: int) -> list[Action]:
        """What is to be done by now, at most so much."""
        actions: list[Action] = []
        while self._heap and self._heap[0][0] <= now_ms and len(actions) < limit:
            due_ms, message_id = heappop(self._heap)
            if not self._is_current(due_ms, message_id):
                continue
            found = self._open[message_id]
            if found.attempts >= self._checks_max:
                found.due_ms = -1  # no moment of its own until it has ended, or `postpone`
                actions.append(Action(message_id, 0))
                continue
            found.attempts += 1
            actions.append(Action(message_id, found.attempts))
            self._put(message_id, found, now_ms + self._interval_ms)
        return actions

    def postpone(self, message_id: bytes, now_ms: int, wait_ms: int) -> None:
        """It could not be given up now: try again later."""
        found = self._open.get(message_id)
        if found is not None and found.due_ms < 0:
            self._put(message_id, found, now_ms + wait_ms)

    def _put(self, message_id: bytes, found: _Open, due_ms: int) -> None:
        found.due_ms = due_ms
        heappush(self._heap, (due_ms, message_id))

    def _is_current(self, due_ms: int, message_id: bytes) -> bool:
        found = self._open.get(message_id)
        return found is not None and found.due_ms == due_ms
