"""The relay: sends what was committed, at once where it is told of a commit, and whatever a crash left behind.

One thread, which looks for hints (send ids that were perhaps just committed) and, at intervals, for unsent rows whose
claim is over. Both ways read the row from the table: what is not committed is not visible, so it cannot go out.

What always holds: messages of one topic and business id go out in the order of their insertion, whichever of several
relays and processes sends them, and one that fails holds back those behind it and nobody else; a row is marked only
after a broker acknowledged it. A crash between the two sends it again under the same send id, which the inbox knows.

Send ids that were perhaps just committed, and when to look for each.

Pure code. What always holds: a hint that finds no row is looked for a few times more, since a commit may take its time,
and then forgotten; the relay's scan finds the row anyhow. There are never more hints than a bound.

Which rows of the sender table a relay may send: claims, the rows that hold others back, and what becomes of them.

A claim is two columns: who, and until when. Where the database can skip locked rows, several relays claim side by side
without waiting for each other; elsewhere one statement claims, and the database lets one at a time write. A row is held
back by an unsent row before it, of the same topic and business id, that another relay is to send.

What always holds: of two relays that ask at once, no row goes to both; a row that its owner does not finish is free
again when its claim is over; a row that has ended is never touched here. Rows are checked for blockers after they were
claimed, so that everything committed before them is seen; a row that is just being sent holds back, since only its mark
says that a broker has it. Blockers are found by the index of unsent rows, however many rows have ended, and whatever
the database believes of the table.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Table,
    and_,
    any_,
    bindparam,
    func,
    not_,
    select,
    text,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, InvalidSettings
from dmq.event_log import EventLog
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.engines import among, array_text, background, go_by_index, is_mysql, sentence, skips_locked
from dmq.outbox.metrics import Counts
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.dispatch import Dispatch, Sent
from dmq.outbox.sender.message_row import columns_of
from dmq.outbox.states import SendState

if TYPE_CHECKING:
    from dmq.client.client import Client

__all__ = ["Blockers", "Claims", "Hints", "Relay", "make_owner"]

log = EventLog(__name__)

_PAUSE_SECONDS_MIN: Final = 0.2
_PAUSE_SECONDS_MAX: Final = 5.0
# A scan that finds only rows behind others that are just being sent looks again after this, then more and more seldom.
_BEHIND_SECONDS: Final = 0.05
_STUCK_SECONDS: Final = 1.0
_SEEN_MAX: Final = 10_000
_owners: Final = count(1)


def make_owner() -> str:
    """A name for one relay or one process's direct sends, as claims have it."""
    return f"{socket.gethostname()[:32]}-{os.getpid()}-{next(_owners)}-{os.urandom(4).hex()}"


