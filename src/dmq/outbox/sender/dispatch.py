"""Dispatch: hands rows to a broker, and sorts them by its answers.

What always holds: of every row it is known afterwards whether a broker has it, refused it, or was not asked; a row that
is refused takes those of its business id with it, and no others; a broker that fails or cannot be reached is no row's
fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Row

from dmq.errors import DeadLettered, DMQError, InvalidMessage, OutOfRetries, RateLimited
from dmq.event_log import EventLog
from dmq.outbox.alerts import Alert, AlertKind, OnAlert
from dmq.outbox.metrics import Counts
from dmq.outbox.sender.message_row import message_of

if TYPE_CHECKING:
    from dmq.client.client import Client
    from dmq.client.producer.producer import Producer

__all__ = ["Dispatch", "Sent"]

log = EventLog(__name__)

_BACKOFF_MS: Final = (1_000, 2_000, 4_000, 8_000, 15_000, 30_000, 60_000)
_LIMITED_MS: Final = 1_000


class Sent:
    """What became of some rows of one topic."""

    def __init__(self) -> None:
        self.rows: list[Row[Any]] = []  # a broker has them
        self.refused: list[Row[Any]] = []
        self.given_back: list[Row[Any]] = []  # not asked about, or not to be asked about now
        self.reason = ""
        self.wait_ms = 0  # until the refused and the given back are tried again; 0: whenever somebody can
        self.trouble: DMQError | None = None  # with the broker: no sense in going on at once
        self.count = 0

    def rows_marked(self) -> None:
        self.count += len(self.rows)
        self.rows = []

    def refused_marked(self) -> None:
        self.refused = []


class Dispatch:
    """Sends rows, topic by topic."""

    def __init__(self, client: Client, timeout: float, alert_after: int, alert: OnAlert, counts: Counts) -> None:
        self._client = client
        self._timeout = timeout
        self._alert_after = alert_after
        self._alert = alert
        self._counts = counts
        self._made: Producer | None = None

    @property
    def _producer(self) -> Producer:
        if self._made is None:
            self._made = self._client.producer(timeout=self._timeout)
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.close(0.0)

    def send(self, topic: str, rows: Sequence[Row[Any]]) -> Sent:
        """Send rows in their order; never raises for what a broker says."""
        sent = Sent()
        try:
            self._producer.send_many(topic, [message_of(row) for row in rows])
            sent.rows = [*rows]
        except InvalidMessage as error:
            self._one_by_one(topic, self._left(rows, error, sent), sent)
        except DMQError as error:
            self._sort_out(self._left(rows, error, sent), error, sent)
        if sent.refused:
            self._refused(topic, sent)
        return sent

    @staticmethod
    def _left(rows: Sequence[Row[Any]], error: DMQError, sent: Sent) -> list[Row[Any]]:
        """Note what is stored nevertheless; the others."""
        stored = {*error.detail.get("stored_indexes", ())}
        sent.rows += [row for index, row in enumerate(rows) if index in stored]
        return [row for index, row in enumerate(rows) if index not in stored]

    def _one_by_one(self, topic: str, rows: Sequence[Row[Any]], sent: Sent) -> None:
        """One of these is at fault: find it, and let the others through."""
        held: set[str] = set()
        for index, row in enumerate(rows):
            if row.is_ordered and row.business_id in held:
                sent.given_back.append(row)
                continue
            try:
                self._producer.send_many(topic, [message_of(row)])
                sent.rows.append(row)
            except InvalidMessage as error:
                sent.refused.append(row)
                sent.reason = str(error)
                if row.is_ordered:
                    held.add(row.business_id)
            except DMQError as error:
                self._sort_out(rows[index:], error, sent)
                return

    @staticmethod
    def _sort_out(rows: Sequence[Row[Any]], error: DMQError, sent: Sent) -> None:
        """A broker said no to all of these."""
        if isinstance(error, DeadLettered):
            sent.rows += rows  # it is kept, and comes from there when somebody resends it
        elif isinstance(error, RateLimited):
            sent.given_back += rows
            sent.wait_ms = round((error.retry_after or 0.0) * 1000) or _LIMITED_MS
        elif error.retriable or isinstance(error, OutOfRetries):
            sent.given_back += rows
            sent.trouble = error
        else:
            sent.refused += rows
            sent.reason = str(error)

    def _refused(self, topic: str, sent: Sent) -> None:
        attempts = max(row.attempts for row in sent.refused)
        sent.wait_ms = max(sent.wait_ms, _BACKOFF_MS[min(attempts, len(_BACKOFF_MS) - 1)])
        self._counts.add("refused", len(sent.refused))
        log.warning(
            "a broker refuses messages of the outbox: they stay in the table and are tried again",
            once_for=(topic, sent.reason),
            topic=topic,
            messages=len(sent.refused),
            attempts=attempts + 1,
            again_seconds=sent.wait_ms / 1000,
            reason=sent.reason,
        )
        late = [row for row in sent.refused if row.attempts + 1 == self._alert_after]
        if late:
            self._alert(
                Alert(
                    kind=AlertKind.SEND,
                    send_id=late[0].send_id,
                    topic=topic,
                    business_id=late[0].business_id,
                    attempts=self._alert_after,
                    reason=sent.reason,
                    count=len(late),
                )
            )
