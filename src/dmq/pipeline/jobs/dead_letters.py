"""Job `dead-letters`: how many messages died each day, why, and examples, into `dead_letter_daily`.

New letters are added up into rows of `dead_letter_part` (`parts.letter_parts`), and the rows of their days are made of
the parts. The first time, and where the log does not say which rows are new, Spark counts whole days anew.

What always holds: a message that died counts once for each group and attempt, on the day it was first stored as a dead
letter; parts and the mark that says what they are made of change in one commit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.changes import keep_up, news_of, remember, source_of, undisturbed
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.jobs.parts.letter_parts import daily_rows, letters_of_days, letters_of_news
from dmq.pipeline.jobs.table_files import SORT, staged
from dmq.pipeline.tables import COPY, DEAD_LETTER_DAILY, DEAD_LETTER_PART

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["run"]

NEW_ROWS_MAX = 20_000_000  # that the driver looks at; more is for Spark


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Add up what is new, and make the days of it; see `dmq.pipeline.jobs.job`."""
    began = time.monotonic()
    undisturbed(lambda: add_parts(spark, archive, context))
    part, daily = archive.table(DEAD_LETTER_PART), archive.table(DEAD_LETTER_DAILY)
    news = news_of(part, daily, everything=flag_option(context, EVERYTHING))
    # A day that lost its only letter to one that was stored before has no parts any more.
    dts = news.dts | (frozenset(daily.days()) & frozenset(archive.table(COPY).days()) - frozenset(part.days()))
    rows = 0
    if dts:
        made = daily_rows(part.live_files(dts))
        daily.replace(dts, write_days(made, daily.folder, sort_by=SORT[DEAD_LETTER_DAILY]))
        rows = made.num_rows
        remember(daily, {part: news})
    else:
        keep_up(daily, {part: news})
    return JobResult("dead-letters", {DEAD_LETTER_DAILY: rows}, dts, time.monotonic() - began)


def add_parts(spark: SparkSession, archive: Archive, context: JobContext) -> None:
    """Bring `dead_letter_part` up to `copy`.

    Raises:
        ArchiveConflict: another run did that meanwhile.
    """
    part, lateness = archive.table(DEAD_LETTER_PART), lateness_of(context)
    source = source_of(archive.table(COPY), part, everything=flag_option(context, EVERYTHING))
    new = source.new_files()
    if not new:
        keep_up(part, {source.table: source.news})
        return
    if source.is_told and sum(file.rows for file in new) <= NEW_ROWS_MAX:
        rows = letters_of_news(source.table, new, lateness)
        if rows is not None:
            part.edit([], write_days(rows, part.folder, sort_by=SORT[DEAD_LETTER_PART]), source.marks, source.after)
            return
    # A letter may be one that was first stored on a day before, or stored again on one after: those count anew.
    stored = {file.dt for file in source.live}
    dts = sorted(dt for dt in stored if any(abs(dt - new_dt) <= lateness for new_dt in source.news.dts))
    removes = part.live_files(dts)
    made, written = letters_of_days(spark, source.live, lateness), []
    for index, dt in enumerate(dts):
        context.progress(Progress("dead-letters", f"counting {dt}", 0, index, total=len(dts), unit="days"))
        written += staged(part, made(dt))
    part.edit(removes, written, source.marks, source.after)
