"""The store of dead letters: put, list, claim, mark, delete. Blocking; one thread uses it at a time.

What always holds: putting a letter twice keeps the first, whatever has become of it since; a letter that the database
refuses for good is named, and the others of its batch are kept; a database that cannot be reached, or is full, is
`DatabaseDown`, and nothing was done. A claim is a broker's word that it is resending a letter: nobody else touches it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select, text, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, SQLAlchemyError, StatementError

from dmq.deadletters.engines import insert_new, make_engine
from dmq.deadletters.letter import TEXT_CHARS_MAX, DeadLetter, LetterFilter, LetterState
from dmq.deadletters.schema import LETTERS, make_schema
from dmq.deadletters.url import check_url, shown
from dmq.errors import DatabaseDown
from dmq.model import MessageId

__all__ = ["Claimed", "DeadLetterStore", "Page", "Refused"]

T = TypeVar("T")

_PACKET_TOO_LARGE: Final = 1153  # MySQL's
_ESCAPED: Final = 2  # a driver may write a byte as two
_HEAD_BYTES: Final = 1024  # of a row beside its texts and body
_NAMES: Final = [column.name for column in LETTERS.c if column.name != "number"]
_COLUMNS: Final = [column for column in LETTERS.c if column.name not in ("body", "attributes")]


class Refused(NamedTuple):
    """A letter that the database will never take: which of those given, and why."""

    place: int
    error: str


class Page(NamedTuple):
    """Some letters, by number; `more` says that others follow."""

    letters: list[DeadLetter]
    more: bool


class Claimed(NamedTuple):
    """Letters that are ours to resend, as they were before, and why the others are not."""

    letters: list[DeadLetter]
    problems: dict[int, str]
    left: list[int]  # not looked at: there was no room


class DeadLetterStore:
    """The dead letters of a broker in a database.

    Parameters:
        url: where, see `dmq.deadletters.url`.
        keep_open: `close` leaves it as it is, since somebody else will use it again.

    Raises:
        InvalidSettings: the URL can never work.
    """

    def __init__(self, url: str, *, keep_open: bool = False) -> None:
        self.url = check_url(url)
        self._keep_open = keep_open
        self._engine = make_engine(self.url)
        self._kind = self._engine.dialect.name
        self._insert = insert_new(self._kind)
        self._packet_bytes: int | None = None
        self._is_ready = False

    def open(self) -> None:
        """Connect, and make the tables if they do not exist.

        Raises:
            DatabaseDown: it cannot be reached.
            WrongFormat: another version of DMQ made the tables.
        """
        self._guarded(self._open)

    def _open(self) -> None:
        make_schema(self._engine)
        if self._kind in ("mysql", "mariadb"):
            with self._engine.connect() as connection:
                self._packet_bytes = connection.scalar(text("SELECT @@max_allowed_packet"))
        self._is_ready = True

    def close(self) -> None:
        """Let go of the connections."""
        if not self._keep_open:
            self.dispose()

    def dispose(self) -> None:
        """Let go of the connections, `keep_open` or not."""
        self._engine.dispose()
        self._is_ready = False

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (SQLAlchemyError, OSError) as error:
            self._engine.dispose() if self._kind != "sqlite" else None
            raise self._down(error) from error

    def _down(self, error: Exception) -> DatabaseDown:
        cause = getattr(error, "orig", None) or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        return DatabaseDown(
            f"the database of dead letters at {shown(self.url)} cannot be used: {reason}; they wait in the journal "
            "meanwhile: check broker.dead_letters_url and the database"
        )

    def _do(self, work: Callable[[Connection], T]) -> T:
        """Some work in one transaction."""

        def run() -> T:
            if not self._is_ready:
                self._open()
            with self._engine.begin() as connection:
                return work(connection)

        return self._guarded(run)

    # --- putting ----------------------------------------------------------------------------------------------------

    def put(self, letters: Sequence[DeadLetter]) -> list[Refused]:
        """Keep letters; those that exist already stay as they are.

        Returns:
            What the database refused for good.

        Raises:
            DatabaseDown: none of the others may be taken for kept.
        """
        if not self._is_ready:
            self.open()
        refused: list[Refused] = []
        rows: list[tuple[int, dict[str, Any]]] = []
        for index, letter in enumerate(letters):
            size = _ESCAPED * (len(letter.body) + len(letter.attributes)) + _HEAD_BYTES
            if self._packet_bytes is not None and size > self._packet_bytes:
                refused.append(Refused(index, f"{size} bytes may not fit max_allowed_packet = {self._packet_bytes}"))
            else:
                rows.append((index, _row(letter)))
        self._put(rows, refused)
        return sorted(refused)

    def _put(self, rows: list[tuple[int, dict[str, Any]]], refused: list[Refused]) -> None:
        if not rows:
            return
        try:
            with self._engine.begin() as connection:
                connection.execute(self._insert, [row for _, row in rows])
        except (SQLAlchemyError, ValueError, OverflowError, OSError) as error:
            if not _is_rows_fault(error):
                raise self._down(error) from error
            if len(rows) == 1:
                cause = getattr(error, "orig", None) or error
                refused.append(Refused(rows[0][0], " ".join(str(cause).split())[:300]))
                return
            middle = len(rows) // 2
            self._put(rows[:middle], refused)
            self._put(rows[middle:], refused)

    # --- looking ----------------------------------------------------------------------------------------------------

    def page(
        self,
        wanted: LetterFilter,
        after: int = 0,
        limit: int = 1000,
        *,
        with_bodies: bool = True,
        texts_bytes_max: int = 512 << 10,
        bodies_bytes_max: int = 4 << 20,
    ) -> Page:
        """Letters in the order of their numbers; at least one if there is any, however large."""

        def look(connection: Connection) -> Page:
            query = (
                select(*_COLUMNS, func.length(LETTERS.c.body).label("stored_bytes"))
                .where(LETTERS.c.number > after, *_conditions(wanted))
                .order_by(LETTERS.c.number)
                .limit(limit + 1)
            )
            found = list(connection.execute(query))
            fit = _fitting(found, limit, texts_bytes_max, bodies_bytes_max if with_bodies else None)
            rows = found[:fit]
            bodies: dict[int, bytes] = {}
            if with_bodies and rows:
                numbers = [row.number for row in rows]
                bodies = dict(
                    connection.execute(
                        select(LETTERS.c.number, LETTERS.c.body).where(LETTERS.c.number.in_(numbers))
                    ).all()  # type: ignore[arg-type]
                )
            return Page([_letter(row, bodies.get(row.number, b""), b"") for row in rows], fit < len(found))

        return self._do(look)

    def count(self, wanted: LetterFilter) -> int:
        """How many there are."""
        query = select(func.count()).select_from(LETTERS).where(*_conditions(wanted))
        return int(self._do(lambda connection: connection.scalar(query)) or 0)

    # --- resending and deleting -------------------------------------------------------------------------------------

    def claim(self, numbers: Sequence[int], broker: str, who: str, *, bytes_max: int = 8 << 20) -> Claimed:
        """Claim letters that wait, to resend them for somebody."""

        def work(connection: Connection) -> Claimed:
            found = {
                row.number: row
                for row in connection.execute(
                    select(*_COLUMNS, func.length(LETTERS.c.body).label("stored_bytes")).where(
                        LETTERS.c.number.in_(numbers)
                    )
                )
            }
            wanted: list[int] = []
            problems: dict[int, str] = {}
            left: list[int] = []
            size = 0
            for number in numbers:
                problem = _problem(number, found.get(number), broker)
                if problem:
                    problems[number] = problem
                    continue
                size += int(found[number].stored_bytes)
                if wanted and size > bytes_max:
                    left.append(number)
                else:
                    wanted.append(number)
            ours = self._claim(connection, wanted, broker, who)
            for number in wanted:
                if number not in ours:
                    problems[number] = f"letter {number} is being resent or deleted by somebody else: look again"
            rows = connection.execute(
                select(LETTERS.c.number, LETTERS.c.body, LETTERS.c.attributes).where(LETTERS.c.number.in_(ours))
            )
            parts = {row.number: row for row in rows}
            letters = [
                _letter(found[number], parts[number].body, parts[number].attributes)
                for number in wanted
                if number in parts
            ]
            return Claimed(letters, problems, left)

        return self._do(work)

    def _claim(self, connection: Connection, numbers: list[int], broker: str, who: str) -> set[int]:
        if not numbers:
            return set()
        free = or_(LETTERS.c.claimed_by.is_(None), LETTERS.c.claimed_by == broker)
        waiting = and_(LETTERS.c.number.in_(numbers), LETTERS.c.state == LetterState.WAITING)
        values = {"claimed_by": broker, "changed_by": _cut(who, 512)}
        connection.execute(update(LETTERS).where(waiting, free).values(values))
        ours = select(LETTERS.c.number).where(waiting, LETTERS.c.claimed_by == broker)
        return set(connection.scalars(ours))

    def claims(self, broker: str, limit: int = 1000) -> list[DeadLetter]:
        """Letters that a broker claimed and has not marked, without their bodies."""
        query = (
            select(*_COLUMNS)
            .where(LETTERS.c.claimed_by == broker, LETTERS.c.state == LetterState.WAITING)
            .order_by(LETTERS.c.number)
            .limit(limit)
        )
        return self._do(lambda connection: [_letter(row, b"", b"") for row in connection.execute(query)])

    def release(self, numbers: Iterable[int], broker: str) -> None:
        """Give claims back: the letters were not resent."""
        mine = and_(LETTERS.c.number.in_([*numbers]), LETTERS.c.claimed_by == broker)
        values = {"claimed_by": None, "changed_by": None}
        self._do(lambda connection: connection.execute(update(LETTERS).where(mine).values(values)))

    def mark_resent(self, numbers: Iterable[int], broker: str, at_ms: int) -> None:
        """Letters that a broker claimed were resent, by whom the claim was for."""
        mine = and_(LETTERS.c.number.in_([*numbers]), LETTERS.c.claimed_by == broker)
        values = {"state": LetterState.RESENT, "claimed_by": None, "changed_at_ms": at_ms}
        self._do(lambda connection: connection.execute(update(LETTERS).where(mine).values(values)))

    def delete(self, numbers: Sequence[int], who: str, at_ms: int) -> dict[int, str]:
        """Mark letters deleted, and forget what they held. Returns why not, for those that were not."""

        def work(connection: Connection) -> dict[int, str]:
            query = select(*_COLUMNS).where(LETTERS.c.number.in_(numbers))
            found = {row.number: row for row in connection.execute(query)}
            problems = {n: problem for n in numbers if (problem := _problem(n, found.get(n), ""))}
            wanted = [number for number in numbers if number not in problems]
            values = {
                "state": LetterState.DELETED,
                "body": b"",
                "attributes": b"",
                "properties": "{}",
                "changed_by": _cut(who, 512),
                "changed_at_ms": at_ms,
            }
            still = and_(
                LETTERS.c.number.in_(wanted), LETTERS.c.state == LetterState.WAITING, LETTERS.c.claimed_by.is_(None)
            )
            connection.execute(update(LETTERS).where(still).values(values))
            states = select(LETTERS.c.number).where(
                LETTERS.c.number.in_(wanted), LETTERS.c.state == LetterState.DELETED
            )
            gone = set(connection.scalars(states))
            return problems | {
                n: f"letter {n} is being resent by somebody else: look again" for n in wanted if n not in gone
            }

        return self._do(work)


def _conditions(wanted: LetterFilter) -> list[ColumnElement[bool]]:
    columns = LETTERS.c
    found: list[ColumnElement[bool]] = []
    for name in ("topic", "group", "reason", "state"):
        value = getattr(wanted, name)
        if value:
            found.append(columns[name] == value)
    if wanted.since_ms:
        found.append(columns.dead_at_ms >= wanted.since_ms)
    if wanted.until_ms:
        found.append(columns.dead_at_ms < wanted.until_ms)
    if wanted.message_ids:
        found.append(columns.message_id.in_([str(message_id) for message_id in wanted.message_ids]))
    if wanted.numbers:
        found.append(columns.number.in_(wanted.numbers))
    return found


def _problem(number: int, row: Row[Any] | None, broker: str) -> str:
    """Why a letter cannot be resent or deleted; empty if it can."""
    if row is None:
        return f"there is no dead letter {number}: dmq dlq list shows those that exist"
    if row.state != LetterState.WAITING:
        return f"letter {number} does not wait any more: it was {row.state} by {row.changed_by}"
    if row.claimed_by not in (None, broker):
        return f"letter {number} is being resent by broker {row.claimed_by}, which marks it once it is back"
    return ""


def _fitting(rows: Sequence[Row[Any]], limit: int, texts_max: int, bodies_max: int | None) -> int:
    """How many of the first rows fit."""
    texts = bodies = 0
    for index, row in enumerate(rows[:limit]):
        texts += _HEAD_BYTES + 4 * (len(row.properties) + len(row.first_error) + len(row.last_error))
        bodies += int(row.stored_bytes) if bodies_max is not None else 0
        if index and (texts > texts_max or (bodies_max is not None and bodies > bodies_max)):
            return index
    return min(limit, len(rows))


def _row(letter: DeadLetter) -> dict[str, Any]:
    """A letter as the table has it: texts that every database takes, cut, visibly, to their columns."""
    row: dict[str, Any] = {name: getattr(letter, name) for name in _NAMES}
    for name in ("group", "broker", "topic", "key", "tag", "business_id", "app"):
        row[name] = None if row[name] is None else _cut(row[name], TEXT_CHARS_MAX)
    row["first_error"] = _cut(letter.first_error, 4096)
    row["last_error"] = _cut(letter.last_error, 4096)
    row["message_id"] = str(letter.message_id)
    row["properties"] = json.dumps(letter.properties, ensure_ascii=False).replace("\0", "\u2400")
    row["state"] = str(letter.state)
    return row


def _cut(value: str, chars: int) -> str:
    """Without the one character that PostgreSQL does not take, and no longer than its column."""
    value = value.replace("\0", "\u2400")
    return value if len(value) <= chars else value[: chars - 1] + "…"


def _letter(row: Row[Any], body: bytes, attributes: bytes) -> DeadLetter:
    values = {name: row._mapping[name] for name in DeadLetter.__struct_fields__ if name in row._mapping}
    values["message_id"] = MessageId.parse(row.message_id)
    values["properties"] = json.loads(row.properties)
    return DeadLetter(**values | {"body": bytes(body), "attributes": bytes(attributes)})


def _is_rows_fault(error: Exception) -> bool:
    """Whether a row is at fault, so that no other try will help it, and not the database."""
    if not isinstance(error, SQLAlchemyError):
        return isinstance(error, ValueError | OverflowError)
    if isinstance(error, DataError | IntegrityError | NotSupportedError):
        return True
    if isinstance(error, DBAPIError):
        cause = error.orig
        code = cause.args[0] if cause is not None and cause.args else None
        state = getattr(cause, "sqlstate", None) or ""
        return code == _PACKET_TOO_LARGE or str(state)[:2] in ("22", "54")
    return isinstance(error, StatementError)
