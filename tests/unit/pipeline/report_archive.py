"""An archive with derived tables that plain Python made, so that a report can be looked at without Spark."""

from __future__ import annotations

from datetime import UTC, datetime

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.reconcile import APP_ID
from dmq.pipeline.tables import DEAD_LETTER_DAILY, METRICS_1M, RECONCILE_DIFF, SCHEMAS, TRACE
from tests.archive_rows import Days, Row, archive_rows, arrow
from tests.spark import plain_tables

COMPARED = datetime(2030, 2, 2, 3, tzinfo=UTC)


def put(archive: Archive, name: str, rows: list[Row], version: int = 1, app_id: str = "test") -> None:
    table = archive.table(name)
    full = [dict.fromkeys(SCHEMAS[name].names) | row for row in rows]
    table.commit(write_days(arrow(name, full), table.folder), app_id=app_id, version=version)


def metrics(days: Days) -> list[Row]:
    rows = [
        {"minute": minute, "topic": topic, "app": app} | facts
        for (minute, topic, app), facts in plain_tables.metrics_in(days).items()
    ]
    for (minute, topic, group), facts in plain_tables.metrics_out(days).items():
        lag = plain_tables.lag(days, topic, group, minute)
        rows.append({"minute": minute, "topic": topic, "group": group, "lag": lag, "dt": minute.date()} | facts)
    return rows


def put_all(archive: Archive, days: Days) -> None:
    """Everything a report is made of."""
    archive_rows(archive, days, 1)
    put(archive, METRICS_1M, metrics(days))
    put(archive, TRACE, plain_tables.trace(days))
    letters = plain_tables.dead_letters(days)
    named = [
        {"dt": dt, "topic": topic, "group": group, "reason": reason} | facts
        for (dt, topic, group, reason), facts in letters.items()
    ]
    put(archive, DEAD_LETTER_DAILY, named)


def put_differences(archive: Archive, problems: list[str], at: datetime = COMPARED) -> None:
    """What a comparison found, and that it took place."""
    rows: list[Row] = [
        {
            "run_id": at.isoformat(),
            "found_at": at,
            "problem": problem,
            "send_id": f"{index:032x}",
            "topic": "orders",
            "group": "billing",
            "business_id": "o-7",
            "detail": "consumed, but the sender has no result",
            "dt": at.date(),
        }
        for index, problem in enumerate(problems)
    ]
    put(archive, RECONCILE_DIFF, rows, round(at.timestamp() * 1000), APP_ID)
