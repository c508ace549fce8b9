"""The index by key, business id and message id: its rows for some messages, and which of its files have a hash.

Rows are sorted by a hash of the text that a message is found by. Every batch of the archive job writes files of the
index, and each has hashes of the whole range: without a directory a lookup would have to open all of them. The
directory is a table of runs. A run covers some files of the index: it has one file with their names, and files of
entries, sorted by hash, that say which of them has which hash. Of a hash the directory keeps the top 40 bits, which
take two bytes a row once they are sorted. New files become a new run; a run is merged with those that are not much
larger, so that there are as many runs as the archive's size has digits.

What always holds: a text has the same hash in every process and version, since it is part of the archive's format. The
hash protects against nobody: a reader that finds a hash compares the text. A bucket is the top bits of the hash, so
that sorting by bucket and hash is sorting by the hash as an unsigned number. A file of the index that no run names is
opened by every lookup, and an entry for a file that is gone is passed over. So the directory may lag behind the index,
and losing it costs time and no answer. All files of a run are committed together. Memory is bounded by `ENTRIES_MAX`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dmq.errors import ArchiveConflict
from dmq.pipeline.archive.parquet import Written, write_parquet
from dmq.pipeline.tables import KEY_DIRECTORY, KEY_INDEX, SCHEMAS

if TYPE_CHECKING:
    from dmq.pipeline.archive.folder import Folder
    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = [
    "BUCKETS",
    "BUSINESS_ID",
    "KEY",
    "KINDS",
    "MESSAGE_ID",
    "Covered",
    "EntryFile",
    "bucket_of",
    "cover",
    "hash_prefix",
    "index_rows",
    "is_names",
    "read_names",
    "run_of",
    "text_hash",
    "text_hashes",
]

KEY: Final = "key"
BUSINESS_ID: Final = "business_id"
MESSAGE_ID: Final = "message_id"
KINDS: Final = (KEY, BUSINESS_ID, MESSAGE_ID)  # each the name of a column of `message`

_BUCKET_BITS: Final = 6
BUCKETS: Final = 1 << _BUCKET_BITS

_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_PLACE: Final = ("message_id", "topic", "queue", "queue_offset", "broker", "journal_offset", "dt")


def index_rows(messages: pa.Table) -> pa.Table:
    """The index's rows for rows of `message`, in no order: one for every id, key and business id."""
    parts = []
    for kind in KINDS:
        texts = messages[kind].combine_chunks()
        has_text = texts.is_valid()
        mine = messages.select(_PLACE).filter(has_text)
        texts = texts.drop_null()
        hashes = text_hashes(texts)
        columns: dict[str, Any] = {name: mine[name] for name in _PLACE}
        columns |= {
            "bucket": pa.array((hashes >> np.uint64(64 - _BUCKET_BITS)).astype(np.int32)),
            "hash": pa.array(hashes.view(np.int64)),
            "kind": pa.repeat(pa.scalar(kind), len(texts)),
            "key": texts,
        }
        schema = SCHEMAS[KEY_INDEX]
        parts.append(pa.table([columns[field.name] for field in schema], schema=schema))
    return pa.concat_tables(parts)


def bucket_of(hashed: int) -> int:
    """The bucket of a hash."""
    return (hashed & _U64) >> (64 - _BUCKET_BITS)


def text_hash(text: str) -> int:
    """The hash of a text as the column `hash` has it: splitmix64 over its length and its words of eight bytes."""
    raw = text.encode()
    value = _mix(len(raw))
    for at in range(0, len(raw), 8):
        value = _mix(value ^ int.from_bytes(raw[at : at + 8], "little"))
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _U64
    value = ((value ^ value >> 30) * _FIRST) & _U64
    value = ((value ^ value >> 27) * _SECOND) & _U64
    return value ^ value >> 31


def text_hashes(texts: pa.StringArray) -> npt.NDArray[np.uint64]:
    """`text_hash` of many, as unsigned numbers; none of them may be missing."""
    if len(texts) == 0:
        return np.empty(0, np.uint64)
    _, ends, data = texts.buffers()
    bounds = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    starts, sizes = bounds[:-1], np.diff(bounds)
    # Eight bytes more than there are, so that the last word of the last text can be read whole.
    first = int(bounds[0])
    raw = b"".join((memoryview(data or b"")[first : int(bounds[-1])], bytes(8)))
    words = np.ndarray((len(raw) - 7,), "<u8", raw, 0, (1,))
    values = _mix_many(sizes.astype(np.uint64))
    left, at = sizes, starts - first
    index: npt.NDArray[np.int64] | None = None  # whose words are not at their end; None for all
    while True:
        if int(left.min(initial=1)) <= 0:
            going = np.flatnonzero(left > 0)
            if not len(going):
                return values
            index = going if index is None else index[going]
            left, at = left[going], at[going]
        word = words[at]
        spare = np.clip(8 - left, 0, 7).astype(np.uint64) * np.uint64(8)
        word = (word << spare) >> spare
        if index is None:
            values = _mix_many(values ^ word)
        else:
            values[index] = _mix_many(values[index] ^ word)
        left, at = left - 8, at + 8


