"""What Spark has worked out, as files of a table: written beside the table first, then taken into its folder.

Spark writes into a hidden folder of the table; a finished file is renamed into the folder of its day and described from
its footer, so that no row passes through the driver. Small results come as Arrow instead.

What always holds: a file is in a table only once a commit names it; the staging folder is empty after, however it
ended; what a killed run left there is older than any run and goes with the next one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyarrow import fs

from dmq.pipeline.archive.parquet import DT, ROW_GROUP_BYTES, ROW_GROUP_ROWS, Written, adopt_parquet, write_days
from dmq.pipeline.tables import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dmq.pipeline.archive.table_store import Table

__all__ = ["BLOOM", "FILE_BYTES", "GROUP_ROWS", "SORT", "STAGING", "collected", "staged", "sweep"]

FILE_BYTES: Final = 256 << 20  # what a file should not be much larger than
STAGING: Final = "_staging"
_STALE: Final = timedelta(days=1)
_DAY: Final = "staged_day"

# In what order the rows of a file lie, by table; what is looked up in it by value; and how many rows a row group has,
# where it is not as in others.
SORT: Final[dict[str, tuple[str, ...]]] = {
    "message": ("topic", "queue", "queue_offset"),
    "copy": ("topic", "queue", "queue_offset"),
    "consume_event": ("message_id", "group", "at"),
    "key_index": ("bucket", "hash", "key"),
    "key_directory": ("hash", "file"),
    "trace": ("message_id", "group"),
    "metrics_1m": ("minute", "topic", "group", "app"),
    "position_daily": ("topic", "group", "broker", "queue"),
    "dead_letter_daily": ("topic", "group", "reason"),
    "reconcile_diff": ("problem", "topic", "send_id", "group"),
}
BLOOM: Final[dict[str, tuple[str, ...]]] = {"message": ("key",), "trace": ("message_id",)}
GROUP_ROWS: Final[dict[str, int]] = {"key_index": 16_384}  # of every file a group is read


def collected(table: Table, rows: DataFrame) -> list[Written]:
    """Write a small result: it passes through the driver, and makes one file a day."""
    arrow = rows.toArrow().cast(SCHEMAS[table.name])
    return write_days(arrow, table.folder, sort_by=SORT[table.name])


@contextlib.contextmanager
def staged(table: Table, rows: DataFrame, files: int = 1) -> Iterator[list[Written]]:
    """Write a result of any size; what is not committed inside of this is deleted.

    Parameters:
        rows: with the table's columns; of any days.
        files: how many files about, over all days.
    """
    folder = table.folder
    sweep(table)
    run = f"{STAGING}/{uuid.uuid4().hex}"
    order = SORT[table.name]
    try:
        ordered = rows.select(*(_quoted(name) for name in SCHEMAS[table.name].names))
        if files > 1:
            ordered = ordered.repartitionByRange(files, DT, *map(_quoted, order))
        else:
            ordered = ordered.coalesce(1)
        ordered = ordered.sortWithinPartitions(DT, *map(_quoted, order))
        # Under another name, since Spark leaves a column that names folders out of the files.
        writer = ordered.selectExpr("*", f"{DT} AS {_DAY}").write.partitionBy(_DAY)
        writer.options(**_options(table)).parquet(f"{folder.uri}/{run}")
        yield [adopt_parquet(folder, path, dt) for path, dt in _written(table, run)]
    finally:
        _delete(table, run)


def _options(table: Table) -> dict[str, str]:
    """So that a file is like one that `write_parquet` makes."""
    group_rows = str(GROUP_ROWS.get(table.name, ROW_GROUP_ROWS))
    options = {
        "compression": "zstd",
        "parquet.compression.codec.zstd.level": "1",
        "parquet.block.size": str(ROW_GROUP_BYTES),
        "parquet.block.row.count.limit": group_rows,
    }
    for column in BLOOM.get(table.name, ()):
        options[f"parquet.bloom.filter.enabled#{column}"] = "true"
        options[f"parquet.bloom.filter.expected.ndv#{column}"] = group_rows
    return options


def _written(table: Table, run: str) -> Sequence[tuple[str, date]]:
    """The files of a run with rows in them, by their path below the table's folder."""
    folder = table.folder
    chosen = fs.FileSelector(f"{folder.path}/{run}", recursive=True, allow_not_found=True)
    found: list[tuple[str, date]] = []
    for info in folder.files.get_file_info(chosen):
        day = info.path.rpartition("/")[0].rpartition("/")[2].partition("=")
        if info.type == fs.FileType.File and info.extension == "parquet" and day[0] == _DAY:
            found.append((info.path.removeprefix(f"{folder.path}/"), date.fromisoformat(day[2])))
    return sorted(found)


def _delete(table: Table, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        table.folder.files.delete_dir(f"{table.folder.path}/{path}")


def sweep(table: Table) -> None:
    """Delete what runs that were killed have left, once it is old enough to be nobody's."""
    folder = table.folder
    chosen = fs.FileSelector(f"{folder.path}/{STAGING}", allow_not_found=True)
    for info in folder.files.get_file_info(chosen):
        if info.mtime is not None and info.mtime < datetime.now(UTC) - _STALE:
            _delete(table, info.path.removeprefix(f"{folder.path}/"))


def _quoted(name: str) -> str:
    return f"`{name}`"
