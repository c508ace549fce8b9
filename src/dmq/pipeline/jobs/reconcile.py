"""Job `reconcile`: compares the senders' tables, the consumers' tables and the archive, and writes what disagrees.

The tables are read from every database that is named, each of which may have the sender's tables, a consumer's or
both, and put beside the archive as Parquet (`copy_tables`), by the driver, or by tasks if they are large; Spark joins
them there. Options: `reconcile.days`, how far back, 2 by default; `reconcile.grace_minutes`, how young a message may be
and still be on its way, 10 by default; `reconcile.resend`, true to have what is lost or not consumed sent again;
`reconcile.prefix`, of the tables' names, `m_` by default; `reconcile.tasks`, how many tasks read a table, 1 for the
driver alone, by its size by default.

The query has views of what four sides know. {send}, {result}: the sender's tables; {consumer}: the consumers';
{archived}: messages of the archive that carry a send id; {settled}: message and group that a broker saw acked. Messages
that are too young to be judged, and those from before the archive begins, are not in them, or are marked.

What always holds: run twice for the same moment, it writes once; only what was sent on days that the archive has is
missed in it; a message that has ended is never sent again. A message and group have at most one row, for what went
wrong first: a message that was never sent is not also missing at the consumers. A group without any row here is not
judged by its table, which may be elsewhere. The log of `reconcile_diff` tells when tables and archive were last
compared, also if everything agreed. A row of a table is in one file of those it is copied to. A page is one short
transaction; a task reads the rows of messages made within its part of the period, under file names of its own, so one
that is run twice harms nobody.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dmq.errors import DMQError, InvalidSettings
from dmq.outbox.repair.table_reader import COLUMNS, OutboxReader, Period
from dmq.outbox.schema import PREFIX
from dmq.outbox.sender.envelope import SEND_ID, floor_send_id
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.frames import SORT, STAGING, file_frame, frame, sweep
from dmq.pipeline.jobs.job import JobContext, JobResult, Progress, count_option, flag_option, optional_count
from dmq.pipeline.object_store import store_errors
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, RECONCILE_DIFF, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.folder import Folder
    from dmq.pipeline.archive.table_store import Archive

__all__ = [
    "APP_ID",
    "ARROW",
    "DIFFERENCES",
    "OutboxPart",
    "Sides",
    "copy_part",
    "copy_tables",
    "differences",
    "parts_of",
    "run",
]

APP_ID: Final = "dmq-reconcile"  # its version is the moment of the last run, in milliseconds


# One row for each group that is to answer for a message; NULL stands for any one.
_EXPECTED: Final = """
    SELECT s.*, nullif(trim(g.name), '') AS `group`
    FROM {send} s LATERAL VIEW OUTER explode(
        CASE WHEN s.expected_groups IS NULL THEN array(CAST(NULL AS STRING))
             WHEN trim(s.expected_groups) = '' THEN array()
             ELSE split(s.expected_groups, ',') END) g AS name
