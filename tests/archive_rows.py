"""Made-up days of messages and what groups did with them, as rows of the archive's tables.

What always holds: the same seed gives the same rows; queue offsets are dense; what a group settles of a queue it
settles in order, but retries come when they come, also on the next day.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.object_store import open_parquet
from dmq.pipeline.tables import CONSUME_EVENT, COPY, MESSAGE, SCHEMAS
from dmq.records.layout import MOVED

Row = dict[str, Any]
BROKER = "00000000000000b1"
FIRST = date(2030, 1, 30)
MIDNIGHT = datetime(2030, 1, 31, tzinfo=UTC)


@dataclass
class Days:
    """The rows of three tables."""

    messages: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    journal_offset: int = 0

    def place(self) -> int:
        """The next journal offset."""
        self.journal_offset += 100
        return self.journal_offset

    def message(self, topic: str, queue: int, queue_offset: int, at: datetime, **more: Any) -> Row:
        """Store a message; returns its row."""
        row = dict.fromkeys(SCHEMAS[MESSAGE].names) | {
            "message_id": f"{len(self.messages):026d}",
            "broker": BROKER,
            "journal_offset": self.place(),
            "topic": topic,
            "topic_id": 1 + len(topic) % 7,
            "queue": queue,
            "queue_offset": queue_offset,
            "app": "shop",
            "priority": 4,
            "flags": 0,
            "sent_at": at - timedelta(milliseconds=queue_offset % 9),
            "received_at": at,
            "stored_at": at,
            "body_crc": 0,
            "headers": [],
            "body": b"x" * (queue_offset % 50),
            "dt": at.date(),
        }
        row |= more
        self.messages.append(row)
        return row

    def settle(
        self, message: Row, group: str, outcome: str, at: datetime, *, attempt: int = 1, error: str = "", **more: Any
    ) -> None:
        """Let a group settle a message: two rows, that it was delivered and what came of it."""
        row = {
            "message_id": message["message_id"],
            "topic": message["topic"],
            "group": group,
            "member": "m1",
            "attempt": attempt,
            "broker": BROKER,
            "journal_offset": self.place(),
            "dt": at.date(),
        } | more
        delivered = at - timedelta(milliseconds=40)
        self.events.append(row | {"outcome": "delivered", "at": delivered, "error": None})
        self.events.append(row | {"outcome": outcome, "at": at, "error": error or None})

    def dead(self, message: Row, group: str, at: datetime, reason: str, error: str, attempt: int = 16) -> Row:
        """Store a dead letter; returns its row."""
        row = dict.fromkeys(SCHEMAS[COPY].names) | {
            "message_id": message["message_id"],
            "broker": BROKER,
            "journal_offset": self.place(),
            "topic": f"%DLQ%{group}",
            "topic_id": 90,
            "queue": 0,
            "queue_offset": len(self.copies),
            "origin_topic": message["topic"],
            "group": group,
            "attempt": attempt,
            "reason": reason,
            "error": error,
            "stored_at": at,
            "dt": at.date(),
        }
        self.copies.append(row)
        return row


def made(seed: int = 1, count: int = 300) -> Days:
    """Three days around two midnights: a quick group, one that starts late and fails often, one that is filtered."""
    chance = random.Random(seed)
    days = Days()
    at = MIDNIGHT - timedelta(minutes=40)
    ends: dict[tuple[str, int], int] = {}
    for number in range(count):
        topic, queue = ("orders", "payments")[number % 5 == 0], chance.randrange(2)
        offset = ends.get((topic, queue), 1000)
        ends[topic, queue] = offset + 1
        more = {"app": f"app-{chance.randrange(2)}", "key": f"k-{number}"} | _delayed(number, at)
        message = days.message(topic, queue, offset, at, **more)
        days.settle(message, "quick", "acked", at + timedelta(milliseconds=chance.randrange(60, 3000)))
        if topic == "orders" and offset >= 1010:
            _try(days, message, at + timedelta(seconds=chance.randrange(1, 200)), chance)
        if topic == "payments" and number < count * 3 // 4:
            outcome, why = chance.choice([("acked", ""), ("skipped", "filtered")])
            days.settle(message, "picky", outcome, at + timedelta(minutes=chance.randrange(1, 25)), error=why)
        at += timedelta(seconds=chance.choice([1, 5, 20, 60]), microseconds=chance.randrange(1_000_000))
        if number == count * 2 // 3:
            at = MIDNIGHT + timedelta(days=1, minutes=-5)
    return days


def _delayed(number: int, at: datetime) -> Row:
    """Of every eleventh message, that it was sent hours before, and left the schedule now."""
    sent_at, released_at = at - timedelta(hours=number), at - timedelta(milliseconds=number % 4)
    return {} if number % 11 else {"flags": MOVED, "sent_at": sent_at, "received_at": released_at}


def _try(days: Days, message: Row, at: datetime, chance: random.Random) -> None:
    """Let the group `clumsy` try a message until it works or dies."""
    for attempt in range(1, 6):
        luck = chance.random()
        if luck < 0.6:
            days.settle(message, "clumsy", "acked", at, attempt=attempt)
            return
        if luck < 0.65 or attempt == 5:
            error = chance.choice(["ValueError: no\n  at line 3", "TimeoutError: late", "KeyError: 'x'"])
            reason = "REJECTED" if luck < 0.65 else "RETRIES_EXHAUSTED"
            days.settle(message, "clumsy", "dead", at, attempt=attempt, error=error)
            days.dead(message, "clumsy", at, reason, error, attempt)
            return
        days.settle(message, "clumsy", "failed", at, attempt=attempt, error=f"attempt {attempt} failed")
        at += timedelta(seconds=chance.randrange(1, 900))


def arrow(name: str, rows: list[Row]) -> pa.Table:
    """Rows as a table of the archive has them."""
    return pa.Table.from_pylist(rows, SCHEMAS[name])


def archive_rows(archive: Archive, days: Days, version: int, chunk: int = 1_000_000) -> None:
    """Commit rows as the archive job would, in commits of so many rows."""
    for name, rows in ((MESSAGE, days.messages), (CONSUME_EVENT, days.events), (COPY, days.copies)):
        table = archive.table(name)
        for index, start in enumerate(range(0, len(rows), chunk)):
            files = write_days(arrow(name, rows[start : start + chunk]), table.folder)
            table.commit(files, app_id=f"test-{version}-{index}", version=version)


def table_rows(archive: Archive, name: str) -> list[Row]:
    """All rows of a table, in an order of their own."""
    schema, found = SCHEMAS[name], []
    for uri in archive.table(name).files():
        with open_parquet(uri) as file:
            found.append(file.read().cast(schema))
    rows: list[Row] = pa.concat_tables(found).to_pylist() if found else []
    return sorted(rows, key=repr)
