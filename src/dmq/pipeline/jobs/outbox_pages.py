"""The outbox's tables as files beside the archive, where Spark joins them; read by the driver, or by tasks if large.

What always holds: a row is in one file of those that are returned. A page is one short transaction; a task reads the
rows of messages made within its part of the period, under file names of its own, so one that is run twice harms nobody.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dmq.errors import DMQError, InvalidSettings
from dmq.outbox.repair.table_reader import COLUMNS, OutboxReader, Period
from dmq.outbox.sender.envelope import floor_send_id
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.object_store import store_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ARROW", "OutboxPart", "copy_part", "copy_tables", "parts_of"]

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
