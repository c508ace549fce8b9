"""Results in the sender's tables: what each group answered, which rows are done, and the reverse business (T-04, T-05).

What always holds: a result counts once, however often it comes; a row is done when every group it expects has answered
SUCCESS; the reverse business of a row runs in the transaction that says so in the row, so it has run exactly when the
row says REVERSED; one that fails leaves nothing behind and is tried again.

The sender's result consumer: one thread for each topic that was sent to (T-04).

What always holds: a result is acked only after it is in the table; one whose reverse business fails comes again, later
and later, as long as it takes, and holds up no other; results of other apps never arrive here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import Engine, Row, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from dmq.clock import Clock
from dmq.errors import DMQError, InvalidMessage, UnknownTopic
from dmq.event_log import EventLog
from dmq.outbox.alerts import Alert, AlertKind, OnAlert
from dmq.outbox.engines import among, background, is_mysql
from dmq.outbox.metrics import Counts
from dmq.outbox.schema import OutboxTables
from dmq.outbox.sender.envelope import Result, result_topic, unpack_result
from dmq.outbox.sender.message_row import Executes, OutboxMessage, columns_of, parse_groups, parse_row
from dmq.outbox.states import ENDS, BusinessState, SendState

if TYPE_CHECKING:
    from dmq.client.client import Client
    from dmq.client.consumer.consumer import Consumer
    from dmq.client.consumer.message import Batch, ReceivedMessage

__all__ = ["ResultBook", "ResultConsumers", "Reverse"]

Reverse: TypeAlias = Callable[[Session, OutboxMessage, Result], Any]

_REASON_CHARS_MAX: Final = 4000
_ENDS: Final = frozenset(map(str, ENDS))


class ResultBook:
    """Writes results down. Thread-safe.

    Parameters:
        sessions: makes the session in which a reverse business runs.
        reverse: by topic.
    """

    def __init__(
        self,
        engine: Engine,
        tables: OutboxTables,
        sessions: Callable[[], Session],
        reverse: Mapping[str, Reverse],
        counts: Counts,
        clock: Clock,
    ) -> None:
        self._engine = background(engine)
        self._kind = engine.dialect.name
        self._tables = tables
        self._sessions = sessions
        self._reverse = reverse
        self._counts = counts
        self._clock = clock
        self._upsert = _upsert_of(engine, tables)

    def apply(self, result: Result) -> SendState | None:
        """Write one result down, and run the reverse business if it asks for that.

        Returns:
            What the row is now; None if there is no such row.

        Raises:
            Exception: whatever the reverse business raised; nothing was written.
            SQLAlchemyError: the database cannot be used.
        """
        if result.state is BusinessState.SUCCESS:
            return self.succeeded([result])[result.send_id]
        with self._sessions() as session, session.begin():
            row = self._lock(session, [result.send_id]).get(result.send_id)
            if row is None:
                self._counts.add("results_unknown")
                return None
            self._note(session, [result])
            if not _may_reverse(row, result.group):
                self._counts.add("results_ignored")
                return SendState(row.state)
            reverse = self._reverse.get(row.topic)
            if reverse is not None:
                reverse(session, parse_row(row), result)
            state = SendState.ROLLED_BACK if reverse is None else SendState.REVERSED
            self._end(session, [result.send_id], state)
        self._counts.add("rolled_back")
        self._counts.add("reversed", int(reverse is not None))
        return state

    def succeeded(self, results: Sequence[Result]) -> dict[str, SendState | None]:
        """Write down results that all say SUCCESS; by send id what the rows are now.

        Raises:
            SQLAlchemyError: the database cannot be used; nothing was written.
        """
        with self._engine.begin() as connection:
            rows = self._lock(connection, sorted({result.send_id for result in results}))
            known = [result for result in results if result.send_id in rows]
            self._note(connection, known)
            done = self._complete(connection, rows)
            self._end(connection, done, SendState.DONE)
        self._counts.add("results_unknown", len(results) - len(known))
        self._counts.add("done", len(done))
        states: dict[str, SendState | None] = {send_id: SendState(row.state) for send_id, row in rows.items()}
        states |= dict.fromkeys(done, SendState.DONE)
        return {result.send_id: states.get(result.send_id) for result in results}

    # --- within one transaction ---------------------------------------------------------------------------------------

    def _lock(self, session: Executes, send_ids: Sequence[str]) -> dict[str, Row[Any]]:
        """The rows, so that nobody else changes them until the end of the transaction."""
        send = self._tables.send
        chosen = among(self._kind, send.c.send_id, send_ids)
        if self._engine.dialect.name == "sqlite":
            # No row locks there: a write, of nothing, keeps the others out before we look.
            session.execute(update(send).where(chosen).values(checks=send.c.checks))
        asked = select(*columns_of(send)).where(chosen).order_by(send.c.number).with_for_update()
        return {row.send_id: row for row in session.execute(asked)}

    def _note(self, session: Executes, results: Sequence[Result]) -> None:
        """Write the answers down, the last word of each group."""
        now_ms = self._clock.now_ms()
        rows = {
            (result.send_id, result.group): {
                "send_id": result.send_id,
                "consumer_group": result.group,
                "business_state": str(result.state),
                "consumer_id": result.consumer_id,
                "reason": result.reason[:_REASON_CHARS_MAX].replace("\0", "\u2400") or None,
                "consumed_at_ms": result.at_ms,
                "received_at_ms": now_ms,
            }
            for result in results
        }
        if rows:
            session.execute(self._upsert, [rows[key] for key in sorted(rows)])

    def _complete(self, session: Executes, rows: Mapping[str, Row[Any]]) -> list[str]:
        """Which of these are done, now that an answer of SUCCESS has come for each."""
        done: list[str] = []
        several: dict[str, frozenset[str]] = {}
        for send_id, row in rows.items():
            if row.state in _ENDS:
                continue
            groups = parse_groups(row.expected_groups)
            if groups:
                several[send_id] = frozenset(groups)
            else:
                done.append(send_id)
        if several:
            answered: dict[str, set[str]] = {}
            columns = self._tables.result.c
            asked = select(columns.send_id, columns.consumer_group).where(
                among(self._kind, columns.send_id, several), columns.business_state == str(BusinessState.SUCCESS)
            )
            for send_id, group in session.execute(asked):
                answered.setdefault(send_id, set()).add(group)
            done += [send_id for send_id, groups in several.items() if groups <= answered.get(send_id, set())]
        return done

    def _end(self, session: Executes, send_ids: Sequence[str], state: SendState) -> None:
        if send_ids:
            send = self._tables.send
            session.execute(
                update(send)
                .where(among(self._kind, send.c.send_id, send_ids))
                .values(state=str(state), ended_at_ms=self._clock.now_ms(), claimed_by=None)
            )


def _may_reverse(row: Row[Any], group: str) -> bool:
    """Whether a refusal by this group is one that counts, and the first of them."""
    groups = parse_groups(row.expected_groups)
    if groups is None:  # anybody's; also of a second group, after the first has made it done
        return row.state not in (SendState.ROLLED_BACK, SendState.REVERSED)
    return group in groups and row.state not in _ENDS


def _upsert_of(engine: Engine, tables: OutboxTables) -> Any:
    """An answer, or another one of the same group."""
    changed = ("business_state", "consumer_id", "reason", "consumed_at_ms", "received_at_ms")
    if is_mysql(engine):
        put = mysql.insert(tables.result)
        return put.on_duplicate_key_update({name: put.inserted[name] for name in changed})
    insert: Any = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
    put = insert(tables.result)
    return put.on_conflict_do_update(
        index_elements=["send_id", "consumer_group"], set_={name: put.excluded[name] for name in changed}
    )


log = EventLog(__name__)

_BATCH: Final = 500
_WAIT_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 1.0
_LEASE_SECONDS: Final = 60.0


def result_group(app: str) -> str:
    """The group in which an app gets its results."""
    return f"outbox-{app}"


class ResultConsumers:
    """Listens for the results of some topics. Thread-safe."""

    def __init__(
        self, client: Client, app: str, book: ResultBook, alert_after: int, alert: OnAlert, counts: Counts
    ) -> None:
        self._client = client
        self._app = app
        self._book = book
        self._alert_after = alert_after
        self._alert = alert
        self._counts = counts
        self._mutex = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._ending = threading.Event()

    def listen(self, topics: Iterable[str]) -> None:
        """See that the results of these topics are listened for."""
        for topic in topics:
            if topic in self._threads:
                continue
            with self._mutex:
                if topic in self._threads or self._ending.is_set():
                    continue
                thread = threading.Thread(
                    target=self._run, args=(topic,), name=f"dmq-outbox-results-{topic}", daemon=True
                )
                self._threads[topic] = thread
            thread.start()

    def close(self, timeout: float = 10.0) -> None:
        self._ending.set()
        for thread in [*self._threads.values()]:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self, topic: str) -> None:
        """Consume until closed, over every trouble."""
        is_told = False
        while not self._ending.is_set():
            consumer: Consumer | None = None
            try:
                consumer = self._client.consumer(
                    result_topic(topic), result_group(self._app), tags=self._app, max_attempts=None,
                    lease=_LEASE_SECONDS,
                )  # fmt: skip
                while not self._ending.is_set():
                    batch = consumer.pull(_BATCH, _WAIT_SECONDS)
                    is_told = False
                    if len(batch):
                        self.take(batch)
            except (DMQError, SQLAlchemyError) as error:
                self._counts.add("result_errors")
                if not is_told and not isinstance(error, UnknownTopic):
                    log.warning("results wait", once_for=topic, topic=topic, reason=error)
                is_told = True
            except Exception:
                log.exception("results could not be taken; they come again", once_for=topic, topic=topic)
            finally:
                self._leave(consumer)
            self._ending.wait(_AGAIN_SECONDS)

    @staticmethod
    def _leave(consumer: Consumer | None) -> None:
        """What was not acked goes back."""
        if consumer is not None:
            try:
                consumer.close()
            except DMQError:
                pass  # the broker notices by itself

    def take(self, batch: Batch[ReceivedMessage]) -> None:
        """Write results down and ack them.

        Raises:
            SQLAlchemyError: the database cannot be used; nothing that was not written is acked.
        """
        good: list[tuple[ReceivedMessage, Result]] = []
        refused: list[tuple[ReceivedMessage, Result]] = []
        for message in batch:
            try:
                result = unpack_result(message.body)
            except InvalidMessage as error:
                self._counts.add("results_unreadable")
                message.reject(str(error))
                continue
            (good if result.state is BusinessState.SUCCESS else refused).append((message, result))
        if good:
            self._book.succeeded([result for _, result in good])
            self._counts.add("results", len(good))
            for message, _ in good:
                message.ack()
        for message, result in refused:
            self._reverse(message, result)

    def _reverse(self, message: ReceivedMessage, result: Result) -> None:
        try:
            self._book.apply(result)
        except SQLAlchemyError:
            self._failed(message, result, "the database, or a statement of the reverse business, failed")
            raise
        except Exception as error:
            log.exception("the reverse business failed; it is tried again", once_for=(), send_id=result.send_id)
            self._failed(message, result, f"{type(error).__name__}: {error}")
            return
        self._counts.add("results")
        message.ack()

    def _failed(self, message: ReceivedMessage, result: Result, reason: str) -> None:
        self._counts.add("reverse_failed")
        attempt = message.attempt
        message.nack(reason=reason[:1000])
        if attempt == self._alert_after:
            self._alert(
                Alert(
                    kind=AlertKind.REVERSE,
                    send_id=result.send_id,
                    topic=result.topic,
                    group=result.group,
                    attempts=attempt,
                    reason=reason,
                )
            )
