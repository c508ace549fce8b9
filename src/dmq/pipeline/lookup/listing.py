"""The files of a table, remembered between questions, and those of them that may have what is wanted.

What always holds: a file is left out only if the log says that it has nothing of the kind; a list is at most so old as
was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from dmq.pipeline.archive.files import DT
from dmq.pipeline.archive.store import Table

__all__ = ["Listing"]

Days = tuple[date | None, date | None]


class Listing:
    """See the module.

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
        self._names: list[str] = []
        self._version = -1
        self._read_at = float("-inf")

    def files(self, where: Mapping[str, tuple[Any, Any]] | None = None, days: Days = (None, None)) -> list[str]:
        """Addresses of the files that may have rows of some days with values within bounds, the bounds included."""
        listed = self._fresh()
        if listed is None:
            return []
        keep: Any = None
        for column, least, greatest in [
            (f"partition.{DT}", *days),
            *((name, *pair) for name, pair in (where or {}).items()),
        ]:
            low, high = (column, column) if column.startswith("partition.") else (f"min.{column}", f"max.{column}")
            if least is not None and high in self._names:
                part = pc.fill_null(pc.greater_equal(listed[high], least), True)
                keep = part if keep is None else pc.and_(keep, part)
            if greatest is not None and low in self._names:
                part = pc.fill_null(pc.less_equal(listed[low], greatest), True)
                keep = part if keep is None else pc.and_(keep, part)
        paths = listed["path"] if keep is None else listed["path"].filter(keep)
        return [f"{self._uri}/{path}" for path in paths.to_pylist()]

    def _fresh(self) -> pa.Table | None:
        now = self._now()
        if now - self._read_at < self._fresh_seconds:
            return self._listed
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
                self._listed = pa.table(self._delta.get_add_actions(flatten=True)).combine_chunks()
                self._names, self._version = self._listed.column_names, version
        self._read_at = now
        return self._listed
