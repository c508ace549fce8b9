"""Where the messages lie that new events are about.

Most events come soon after their messages, so files of `message` are searched from the newest on, a few at first, until
every event has its message.

What always holds: only ids, places and times are read; rows of other messages are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from dmq.pipeline.lookup.engine import Engine, quoted

if TYPE_CHECKING:
    from dmq.pipeline.archive.table_store import LiveFile, Table

__all__ = ["EVENT_KEY", "PLACE", "find_places"]

PLACE: Final = ("message_id", "broker", "topic", "topic_id", "queue", "queue_offset", "stored_at", "dt")
EVENT_KEY: Final = "message_id, broker, topic, happened_at, dt"
_FILES_FIRST: Final = 4
_FOUND: Final = """
    SELECT {columns} FROM read_parquet([{files}], hive_partitioning = false)
    WHERE message_id IN (SELECT message_id FROM wanted) AND {bounds}
"""
# An event whose message was stored later has met a wrong clock, or a replay; the message may lie further back.
_LEFT: Final = """
    SELECT w.* FROM wanted w ANTI JOIN found f
        ON w.message_id = f.message_id AND w.broker = f.broker AND w.topic = f.topic AND f.stored_at <= w.happened_at
"""


def find_places(engine: Engine, message: Table, events: pa.Table, lateness: timedelta) -> pa.Table:
    """The rows of messages that some events are about, in the columns `PLACE`.

    Parameters:
        events: with the columns of `EVENT_KEY`.
    """
    columns = pa.schema([message.schema.field(name) for name in PLACE])
    found = [columns.empty_table()]
    left = events
    days = {dt - timedelta(days=n) for dt in pc.unique(events["dt"]).to_pylist() for n in range(lateness.days + 1)}
    for files in _newest_first(message, days):
        if not len(left):
            break
        engine.register("wanted", left)
        ids = pc.min_max(left["message_id"])
        query = _FOUND.format(
            columns=", ".join(PLACE),
            files=", ".join(quoted(file.uri) for file in files),
            bounds=f"message_id BETWEEN {quoted(ids['min'].as_py())} AND {quoted(ids['max'].as_py())}",
        )
        found.append(engine.rows(query, {}).cast(columns))
        engine.register("found", found[-1])
        left = engine.rows(_LEFT, {})
    return pa.concat_tables(found)


def _newest_first(message: Table, days: set[date]) -> Iterator[Sequence[LiveFile]]:
    """Files of some days, twice as many each time."""
    newest = message.bounds("stored_at", days)
    files = sorted(
        message.live_files(days), key=lambda file: (file.dt, str(newest.get(file.path, ("", ""))[1])), reverse=True
    )
    start, count = 0, _FILES_FIRST
    while start < len(files):
        yield files[start : start + count]
        start, count = start + count, 2 * count
