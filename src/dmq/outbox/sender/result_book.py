"""Results in the sender's tables: what each group answered, which rows are done, and the reverse business (T-04, T-05).

What always holds: a result counts once, however often it comes; a row is done when every group it expects has answered
SUCCESS; the reverse business of a row runs in the transaction that says so in the row, so it has run exactly when the
row says REVERSED; one that fails leaves nothing behind and is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import Engine, Row, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import Session

from dmq.clock import Clock
from dmq.outbox.engines import among, background, is_mysql
from dmq.outbox.metrics import Counts
from dmq.outbox.schema import OutboxTables
from dmq.outbox.sender.envelope import Result
from dmq.outbox.sender.message_row import OutboxMessage, columns_of, parse_groups, parse_row
from dmq.outbox.sender.sequence import Executes
from dmq.outbox.states import ENDS, BusinessState, SendState

__all__ = ["ResultBook", "Reverse"]

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
