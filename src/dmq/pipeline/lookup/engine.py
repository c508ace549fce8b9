"""DuckDB over the archive's files: what is asked of it, and what it may not do.

What always holds: a statement that somebody else wrote sees the archive's tables and nothing else; it can read no other
file, write none, load nothing and change no setting. What it takes is bounded: memory, time, rows and bytes of the
result. Nothing is spilled to a disk unless a folder is given for that.

Files of an object store for DuckDB, read through Arrow: DuckDB's own reader would have to be downloaded.

What always holds: nothing is written, and a file is read where it is asked for and not from its beginning.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import duckdb
import pyarrow as pa
from fsspec import AbstractFileSystem
from pyarrow import fs

from dmq.errors import Damaged, DMQError, InvalidRequest, InvalidSettings, LimitReached, TimedOut
from dmq.pipeline.object_store import file_system, scheme_of, store_errors

__all__ = ["Bounds", "Engine", "Result", "quoted"]

_BATCH_ROWS: Final = 2048
_OF_DUCKDB: Final = re.compile("[A-Za-z ]+ Error: ")  # how its errors begin, but for those of a file's decoding
_ALLOWED: Final = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


class Bounds(NamedTuple):
    """What a question may take."""

    rows: int = 1000
    bytes: int = 64 << 20  # of the result
    memory_bytes: int = 1 << 30
    seconds: float = 60.0


class Result(NamedTuple):
    """Rows, and whether there were more than the bounds allow."""

    table: pa.Table
    is_cut: bool


def quoted(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


class Engine:
    """One connection of DuckDB, in memory. A context manager; used by one thread at a time.

    Parameters:
        spill: a folder for what does not fit into the memory it may use.
    """

    def __init__(self, bounds: Bounds | None = None, spill: str = "") -> None:
        self.bounds = bounds or Bounds()
        self._connection = duckdb.connect(
            config={
                "memory_limit": f"{self.bounds.memory_bytes}B",
                "temp_directory": spill,
                "python_enable_replacements": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self._schemes = {"file"}  # of what can be read
        # Footers of files never change, since no file does.
        self._connection.execute("SET parquet_metadata_cache = true")
        self._connection.execute("SET validate_external_file_cache = 'NO_VALIDATION'")
        self._connection.execute("SET TimeZone = 'UTC'")

    def reach(self, *files: str) -> None:
        """See that files of these addresses can be read: those of object stores are read through Arrow.

        Raises:
            InvalidSettings: what is needed for that is not installed.
        """
        for scheme in {scheme_of(uri) for uri in files} - self._schemes:
            try:
                from dmq.pipeline.lookup.engine import StoreFiles
            except ImportError as error:
                raise InvalidSettings('to look into an object store: pip install "dmq[spark]"') from error
            self._connection.register_filesystem(StoreFiles(scheme))
            self._schemes.add(scheme)

    # --- our own questions ------------------------------------------------------------------------------------------

    def rows(self, query: str, parameters: Mapping[str, Any]) -> pa.Table:
        """The answer to a question of ours.

        Raises:
            LimitReached: it takes more memory than is allowed.
        """
        try:
            return self._connection.sql(query, params=dict(parameters)).to_arrow_table()
        except duckdb.Error as error:
            raise _told(error, self.bounds) from error

    def tuples(self, query: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The same as tuples, planned once and not twice; for one without moments, which need more packages.

        Raises:
            LimitReached: as `rows`.
        """
        try:
            return self._connection.execute(query, dict(parameters)).fetchall()
        except duckdb.Error as error:
            raise _told(error, self.bounds) from error

    # --- those of others --------------------------------------------------------------------------------------------

    def show(self, name: str, files: Sequence[str], schema: pa.Schema) -> None:
        """Make a table visible under its name.

        Raises:
            Damaged: a file is gone, or is none.
        """
        self.reach(*files)
        if files:
            listed = ", ".join(map(quoted, files))
            try:
                self._connection.execute(
                    f'CREATE OR REPLACE VIEW "{name}" AS SELECT * FROM read_parquet([{listed}], union_by_name = true)'
                )
            except duckdb.Error as error:
                raise _told(error, self.bounds) from error
        else:
            self._connection.register(name, schema.empty_table())

    def confine(self, files: Iterable[str]) -> None:
        """From now on these files are all there is, and no setting changes."""
        self._connection.execute(f"SET allowed_paths = [{', '.join(map(quoted, files))}]")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def ask(self, query: str) -> Result:
        """The answer to one SELECT that somebody wrote, as far as the bounds go. Call `confine` before.

        Raises:
            InvalidRequest: it is not a SELECT, or DuckDB does not understand it.
            LimitReached: it takes more memory than is allowed.
            TimedOut: it took too long.
        """
        self._check(query)
        overdue = threading.Event()

        def interrupt() -> None:
            overdue.set()
            self._connection.interrupt()

        timer = threading.Timer(self.bounds.seconds, interrupt)
        timer.start()
        try:
            found = self._connection.sql(query)
            return self._taken(found)
        except (duckdb.Error, pa.ArrowException) as error:
            if overdue.is_set():
                raise TimedOut(
                    f"the query took longer than {self.bounds.seconds:g} s: narrow it by topic and dt, or allow more"
                ) from error
            raise _told(error, self.bounds) from error
        finally:
            timer.cancel()

    def stream(self, query: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """All of an answer, some rows at a time, however long that takes. Call `confine` before.

        Raises:
            InvalidRequest, LimitReached: as `ask`.
        """
        self._check(query)
        try:
            with self._connection.sql(query).to_arrow_reader(batch_rows) as reader:
                yield from reader
        except (duckdb.Error, pa.ArrowException) as error:
            raise _told(error, self.bounds) from error

    def register(self, name: str, table: pa.Table) -> None:
        """Make rows of ours visible under a name."""
        self._connection.register(name, table)

    def _check(self, query: str) -> None:
        try:
            statements = self._connection.extract_statements(query)
        except duckdb.Error as error:
            raise _told(error, self.bounds) from error
        if len(statements) != 1 or statements[0].type not in _ALLOWED:
            raise InvalidRequest("one SELECT is allowed, and nothing else: the archive is only read here")

    def _taken(self, found: Any) -> Result:
        with found.to_arrow_reader(_BATCH_ROWS) as reader:
            taken: list[pa.RecordBatch] = []
            rows = size = 0
            is_cut = False
            for batch in reader:
                left = self.bounds.rows - rows
                if size + batch.nbytes > self.bounds.bytes:
                    left = min(left, (self.bounds.bytes - size) * batch.num_rows // max(1, batch.nbytes))
                if batch.num_rows > left:
                    batch, is_cut = batch.slice(0, max(0, left)), True
                taken.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
                if is_cut:
                    break
            return Result(pa.Table.from_batches(taken, reader.schema), is_cut)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _told(error: Exception, bounds: Bounds) -> DMQError:
    """The error in words of ours."""
    text = " ".join(str(error).split("\n\nLINE")[0].split())
    if "Out of Memory" in text or isinstance(error, duckdb.OutOfMemoryException):
        return LimitReached(
            f"the query needs more than {bounds.memory_bytes >> 20} MiB of memory: narrow it by topic and dt, or allow "
            "more with --memory"
        )
    is_of_file = isinstance(error, duckdb.IOException | duckdb.InvalidInputException) and ".parquet" in text
    if is_of_file or not _OF_DUCKDB.match(text):
        return Damaged(f"a file of the archive is gone or damaged, put it back from a copy: {text}")
    return InvalidRequest(f"the query cannot be answered: {text}")


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of all addresses with one scheme.

    Parameters:
        scheme: as `scheme_of` gives it.
    """

    cachable = False

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.protocol = scheme

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **how: Any) -> dict[str, Any]:
        files, below = file_system(path)
        with store_errors(path):
            found = files.get_file_info(below)
        if found.type != fs.FileType.File:
            raise FileNotFoundError(path)
        return {"name": path, "size": found.size, "type": "file", "mtime": found.mtime}

    def modified(self, path: str) -> Any:
        return self.info(path)["mtime"]

    def glob(self, path: str, **how: Any) -> list[str]:
        return [path]  # files are named one by one

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        files, below = file_system(path)
        with store_errors(path):
            return files.open_input_file(below)