"""

DIFFERENCES: Final = f"""
    WITH stored AS (
        SELECT send_id, min(message_id) AS message_id, min(topic) AS topic, min(business_id) AS business_id
        FROM {{archived}} GROUP BY send_id
    ), sent AS (
        SELECT s.*, a.message_id FROM {{send}} s LEFT JOIN stored a ON s.send_id = a.send_id
    ), asked AS (
        SELECT e.send_id, e.topic, e.business_id, e.state, a.message_id,
               coalesce(e.`group`, c.consumer_group) AS `group`, c.business_state AS consumer_state
        FROM ({_EXPECTED}) e LEFT JOIN stored a ON e.send_id = a.send_id
        LEFT JOIN {{consumer}} c
            ON e.send_id = c.send_id AND (e.`group` IS NULL OR e.`group` = c.consumer_group)
        WHERE e.state <> 'NEW' AND coalesce(trim(e.expected_groups) <> '', TRUE)
    ), on_the_way AS (
        SELECT 'not_sent' AS problem, send_id, message_id, topic, CAST(NULL AS STRING) AS `group`, business_id,
               state AS sender_state, CAST(NULL AS STRING) AS consumer_state,
               concat(CASE WHEN message_id IS NULL THEN 'committed, but no broker has it'
                           ELSE 'a broker has it, but the sender does not know' END,
                      CASE WHEN attempts > 0 THEN concat('; sent ', attempts, ' times') ELSE '' END,
                      CASE WHEN last_error <> '' THEN concat('; ', left(last_error, 200)) ELSE '' END) AS detail
        FROM sent WHERE state = 'NEW'
        UNION ALL
        SELECT 'not_archived', send_id, NULL, topic, NULL, business_id, state, NULL,
               'sent, but not in the archive'
        FROM sent WHERE state <> 'NEW' AND message_id IS NULL AND is_covered
    ), consumed AS (
        SELECT 'not_consumed' AS problem, a.send_id, a.message_id, a.topic, a.`group`, a.business_id,
               a.state AS sender_state, a.consumer_state,
               CASE WHEN t.message_id IS NULL THEN 'no consumer has it in its table'
                    ELSE 'a broker saw it acked, but the consumer table has no row' END AS detail
        FROM asked a LEFT JOIN {{settled}} t ON a.message_id = t.message_id AND a.`group` = t.`group`
        LEFT ANTI JOIN {{result}} r
            ON a.send_id = r.send_id AND (a.`group` IS NULL OR a.`group` = r.consumer_group)
        WHERE coalesce(a.consumer_state, 'UNKNOWN') = 'UNKNOWN' AND (a.message_id IS NOT NULL OR NOT :has_archive)
          AND :has_consumers
        UNION ALL
        SELECT 'no_result', a.send_id, a.message_id, a.topic, a.`group`, a.business_id, a.state, a.consumer_state,
               'consumed, but the sender has no result'
        FROM asked a LEFT ANTI JOIN {{result}} r ON a.send_id = r.send_id AND a.`group` = r.consumer_group
        WHERE a.consumer_state IN ('SUCCESS', 'ROLLBACK')
        UNION ALL
        SELECT 'result_differs', c.send_id, s.message_id, c.topic, c.consumer_group, c.business_id, s.state,
               c.business_state, concat('the sender was told ', r.business_state)
        FROM {{consumer}} c JOIN {{result}} r ON c.send_id = r.send_id AND c.consumer_group = r.consumer_group
        LEFT JOIN sent s ON c.send_id = s.send_id
        WHERE c.business_state <> r.business_state AND c.business_state <> 'UNKNOWN'
        UNION ALL
        SELECT 'result_differs', s.send_id, s.message_id, s.topic, r.consumer_group, s.business_id, s.state, NULL,
               concat('the sender was told ', r.business_state, ', but the consumer table has no row')
        FROM sent s JOIN {{result}} r ON s.send_id = r.send_id
        LEFT SEMI JOIN {{consumer}} k ON r.consumer_group = k.consumer_group
        LEFT ANTI JOIN {{consumer}} c ON r.send_id = c.send_id AND r.consumer_group = c.consumer_group
        UNION ALL
        SELECT 'result_differs', s.send_id, s.message_id, s.topic, r.consumer_group, s.business_id, s.state, NULL,
               'done, although a group rolled back'
        FROM sent s JOIN {{result}} r ON s.send_id = r.send_id
        LEFT SEMI JOIN {{consumer}} c
            ON c.send_id = r.send_id AND c.consumer_group = r.consumer_group AND c.business_state = r.business_state
        WHERE s.state = 'DONE' AND r.business_state = 'ROLLBACK'
    ), strangers AS (
        SELECT 'unknown' AS problem, c.send_id, a.message_id, c.topic, c.consumer_group AS `group`, c.business_id,
               CAST(NULL AS STRING) AS sender_state, c.business_state AS consumer_state,
               'consumed, but no sender has it' AS detail
        FROM {{consumer}} c LEFT JOIN stored a ON c.send_id = a.send_id
        LEFT ANTI JOIN {{send}} s ON c.send_id = s.send_id
        UNION ALL
        SELECT 'unknown', a.send_id, a.message_id, a.topic, NULL, a.business_id, NULL, NULL,
               'in the archive, but no sender has it'
        FROM stored a LEFT ANTI JOIN {{send}} s ON a.send_id = s.send_id
        LEFT ANTI JOIN {{consumer}} c ON a.send_id = c.send_id
    )
    SELECT * FROM on_the_way UNION ALL SELECT * FROM consumed UNION ALL SELECT * FROM strangers