def _mix_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = values + np.uint64(_GOLDEN)  # wraps, as unsigned sums of arrays do
    value = (value ^ value >> np.uint64(30)) * np.uint64(_FIRST)
    value = (value ^ value >> np.uint64(27)) * np.uint64(_SECOND)
    return value ^ value >> np.uint64(31)


FILES_MIN: Final = 16  # files of the index that no run names, before a run is made of them
ENTRIES_MAX = 4_000_000  # entries that are sorted at once
GROUP_ROWS: Final = 16_384  # a lookup reads one group
_GROWTH: Final = 4  # a run at most so many times as large as what is merged already is merged with it
_FILE_BITS: Final = 24
_PREFIX_BITS: Final = 40
_NAMES: Final = "names"

Entries = npt.NDArray[np.uint64]  # the prefix in the upper 40 bits, the number of the file in the lower 24


class Covered(NamedTuple):
    """What `cover` did: files of the index that runs name now and did not before, and how many runs there are."""

    files: int
    runs: int


class _Run(NamedTuple):
    """A run: its files, and the files of the index that it covers."""

    files: tuple[LiveFile, ...]
    names: tuple[str, ...]

    @property
    def entries(self) -> int:
        return sum(file.rows for file in self.files) - len(self.names)


def hash_prefix(hashed: int) -> int:
    """What the directory keeps of a hash."""
    return (hashed & 0xFFFF_FFFF_FFFF_FFFF) >> (64 - _PREFIX_BITS)


def run_of(path: str) -> str:
    """The run that a file of the directory belongs to."""
    return path.rpartition("/")[2].partition("-")[0]


def is_names(path: str) -> bool:
    """Whether a file of the directory has the names of its run's files, and not entries."""
    return path.rpartition("/")[2].split("-")[1] == _NAMES


def read_names(folder: Folder, path: str) -> list[str]:
    """The files of the index that a run covers, by their numbers."""
    found: list[str] = pq.read_table(f"{folder.path}/{path}", columns=["path"], filesystem=folder.files)[
        "path"
    ].to_pylist()
    return found


class EntryFile:
    """A file of entries, opened, and which hashes its row groups have."""

    def __init__(self, folder: Folder, path: str) -> None:
        self._parquet = pq.ParquetFile(f"{folder.path}/{path}", filesystem=folder.files)
        said = self._parquet.metadata
        bounds = [said.row_group(group).column(0).statistics for group in range(said.num_row_groups)]
        self._least = np.array([one.min for one in bounds], np.int64)
        self._greatest = np.array([one.max for one in bounds], np.int64)

    def between(self, least: int, greatest: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]]:
        """Prefixes, the bounds included, and the files that have them; by row group."""
        for group in np.flatnonzero((self._least <= greatest) & (self._greatest >= least)).tolist():
            rows = self._parquet.read_row_group(group, columns=["hash", "file"], use_threads=False)
            hashes, files = rows["hash"].to_numpy(), rows["file"].to_numpy()
            at = slice(np.searchsorted(hashes, least), np.searchsorted(hashes, greatest, side="right"))
            yield hashes[at], files[at]


def cover(archive: Archive, files_min: int = FILES_MIN) -> Covered:
    """Bring the directory up to the index: name the files that no run names, and merge runs.

    Parameters:
        files_min: fewer files than this are left to the next time.
    """
    index, table = archive.table(KEY_INDEX), archive.table(KEY_DIRECTORY)
    live = {file.path: file for file in index.live_files()}
    runs = _runs(table)
    named = {name for run in runs for name in run.names}
    missing = [file for path, file in live.items() if path not in named]
    if len(missing) < files_min:
        missing = []
    for some in _portions(missing):
        _commit(table, (), _new_run(table, index, some))
    runs = _runs(table) if missing else runs
    merged = _to_merge(runs, live.keys())
    if merged:
        _commit(table, [file for run in merged for file in run.files], _merged_run(table, merged, live.keys()))
        runs = _runs(table)
    return Covered(len(missing), len(runs))


def _commit(table: Table, removes: Sequence[LiveFile], adds: Sequence[Written]) -> None:
    with suppress(ArchiveConflict):  # another process was quicker, and what it made is as good
        table.swap(removes, adds)


