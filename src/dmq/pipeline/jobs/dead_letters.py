"""Job `dead-letters`: how many messages died each day, why, and examples, into `dead_letter_daily`.

What always holds: a message that died counts once for each group and attempt, on the day it was first stored as a dead
letter; letters that the broker wrote again, to outlive the segment they lay in, are no new ones as long as the first
lies within the lateness window.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Final

from dmq.pipeline.jobs.changes import news_of, remember
from dmq.pipeline.jobs.frames import frame
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.jobs.staged_files import collected
from dmq.pipeline.tables import COPY, DEAD_LETTER_DAILY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["ERRORS_MAX", "ERROR_CHARS_MAX", "SAMPLES_MAX", "dead_letter_rows", "run"]

ERRORS_MAX: Final = 5
SAMPLES_MAX: Final = 5
ERROR_CHARS_MAX: Final = 300
_ROWS: Final = f"""
    WITH letters AS (
        SELECT message_id, `group`, attempt,
               min_by(struct(origin_topic AS topic, coalesce(reason, '') AS reason, coalesce(error, '') AS error,
                             stored_at, dt), struct(stored_at, broker, journal_offset)) AS letter
        FROM {{copy}} WHERE startswith(topic, '%DLQ%')
        GROUP BY message_id, `group`, attempt
    ), first_lines AS (
        SELECT message_id, `group`, letter.topic, letter.reason, letter.stored_at, letter.dt,
               left(trim(split_part(letter.error, '\\n', 1)), {ERROR_CHARS_MAX}) AS error
        FROM letters
    ), numbered AS (
        SELECT *, row_number() OVER (PARTITION BY dt, topic, `group`, reason ORDER BY stored_at, message_id) AS place
        FROM first_lines
    ), by_error AS (
        SELECT dt, topic, `group`, reason, error, count(*) AS count,
               row_number() OVER (PARTITION BY dt, topic, `group`, reason ORDER BY count(*) DESC, error) AS rank
        FROM first_lines WHERE error <> '' GROUP BY dt, topic, `group`, reason, error
    ), top AS (
        SELECT dt, topic, `group`, reason,
               transform(sort_array(collect_list(struct(rank, error, count))),
                         one -> struct(one.error AS error, one.count AS count)) AS top_errors
        FROM by_error WHERE rank <= {ERRORS_MAX} GROUP BY dt, topic, `group`, reason
    ), totals AS (
        SELECT dt, topic, `group`, reason, count(*) AS count,
               transform(sort_array(collect_list(struct(place, message_id)) FILTER (WHERE place <= {SAMPLES_MAX})),
                         one -> one.message_id) AS samples
        FROM numbered GROUP BY dt, topic, `group`, reason
    )
    SELECT t.topic, t.`group`, t.reason, t.count,
           coalesce(e.top_errors, array()) AS top_errors, t.samples, t.dt
    FROM totals t LEFT JOIN top e
        ON t.dt = e.dt AND t.topic <=> e.topic AND t.`group` <=> e.`group` AND t.reason = e.reason
"""


def dead_letter_rows(spark: SparkSession, copies: DataFrame, dts: Iterable[date]) -> DataFrame:
    """The rows of `dead_letter_daily` about some days, from the copies of these days and of the window before."""
    from pyspark.sql.functions import col

    return spark.sql(_ROWS, copy=copies).where(col("dt").isin(*sorted(dts)))


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Make the days anew that copies came to; see `dmq.pipeline.jobs.job`."""
    began, everything = time.monotonic(), flag_option(context, EVERYTHING)
    copy, daily = archive.table(COPY), archive.table(DEAD_LETTER_DAILY)
    news = {copy: news_of(copy, daily, everything=everything)}
    stored = copy.days()
    dts = news[copy].dts
    rows = 0
    if dts:
        context.progress(Progress("dead-letters", "counting", 0, 0, total=len(dts), unit="days"))
        lateness = lateness_of(context)
        window = [day for day in stored if any(dt - lateness <= day <= dt for dt in dts)]
        files = collected(daily, dead_letter_rows(spark, frame(spark, copy, window), dts))
        daily.replace(dts, files)
        rows = sum(file.rows for file in files)
    remember(daily, news)
    return JobResult("dead-letters", {DEAD_LETTER_DAILY: rows}, dts, time.monotonic() - began)
