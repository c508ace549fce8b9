"""The compensator: mends what got lost between sender and consumer, by asking (T-06).

It takes rows that were sent a while ago (10 minutes, `MessageService(result_after=)`) and have no result, and asks the
confirm service of every group that is expected to answer and has not:

- it was consumed → the result is written down, as if it had come by its topic, reverse business included;
- it was not, and the group has nothing left to consume → it is sent again with the same send id; the inbox knows it;
- it was not, and messages wait for the group → it may be among them: the first few times, it is waited for;
- no confirm service answers → nothing is known: it is left alone. A message is not sent again while that is so, since
  the broker still has it for the group, and a consumer that is down would find it many times;
- after `tries` checks a person is told, once. It is still asked about from then on, less often, and ended if possible.

What always holds: of two compensators that ask at once, in any process, no row goes to both; a row that its owner does
not finish is free again when its claim is over; a row whose result came meanwhile is not touched any more; each check
is counted in the row, so a restart forgets nothing.

Asks groups what messages came to: any live instance of a group's confirm service, found in the registry.

What always holds: an answer is one that an instance gave; where none did, nothing is known, which is not the same as
"not consumed".
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import Engine, Row, bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from dmq.client.client import Client
from dmq.client.producer.producer import Producer
from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, InvalidSettings, NotConnected
from dmq.event_log import EventLog
from dmq.outbox.alerts import Alert, AlertKind
from dmq.outbox.engines import background, skips_locked
from dmq.outbox.repair.confirm_service import IDS_MAX, NAMESPACE, Confirmed, ask_address
from dmq.outbox.schema import OutboxTables
from dmq.outbox.sender.envelope import Result, pack_result, result_topic
from dmq.outbox.sender.message_row import OutboxMessage, columns_of, parse_row
from dmq.outbox.sender.relay import make_owner
from dmq.outbox.sender.service import MessageService
from dmq.outbox.states import BusinessState, SendState

__all__ = ["Compensation", "Compensator", "ConfirmClient", "Overdue"]

log = EventLog(__name__)


_WAITING = (str(SendState.SENT), str(SendState.ALERTED))


class Overdue:
    """The sender table, as compensators see it. Thread-safe: every call is one transaction."""

    def __init__(self, engine: Engine, tables: OutboxTables) -> None:
        self._engine = background(engine)
        self._tables = tables
        columns = tables.send.c
        self._due = (
            select(columns.number)
            .where(columns.state.in_(_WAITING), columns.due_at_ms <= bindparam("now"))
            .order_by(columns.due_at_ms, columns.number)
            .limit(bindparam("limit"))
        )
        self._pick = self._due.with_only_columns(*columns_of(tables.send))
        self._own = (
            update(tables.send)
            .where(columns.number.in_(self._due.scalar_subquery()))
            .values(claimed_by=bindparam("owner"), due_at_ms=bindparam("until"))
            .returning(*columns_of(tables.send))
        )

    def claim(self, limit: int, owner: str, now_ms: int, until_ms: int) -> list[OutboxMessage]:
        """Rows whose result is overdue; ours until a moment."""
        asked = {"now": now_ms, "limit": limit}
        rows: Sequence[Row[Any]]
        with self._engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                # A write would lock out everybody: look first.
                if connection.execute(self._due, asked | {"limit": 1}).first() is None:
                    return []
                rows = connection.execute(self._own, asked | {"owner": owner, "until": until_ms}).all()
            else:
                rows = connection.execute(
                    self._pick.with_for_update(skip_locked=skips_locked(self._engine)), asked
                ).all()
                if rows:
                    send = self._tables.send
                    mine = update(send).where(send.c.number.in_([row.number for row in rows]))
                    connection.execute(mine.values(claimed_by=owner, due_at_ms=until_ms))
            connection.commit()
        return sorted(map(parse_row, rows), key=lambda row: row.number)

    def answered(self, send_ids: Sequence[str]) -> dict[str, set[str]]:
        """By send id, the groups whose success is known."""
        columns = self._tables.result.c
        found: dict[str, set[str]] = {}
        asked = select(columns.send_id, columns.consumer_group).where(
            columns.send_id.in_(send_ids), columns.business_state == str(BusinessState.SUCCESS)
        )
        with self._engine.connect() as connection:
            for send_id, group in connection.execute(asked):
                found.setdefault(send_id, set()).add(group)
        return found

    def put(self, rows: Sequence[OutboxMessage], owner: str, **values: Any) -> int:
        """Change rows that still are ours and have no result, and give them back; how many that were."""
        if not rows:
            return 0
        send = self._tables.send
        chosen = update(send).where(
            send.c.number.in_([row.number for row in rows]), send.c.claimed_by == owner, send.c.state.in_(_WAITING)
        )
        with self._engine.begin() as connection:
            return connection.execute(chosen.values(claimed_by=None, checks=send.c.checks + 1, **values)).rowcount


_CLAIM_MS: Final = 60_000


class Compensation(NamedTuple):
    """What one round did, in rows."""

    asked: int = 0
    updated: int = 0  # a result was found, and written down or passed on
    resent: int = 0
    waiting: int = 0  # nothing could be done yet
    alerted: int = 0

    def __add__(self, other: object) -> Compensation:
        assert isinstance(other, Compensation)
        return Compensation(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Compensator:
    """Asks about results that are overdue. A context manager that starts a thread, or call `run_once`.

    Parameters:
        service: of the sender; its alerts and counts are used, too.
        client: a connection to a broker; the service's if left out.
        again: seconds until a row that could not be mended is asked about again.
        tries: after this many checks a person is told.
        backlog_tries: this many checks wait for a group that has messages left to consume.
        alerted_again: seconds until a row is asked about again after that.
        poll: seconds between two looks into the table, of the thread.
        batch: rows of one round.
        timeout: seconds one confirm service has for an answer.
        passes_on: a refusal is not written down here but sent to the results topic, for the service that knows the
            reverse business; for compensators that run in another process.
        clock: for tests; the machine's if left out.

    Raises:
        InvalidSettings: a value makes no sense.
    """

    def __init__(
        self,
        service: MessageService,
        client: Client | None = None,
        *,
        again: float = 60.0,
        tries: int = 10,
        backlog_tries: int = 3,
        alerted_again: float = 3600.0,
        poll: float = 5.0,
        batch: int = 200,
        timeout: float = 5.0,
        passes_on: bool = False,
        clock: Clock | None = None,
    ) -> None:
        found = client or service.client
        if found is None:
            raise InvalidSettings("a compensator needs a connection to a broker: pass client=")
        if min(again, alerted_again, poll, timeout) <= 0 or min(tries, batch) < 1 or backlog_tries < 0:
            raise InvalidSettings("times of a compensator are above 0, and tries and batch from 1 on")
        self._service = service
        self._client = found
        self._asker = ConfirmClient(found, timeout)
        self._overdue = Overdue(service.engine, service.tables)
        self._owner = make_owner()
        self._again_ms, self._alerted_ms = round(again * 1000), round(alerted_again * 1000)
        self._tries, self._backlog_tries = tries, backlog_tries
        self._poll, self._batch = poll, batch
        self._passes_on = passes_on
        self._clock = clock or SystemClock()
        self._producer: Producer | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # --- one round --------------------------------------------------------------------------------------------------

    def run_once(self) -> Compensation:
        """Ask about every row that is overdue now.

        Raises:
            SQLAlchemyError: the database cannot be used.
            DMQError: no broker can be reached.
        """
        done = Compensation()
        while not self._ending.is_set():
            now_ms = self._clock.now_ms()
            rows = self._overdue.claim(self._batch, self._owner, now_ms, now_ms + _CLAIM_MS)
            if not rows:
                break
            done += self._mend(rows)
            if len(rows) < self._batch:
                break
        return done

    def _mend(self, rows: list[OutboxMessage]) -> Compensation:
        missing = self._missing(rows)
        said = {
            group: self._asker.ask(group, [row.send_id for row in rows if group in missing[row.send_id]])
            for group in sorted({group for groups in missing.values() for group in groups})
        }
        self._service.counts.add("asked", len(rows))
        updated, resend, wait, alert = 0, [], [], dict[str, list[OutboxMessage]]()
        for row in rows:
            answers = {group: said[group] for group in missing[row.send_id]}
            if self._update(row, answers):
                updated += 1
                continue
            reason, may_resend = self._judge(row, answers)
            if row.checks + 1 >= self._tries and row.state is not SendState.ALERTED:
                alert.setdefault(reason, []).append(row)
            elif may_resend and row.state is not SendState.ALERTED:
                resend.append(row)
            else:
                wait.append(row)
        self._put_off(wait)
        return Compensation(len(rows), updated, self._resend(resend), len(wait), alerted=self._tell(alert))

    def _missing(self, rows: Iterable[OutboxMessage]) -> dict[str, list[str]]:
        """By send id, the groups that have not answered. Of a row that expects anybody's answer, all that consume."""
        rows = [*rows]
        answered = self._overdue.answered([row.send_id for row in rows])
        consuming = {row.topic: self._asker.groups_of(row.topic) for row in rows if row.groups is None}
        return {
            row.send_id: [
                group
                for group in (consuming[row.topic] if row.groups is None else row.groups)
                if group not in answered.get(row.send_id, ())
            ]
            for row in rows
        }

    # --- what becomes of a row --------------------------------------------------------------------------------------

    def _update(self, row: OutboxMessage, answers: Mapping[str, Mapping[str, Confirmed | None] | None]) -> bool:
        """Write down what groups said; whether the row has come to its end, or will by what was passed on."""
        is_over = False
        for group, answer in answers.items():
            found = None if answer is None else answer.get(row.send_id)
            if found is None or found.state is BusinessState.UNKNOWN:
                continue
            result = Result(
                send_id=row.send_id,
                topic=row.topic,
                group=group,
                state=found.state,
                consumer_id=found.consumer_id,
                at_ms=found.at_ms,
                reason=found.reason,
            )
            try:
                is_over = self._apply(row, result) or is_over
            except Exception as error:
                # The reverse business, most likely: the row is asked about again.
                log.warning("a result could not be applied", once_for=(), send_id=row.send_id, exc_info=error)
        return is_over

    def _apply(self, row: OutboxMessage, result: Result) -> bool:
        if result.state is BusinessState.ROLLBACK and self._passes_on:
            message = pack_result(result, row.app)
            self._results.send(result_topic(row.topic), message.body, key=message.key, tag=message.tag)
            self._overdue.put([row], self._owner, due_at_ms=self._clock.now_ms() + self._again_ms)
            return True
        state = self._service.apply_result(result)
        return state is None or state not in (SendState.NEW, SendState.SENT, SendState.ALERTED)

    def _judge(
        self, row: OutboxMessage, answers: Mapping[str, Mapping[str, Confirmed | None] | None]
    ) -> tuple[str, bool]:
        """Why there is no result, and whether sending again may help."""
        silent = [group for group, answer in answers.items() if answer is None]
        idle = [group for group, answer in answers.items() if answer is not None and answer.get(row.send_id) is None]
        if silent or not answers:
            who = ", ".join(silent) or "any group"
            # Where anybody's answer is enough and nobody consumes, sending again makes nobody consume.
            return f"no confirm service of {who} could be asked", False
        if not idle:
            return "its result could not be applied", False
        if row.checks < self._backlog_tries and any(self._asker.has_backlog(row.topic, group) for group in idle):
            return f"{', '.join(idle)} did not consume it yet", False
        return f"{', '.join(idle)} did not consume it", True

    def _resend(self, rows: list[OutboxMessage]) -> int:
        ours = self._overdue.put(rows, self._owner, due_at_ms=self._clock.now_ms() + self._again_ms)
        return self._service.resend([row.send_id for row in rows]) if ours else 0

    def _put_off(self, rows: list[OutboxMessage]) -> None:
        now_ms = self._clock.now_ms()
        alerted = [row for row in rows if row.state is SendState.ALERTED]
        others = [row for row in rows if row.state is not SendState.ALERTED]
        self._overdue.put(others, self._owner, due_at_ms=now_ms + self._again_ms)
        self._overdue.put(alerted, self._owner, due_at_ms=now_ms + self._alerted_ms)

    def _tell(self, reasons: Mapping[str, list[OutboxMessage]]) -> int:
        """Tell a person, once for all rows of a topic that have the same trouble."""
        due_at_ms = self._clock.now_ms() + self._alerted_ms
        for reason, rows in reasons.items():
            self._overdue.put(rows, self._owner, state=str(SendState.ALERTED), due_at_ms=due_at_ms, last_error=reason)
            for topic in sorted({row.topic for row in rows}):
                mine = [row for row in rows if row.topic == topic]
                self._service.alert(
                    Alert(
                        kind=AlertKind.NO_RESULT,
                        send_id=mine[0].send_id,
                        topic=topic,
                        business_id=mine[0].business_id,
                        attempts=mine[0].checks + 1,
                        reason=reason,
                        count=len(mine),
                    )
                )
        return sum(map(len, reasons.values()))

    @property
    def _results(self) -> Producer:
        if self._producer is None:
            self._producer = self._client.producer()
        return self._producer

    # --- as a thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look into the table again and again, in a thread. Safe to call twice."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="dmq-compensator", daemon=True)
            self._thread.start()

    def run(self) -> None:
        """The same in this thread, until `stop`."""
        while not self._ending.is_set():
            try:
                self.run_once()
            except (DMQError, SQLAlchemyError) as error:
                log.warning("the compensator could not work: it tries again", once_for=(), error=error)
            except Exception:
                log.exception("the compensator could not work: it tries again", once_for=())
            self._ending.wait(self._poll)

    def stop(self) -> None:
        """Let `run` come to its end, without waiting."""
        self._ending.set()

    def close(self) -> None:
        """Stop; what is claimed is free again in a minute."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        if self._producer is not None:
            self._producer.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ConfirmClient:
    """Asks confirm services.

    Parameters:
        timeout: seconds one instance has for an answer.
    """

    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def ask(self, group: str, send_ids: Sequence[str]) -> dict[str, Confirmed | None] | None:
        """What each message came to in a group; None for one that was not consumed.

        Returns:
            None if nobody could be asked about all of them.
        """
        found: dict[str, Confirmed | None] = {}
        for start in range(0, len(send_ids), IDS_MAX):
            part = [*send_ids[start : start + IDS_MAX]]
            said = self._ask_any(group, part)
            if said is None:
                return None
            found |= {send_id: said.get(send_id) for send_id in part}
        return found

    def _ask_any(self, group: str, send_ids: list[str]) -> dict[str, Confirmed] | None:
        addresses = [*self._client.registry.entries(NAMESPACE, f"{group}/").values()]
        random.shuffle(addresses)
        for address in addresses:
            try:
                return ask_address(address.decode(errors="replace"), group, send_ids, self._timeout)
            except NotConnected as error:
                log.info("a confirm service did not answer", group=group, error=error)
        return None

    def groups_of(self, topic: str) -> list[str]:
        """The groups that consume a topic.

        Raises:
            DMQError: the broker does not say.
        """
        return [group.name for group in self._client.admin.groups(topic)]

    def has_backlog(self, topic: str, group: str) -> bool:
        """Whether messages wait for a group, so that one which is missing may be among them."""
        try:
            found = [report for report in self._client.admin.groups(topic) if report.name == group]
        except DMQError:
            return True
        return any(report.lag or report.retrying for report in found)
