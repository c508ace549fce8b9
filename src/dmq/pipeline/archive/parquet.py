"""Parquet files of the archive: the one place that writes them.

A file holds rows of one `dt` and lies in the table's folder below `dt=…`. The column `dt` is in the file, too: who
reads files by name, as DuckDB, Arrow and `spark.read.parquet` do here, finds it without knowing the folder's name.

What always holds: a file's name is new, so nothing is ever written over; a file is on the disk for good when its
`Written` is there; times are microseconds; a file that no commit names is nothing, and a later vacuum takes it away.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.object_store import store_errors

__all__ = [
    "DT",
    "FILE_BYTES",
    "ROW_GROUP_BYTES",
    "ROW_GROUP_ROWS",
    "DayFile",
    "Layout",
    "Written",
    "split_days",
    "write_days",
    "write_parquet",
]

DT: Final = "dt"
FILE_BYTES: Final = 128 << 20  # what a file should not be much larger than
# A row group is the least that a lookup reads of a column, so it is small.
ROW_GROUP_ROWS: Final = 32_768
ROW_GROUP_BYTES: Final = 16 << 20  # about, uncompressed
_BLOOM_FPP: Final = 0.01
_TEXT_MAX: Final = 32  # characters of a text in the log's statistics, as other writers have it
_AFTER_ALL: Final = "\U0010ffff"
# Columns of values that are as good as all distinct, where a dictionary is only in the way; and those of them that rise
# in small steps. Measured, it is a third less time and a sixth less space. The steps of hashes are not small, but they
# are read in a third of the time.
_RISING: Final = frozenset(
    {"hash", "file", "journal_offset", "queue_offset", "sent_at", "received_at", "stored_at", "at"}
)
_DISTINCT: Final = _RISING | {"body", "body_crc", "key", "message_id"}


class Written(NamedTuple):
    """A file that was written: its path below the table's folder, and what a commit says of it."""

    path: str
    rows: int
    bytes: int
    stats: str
    dt: date
    written_at_ms: int


