"""Settlements: the outcomes in the journal's events, as rows that still have to be joined with their messages.

An event names a queue and a range of offsets. Here it becomes a row for each run of offsets; `settlement_join` joins
them with the messages that stand there.

What always holds: an event is decoded only if it is one of the dequeue log. Left out is what the broker does for itself
under groups of its own, copies to the tail of a queue, and offsets that retention took before a group came to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from dmq.model import SYSTEM_PREFIX
from dmq.offset_runs import bitmap_runs
from dmq.pipeline.decode.units import SystemRecord
from dmq.storage.state.events import Outcome, Settled, decode_event

__all__ = ["OUTCOMES", "SETTLEMENT", "Settlements"]

OUTCOMES: Final[dict[int, str]] = {
    Outcome.ACKED: "acked",
    Outcome.RETRIED: "failed",
    Outcome.DEAD: "dead",
    Outcome.EXPIRED: "expired",
    Outcome.SKIPPED: "skipped",
}
_TIME: Final = pa.timestamp("us", tz="UTC")
SETTLEMENT: Final = pa.schema(
    [
        pa.field("topic_id", pa.int64()),
        pa.field("queue", pa.int32()),
        pa.field("first_offset", pa.int64()),
        pa.field("last_offset", pa.int64()),
        pa.field("group", pa.string()),
        pa.field("member", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("outcome", pa.string()),
        pa.field("leased_at", _TIME),
        pa.field("settled_at", _TIME),
        pa.field("error", pa.string()),
        pa.field("journal_offset", pa.int64()),
        pa.field("dt", pa.date32()),
    ]
)
_SETTLED_TAG: Final = 3
_GONE: Final = "gone"  # as `dmq.broker.delivery.cursor` says it; such ranges may be of any length, and have no messages
_DAY_MS: Final = 86_400_000
_TIME_MAX_MS: Final = 253_402_300_799_999


class Settlements:
    """The settlements of some units.

    Attributes:
        count: how many messages they are about.
        bounds: by topic id, the least and the greatest offset among them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.bounds: dict[int, tuple[int, int]] = {}
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, records: Iterable[SystemRecord]) -> None:
        """Take in what system records say."""
        for record in records:
            # An array's head, then its event's number: most other events are told apart without decoding them.
            if not record.is_snapshot and len(record.body) > 1 and record.body[1] == _SETTLED_TAG:
                event = decode_event(record.body)
                if isinstance(event, Settled):
                    self._add(event, record.journal_offset, record.stored_at_ms)

    def _add(self, event: Settled, journal_offset: int, stored_at_ms: int) -> None:
        outcome = OUTCOMES.get(event.outcome)
        if outcome is None or event.group.startswith(SYSTEM_PREFIX) or (event.error == _GONE and outcome == "skipped"):
            return
        for first, end in bitmap_runs(event.start, event.count, event.bitmap):
            self._rows.append(
                (
                    event.topic_id,
                    event.queue,
                    first,
                    end - 1,
                    event.group,
                    event.member or None,
                    event.attempt,
                    outcome,
                    _micros(event.leased_at_ms),
                    _micros(event.settled_at_ms or stored_at_ms),
                    event.error or None,
                    journal_offset,
                    stored_at_ms // _DAY_MS,
                )
            )
            self.count += end - first
            least, greatest = self.bounds.get(event.topic_id, (first, first))
            self.bounds[event.topic_id] = (min(least, first), max(greatest, end - 1))

    def table(self) -> pa.Table:
        """As rows."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(SETTLEMENT)
        arrays = []
        for column, field in zip(columns, SETTLEMENT, strict=True):
            if pa.types.is_timestamp(field.type):
                arrays.append(pa.array(column, pa.int64()).cast(field.type))
            elif pa.types.is_date32(field.type):
                arrays.append(pa.array(column, pa.int32()).cast(field.type))
            else:
                arrays.append(pa.array(column, field.type))
        return pa.Table.from_arrays(arrays, schema=SETTLEMENT)


def _micros(at_ms: int) -> int | None:
    return min(at_ms, _TIME_MAX_MS) * 1000 if at_ms > 0 else None