class Relay:
    """Sends the rows of a sender table.

    Parameters:
        engine: the database; one that blocks.
        client: a connection to a broker.
        tables: the outbox's; with the default names if left out.
        batch: how many rows it claims at a time.
        poll: seconds between two looks for rows that were left behind.
        lease: seconds a claim lasts: after this time another relay takes over from one that died.
        result_after: seconds after sending at which a row without its results is the compensator's.
        timeout: seconds to wait for a broker's answer.
        alert_after: a message that was refused this often is an alert.
        on_alert: called with an `Alert`.
        scan: whether it looks for rows that were left behind; without, it follows hints alone.
    """

    def __init__(
        self,
        engine: Engine,
        client: Client,
        *,
        tables: OutboxTables | None = None,
        batch: int = 1000,
        poll: float = 0.5,
        lease: float = 20.0,
        result_after: float = 600.0,
        timeout: float = 5.0,
        alert_after: int = 10,
        on_alert: OnAlert | None = None,
        scan: bool = True,
        owner: str | None = None,
        counts: Counts | None = None,
        clock: Clock | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("poll", poll), ("timeout", timeout), ("alert_after", alert_after)):
            if value <= 0:
                raise InvalidSettings(f"{name}= is above 0, not {value!r}")
        if lease < 2 * timeout:
            raise InvalidSettings(f"lease= must be at least twice timeout=, which is {timeout:g} s: not {lease:g} s")
        self.owner: Final = owner or make_owner()
        self.counts: Final = counts or Counts()
        self._engine = engine
        self._clock = clock or SystemClock()
        send = (tables or default_tables()).send
        self._claims = Claims(engine, send)
        self._blockers = Blockers(engine, send)
        self._dispatch = Dispatch(client, timeout, alert_after, alert_with(on_alert, self.counts), counts=self.counts)
        self._hints = Hints(self._clock)
        self._batch = batch
        self._poll = poll
        self._lease_ms = round(lease * 1000)
        self._timeout_ms = round(timeout * 1000)
        self._result_ms = round(result_after * 1000)
        self._scan = scan
        self._next_scan = 0.0
        self._pause = 0.0
        self._trouble: DMQError | None = None
        self._fruitless = 0
        self._seen: dict[Place, tuple[int, float]] = {}
        self._unmarked: list[Sent] = []
        self._wake = threading.Condition()
        self._is_idle = True
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # --- from other threads -------------------------------------------------------------------------------------------

    def hint(self, send_ids: Sequence[str]) -> None:
        """These rows were perhaps just committed: look now. Never waits, never fails."""
        with self._wake:
            self._hints.add(send_ids)
            self._is_idle = False
            self._wake.notify_all()

    def start(self) -> None:
        """Run in a thread of its own. Safe to call twice."""
        with self._wake:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self.run, name="dmq-outbox-relay", daemon=True)
                self._thread.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until every hint was followed; whether that came in time."""
        with self._wake:
            return self._wake.wait_for(lambda: self._is_idle and not self._hints, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Follow the hints that are left, as long as that goes well, and stop. What is not sent stays in the table."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pause == 0.0:
            self.flush(timeout)
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout + self._timeout_ms / 1000)
        self._dispatch.close()

    def stop(self) -> None:
        """Have `run` return soon. Safe in a signal handler."""
        self._is_closing = True

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Relay until closed."""
        while not self._is_closing:
            try:
                is_busy = self.step()
            except SQLAlchemyError as error:
                self.counts.add("database_errors")
                reason = sentence(error, self._engine)
                log.warning("the database of the outbox is gone: the relay tries again", once_for="sql", reason=reason)
                self._slow_down()
                is_busy = False
            except Exception:
                log.exception("the relay failed; it tries again", once_for=())
                self._slow_down()
                is_busy = False
            if not is_busy:
                self._rest()

    def _rest(self) -> None:
        now = self._clock.monotonic()
        with self._wake:
            if self._is_closing:
                return
            if self._pause:
                self._wake.wait(self._pause)
                return
            moments = [moment for moment in (self._hints.next_at, self._next_scan if self._scan else None) if moment]
            self._is_idle = not self._hints
            self._wake.notify_all()
            if self._hints.has_new:
                return
            self._wake.wait(min([max(0.0, moment - now) for moment in moments], default=self._poll))

    def _slow_down(self) -> None:
        self._pause = min(max(_PAUSE_SECONDS_MIN, self._pause * 2), _PAUSE_SECONDS_MAX)

    def step(self) -> bool:
        """Follow the hints that are due, and look for what was left behind if it is time; whether there is more.

        Raises:
            SQLAlchemyError: the database cannot be used now.
        """
        self._mark()
        went = self._follow()
        if self._scan and self._clock.monotonic() >= self._next_scan:
            went += self._look()
        trouble, self._trouble = self._trouble, None
        if trouble is None:
            if self._pause:
                log.warning("the outbox goes on")
            self._pause = 0.0
            return bool(went)
        log.warning("the outbox waits for a broker", once_for=(), code=trouble.code, reason=trouble)
        self._slow_down()
        return False

    def _look(self) -> int:
        """Send what was left behind."""
        now = self._clock.monotonic()
        self._next_scan = now + self._poll
        until_ms = self._clock.now_ms() + self._lease_ms
        rows = self._claims.claim(self._batch, self.owner, self._clock.now_ms(), until_ms)
        went = self._go(rows, until_ms)
        self.counts.add("relayed", went)
        self._fruitless = 0 if went or not rows else self._fruitless + 1
        if self._fruitless:
            wait = min(_STUCK_SECONDS, _BEHIND_SECONDS * 2 ** min(self._fruitless - 1, 8))
            self._next_scan = self._clock.monotonic() + wait
        elif len(rows) == self._batch:
            self._next_scan = now
        return went

    def _follow(self) -> int:
        """Send what hints tell of."""
        with self._wake:
            asked = self._hints.take(self._batch)
        if not asked:
            return 0
        found = self._claims.look([*asked])
        self._hints.missed({send_id: asked[send_id] for send_id in asked.keys() - {row.send_id for row in found}})
        ours = [row for row in found if row.state == "NEW" and row.claimed_by == self.owner]
        until_ms = min((row.due_at_ms for row in ours), default=0)
        if ours and until_ms < self._clock.now_ms() + self._timeout_ms:
            # The transaction took long: the claim of its rows may be over, or end while we send.
            until_ms = self._clock.now_ms() + self._lease_ms
            kept = {*self._claims.keep([row.number for row in ours], self.owner, until_ms)}
            ours = [row for row in ours if row.number in kept]
        went = self._go(ours, until_ms)
        if went < len(ours):
            self._next_scan = min(self._next_scan, self._clock.monotonic() + _BEHIND_SECONDS)
        self.counts.add("sent_directly", went)
        return went

    def _go(self, rows: Sequence[Row[Any]], until_ms: int) -> int:
        """Send rows that are ours until a moment; how many were."""
        ready = self._free(rows)
        by_topic: dict[str, list[Row[Any]]] = {}
        for row in ready:
            by_topic.setdefault(row.topic, []).append(row)
        went = 0
        for topic, group in by_topic.items():
            if self._clock.now_ms() + self._timeout_ms > until_ms:
                self._claims.release([row.number for row in group])
                continue
            sent = self._dispatch.send(topic, group)
            self._unmarked.append(sent)
            self._mark()
            went += sent.count
            self._trouble = sent.trouble or self._trouble
        return went

    def _free(self, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        """Those that nobody holds back; the others are given back until their turn has come."""
        blockers = self._blockers.of(rows)
        if not blockers:
            return [*rows]
        now_ms = self._clock.now_ms()
        free: list[Row[Any]] = []
        held: dict[Place, list[int]] = {}
        for row in rows:
            place = (row.topic, row.business_id or "")
            blocker = blockers.get(place) if row.is_ordered else None
            if blocker is None or row.number < blocker.number:
                free.append(row)
            else:
                held.setdefault(place, []).append(row.number)
        for place, numbers in held.items():
            self._claims.release(numbers, self._until(place, blockers[place], now_ms))
            self.counts.add("held_back", len(numbers))
        return free

    def _until(self, place: Place, blocker: Blocker, now_ms: int) -> int | None:
        """When to look again at rows that are behind another one; None is at once, in their turn."""
        if not blocker.is_claimed:
            return blocker.due_at_ms if blocker.due_at_ms > now_ms else None
        # Another relay is sending it. One that does not get on for a second may be dead: let other rows come first.
        number, since = self._seen.get(place, (0, 0.0))
        now = self._clock.monotonic()
        if number != blocker.number:
            if len(self._seen) >= _SEEN_MAX:
                self._seen.clear()
            self._seen[place] = (blocker.number, now)
            return None
        return None if now - since < _STUCK_SECONDS else min(blocker.due_at_ms, now_ms + round(_STUCK_SECONDS * 1000))

    def _mark(self) -> None:
        """Write down what became of rows; kept and tried again first of all if the database does not take it."""
        while self._unmarked:
            sent = self._unmarked[0]
            now_ms = self._clock.now_ms()
            if sent.rows:
                self._claims.sent(sent.rows, now_ms, now_ms + self._result_ms)
                sent.rows_marked()
            if sent.refused:
                self._claims.failed(sent.refused, sent.reason, now_ms + sent.wait_ms)
                sent.refused_marked()
            if sent.given_back:
                until_ms = now_ms + sent.wait_ms if sent.wait_ms else None
                self._claims.release([row.number for row in sent.given_back], until_ms)
            self._unmarked.pop(0)
            self.counts.add("sent", sent.count)


_AGAIN_SECONDS: Final = (0.005, 0.02, 0.1, 0.5)
_HINTS_MAX: Final = 100_000


class Hints:
    """Not thread-safe: the relay guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._new: deque[str] = deque()
        self._again: deque[tuple[float, str, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._new or self._again)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    @property
    def next_at(self) -> float | None:
        """When there is something to look for, by the monotonic clock."""
        if self._new:
            return self._clock.monotonic()
        return min((moment for moment, _, _ in self._again), default=None)

    def add(self, send_ids: Iterable[str]) -> None:
        for send_id in send_ids:
            if len(self._new) >= _HINTS_MAX:
                return
            self._new.append(send_id)

    def take(self, limit: int) -> dict[str, int]:
        """Up to `limit` that are due, each with how often it was looked for."""
        taken: dict[str, int] = {}
        while self._new and len(taken) < limit:
            taken[self._new.popleft()] = 0
        now = self._clock.monotonic()
        for _ in range(len(self._again)):
            moment, send_id, tries = self._again.popleft()
            if moment <= now and len(taken) < limit:
                taken.setdefault(send_id, tries)
            else:
                self._again.append((moment, send_id, tries))
        return taken

    def missed(self, asked: Mapping[str, int]) -> None:
        """These were not found: look again later, or no more."""
        now = self._clock.monotonic()
        for send_id, tries in asked.items():
            if tries < len(_AGAIN_SECONDS) and len(self._again) < _HINTS_MAX:
                self._again.append((now + _AGAIN_SECONDS[tries], send_id, tries + 1))


Place = tuple[str, str]  # topic and business id: within one, order is kept


class Blocker(NamedTuple):
    """The first unsent row of a place that is not among those asked about, and comes before the last of them."""

    number: int
    due_at_ms: int
    is_claimed: bool  # somebody is about to send it; else it waits until it is due


class Blockers:
    """The sender table, as one that keeps an order sees it. Thread-safe."""

    def __init__(self, engine: Engine, send: Table) -> None:
        self._engine = background(engine)
        self._kind = engine.dialect.name
        self._send = send
        # Compared as a text in the database, so that there is nothing to read where nothing is in the way. A query for
        # each place, since the planner, left to join, takes any index but the right one on a table that has just grown.
        self._heads = text(
            f"""
            SELECT asked.at, head.numbers
            FROM unnest(CAST(:topics AS varchar[]), CAST(:ids AS varchar[]), CAST(:counts AS int[]),
                CAST(:numbers AS text[])) WITH ORDINALITY AS asked(topic, business_id, count, numbers, at)
            CROSS JOIN LATERAL (
                SELECT string_agg(CAST(unsent.number AS text), ',') AS numbers
                FROM (
                    SELECT number FROM {engine.dialect.identifier_preparer.format_table(send)}
                    WHERE state = '{SendState.NEW}' AND business_id = asked.business_id
                        AND topic = asked.topic AND is_ordered = 1
                    ORDER BY number LIMIT asked.count
                ) AS unsent
            ) AS head
            WHERE head.numbers IS DISTINCT FROM asked.numbers
            """
        )

    def of(self, rows: Sequence[Row[Any]]) -> dict[Place, Blocker]:
        """By place, what holds back rows of it; these come in the order of their numbers."""
        places: dict[Place, list[int]] = {}
        for row in rows:
            if row.is_ordered:
                places.setdefault((row.topic, row.business_id), []).append(row.number)
        if not places:
            return {}
        with self._engine.connect() as connection:
            look = self._by_heads if self._kind == "postgresql" else self._by_number
            found = look(connection, places)
            return self._facts(connection, found) if found else {}

    def _by_heads(self, connection: Connection, places: Mapping[Place, Sequence[int]]) -> dict[Place, int]:
        """Of a place with n rows of ours, look at the first n that are unsent: they must be ours."""
        listed = [*places.items()]
        asked = {
            "topics": array_text([place[0] for place in places]),
            "ids": array_text([place[1] for place in places]),
            "counts": array_text([*map(len, places.values())]),
            "numbers": array_text([",".join(map(str, numbers)) for numbers in places.values()]),
        }
        found: dict[Place, int] = {}
        for at, numbers in connection.execute(self._heads, asked):
            place, ours = listed[at - 1]
            # None if all of them have ended meanwhile; then nothing is known to be in the way, and nothing is.
            others = {*map(int, numbers.split(","))}.difference(ours) if numbers else ()
            first = min((number for number in others if number < ours[-1]), default=None)
            if first is not None:
                found[place] = first
        return found

    def _by_number(self, connection: Connection, places: Mapping[Place, Sequence[int]]) -> dict[Place, int]:
        """Look at all that is unsent of these business ids, up to the last of ours."""
        columns = self._send.c
        ours = [number for numbers in places.values() for number in numbers]
        first = (
            select(columns.topic, columns.business_id, func.min(columns.number))
            .where(
                columns.state == SendState.NEW.value,
                among(self._kind, columns.business_id, {business_id for _, business_id in places}),
                columns.number < max(ours),
                not_(among(self._kind, columns.number, ours)),
                columns.is_ordered == 1,
            )
            .group_by(columns.topic, columns.business_id)
        )
        found = {(topic, business_id): number for topic, business_id, number in connection.execute(first)}
        return {place: found[place] for place in found.keys() & places.keys() if found[place] < places[place][-1]}

    def _facts(self, connection: Connection, found: Mapping[Place, int]) -> dict[Place, Blocker]:
        columns = self._send.c
        asked = select(columns.number, columns.due_at_ms, columns.claimed_by).where(
            among(self._kind, columns.number, found.values()), columns.state == SendState.NEW.value
        )
        facts = {row[0]: row for row in connection.execute(asked)}
        # One that was sent meanwhile blocks all the same: there may be another one behind it.
        return {
            place: Blocker(number, facts[number].due_at_ms, facts[number].claimed_by is not None)
            if number in facts
            else Blocker(number, 0, False)
            for place, number in found.items()
        }


_ERROR_CHARS_MAX: Final = 1000
_number: Final = itemgetter(0)  # of a row of `columns_of`, which begins with it


class Claims:
    """The sender table, as relays see it. Thread-safe: every call is one transaction."""

    def __init__(self, engine: Engine, send: Table) -> None:
        self._engine = background(engine)
        self._send = send
        columns = send.c
        self._is_new = columns.state == SendState.NEW.value
        # Of rows that are known by their numbers. PostgreSQL might go through its index of all unsent rows instead.
        self._is_still_new = self._is_new if is_mysql(engine) else columns.state.concat("") == SendState.NEW.value
        self._columns = columns_of(send)
        due = (
            select(columns.number)
            .where(self._is_new, columns.due_at_ms <= bindparam("now"))
            .order_by(columns.due_at_ms, columns.number)
            .limit(bindparam("limit"))
        )
        self._due = due
        self._pick = due.with_only_columns(*self._columns).with_for_update(skip_locked=True)
        self._pick_waiting = due.with_only_columns(*self._columns).with_for_update()
        own = update(send).values(claimed_by=bindparam("owner"), due_at_ms=bindparam("until")).returning(*self._columns)
        if engine.dialect.name == "postgresql":
            # As an array: for a join the planner may read the whole table.
            picked = func.array(due.with_for_update(skip_locked=True).scalar_subquery())
            self._own = own.where(columns.number == any_(picked))
        else:
            self._own = own.where(columns.number.in_(due.scalar_subquery()))

    # --- getting rows -------------------------------------------------------------------------------------------------

    def claim(self, limit: int, owner: str, now_ms: int, until_ms: int) -> list[Row[Any]]:
        """Unsent rows whose time has come, in the order of their insertion; ours until a moment."""
        asked = {"now": now_ms, "limit": limit}
        with self._engine.connect() as connection:
            if is_mysql(self._engine):
                pick = self._pick if skips_locked(self._engine) else self._pick_waiting
                rows = connection.execute(pick, asked).all()
                if rows:
                    self._put(connection, [row.number for row in rows], claimed_by=owner, due_at_ms=until_ms)
            else:
                # A write would lock out everybody else of SQLite: look first.
                is_sqlite = connection.dialect.name == "sqlite"
                if is_sqlite and connection.execute(self._due, asked | {"limit": 1}).first() is None:
                    return []
                go_by_index(connection)
                rows = connection.execute(self._own, asked | {"owner": owner, "until": until_ms}).all()
            connection.commit()
        return sorted(rows, key=_number)

    def look(self, send_ids: Sequence[str]) -> list[Row[Any]]:
        """Those of these rows that are committed, with `claimed_by` and `due_at_ms`."""
        send = self._send
        asked = select(*self._columns, send.c.claimed_by, send.c.due_at_ms).where(self._among(send.c.send_id, send_ids))
        with self._engine.connect() as connection:
            return sorted(connection.execute(asked), key=_number)

    def keep(self, numbers: Sequence[int], owner: str, until_ms: int) -> list[int]:
        """Make claims of ours last longer; those that still are ours."""
        columns = self._send.c
        with self._engine.begin() as connection:
            is_ours = and_(self._among(columns.number, numbers), self._is_new, columns.claimed_by == owner)
            connection.execute(update(self._send).where(is_ours).values(due_at_ms=until_ms))
            return [*connection.scalars(select(columns.number).where(is_ours, columns.due_at_ms == until_ms))]

    # --- what becomes of them -----------------------------------------------------------------------------------------

    def sent(self, rows: Iterable[Row[Any]], now_ms: int, ask_at_ms: int) -> None:
        """A broker has these: results are waited for until a moment, or nothing more is expected."""
        waiting: list[int] = []
        ended: list[int] = []
        for row in rows:
            (ended if row.expected_groups == "" else waiting).append(row.number)
        attempts = self._send.c.attempts + 1
        common: dict[str, Any] = {"claimed_by": None, "attempts": attempts, "sent_at_ms": now_ms, "last_error": None}
        with self._engine.begin() as connection:
            if waiting:
                self._put(connection, waiting, state=SendState.SENT.value, due_at_ms=ask_at_ms, **common)
            if ended:
                self._put(connection, ended, state=SendState.DONE.value, ended_at_ms=now_ms, **common)

    def failed(self, rows: Sequence[Row[Any]], error: str, due_at_ms: int) -> None:
        """These rows of one topic were refused: to be tried again, and with them all that waits behind them."""
        columns = self._send.c
        said = error[:_ERROR_CHARS_MAX].replace("\0", "\u2400")
        ordered = [row for row in rows if row.is_ordered]
        with self._engine.begin() as connection:
            self._put(
                connection,
                [row.number for row in rows],
                attempts=columns.attempts + 1,
                last_error=said,
                claimed_by=None,
                due_at_ms=due_at_ms,
            )
            if ordered:
                # At one stroke: a long tail would else be claimed, found blocked and given back piece by piece.
                behind = and_(
                    self._is_new,
                    self._among(columns.business_id, {row.business_id for row in ordered}),
                    columns.topic == ordered[0].topic,
                    columns.is_ordered == 1,
                    columns.number > min(row.number for row in ordered),
                    columns.due_at_ms < due_at_ms,
                )
                connection.execute(update(self._send).where(behind).values(due_at_ms=due_at_ms))

    def release(self, numbers: Sequence[int], due_at_ms: int | None = None) -> None:
        """Give rows back, to be looked at at a moment; left out, at once, and before all that came behind them."""
        if numbers:
            due = self._send.c.created_at_ms if due_at_ms is None else due_at_ms
            with self._engine.begin() as connection:
                self._put(connection, numbers, claimed_by=None, due_at_ms=due)

    def _among(self, column: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
        return among(self._engine.dialect.name, column, values)

    def _put(self, connection: Connection, numbers: Sequence[int], **values: Any) -> None:
        # A result may have come meanwhile and ended the row; its number says enough otherwise.
        chosen = self._among(self._send.c.number, numbers)
        connection.execute(update(self._send).where(chosen, self._is_still_new).values(**values))
