"""`dmq archive query`: archived messages by id, key, business id, time or SQL, without Java."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.archive.options import Since, Tables, Until, needs_spark_extra
from dmq.cli.message.messages import body_facts, body_text
from dmq.cli.options import Format, Formatted, checked_id, parse_moment
from dmq.cli.output import cut, moment, show_rows
from dmq.errors import UnknownMessage

if TYPE_CHECKING:
    from dmq.pipeline.lookup.lookup import Life, Row

__all__ = ["query"]

_SHOWN_CHARS = 80
_REPLAYED = 0x20

MIB = 1 << 20


def query(
    tables: Tables,
    message_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="The message with this id.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Messages with this key.")] = None,
    business_id: Annotated[str | None, typer.Option(metavar="ID", help="Messages with this business id.")] = None,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only of this topic.")] = "",
    since: Since = None,
    until: Until = None,
    sql: Annotated[str | None, typer.Option(metavar="SELECT", help="One SELECT over the archive's tables.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With --id: what became of it, too.")] = False,
    body: Annotated[bool, typer.Option("--body", help="Show bodies.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most this many rows.")] = 100,
    memory: Annotated[int, typer.Option(min=64, metavar="MIB", help="What --sql may take.")] = 1024,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long --sql may take.")] = 60.0,
    form: Formatted = Format.TABLE,
) -> None:
    """Look into the archive: by --id, --key or --business-id, by --topic with --since or --until, or by --sql.

    The exit code is 1 if there is nothing.
    """
    by_time = since is not None or until is not None
    ways = [message_id is not None, key is not None, business_id is not None, sql is not None]
    if sum(ways) > 1 or not (any(ways) or topic):
        raise typer.BadParameter(
            "give one of --id, --key, --business-id and --sql, or a --topic, with times if you like"
        )
    if (by_time and any(ways)) or (sql is not None and (topic or trace or body)):
        raise typer.BadParameter("--since and --until go with --topic alone; --sql says all by itself")
    if trace and message_id is None:
        raise typer.BadParameter("--trace goes with --id")
    if sql is not None:
        _show_sql(tables, sql, limit, memory, timeout=timeout, form=form)
        return
    with needs_spark_extra():
        from dmq.pipeline.lookup.lookup import Lookup

    with Lookup(tables) as lookup:
        if trace and message_id is not None:
            life = lookup.life(checked_id(message_id), bodies=body)
            _show_life(life, message_id, form)
            return
        if message_id is not None:
            found, what = lookup.by_id(checked_id(message_id), topic, bodies=body, limit=limit), f"id {message_id}"
        elif key is not None:
            found, what = lookup.by_key(key, topic, bodies=body, limit=limit), f"key {key!r}"
        elif business_id is not None:
            found = lookup.by_business_id(business_id, topic, bodies=body, limit=limit)
            what = f"business id {business_id!r}"
        else:
            found = lookup.by_time(topic, parse_moment(since), parse_moment(until), bodies=body, limit=limit)
            what = f"topic {topic!r} at that time" if by_time else f"topic {topic!r}"
    if not found:
        raise UnknownMessage(f"no message with {what} is archived: check it; `dmq find` looks into the broker")
    show = row_of if form == Format.TABLE else facts_of
    show_rows([show(row) for row in found], form, empty="")
    if form == Format.TABLE and len(found) == limit:
        typer.echo(f"\nthere may be more than {limit}: --limit shows them")


def row_of(row: Row) -> dict[str, Any]:
    """A message as a row of a table."""
    shown: dict[str, Any] = {
        "topic": row["topic"],
        "queue": row["queue"],
        "offset": row["queue_offset"],
        "stored": _moment(row["stored_at"]),
        "id": row["message_id"],
        "key": row["key"],
        "tag": row["tag"],
        "business_id": row["business_id"],
        "replayed": "yes" if row["flags"] & _REPLAYED else None,
        "bytes": row["body_bytes"],
    }
    if "body" in row:
        shown["body"] = cut(body_text(row["body"]), _SHOWN_CHARS)
    return shown


def facts_of(row: Row) -> dict[str, Any]:
    """Everything of a message, for JSON; the body as `body_facts` has it."""
    facts = {name: plain(value) for name, value in row.items() if name != "body"}
    return facts | (body_facts(row["body"]) if "body" in row else {})


def plain(value: Any) -> Any:
    """A value of a table as JSON has it: moments as ISO 8601 in UTC, bytes as text or base 64."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _show_sql(tables: str, sql: str, limit: int, memory: int, timeout: float, form: Format) -> None:
    with needs_spark_extra():
        from dmq.pipeline.lookup.engine import Bounds
        from dmq.pipeline.lookup.lookup import run_sql

    result = run_sql(tables, sql, Bounds(rows=limit, memory_bytes=memory * MIB, seconds=timeout))
    rows = [{name: plain(value) for name, value in row.items()} for row in result.table.to_pylist()]
    show_rows(rows, form, empty="no rows")
    if result.is_cut:
        typer.echo(f"only the first {len(rows)} rows are shown: --limit shows more", err=True)


def _show_life(life: Life, message_id: str, form: Format) -> None:
    if not any(life):
        raise UnknownMessage(f"nothing of message {message_id} is archived: `dmq trace` looks into the broker")
    if form == Format.JSON:
        parts = {name: [facts_of(row) for row in rows] for name, rows in zip(life._fields, life, strict=True)}
        typer.echo(json.dumps(parts, indent=2))
        return
    show_rows([row_of(row) for row in life.messages], form, empty="the message itself is not archived")
    steps = [_copy_step(row) for row in life.copies] + [_event_step(row) for row in life.events]
    typer.echo("")
    show_rows(sorted(steps, key=lambda step: step["at"]), form, empty="nothing else is known of it")


def _copy_step(row: Row) -> dict[str, Any]:
    return {
        "at": _moment(row["stored_at"]),
        "what": "copied",
        "where": f"{row['topic']} {row['queue']}/{row['queue_offset']}",
        "group": row["group"],
        "member": None,
        "attempt": row["attempt"],
        "note": row["error"] or row["reason"],
    }


def _event_step(row: Row) -> dict[str, Any]:
    return {
        "at": _moment(row["at"]),
        "what": row["outcome"],
        "where": row["topic"],
        "group": row["group"],
        "member": row["member"],
        "attempt": row["attempt"],
        "note": row["error"],
    }


def _moment(at: datetime) -> str:
    return moment(round(at.timestamp() * 1000))