"""

_DAYS: Final = 2
_GRACE_MINUTES: Final = 10
_ROWS_MAX: Final = 200_000  # of differences; with more, something is wrong that one row each does not tell
_RESEND: Final = ("not_archived", "not_consumed")


@dataclass(frozen=True)
class Sides:
    """What is compared, as frames; see `dmq.pipeline.jobs.reconcile`."""

    send: DataFrame  # with `is_covered`: it should be in the archive
    result: DataFrame
    consumer: DataFrame
    archived: DataFrame
    settled: DataFrame
    has_consumers: bool
    has_archive: bool


def differences(spark: SparkSession, sides: Sides) -> DataFrame:
    """What disagrees: the columns of `reconcile_diff` from `problem` to `detail`."""
    return spark.sql(
        DIFFERENCES,
        args={"has_consumers": sides.has_consumers, "has_archive": sides.has_archive},
        send=sides.send,
        result=sides.result,
        consumer=sides.consumer,
        archived=sides.archived,
        settled=sides.settled,
    )


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Compare, write, and order resends if that is wanted; see `dmq.pipeline.jobs.job`.

    Raises:
        InvalidSettings: a database that is named has none of the tables.
        DatabaseDown: one cannot be reached.
    """
    began = time.monotonic()
    if not context.outbox_urls:
        return JobResult("reconcile", notes=("nothing to compare: --outbox names the databases of outbox tables",))
    resend = flag_option(context, "reconcile.resend")
    period = _period(context)
    table = archive.table(RECONCILE_DIFF)
    now_ms = _ms(context.now)
    sweep(table)
    with _pages(table.folder) as folder:
        sides = _sides(spark, archive, _copy(spark, context, folder, period), period)
        context.progress(Progress("reconcile", "comparing"))
        found = differences(spark, sides).limit(_ROWS_MAX + 1).toArrow()
    rows = _rows(found.slice(0, _ROWS_MAX), context)
    if table.version_of(APP_ID) != now_ms:
        files = write_days(rows, table.folder, sort_by=SORT[RECONCILE_DIFF]) if rows.num_rows else []
        table.commit(files, app_id=APP_ID, version=now_ms)
    notes = [f"{count} {problem}" for problem, count in sorted(_counts(rows).items())] or ["everything agrees"]
    if found.num_rows > _ROWS_MAX:
        notes.append(f"there are more than the {_ROWS_MAX} that were written")
    if resend:
        notes.append(f"{_send_again(context, rows)} are sent again")
    return JobResult(
        "reconcile",
        {RECONCILE_DIFF: rows.num_rows},
        frozenset({context.now.date()} if rows.num_rows else ()),
        time.monotonic() - began,
        notes=tuple(notes),
    )


def _period(context: JobContext) -> Period:
    days = count_option(context, "reconcile.days", _DAYS)
    grace = count_option(context, "reconcile.grace_minutes", _GRACE_MINUTES)
    first = datetime.combine(context.now.date() - timedelta(days=days), clock_time(), UTC)
    return Period(_ms(first), _ms(context.now - timedelta(minutes=grace)))


# --- the sides --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pages(folder: Folder) -> Iterator[Folder]:
    """A folder beside the archive, which every executor can reach, for as long as it is needed."""
    place = folder.below(STAGING).below(uuid.uuid4().hex)
    place.make()
    try:
        yield place
    finally:
        place.delete()


def _reader(context: JobContext, url: str) -> OutboxReader:
    return OutboxReader(url, context.options.get("reconcile.prefix", PREFIX))