def write_parquet(
    table: pa.Table,
    folder: str | Folder,
    *,
    sort_by: Sequence[str] = (),
    bloom: Iterable[str] = (),
    row_group_rows: int = ROW_GROUP_ROWS,
    name: str = "part",
) -> Written:
    """Write rows of one day as a new file of a table.

    Parameters:
        table: the rows, at least one, in the columns of the table's schema.
        folder: the table's, not the day's.
        sort_by: columns to sort by before; none if the rows are in order.
        bloom: columns that are looked up by value.
        row_group_rows: rows of a row group at most, of which a lookup reads one; fewer if they are large.
        name: what the file's name begins with.

    Raises:
        ValueError: there is no row, or there are several days.
    """
    days = pc.unique(table[DT]).to_pylist()
    if len(days) != 1 or days[0] is None:
        raise ValueError(f"a file holds rows of one dt, not of {days}")
    place = folder if isinstance(folder, Folder) else Folder.at(folder)
    if sort_by:
        table = table.sort_by([(column, "ascending") for column in sort_by])
    group_rows = max(1, min(row_group_rows, table.num_rows, ROW_GROUP_BYTES * table.num_rows // table.nbytes))
    layout = Layout(tuple(sort_by), tuple(bloom), group_rows)
    with DayFile(place, days[0], table.schema, layout, name=name) as file:
        for start in range(0, table.num_rows, group_rows):
            file.write(table.slice(start, group_rows))
    return file.written


class Layout(NamedTuple):
    """How the rows of a file lie."""

    sort_by: tuple[str, ...] = ()  # the order they are in
    bloom: tuple[str, ...] = ()  # columns that are looked up by value
    row_group_rows: int = ROW_GROUP_ROWS  # at most


class DayFile:
    """A new file of a table, written row group by row group under its final name. A context manager.

    Attributes:
        written: what a commit says of it, once it was closed.
    """

    def __init__(self, folder: Folder, dt: date, schema: pa.Schema, layout: Layout, *, name: str = "part") -> None:
        self._folder = folder
        self._dt = dt
        self._schema = schema
        self._path = f"{DT}={dt.isoformat()}/{name}-{uuid.uuid4().hex}.parquet"
        self._rows = 0
        self._collected: list[pq.FileMetaData] = []
        folder.make(self._path.rpartition("/")[0])
        with store_errors(folder.uri):
            self._stream = folder.files.open_output_stream(f"{folder.path}/{self._path}")
        self._writer: pq.ParquetWriter | None = None
        with self._whole():
            self._writer = pq.ParquetWriter(
                self._stream,
                schema,
                compression="zstd",
                compression_level=1,
                coerce_timestamps="us",
                use_dictionary=[name for name in schema.names if name not in _DISTINCT],
                column_encoding={name: "DELTA_BINARY_PACKED" for name in schema.names if name in _RISING} or None,
                write_page_index=True,
                sorting_columns=_order(schema, layout.sort_by),
                bloom_filter_options={
                    column: {"ndv": layout.row_group_rows, "fpp": _BLOOM_FPP} for column in layout.bloom
                }
                or None,
                metadata_collector=self._collected,
            )

    @property
    def bytes(self) -> int:
        """How large it is so far."""
        return int(self._stream.tell())

    def write(self, table: pa.Table) -> None:
        """Add a row group."""
        assert self._writer is not None
        with self._whole():
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._rows += table.num_rows

    def close(self) -> None:
        """End it, and see that it is there for good."""
        assert self._writer is not None
        with self._whole():
            self._writer.close()
            size = self.bytes
            self._stream.close()
            self._folder.sync(self._path)
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        stats = _stats(self._collected[0], self._schema)
        self.written = Written(self._path, self._rows, size, stats, dt=self._dt, written_at_ms=now_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What fails in here leaves no part of the file."""
        try:
            with store_errors(self._folder.uri):
                yield
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        """Delete what was written: on a disk that is full, it would be what fills it."""
        for thing in (self._writer, self._stream):
            with suppress(Exception):
                if thing is not None:
                    thing.close()
        with suppress(Exception):
            self._folder.files.delete_file(f"{self._folder.path}/{self._path}")


def _order(schema: pa.Schema, sort_by: Sequence[str]) -> list[pq.SortingColumn] | None:
    try:
        return list(pq.SortingColumn.from_ordering(schema, list(sort_by))) if sort_by else None
    except ValueError:  # behind a nested column it cannot count; it is a hint and no more
        return None


def split_days(table: pa.Table) -> Iterator[tuple[date, pa.Table]]:
    """The rows of each day, in their order."""
    days = sorted(pc.unique(table[DT]).to_pylist()) if table.num_rows else []
    for day in days:
        yield day, table if len(days) == 1 else table.filter(pc.equal(table[DT], pa.scalar(day, pa.date32())))


def write_days(table: pa.Table, folder: str | Folder, **how: Any) -> list[Written]:
    """A file for each day there are rows of; see `write_parquet`."""
    return [write_parquet(rows, folder, **how) for _, rows in split_days(table)]


# --- what the log says of a file --------------------------------------------------------------------------------------


def _stats(found: pq.FileMetaData, schema: pa.Schema) -> str:
    """Least, greatest and missing values by column, so that readers leave out files; JSON as in a Delta log."""
    flat = {field.name for field in schema if _is_counted(field.type) and field.name != DT}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    missing: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(found.num_row_groups):
        row_group = found.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            name = chunk.path_in_schema
            if name not in flat:
                continue
            said = chunk.statistics
            if said is None or not said.has_null_count:
                unknown.add(name)
                continue
            missing[name] = missing.get(name, 0) + said.null_count
            try:
                if said.has_min_max:
                    least[name] = min(least.get(name, said.min), said.min)
                    greatest[name] = max(greatest.get(name, said.max), said.max)
                elif said.null_count < row_group.num_rows:
                    unknown.add(name)
            except (OverflowError, ValueError):  # a time that no calendar has; senders' clocks may be anything
                unknown.add(name)
    for name in unknown:
        for column in (least, greatest, missing):
            column.pop(name, None)
    return json.dumps(
        {
            "numRecords": found.num_rows,
            "minValues": _as_json(least, is_greatest=False),
            "maxValues": _as_json(greatest, is_greatest=True),
            "nullCount": missing,
        }
    )


def _is_counted(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_boolean(kind))


def _as_json(values: Mapping[str, Any], *, is_greatest: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, datetime):
            found[name] = value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        elif isinstance(value, date):
            found[name] = value.isoformat()
        elif isinstance(value, str):
            # Cut short it is still a bound: less than the least, and with a last character more than the greatest.
            is_long = len(value) > _TEXT_MAX
            found[name] = value[:_TEXT_MAX] + (_AFTER_ALL if is_greatest else "") if is_long else value
        elif not isinstance(value, float) or math.isfinite(value):
            found[name] = value
    return found
