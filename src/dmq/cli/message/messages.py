"""Messages as lines, rows and JSON: what `tail`, `peek` and `find` print, and what `send --json-lines` reads back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmq.cli.output import cut, moment, printable, shard_fact

if TYPE_CHECKING:
    from dmq.client.admin.reports import StoredMessage

__all__ = ["body_facts", "body_text", "message_facts", "message_line", "message_row"]

_SHOWN_CHARS = 80


def message_facts(message: StoredMessage, names: Mapping[int, str]) -> dict[str, Any]:
    """Everything, for JSON; the body as `body_facts` has it, the shard by its name."""
    facts: dict[str, Any] = {
        "id": None if message.id is None else str(message.id),
        "topic": message.topic,
        **shard_fact(names, message.shard),
        "queue": message.queue,
        "offset": message.offset,
        "key": message.key,
        "tag": message.tag,
        "business_id": message.business_id,
        "priority": message.priority,
        "app": message.app,
        "sent_at_ms": message.sent_at_ms,
        "stored_at_ms": message.stored_at_ms,
        "properties": dict(message.properties),
    }
    if message.damage:
        facts["damage"] = message.damage
    return facts | body_facts(message.body)


def body_facts(body: bytes) -> dict[str, str]:
    """A body for JSON: as `body`, or as `body_base64` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def body_text(body: bytes) -> str:
    """A body on one line, nothing left out; bytes that are not UTF-8 are written as in Python."""
    try:
        return printable(body.decode())
    except UnicodeDecodeError:
        return repr(body)


def message_line(message: StoredMessage, names: Mapping[int, str]) -> str:
    """One message on one line."""
    named = (("key", message.key), ("tag", message.tag), ("business_id", message.business_id))
    parts = [] if message.id is None else [f"id={message.id}"]
    parts += [f"{name}={printable(value)}" for name, value in named if value is not None]
    parts += [f"{printable(name)}={printable(value)}" for name, value in message.properties.items()]
    shard = "".join(f"{name}/" for name in shard_fact(names, message.shard).values())
    place = (moment(message.stored_at_ms), f"{shard}{message.queue}/{message.offset}")
    return " ".join((*place, *parts, _shown_body(message)))


def _shown_body(message: StoredMessage) -> str:
    """The body on one line; of a record that nobody can read, what is wrong with it."""
    return f"<damaged record: {printable(message.damage)}>" if message.damage else body_text(message.body)


def message_row(message: StoredMessage, names: Mapping[int, str]) -> dict[str, Any]:
    """One message as a row of a table; a long body is cut, and JSON has all of it."""
    return {
        "topic": message.topic,
        **shard_fact(names, message.shard),
        "queue": message.queue,
        "offset": message.offset,
        "stored": moment(message.stored_at_ms),
        "id": None if message.id is None else str(message.id),
        "key": message.key,
        "tag": message.tag,
        "bytes": len(message.body),
        "body": cut(_shown_body(message), _SHOWN_CHARS),
    }