def _runs(table: Table) -> list[_Run]:
    files: dict[str, list[LiveFile]] = {}
    for file in table.live_files():
        files.setdefault(run_of(file.path), []).append(file)
    runs = []
    for some in files.values():
        names = [name for file in some if is_names(file.path) for name in read_names(table.folder, file.path)]
        runs.append(_Run(tuple(some), tuple(names)))
    return runs


def _portions(files: Iterable[LiveFile]) -> Iterator[list[LiveFile]]:
    """Files in groups that are sorted at once, oldest day first."""
    some: list[LiveFile] = []
    rows = 0
    for file in files:
        if some and rows + file.rows > ENTRIES_MAX:
            yield some
            some, rows = [], 0
        some.append(file)
        rows += file.rows
    if some:
        yield some


def _to_merge(runs: Sequence[_Run], live: Iterable[str]) -> list[_Run]:
    """The runs that become one: the small ones, and those that are mostly about files that are gone."""
    there = set(live)
    left = sorted(runs, key=lambda run: run.entries)
    chosen: list[_Run] = []
    for run in left:
        if not chosen or run.entries <= _GROWTH * sum(one.entries for one in chosen):
            chosen.append(run)
    stale = [run for run in left if run not in chosen and 2 * len(there.intersection(run.names)) < len(run.names)]
    is_stale = len(chosen) == 1 and 2 * len(there.intersection(chosen[0].names)) < len(chosen[0].names)
    return chosen + stale if len(chosen) + len(stale) > 1 or is_stale else []


# --- runs -------------------------------------------------------------------------------------------------------------


def _new_run(table: Table, index: Table, files: Sequence[LiveFile]) -> list[Written]:
    """A run over files of the index."""
    parts = []
    for number, file in enumerate(files):
        path = f"{index.folder.path}/{file.path}"
        hashes = pq.read_table(path, columns=["hash"], filesystem=index.folder.files)["hash"].to_numpy()
        prefixes = np.unique(hashes.view(np.uint64) >> np.uint64(64 - _PREFIX_BITS))
        parts.append(prefixes << np.uint64(_FILE_BITS) | np.uint64(number))
    return _written(table, [file.path for file in files], [np.concatenate(parts)])


def _merged_run(table: Table, runs: Sequence[_Run], live: Iterable[str]) -> list[Written]:
    """One run in the place of several, without what is gone; no file if nothing is left."""
    there = set(live)
    names = list(dict.fromkeys(name for run in runs for name in run.names if name in there))
    if not names:
        return []
    numbers = {name: number for number, name in enumerate(names)}
    maps = [np.array([numbers.get(name, -1) for name in run.names], np.int64) for run in runs]
    opened = [
        (EntryFile(table.folder, file.path), renamed)
        for run, renamed in zip(runs, maps, strict=True)
        for file in run.files
        if not is_names(file.path)
    ]
    count = -(-sum(run.entries for run in runs) // ENTRIES_MAX)
    bounds = [(1 << _PREFIX_BITS) * number // count for number in range(count + 1)]

    def pieces() -> Iterator[Entries]:
        for least, end in pairwise(bounds):
            parts = [np.empty(0, np.uint64)]
            for file, renamed in opened:
                for hashes, files in file.between(least, end - 1):
                    now = renamed[files]
                    kept = now >= 0
                    parts.append(hashes[kept].astype(np.uint64) << np.uint64(_FILE_BITS) | now[kept].astype(np.uint64))
            yield np.unique(np.concatenate(parts))

    return _written(table, names, pieces())


def _written(table: Table, names: Sequence[str], pieces: Iterable[Entries]) -> list[Written]:
    """The files of a run. Its day is the last one that it knows of, so that it goes with it."""
    day = max(date.fromisoformat(name.partition("/")[0].partition("=")[2]) for name in names)
    run = uuid.uuid4().hex[:16]

    def write(columns: dict[str, pa.Array], name: str) -> Written:
        count = len(columns["file"])
        schema = SCHEMAS[KEY_DIRECTORY]
        same = {"dt": pa.scalar(day, pa.date32())}
        arrays = [
            columns.get(field.name, pa.repeat(same.get(field.name, pa.scalar(None, field.type)), count))
            for field in schema
        ]
        rows = pa.table(arrays, schema=schema)
        return write_parquet(rows, table.folder, row_group_rows=GROUP_ROWS, name=f"{run}-{name}")

    numbers = pa.array(np.arange(len(names), dtype=np.int32))
    written = [write({"file": numbers, "path": pa.array(names, pa.string())}, _NAMES)]
    for entries in pieces:
        entries = np.sort(entries)
        if len(entries):
            prefixes = (entries >> np.uint64(_FILE_BITS)).astype(np.int64)
            files = (entries & np.uint64((1 << _FILE_BITS) - 1)).astype(np.int32)
            written.append(write({"hash": pa.array(prefixes), "file": pa.array(files)}, "entries"))
    return written
