"""Which archived messages, said once and for all: what `dmq archive replay` is given, and the question it becomes.

What always holds: texts of a user get into a question as values, but for the one that is SQL; and that one only ever
stands in a SELECT over the archive's own tables (`dmq.pipeline.lookup.engine`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from dmq.errors import InvalidRequest
from dmq.pipeline.lookup.engine import quoted

__all__ = ["Selection"]


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that is given must hold; of several ids, keys or business ids one of them."""

    topic: str = ""
    ids: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    business_ids: tuple[str, ...] = ()
    since: datetime | None = None  # by the time they were stored, this moment included
    until: datetime | None = None  # this one not
    where: str = ""  # SQL over the columns of `message`

    def check(self) -> None:
        """Refuse to choose everything there is without being told so.

        Raises:
            InvalidRequest: nothing is said, or the times are the wrong way round.
        """
        if not any((self.topic, self.ids, self.keys, self.business_ids, self.since, self.until, self.where)):
            raise InvalidRequest("say which messages: --topic, --id, --key, --business-id, --since, --until or --where")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidRequest("--since must be before --until")
        if ";" in self.where or self.where.count("(") != self.where.count(")"):
            raise InvalidRequest("--where is one condition as in \"tag = 'paid' AND priority > 4\"")

    def condition(self) -> str:
        """As SQL."""
        said = []
        if self.topic:
            said.append(f"topic = {quoted(self.topic)}")
        for column, values in (("message_id", self.ids), ("key", self.keys), ("business_id", self.business_ids)):
            if values:
                said.append(f"{column} IN ({', '.join(map(quoted, values))})")
        if self.since is not None:
            said.append(f"stored_at >= {_moment(self.since)}")
        if self.until is not None:
            said.append(f"stored_at < {_moment(self.until)}")
        if self.where:
            said.append(f"({self.where})")
        return " AND ".join(said)

    def bounds(self) -> dict[str, tuple[Any, Any]]:
        """What a file's statistics may be compared with."""
        found: dict[str, tuple[Any, Any]] = {}
        if self.topic:
            found["topic"] = (self.topic, self.topic)
        if self.since is not None or self.until is not None:
            found["stored_at"] = (self.since, self.until)
        return found

    def words(self) -> str:
        """For people."""
        parts = [f"topic {self.topic}"] if self.topic else []
        for name, values in (("id", self.ids), ("key", self.keys), ("business id", self.business_ids)):
            if values:
                parts.append(f"{name} {', '.join(values[:3])}{'…' if len(values) > 3 else ''}")
        parts += [f"from {self.since.isoformat()}"] if self.since else []
        parts += [f"before {self.until.isoformat()}"] if self.until else []
        parts += [f"where {self.where}"] if self.where else []
        return ", ".join(parts)


def _moment(at: datetime) -> str:
    return f"TIMESTAMPTZ {quoted(at.astimezone(UTC).isoformat())}"