def _copy(spark: SparkSession, context: JobContext, folder: Folder, period: Period) -> dict[str, list[str]]:
    """Put the tables of all databases there; returns the files by table."""
    rows = 0

    def tell(what: str, count: int) -> None:
        nonlocal rows
        rows += count
        context.progress(Progress("reconcile", f"reading m_msg{what}", rows))

    databases = (_reader(context, url) for url in context.outbox_urls)
    tasks = optional_count(context, "reconcile.tasks")
    return copy_tables(spark, databases, period, folder, tasks=tasks, on_rows=tell)


def _sides(spark: SparkSession, archive: Archive, files: Mapping[str, list[str]], period: Period) -> Sides:
    message, event = archive.table(MESSAGE), archive.table(CONSUME_EVENT)
    first = datetime.fromtimestamp(period.from_ms / 1000, UTC).date()
    days = [dt for dt in message.days() if dt >= first]
    covered = _ms(datetime.combine(days[0], clock_time(), UTC)) if days else None
    read = {what: file_frame(spark, files.get(what, ()), schema) for what, schema in ARROW.items()}
    # What was sent before the archive begins cannot be missed in it.
    is_covered = "FALSE" if covered is None else f"coalesce(sent_at_ms >= {covered}, FALSE)"
    archived = frame(spark, message, days, ("message_id", "topic", "business_id", "headers")).selectExpr(
        "message_id",
        "topic",
        "business_id",
        f"decode(filter(headers, one -> one.key = '{SEND_ID}')[0].value, 'UTF-8') AS send_id",
    )
    bounds = "send_id >= '{:012x}' AND send_id < '{:012x}'".format(*period)
    settled = [dt for dt in event.days() if dt >= first]
    acked = frame(spark, event, settled, ("message_id", "group", "outcome")).where("outcome = 'acked'")
    return Sides(
        read["send"].selectExpr("*", f"{is_covered} AS is_covered"),
        read["result"],
        read["consumer"],
        archived.where(bounds),
        settled=acked.select("message_id", "`group`").distinct(),
        has_consumers="consumer" in files,
        has_archive=bool(days),
    )


# --- what comes of it -------------------------------------------------------------------------------------------------


