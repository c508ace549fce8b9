"""The outbox's tables in pages, to be compared with others, and orders to send messages again.

What always holds: a page is one short transaction, so that reading millions of rows locks nobody out; rows come in the
order of their send ids, which is that of time, each once; bodies are never read. A row that has ended is not sent
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Column, ColumnElement, Engine, Table, and_, inspect, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from dmq.errors import DatabaseDown
from dmq.outbox.engines import background, open_engine, sentence
from dmq.outbox.schema import PREFIX, OutboxTables, tables
from dmq.outbox.sender.envelope import floor_send_id
from dmq.outbox.states import SendState

__all__ = ["COLUMNS", "OutboxReader", "Period"]

T = TypeVar("T")

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "send": (
        "send_id",
        "app",
        "topic",
        "business_id",
        "sequence",
        "expected_groups",
        "state",
        "attempts",
        "created_at_ms",
        "sent_at_ms",
        "ended_at_ms",
        "last_error",
    ),
    "result": ("send_id", "consumer_group", "business_state", "consumer_id", "consumed_at_ms", "received_at_ms"),
    "consumer": (
        "send_id",
        "consumer_group",
        "topic",
        "business_id",
        "sequence",
        "business_state",
        "consumer_id",
        "created_at_ms",
        "consumed_at_ms",
    ),
}
_PAGE_ROWS: Final = 5000
_IDS_MAX: Final = 500  # in one statement
_RESENDABLE: Final = (SendState.SENT.value, SendState.ALERTED.value)


class Period(NamedTuple):
    """Messages made within these times: from the first on, before the second."""

    from_ms: int
    to_ms: int


class OutboxReader:
    """One database that has some of the tables. A context manager.

    Parameters:
        url: as SQLAlchemy writes it.
        prefix: of the tables' names.

    Raises:
        InvalidSettings: the URL can never work.
    """

    def __init__(self, url: str, prefix: str = PREFIX, *, option: str = "--outbox") -> None:
        self.url: Final = url
        self.prefix: Final = prefix
        self._engine: Engine = open_engine(url, option)
        self._quiet = background(self._engine)
        self._tables: OutboxTables = tables(prefix)

    def __enter__(self) -> OutboxReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()

    @property
    def is_file(self) -> bool:
        """Whether it is a file, which other machines do not reach."""
        return self._engine.dialect.name == "sqlite"

    def there(self) -> list[str]:
        """Which of the tables it has: `send`, `result`, `consumer`.

        Raises:
            DatabaseDown: it cannot be reached.
        """

        def look() -> list[str]:
            found = inspect(self._engine)
            return [what for what in COLUMNS if found.has_table(self._table(what).name)]

        return self._guarded(look)

    def pages(self, what: str, period: Period, page_rows: int = _PAGE_ROWS) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a table about messages made within a period, in the columns of `COLUMNS`.

        Raises:
            DatabaseDown: it cannot be reached.
        """
        table = self._table(what)
        order = [table.c.send_id] if what == "send" else [table.c.send_id, table.c.consumer_group]
        asked = (
            select(*(table.c[name] for name in COLUMNS[what]))
            .where(table.c.send_id >= floor_send_id(period.from_ms), table.c.send_id < floor_send_id(period.to_ms))
            .order_by(*order)
            .limit(page_rows)
        )
        last: tuple[Any, ...] | None = None
        while True:
            rows = self._rows(asked if last is None else asked.where(_behind(order, last)))
            if rows:
                yield rows
            if len(rows) < page_rows:
                return
            last = tuple(rows[-1][: len(order)])

    def _rows(self, asked: Any) -> list[tuple[Any, ...]]:
        def look() -> list[tuple[Any, ...]]:
            with self._quiet.connect() as connection:
                return [tuple(row) for row in connection.execute(asked)]

        return self._guarded(look)

    def send_again(self, send_ids: Sequence[str], now_ms: int | None = None) -> int:
        """Put rows back among those that wait to be sent, so that the relay sends them; returns how many.

        Rows that have ended, or wait already, stay as they are. Consumers know a message by its send id, and skip one
        that they had.

        Raises:
            DatabaseDown: it cannot be reached.
        """
        send = self._table("send")
        due_at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms

        def put() -> int:
            count = 0
            for start in range(0, len(send_ids), _IDS_MAX):
                chosen = send.c.send_id.in_(send_ids[start : start + _IDS_MAX])
                change = update(send).where(chosen, send.c.state.in_(_RESENDABLE))
                values = {"state": SendState.NEW.value, "claimed_by": None, "due_at_ms": due_at_ms}
                with self._quiet.begin() as connection:
                    count += connection.execute(change.values(**values)).rowcount
            return count

        return self._guarded(put)

    def _table(self, what: str) -> Table:
        found: Table = getattr(self._tables, what)
        return found

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except SQLAlchemyError as error:
            raise DatabaseDown(sentence(error, self._engine)) from error


def _behind(order: Sequence[Column[Any]], last: Sequence[Any]) -> ColumnElement[bool]:
    """What follows a row; not compared as a pair, for which MySQL uses no index."""
    further: ColumnElement[bool] = order[0] > last[0]
    if len(order) == 1:
        return further
    return and_(order[0] >= last[0], or_(further, order[1] > last[1]))
