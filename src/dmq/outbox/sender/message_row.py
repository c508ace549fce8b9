"""Rows of the sender table: what a user hands in becomes one, and one becomes a message again.

Pure code. What always holds: a row that was made here can be sent, as far as its sender can know: what breaks a rule of
the message format raises before anything is inserted; the message that is made of a row is the same every time.

Strict order: the messages of a topic and business id are numbered in the sender's own transaction (T-09).

What always holds: numbers begin with 1 and have no gap; the counter's row stays locked until the transaction ends, so
two transactions of the same business id come one after the other, and one that rolls back gives its numbers back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
from sqlalchemy import Connection, Dialect, Engine, Row, Table, text
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from dmq.client.producer.encoder import encode_body
from dmq.client.producer.message import check_message
from dmq.errors import InvalidMessage, InvalidSettings
from dmq.model import DEFAULT_PRIORITY, Message, check_name
from dmq.outbox.schema import NAME_CHARS_MAX
from dmq.outbox.sender.envelope import check_properties, make_send_id, pack_properties
from dmq.outbox.states import SendState

__all__ = [
    "BODY_BYTES_MAX",
    "Executes",
    "MessageDraft",
    "Numbering",
    "OutboxMessage",
    "columns_of",
    "groups_text",
    "make_row",
    "message_of",
    "parse_row",
]

BODY_BYTES_MAX: Final = 4 << 20
_COLUMNS: Final = (
    "number", "send_id", "app", "topic", "business_id", "sequence", "is_ordered", "message_key", "tag", "priority",
    "body", "properties", "expected_groups", "state", "attempts", "checks", "created_at_ms", "sent_at_ms",
)  # fmt: skip
_SMALL: Final = 16
_encode: Final = msgspec.json.Encoder().encode


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the sender table."""

    number: int
    send_id: str
    app: str
    topic: str
    business_id: str | None
    sequence: int | None
    is_ordered: bool
    key: str | None
    tag: str | None
    priority: int
    body: bytes
    properties: dict[str, str]
    groups: tuple[str, ...] | None  # None: the first answer is enough; empty: none is expected
    state: SendState
    attempts: int
    checks: int
    created_at_ms: int
    sent_at_ms: int | None


def columns_of(send: Table) -> list[ColumnElement[Any]]:
    """What to select for `parse_row` and `message_of`."""
    return [send.c[name] for name in _COLUMNS]


def parse_row(row: Row[Any]) -> OutboxMessage:
    """A row as it was selected."""
    groups = parse_groups(row.expected_groups)
    return OutboxMessage(
        number=row.number,
        send_id=row.send_id,
        app=row.app,
        topic=row.topic,
        business_id=row.business_id,
        sequence=row.sequence,
        is_ordered=bool(row.is_ordered),
        key=row.message_key,
        tag=row.tag,
        priority=row.priority,
        body=bytes(row.body),
        properties=json.loads(row.properties) if row.properties else {},
        groups=groups,
        state=SendState(row.state),
        attempts=row.attempts,
        checks=row.checks,
        created_at_ms=row.created_at_ms,
        sent_at_ms=row.sent_at_ms,
    )


def message_of(row: Row[Any]) -> Message:
    """What goes to the broker. Without a key of its own it is found by its send id."""
    (_, send_id, app, _, business_id, sequence, is_ordered, key, tag, priority, body, properties, groups, *_) = row
    own = json.loads(properties) if properties else None
    packed = pack_properties(own, send_id, "" if groups == "" else app, sequence)
    return Message(
        bytes(body), key or send_id, tag, business_id, ordered=bool(is_ordered), priority=priority, properties=packed
    )


def groups_text(groups: Iterable[str] | None) -> str | None:
    """Expected groups as the table has them.

    Raises:
        InvalidName, InvalidSettings: that is not a list of groups.
    """
    if groups is None:
        return None
    if isinstance(groups, str):
        raise InvalidSettings(f"groups= is a list of names: write [{groups!r}]")
    return ",".join(sorted({check_name(group, "group") for group in groups}))


