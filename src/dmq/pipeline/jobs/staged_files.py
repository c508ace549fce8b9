"""What Spark has worked out, as files of a table that wait for their commit.

Executors write the files into the table's folder under their final names and describe them, so that no row passes
through the driver (`dmq.pipeline.jobs.table_files`). Small results come as Arrow instead.

What always holds: a file is in a table only once a commit names it; what a killed run has written lies there unnamed
until the job `retain` deletes it.
"""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dmq.pipeline.archive.parquet import DT, ROW_GROUP_ROWS, Layout, Written, write_days
from dmq.pipeline.tables import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dmq.pipeline.archive.table_store import Table

__all__ = ["BLOOM", "GROUP_ROWS", "SORT", "STAGING", "collected", "staged", "sweep"]

STAGING: Final = "_staging"
_STALE: Final = timedelta(days=1)

# In what order the rows of a file lie, by table; what is looked up in it by value; and how many rows a row group has,
# where it is not as in others.
SORT: Final[dict[str, tuple[str, ...]]] = {
    "message": ("topic", "queue", "queue_offset"),
    "copy": ("topic", "queue", "queue_offset"),
    "consume_event": ("message_id", "group", "at"),
    "key_index": ("bucket", "hash", "key"),
    "key_directory": ("hash", "file"),
    "trace": ("message_id", "group"),
    "rollup_part": ("kind", "minute", "topic", "group", "app"),
    "metrics_1m": ("minute", "topic", "group", "app"),
    "position_daily": ("topic", "group", "broker", "queue"),
    "dead_letter_part": ("topic", "group", "reason", "error"),
    "dead_letter_daily": ("topic", "group", "reason"),
    "reconcile_diff": ("problem", "topic", "send_id", "group"),
}
BLOOM: Final[dict[str, tuple[str, ...]]] = {"message": ("key",), "trace": ("message_id",)}
GROUP_ROWS: Final[dict[str, int]] = {"key_index": 16_384}  # of every file a group is read


def collected(table: Table, rows: DataFrame) -> list[Written]:
    """Write a small result: it passes through the driver, and makes one file a day."""
    arrow = rows.toArrow().cast(SCHEMAS[table.name])
    return write_days(arrow, table.folder, sort_by=SORT[table.name])


def staged(table: Table, rows: DataFrame, files: int = 1) -> list[Written]:
    """Write a result of any size; it belongs to the table once the files are committed.

    Parameters:
        rows: with the table's columns; of any days.
        files: how many files about, over all days.
    """
    from dmq.pipeline.jobs.table_files import TableFiles, decode_manifest, register

    order = SORT[table.name]
    ordered = rows.select(*(_quoted(name) for name in SCHEMAS[table.name].names))
    if files > 1:
        ordered = ordered.repartitionByRange(files, DT, *map(_quoted, order))
    else:
        ordered = ordered.coalesce(1)
    ordered = ordered.sortWithinPartitions(DT, *map(_quoted, order))
    layout = Layout(order, BLOOM.get(table.name, ()), GROUP_ROWS.get(table.name, ROW_GROUP_ROWS))
    register(rows.sparkSession)
    with tempfile.TemporaryDirectory(prefix="dmq-") as place:
        manifest = Path(place) / "manifest.json"
        writer = ordered.write.format(TableFiles.name()).mode("append")
        writer.options(folder=table.uri, layout=json.dumps(layout), manifest=str(manifest)).save()
        return decode_manifest(manifest.read_text())


def sweep(table: Table) -> None:
    """Delete what runs that were killed have left, once it is old enough to be nobody's."""
    table.folder.below(STAGING).sweep(_STALE)


def _quoted(name: str) -> str:
    return f"`{name}`"
