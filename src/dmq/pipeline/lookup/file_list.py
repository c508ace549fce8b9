"""The files of a table, remembered between questions, and those of them that may have what is wanted.

What always holds: a file is left out only if the log says that it has nothing of the kind; a list is at most so old as
was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from dmq.pipeline.archive.parquet import DT
from dmq.pipeline.archive.table_store import Table

__all__ = ["Listing"]

Days = tuple[date | None, date | None]


class Listing:
    """The files of one table, read again when they are too old.

    Parameters:
        fresh_seconds: how old the list may be.
        now: seconds that never go back.
    """

    def __init__(self, table: Table, fresh_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._uri = table.uri
        self._fresh_seconds = fresh_seconds
        self._now = now
        self._delta: DeltaTable | None = None
        self._listed: pa.Table | None = None
        self._columns: dict[str, list[Any]] = {}  # of the list, as far as they were asked for
        self._version = -1
        self._read_at = float("-inf")

    def files(self, where: Mapping[str, tuple[Any, Any]] | None = None, days: Days = (None, None)) -> list[str]:
        """Addresses of the files that may have rows of some days with values within bounds, the bounds included."""
        if not self._fresh():
            return []
        left: Iterable[int] = range(len(self._column("path")))
        # In Python: a list has tens of files, or hundreds, and Arrow takes longer to see that a bound is a text.
        for name, (least, greatest) in {DT: days, **(where or {})}.items():
            if least is not None and (high := self._bound("max", name)):
                left = [at for at in left if high[at] is None or high[at] >= least]
            if greatest is not None and (low := self._bound("min", name)):
                left = [at for at in left if low[at] is None or low[at] <= greatest]
        paths = self._column("path")
        return [f"{self._uri}/{paths[at]}" for at in left]

    def _bound(self, which: str, name: str) -> list[Any]:
        """The least or greatest value of a column in each file; empty if the log has none."""
        return self._column(f"partition.{DT}" if name == DT else f"{which}.{name}")

    def _column(self, name: str) -> list[Any]:
        if name not in self._columns:
            assert self._listed is not None
            self._columns[name] = self._listed[name].to_pylist() if name in self._listed.column_names else []
        return self._columns[name]

    def _fresh(self) -> bool:
        """See that the list is new enough; whether there is a table."""
        now = self._now()
        if now - self._read_at < self._fresh_seconds:
            return self._listed is not None
        try:
            if self._delta is None:
                self._delta = DeltaTable(self._uri)
            else:
                self._delta.update_incremental()
        except TableNotFoundError:
            self._delta = self._listed = None
        else:
            version = self._delta.version()
            if self._listed is None or version != self._version:
                self._listed = pa.table(self._delta.get_add_actions(flatten=True))
                self._columns, self._version = {}, version
        self._read_at = now
        return self._listed is not None
