"""The files of a table, remembered between questions, and those of them that may have what is wanted.

What always holds: a file is left out only if the log says that it has nothing of the kind; a list is at most so old as
was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from dmq.pipeline.archive.parquet import DT
from dmq.pipeline.archive.table_store import Table

__all__ = ["Listing"]

Days = tuple[date | None, date | None]
_Bounds: TypeAlias = Mapping[str, tuple[Any, Any]]
_EPOCH: Final = date(1970, 1, 1)


class Listing:
    """The files of one table, read again when they are too old.

    Parameters:
        fresh_seconds: how old the list may be.
        now: seconds that never go back.
    """

    def __init__(self, table: Table, fresh_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = table.folder
        self._fresh_seconds = fresh_seconds
        self._now = now
        self._delta: DeltaTable | None = None
        self._listed: pa.Table | None = None
        self._paths: list[str] = []
        self._places: dict[str, int] = {}  # of paths in the list, once they are asked for
        self._columns: dict[str, _Values | None] = {}  # of the list, as far as they were asked for
        self._version = -1
        self._read_at = float("-inf")

    def version(self) -> int:
        """The version of the table that is listed; -1 if there is none."""
        return self._version if self._fresh() else -1

    def address(self, path: str) -> str:
        """The address of a file."""
        return f"{self._folder.uri}/{path}"

    def files(self, where: _Bounds | None = None, days: Days = (None, None)) -> list[str]:
        """Addresses of the files that may have rows of some days with values within bounds, the bounds included."""
        return [self.address(path) for path in self.paths(where, days)]

    def paths(self, where: _Bounds | None = None, days: Days = (None, None)) -> list[str]:
        """As `files`: paths below the table's folder."""
        if not self._fresh():
            return []
        left = np.arange(len(self._paths))
        first, last = (None if day is None else (day - _EPOCH).days for day in days)
        bounds = {DT: (first, last), **(where or {})}
        # Numbers before texts: numpy leaves few files to compare texts of.
        for name, (least, greatest) in sorted(bounds.items(), key=lambda item: isinstance(item[1][0], str)):
            if least is not None and (high := self._bound("max", name)) is not None:
                left = high.at_least(least, left)
            if greatest is not None and (low := self._bound("min", name)) is not None:
                left = low.at_most(greatest, left)
        return [self._paths[at] for at in left.tolist()]

    def by_age(self, paths: set[str]) -> list[tuple[date, int, str]]:
        """Files, by the day and the least journal offset of what they have."""
        if not self._fresh():
            return []
        if not self._places:
            self._places = {path: at for at, path in enumerate(self._paths)}
        low = self._bound("min", "journal_offset")
        found = []
        for path in paths & self._places.keys():
            offset = None if low is None else low.value(self._places[path])
            found.append((date.fromisoformat(path.partition("/")[0].partition("=")[2]), offset or 0, path))
        return sorted(found)

    def _bound(self, which: str, name: str) -> _Values | None:
        """The least or greatest value of a column in each file; None if the log has none."""
        column = f"partition.{DT}" if name == DT else f"{which}.{name}"
        if column not in self._columns:
            assert self._listed is not None
            known = column in self._listed.column_names
            self._columns[column] = _Values(self._listed[column].combine_chunks()) if known else None
        return self._columns[column]

    def _fresh(self) -> bool:
        """See that the list is new enough; whether there is a table."""
        now = self._now()
        if now - self._read_at < self._fresh_seconds:
            return self._listed is not None
        try:
            if self._delta is None:
                self._delta = self._folder.delta()
            else:
                self._delta.update_incremental()
        except TableNotFoundError:
            self._delta = self._listed = None
        else:
            version = self._delta.version()
            if self._listed is None or version != self._version:
                self._listed = pa.table(self._delta.get_add_actions(flatten=True))
                self._paths = self._listed["path"].to_pylist()
                self._columns, self._places, self._version = {}, {}, version
        self._read_at = now
        return self._listed is not None


class _Values:
    """One value for each file, or none where the log does not say: numbers and days for numpy, others for Python."""

    def __init__(self, said: pa.Array) -> None:
        self._texts: list[Any] | None = None
        if pa.types.is_date32(said.type):
            said = said.cast(pa.int32())
        if pa.types.is_integer(said.type):
            self._numbers: npt.NDArray[np.int64] = said.fill_null(0).to_numpy()
            self._unknown: npt.NDArray[np.bool_] = said.is_null().to_numpy(zero_copy_only=False)
        else:
            self._texts = said.to_pylist()

    def value(self, at: int) -> Any:
        if self._texts is not None:
            return self._texts[at]
        return None if self._unknown[at] else int(self._numbers[at])

    def at_least(self, bound: Any, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of some files that may have a value from the bound on."""
        if self._texts is not None:
            texts = self._texts
            return np.array([at for at in left.tolist() if texts[at] is None or texts[at] >= bound], np.int64)
        found: npt.NDArray[np.int64] = left[(self._numbers[left] >= bound) | self._unknown[left]]
        return found

    def at_most(self, bound: Any, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of some files that may have a value up to the bound."""
        if self._texts is not None:
            texts = self._texts
            return np.array([at for at in left.tolist() if texts[at] is None or texts[at] <= bound], np.int64)
        found: npt.NDArray[np.int64] = left[(self._numbers[left] <= bound) | self._unknown[left]]
        return found