def parse_groups(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(filter(None, text.split(",")))


class MessageDraft(msgspec.Struct, frozen=True, gc=False):
    """A message as a user hands it in."""

    topic: str
    body: object
    business_id: str | None = None
    key: str | None = None
    tag: str | None = None
    priority: int = DEFAULT_PRIORITY
    properties: Mapping[str, str] | None = None
    ordered: bool | None = None  # None: if it has a business id
    groups: str | None = None  # as `groups_text` has them


def make_row(app: str, draft: MessageDraft, owner: str | None, now_ms: int, due_at_ms: int) -> dict[str, Any]:
    """The values of a new row, without the `sequence` of a strict message.

    Parameters:
        owner: who has claimed it, until `due_at_ms`; None: any relay may send it then.

    Raises:
        InvalidMessage, MessageTooLarge, InvalidName: it could never be sent.
    """
    topic, business_id, key, tag, properties = draft.topic, draft.business_id, draft.key, draft.tag, draft.properties
    check_name(topic, "topic")
    is_ordered = bool(business_id) if draft.ordered is None else draft.ordered
    if is_ordered and not business_id:
        raise InvalidMessage("ordered=True needs a business_id: messages of the same one stay in order")
    for what, value in (("business_id", business_id), ("key", key), ("tag", tag)):
        if value is not None and (len(value) > NAME_CHARS_MAX or "\0" in value):
            raise InvalidMessage(f"{what} is longer than {NAME_CHARS_MAX} characters, or has a NUL in it: shorten it")
    check_properties(properties)
    # Small plain properties need no closer look, which costs as much as all the rest.
    looked_at = None if properties is None or _are_small(properties) else properties
    message = Message(
        encode_body(draft.body),
        key,
        tag,
        business_id,
        ordered=is_ordered,
        priority=draft.priority,
        properties=looked_at,
    )
    check_message(topic, message, BODY_BYTES_MAX)
    return {
        "send_id": make_send_id(),
        "app": app,
        "topic": topic,
        "business_id": business_id,
        "sequence": None,
        "is_ordered": int(is_ordered),
        "message_key": key,
        "tag": tag,
        "priority": draft.priority,
        "body": message.body,
        "properties": _encode(properties).decode() if properties else None,
        "expected_groups": draft.groups,
        "state": "NEW",
        "attempts": 0,
        "checks": 0,
        "claimed_by": owner,
        "due_at_ms": due_at_ms,
        "created_at_ms": now_ms,
    }


def _are_small(properties: Mapping[str, str]) -> bool:
    return len(properties) <= _SMALL and all(
        type(name) is str and type(value) is str and name.isascii() and value.isascii() and len(name) + len(value) < 256
        for name, value in properties.items()
    )


class Executes(Protocol):
    """A session or a connection."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...


class Numbering:
    """The counters of a database.

    Parameters:
        dialect: of the database.
        sequence: the table with the counters.
    """

    def __init__(self, dialect: Dialect, sequence: Table) -> None:
        # As text, which is compiled once: SQLAlchemy compiles its own upserts anew each time, which takes longer than
        # all the rest of a send.
        name = dialect.identifier_preparer.format_table(sequence)
        columns = "(topic, business_id, last) VALUES (:topic, :business_id,"
        where = "topic = :topic AND business_id = :business_id"
        self._is_mysql = dialect.name in ("mysql", "mariadb")
        if self._is_mysql:
            self._look = text(f"SELECT 1 FROM {name} WHERE {where}")
            self._begin = text(f"INSERT IGNORE INTO {name} {columns} 0)")
            self._put = text(f"UPDATE {name} SET last = LAST_INSERT_ID(last + 1) WHERE {where}")
        else:
            self._put = text(
                f"INSERT INTO {name} AS counter {columns} 1) "
                "ON CONFLICT (topic, business_id) DO UPDATE SET last = counter.last + 1 RETURNING last"
            )

    def next(self, session: Session | Connection, topic: str, business_id: str) -> int:
        """The next number of a topic and business id, in the transaction of this session."""
        place = {"topic": topic, "business_id": business_id}
        if not self._is_mysql:
            return int(session.execute(self._put, place).scalar_one())
        if session.execute(self._look, place).first() is None:
            # Not in this transaction: InnoDB ends those who wait for a row that is inserted and rolled back with a
            # deadlock. And not after an update that found nothing, whose lock on the gap we would wait for ourselves.
            with _engine_of(session).begin() as connection:
                connection.execute(self._begin, place)
        put: Any = session.execute(self._put, place)
        return int(put.lastrowid)


def _engine_of(session: Session | Connection) -> Engine:
    bind = session if isinstance(session, Connection) else session.get_bind()
    return bind.engine