def _rows(found: pa.Table, context: JobContext) -> pa.Table:
    count = found.num_rows
    day: date = context.now.date()
    columns: Mapping[str, Any] = {
        "run_id": pa.repeat(pa.scalar(context.now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")), count),
        "found_at": pa.repeat(pa.scalar(_ms(context.now) * 1000, pa.timestamp("us", "UTC")), count),
        **{name: found[name] for name in found.column_names},
        "dt": pa.repeat(pa.scalar(day, pa.date32()), count),
    }
    schema = SCHEMAS[RECONCILE_DIFF]
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)


def _counts(rows: pa.Table) -> dict[str, int]:
    grouped = rows.group_by("problem").aggregate([("problem", "count")]).to_pylist()
    return {row["problem"]: row["problem_count"] for row in grouped}


def _send_again(context: JobContext, rows: pa.Table) -> int:
    """Have what is lost, or not consumed, sent again by the sender whose row it is; returns how many."""
    chosen = {row["send_id"] for row in rows.select(["problem", "send_id"]).to_pylist() if row["problem"] in _RESEND}
    count = 0
    for url in context.outbox_urls:
        with _reader(context, url) as reader:
            if chosen and "send" in reader.there():
                count += reader.send_again(sorted(chosen), _ms(context.now))
    return count


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


LOCAL_ROWS_MAX: Final = 100_000  # of one table that the driver reads; the rest is for tasks
_TASKS_A_CORE: Final = 4  # traffic is not even over the day
_MS_DIGITS: Final = 12  # of a send id, that say when it was made
ARROW: Final = {
    what: pa.schema(
        [
            pa.field(name, pa.int64() if name.endswith("_ms") or name in ("sequence", "attempts") else pa.string())
            for name in names
        ]
    )
    for what, names in COLUMNS.items()
}
Page = list[tuple[Any, ...]]


class OutboxPart(NamedTuple):
    """What one task reads: the rows of a table about messages made within a part of the period."""

    url: str
    prefix: str
    what: str
    period: Period
    folder: str  # address, for the files


def copy_tables(
    spark: SparkSession,
    databases: Iterable[OutboxReader],
    period: Period,
    folder: Folder,
    *,
    tasks: int | None,
    on_rows: Callable[[str, int], None],
) -> dict[str, list[str]]:
    """Write the tables of all databases as files; returns their addresses, by table that is there.

    Parameters:
        databases: each is closed when it was read.
        tasks: how many read a table, 1 for the driver alone; None goes by its size.
        on_rows: is told, now and then, of which table how many rows were read.

    Raises:
        InvalidSettings: a database has none of the tables.
        DatabaseDown: one cannot be reached.
    """
    files: dict[str, list[str]] = {}
    parts: list[OutboxPart] = []
    is_local = (spark.sparkContext.master or "").startswith("local")
    wanted = tasks or _TASKS_A_CORE * spark.sparkContext.defaultParallelism
    for database in databases:
        with database as reader:
            found = reader.there()
            if not found:
                raise InvalidSettings(
                    "a database that was named has none of the outbox's tables msgsend, msgresult, msgconsumer: name "
                    "the one that your application's tables are in, and by reconcile.prefix what their names begin with"
                )
            # A SQLite file is on this machine alone.
            is_shared = tasks != 1 and (is_local or not reader.is_file)
            limit = None if not is_shared else LOCAL_ROWS_MAX if tasks is None else 0
            for what in found:
                mine = files.setdefault(what, [])
                for page in _read_some(reader, what, period, limit):
                    if isinstance(page, Period):
                        parts += [
                            OutboxPart(reader.url, reader.prefix, what, part, folder=folder.uri)
                            for part in parts_of(page, wanted)
                        ]
                    else:
                        mine.append(_write(folder, what, page))
                        on_rows(what, len(page))
    if parts:
        for part, result in zip(
            parts, spark.sparkContext.parallelize(parts, len(parts)).map(copy_part).collect(), strict=True
        ):
            if isinstance(result, DMQError):
                raise result
            files[part.what] += result[0]
            on_rows(part.what, result[1])
    return files


def _read_some(reader: OutboxReader, what: str, period: Period, limit: int | None) -> Iterator[Page | Period]:
    """The pages of a table as far as the limit goes, and then the part of the period that was not read."""
    if limit == 0:
        yield period
        return
    rows = 0
    for page in reader.pages(what, period):
        rows += len(page)
        if limit is None or rows < limit:
            yield page
            continue
        # Messages of the last millisecond may go on in the next page.
        rest_ms = int(page[-1][0][:_MS_DIGITS], 16)
        yield [row for row in page if row[0] < floor_send_id(rest_ms)]
        yield Period(rest_ms, period.to_ms)
        return


def parts_of(period: Period, count: int) -> list[Period]:
    """A period in parts of the same length, that have each moment of it once."""
    first, last = period
    count = max(1, min(count, last - first))
    cuts = [first + (last - first) * number // count for number in range(count + 1)]
    return [Period(*pair) for pair in pairwise(cuts)]


def copy_part(part: OutboxPart) -> tuple[list[str], int] | DMQError:
    """Do it, on an executor: the addresses of the files and how many rows they have, or what was wrong."""
    folder, files, rows = Folder.at(part.folder), [], 0
    try:
        with OutboxReader(part.url, part.prefix) as reader:
            for page in reader.pages(part.what, part.period):
                files.append(_write(folder, part.what, page))
                rows += len(page)
    except DMQError as error:
        return error
    return files, rows


def _write(folder: Folder, what: str, page: Page) -> str:
    name = f"{what}-{uuid.uuid4().hex}.parquet"
    schema = ARROW[what]
    columns = zip(*page, strict=True) if page else [[] for _ in schema]
    table = pa.table([pa.array([*column], field.type) for column, field in zip(columns, schema, strict=True)], schema)
    with store_errors(folder.uri):
        pq.write_table(table, f"{folder.path}/{name}", filesystem=folder.files)
    return f"{folder.uri}/{name}"
