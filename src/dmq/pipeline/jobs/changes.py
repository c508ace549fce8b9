"""What has come to a table since a derived table was last made: the files that later commits added.

A derived table remembers in its own log, under an app id for each source, the source's version it was made of; that is
written in the commit that puts its rows in place. So a job that was killed finds the same news again, and makes the
same days once more.

What always holds: files that only hold the same rows in another order, as compaction writes them, are no news; where
the log of a source does not reach back far enough, everything in it is news.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pyarrow import fs

from dmq.errors import ArchiveConflict

if TYPE_CHECKING:
    from dmq.pipeline.archive.table_store import LiveFile, Table

__all__ = [
    "News",
    "Source",
    "added",
    "keep_up",
    "mark_of",
    "news_of",
    "portions",
    "remember",
    "source_of",
    "undisturbed",
]

_Done = TypeVar("_Done")
_TRIES: Final = 20
_COMMITS_KEPT: Final = 25  # of a source that had nothing new, that may be looked through again


class News(NamedTuple):
    """What is new in a source: which days have new rows, and the live files they may be in."""

    version: int  # of the source; -1 if it does not exist
    dts: frozenset[date]
    files: tuple[str, ...]
    has_old: bool = False  # the files have rows that are not new, too


class Source(NamedTuple):
    """A source at one moment: all its files then, and what is new in it for a derived table."""

    table: Table
    news: News
    live: tuple[LiveFile, ...]
    seen: int | None  # the version that the derived table was made of
    is_told: bool  # the new files have new rows alone, and all of them

    def new_files(self) -> list[LiveFile]:
        paths = set(self.news.files)
        return [file for file in self.live if file.uri in paths]

    @property
    def marks(self) -> dict[str, int]:
        """What the derived table remembers once it has taken in what is new."""
        return {mark_of(self.table): self.news.version} if self.news.version >= 0 else {}

    @property
    def after(self) -> dict[str, int | None]:
        """What it remembers until then."""
        return {mark_of(self.table): self.seen} if self.news.version >= 0 else {}


def mark_of(source: Table) -> str:
    """The app id under which a derived table remembers how far it has read a source."""
    return f"dmq-from-{source.name}"


def news_of(source: Table, derived: Table, *, everything: bool = False) -> News:
    """What came to a source since the derived table was made, or everything in it."""
    version = source.version()
    seen = None if everything else derived.version_of(mark_of(source))
    if version < 0 or seen == version:
        return News(version, frozenset(), ())
    live = source.live_files()
    # A source that has fewer versions than were seen is another table: its folder was deleted and filled again.
    paths = None if seen is None or seen > version else _paths_since(source, seen, version)
    if paths is None:
        return News(version, frozenset(file.dt for file in live), tuple(file.uri for file in live), seen is not None)
    by_path = {file.path: file for file in live}
    dts = frozenset(paths.values())
    # Rows of a file that is gone again lie in some other file of its day.
    lost = {dt for path, dt in paths.items() if path not in by_path}
    files = [file.uri for file in live if file.path in paths or file.dt in lost]
    return News(version, dts & frozenset(file.dt for file in live), tuple(files), has_old=bool(lost))


def portions(source: Table, derived: Table, news: News, rows_max: int) -> list[News]:
    """The same news as several, one after the other: each of whole commits that have so many rows, or of one."""
    seen = derived.version_of(mark_of(source))
    assert seen is not None, "where that is not known, everything is news"
    live = {file.path: file for file in source.live_files(news.dts)}
    parts: list[News] = []
    rows = rows_max
    for version in range(seen + 1, news.version + 1):
        paths = _paths_since(source, version - 1, version)
        files = [file for path in paths or () if (file := live.get(path)) is not None]
        has_old = paths is None or len(files) < len(paths)
        count = sum(file.rows for file in files)
        if rows + count > rows_max:
            parts.append(News(version, frozenset(), ()))
            rows = 0
        before = parts[-1]
        parts[-1] = News(
            version,
            before.dts | {file.dt for file in files},
            (*before.files, *(file.uri for file in files)),
            has_old=before.has_old or has_old,
        )
        rows += count
    return parts


def undisturbed(work: Callable[[], _Done]) -> _Done:
    """Do something that finds what is missing by itself, again if another run changed the same tables meanwhile.

    Raises:
        ArchiveConflict: that happened every time.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(ArchiveConflict):
            return work()
    return work()


def source_of(table: Table, derived: Table, *, everything: bool = False) -> Source:
    """A source as it is now: what is new in it, and all files, of one and the same version.

    Raises:
        ArchiveConflict: it changes all the time.
    """
    for _ in range(_TRIES):
        seen = derived.version_of(mark_of(table))
        news, live = news_of(table, derived, everything=everything), table.live_files()
        if table.version() == news.version:  # nothing came in between
            is_told = not everything and not news.has_old and (seen is not None or news.version < 0)
            return Source(table, news, tuple(live), seen, is_told=is_told)
    raise ArchiveConflict(f"table {table.name} changes all the time: run this again", table=table.name)


def remember(derived: Table, news: Mapping[Table, News]) -> None:
    """Note how far the sources of a derived table have been read, once its rows are committed."""
    for source, found in news.items():
        if found.version >= 0 and derived.version_of(mark_of(source)) != found.version:
            # Another run was quicker, and knows of more; or the source is a new one, and is read from its beginning.
            with contextlib.suppress(ArchiveConflict):
                derived.commit([], app_id=mark_of(source), version=found.version)


def keep_up(derived: Table, news: Mapping[Table, News]) -> None:
    """Note how far sources have been read that had nothing new, if that is far: later runs read the log from there."""
    far = {source: found for source, found in news.items() if _is_far(derived.version_of(mark_of(source)), found)}
    remember(derived, far)


def _is_far(seen: int | None, news: News) -> bool:
    return seen is None or news.version - seen > _COMMITS_KEPT


def added(lines: Iterable[str]) -> dict[str, date]:
    """The files with new rows that a commit's lines add, with their days."""
    found: dict[str, date] = {}
    for line in lines:
        add = json.loads(line).get("add") if '"add"' in line else None
        if add is not None and add.get("dataChange", True):
            found[add["path"]] = date.fromisoformat(add["partitionValues"]["dt"])
    return found


def _paths_since(source: Table, seen: int, version: int) -> dict[str, date] | None:
    """The files added by the versions after `seen`; None where the log no longer tells."""
    folder = source.folder
    names: Sequence[str] = [f"{folder.path}/_delta_log/{at:020d}.json" for at in range(seen + 1, version + 1)]
    found: dict[str, date] = {}
    for info in folder.files.get_file_info(list(names)):
        if info.type != fs.FileType.File:
            return None
        with folder.files.open_input_stream(info.path) as stream:
            found |= added(stream.read().decode().splitlines())
    return found
