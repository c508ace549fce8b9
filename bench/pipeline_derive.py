"""Row `derive` of `bench.pipeline`: a day that grows, and how long the other tables take to follow.

The tables are written as the archive job writes them, a portion at a time, without a broker, and the jobs `rollup`,
`trace` and `dead-letters` follow each portion. Every message is acked by a group a few seconds after it was stored;
one of a hundred failed before, and was acked, or died, in the next portion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bench.pipeline_load import Names, body_array
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import dead_letters, rollup, trace
from dmq.pipeline.jobs.changes import mark_of
from dmq.pipeline.jobs.frames import SORT
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.tables import CONSUME_EVENT, COPY, DEAD_LETTER_PART, MESSAGE, ROLLUP_PART, SCHEMAS, TRACE

if TYPE_CHECKING:
    from bench.pipeline import Rig

MESSAGES = 10_000_000
PORTION = 250_000
NEW = 100_000
DAY = date(2030, 1, 1)
_BEGIN_US = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1e6)
_STEP_US = 8000  # 10 million messages are 22 hours
_FAILED = 100  # one of so many fails once
_DEAD = 2000  # one of so many dies then
_BROKER = "0123456789abcdef"
JOBS = {"rollup": rollup.run, "trace": trace.run, "dead-letters": dead_letters.run}


def derive(rig: Rig) -> dict[str, Any]:
    """Seconds that the other tables take, while a day grows to ten million messages and after 100,000 more."""
    total = max(2 * PORTION, int(MESSAGES * rig.scale))
    archive = Archive.create(str(rig.new_folder("derived")))
    context = JobContext(archive.uri, datetime(2030, 1, 2, tzinfo=UTC))
    _begin(archive)
    curve: list[dict[str, float]] = []
    for first in range(0, total, PORTION):
        _store(archive, first, min(PORTION, total - first))
        curve.append(_derived(archive, context))
    rounds = []
    for number in range(rig.rounds):
        _store(archive, total + number * NEW, NEW)
        rounds.append(_derived(archive, context))
    return {
        "messages": total,
        "portion": PORTION,
        "first_portions": curve[1:4],
        "last_portions": curve[-3:],
        "new": NEW,
        "rounds": rounds,
        "seconds": sorted(each["seconds"] for each in rounds)[len(rounds) // 2],
        "cpu_seconds": sorted(each["cpu_seconds"] for each in rounds)[len(rounds) // 2],
        "files": {name: len(archive.table(name).live_files()) for name in SCHEMAS},
        "bar": "<= 5 s after 100,000 new messages",
    }


def _begin(archive: Archive) -> None:
    """Derive when there is nothing yet; later runs then know what is new, and need no Spark."""
    sources = {ROLLUP_PART: (MESSAGE, CONSUME_EVENT), TRACE: (MESSAGE, CONSUME_EVENT), DEAD_LETTER_PART: (COPY,)}
    for derived, names in sources.items():
        for source in map(archive.table, names):
            source.commit([], app_id="bench", version=0)
            archive.table(derived).commit([], app_id=mark_of(source), version=source.version())


def _derived(archive: Archive, context: JobContext) -> dict[str, float]:
    spark: Any = None
    began, cpu = time.perf_counter(), _cpu()
    found = {}
    for name, job in JOBS.items():
        at = time.perf_counter()
        job(spark, archive, context)
        found[name] = time.perf_counter() - at
    return found | {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu() - cpu}


def _cpu() -> float:
    """Of this process; Spark has no part in it."""
    times = os.times()
    return times.user + times.system


def _store(archive: Archive, first: int, count: int) -> None:
    """Commit the next messages, what became of them, and of those that had failed before."""
    for name, rows in _tables(first, count):
        table = archive.table(name)
        folder = table.folder._replace(is_local=False)  # not synced, which is most of the time
        table.folder.make(f"dt={DAY.isoformat()}")
        table.commit(write_days(rows, folder, sort_by=SORT[name]), app_id="bench", version=first + count)


def _tables(first: int, count: int) -> Iterator[tuple[str, pa.Table]]:
    numbers = np.arange(first, first + count)
    ids = pa.array([Names.message_id(number) for number in range(first, first + count)])
    stored = _BEGIN_US + numbers * _STEP_US
    yield (
        MESSAGE,
        _rows(
            MESSAGE,
            count,
            message_id=ids,
            journal_offset=numbers * 600,
            queue=numbers % 4,
            queue_offset=numbers // 4,
            key=[Names.key(number) for number in range(first, first + count)],
            sent_at=stored - numbers % 20 * 1000,
            received_at=stored,
            stored_at=stored,
            body=body_array(count, 1),
            topic="orders",
            app="shop",
            flags=0,
            topic_id=3,
        ),
    )
    failed = numbers[numbers % _FAILED == 0]
    before = np.arange(first - len(failed) * _FAILED, first, _FAILED) if first else failed[:0]
    dead = before[before % _DEAD == 0]
    if len(dead):
        yield (
            COPY,
            _rows(
                COPY,
                len(dead),
                message_id=[Names.message_id(number) for number in dead.tolist()],
                journal_offset=dead * 600 + 5,
                queue=0,
                queue_offset=dead // _DEAD,
                topic="%DLQ%billing",
                topic_id=9,
                origin_topic="orders",
                group="billing",
                attempt=2,
                reason="RETRIES_EXHAUSTED",
                error=[f"ValueError: no {number % 7}\n  line 1" for number in (dead // _DEAD).tolist()],
                stored_at=np.full(len(dead), stored[0]),
            ),
        )
    taken = stored + 2_000_000 + numbers % 500 * 10_000
    outcomes = np.where(numbers % _FAILED == 0, "failed", "acked")
    parts = [
        _events(ids, numbers, taken - 40_000, "delivered", 1),
        _events(ids, numbers, taken, outcomes, 1),
    ]
    if len(before):
        texts = pa.array([Names.message_id(number) for number in before.tolist()])
        at = np.full(len(before), stored[0]) + before % 1000 * 1000
        parts += [
            _events(texts, before, at - 40_000, "delivered", 2),
            _events(texts, before, at, np.where(before % _DEAD == 0, "dead", "acked"), 2),
        ]
    yield CONSUME_EVENT, pa.concat_tables(parts)


def _events(ids: pa.Array, numbers: np.ndarray, at: np.ndarray, outcome: Any, attempt: int) -> pa.Table:
    return _rows(
        CONSUME_EVENT,
        len(ids),
        message_id=ids,
        at=at,
        outcome=outcome,
        attempt=attempt,
        journal_offset=numbers * 600 + 300 * attempt,
        topic="orders",
        group="billing",
        member="m1",
    )


def _rows(name: str, count: int, **columns: Any) -> pa.Table:
    """Rows of a table; a column is its values, or one value for all."""
    columns |= {"dt": DAY, "broker": _BROKER}
    arrays = []
    for field in SCHEMAS[name]:
        value = columns.get(field.name)
        if isinstance(value, (np.ndarray, list, pa.Array)):
            array = pa.array(value)
            arrays.append(array.cast(pa.int64()).cast(field.type) if pa.types.is_integer(array.type) else array)
        else:
            arrays.append(pa.repeat(pa.scalar(value, field.type), count))
    return pa.table(arrays, schema=SCHEMAS[name])
