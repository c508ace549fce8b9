"""`dmq journal`: look into a data directory and check it, offline or beside a running broker.

Arguments and layout only. What always holds: nothing in the directory is locked, made or changed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from dmq.cli.options import Format, Formatted
from dmq.storage.file_pool import FilePool
from dmq.storage.files import OsFiles
from dmq.storage.journal.unit import Unit
from dmq.storage.offline.inspection import (
    checkpoint_facts,
    inspect_queue,
    inspect_records,
    inspect_units,
    open_journal,
    segment_named,
    unit_facts,
)
from dmq.storage.offline.verification import Report
from dmq.storage.offline.verification import verify as verify_directory

__all__ = ["app"]

app = typer.Typer(help="Look into a data directory and check it, offline.", no_args_is_help=True)

_PROGRESS_BYTES_MIN = 64 << 20


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The data directory, the one with journal/ in it.")]


@app.command()
def inspect(
    directory: Directory,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="Begin at this journal offset, or queue offset with --queue.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show this many units or entries; 0 shows all.")] = 100,
    records: Annotated[bool, typer.Option("--records", help="Show the records of each unit, too.")] = False,
    segment: Annotated[str | None, typer.Option(metavar="NAME", help="Show this segment only.")] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="TOPIC/QUEUE", help="Show the index entries of this queue instead.")
    ] = None,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Show the checkpoint instead.")] = False,
    form: Formatted = Format.TABLE,
) -> None:
    """Show the units of a journal, with --records what is in them; damage is shown in its place."""
    if (queue is not None) + checkpoint + (records or segment is not None) > 1:
        raise typer.BadParameter("--queue, --checkpoint, and --records or --segment exclude each other")
    files = OsFiles(directory, create=False)
    pool = FilePool(files, 64)
    with contextlib.closing(pool):
        if checkpoint:
            _show_facts(checkpoint_facts(files, pool), form)
            return
        if queue is not None:
            rows = inspect_queue(files, pool, queue, start or 0)
            _show_rows(islice(rows, limit or None), form, _entry_line, _ENTRY_HEAD)
            return
        journal = open_journal(files, pool)
        end = None
        if segment is not None:
            chosen = segment_named(journal, segment)
            start, end = max(start or 0, chosen.start), chosen.end
        found = inspect_units(journal, start, end)
        rows = (_unit_row(unit, records) for unit in islice(found, limit or None))
        _show_rows(rows, form, _unit_lines, _UNIT_HEAD)


@app.command()
def verify(directory: Directory, form: Formatted = Format.TABLE) -> None:
    """Check every byte of a data directory; say what is wrong and what to do about it.

    The exit code is 0 if all is good but for a torn tail, which a crash leaves and the next start cuts; it is 1 for
    anything else.
    """
    files = OsFiles(directory, create=False)
    with _progress() as progress:
        report = verify_directory(files, progress)
    if form == Format.JSON:
        findings = [finding._asdict() for finding in report.findings]
        typer.echo(json.dumps({**report._asdict(), "findings": findings, "is_good": report.is_good}, indent=2))
    else:
        _show_report(report)
    if not report.is_good:
        raise typer.Exit(1)


# --- units and records ------------------------------------------------------------------------------------------------

_UNIT_HEAD = f"{'offset':>20} {'bytes':>10} {'epoch':>6} {'records':>8} {'batches':>8} {'stored':<24} flushed through"
_ENTRY_HEAD = f"{'queue offset':>20} {'journal offset':>20} {'bytes':>10} {'tag hash':>8} {'state':<6} file"


def _unit_row(found: Unit | tuple[int, int], records: bool) -> dict[str, Any]:
    if not isinstance(found, Unit):
        return {"offset": found[0], "bytes": found[1] - found[0], "damaged": "no valid unit"}
    row = unit_facts(found)
    if records:
        row["content"] = list(inspect_records(found))
    return row


def _unit_lines(row: dict[str, Any]) -> Iterator[str]:
    if "damaged" in row:
        yield f"{row['offset']:>20} {row['bytes']:>10} no valid unit: damaged or torn, dmq journal verify tells"
        return
    mark = "  snapshot" if row["snapshot"] else ""
    yield (
        f"{row['offset']:>20} {row['bytes']:>10} {row['epoch']:>6} {row['records']:>8} {row['batches']:>8} "
        f"{_time_text(row['stored_at_ms'])} {row['flushed_through']}{mark}"
    )
    yield from map(_record_line, row.get("content", ()))


def _record_line(row: dict[str, Any]) -> str:
    head = f"{row['offset']:>20} {row['bytes']:>10}   "
    if "damaged" in row:
        return f"{head}damaged: {row['damaged']}"
    if "event" in row:
        return f"{head}{row['words']}"
    named = {
        "id": row["id"],
        "key": row["key"],
        "tag": row["tag"],
        "app": row["app"],
        "business_id": row["business_id"],
        "priority": row["priority"],
        "flags": ",".join(row["flags"]) or None,
        "sent": _time_text(row["sent_at_ms"]),
        "received": _time_text(row["received_at_ms"]),
        "stored": _time_text(row["stored_at_ms"]),
        "client": row["client"],
        "body": row["body_bytes"],
        "body_stored": row["stored_body_bytes"] if "compressed" in row["flags"] else None,
        "attributes": row["attribute_bytes"],
    }
    told = " ".join(f"{name}={_word(value)}" for name, value in named.items() if value is not None)
    return f"{head}{row['topic']}/{row['queue']} at {row['queue_offset']}: {told}"


def _time_text(ms: int) -> str:
    """A time as ISO 8601 in UTC; the bare number where no calendar has it."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    except (OverflowError, ValueError, OSError):
        return str(ms)


def _word(value: object) -> str:
    """A value on one line: what a stranger wrote must not steer the terminal."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _entry_line(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{row['queue_offset']:>20} {row['journal_offset']:>20} {row['bytes']:>10} {row['tag_hash']:>8} "
        f"{row['state']:<6} {row['file']}"
    )


def _show_rows(
    rows: Iterable[dict[str, Any]], form: Format, lines: Callable[[dict[str, Any]], Iterator[str]], head: str
) -> None:
    """One row after the other, as they come, since there may be millions."""
    if form == Format.TABLE:
        typer.echo(head)
        for row in rows:
            typer.echo("\n".join(lines(row)))
        return
    separator = "[\n"
    for row in rows:
        typer.echo(separator + json.dumps(row), nl=False)
        separator = ",\n"
    typer.echo("\n]" if separator != "[\n" else "[]")


def _show_facts(facts: dict[str, Any], form: Format) -> None:
    if form == Format.JSON:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        shown = _time_text(value) if name.endswith("_ms") else value
        label = name.removesuffix("_ms").replace("_", " ")
        items = [f"{key}: {item}" for key, item in value.items()] if isinstance(value, dict) else value
        if isinstance(items, list) and items:
            typer.echo(f"{label}:")
            for item in items:
                parts = item.items() if isinstance(item, dict) else ()
                typer.echo("  " + (" ".join(f"{key}={_word(part)}" for key, part in parts) if parts else str(item)))
        else:
            typer.echo(f"{label}: {'none' if shown == [] else shown}")


# --- verify -----------------------------------------------------------------------------------------------------------


def _show_report(report: Report) -> None:
    if report.in_use_by is not None:
        typer.echo(f"in use by process {report.in_use_by}")
    typer.echo(
        f"{report.segments} segments, {report.units} units, {report.records} records, {report.bytes} bytes, "
        f"{report.entries} index entries"
    )
    for finding in report.findings:
        typer.echo(f"{finding.kind}: {finding.where}: {finding.what}\n    {finding.advice}")
    if not report.findings:
        typer.echo("all good")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal, for journals large enough to wait for."""
    if not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as shown:
        update: Callable[[int, int], None] | None = None

        def show(done: int, total: int) -> None:
            nonlocal update
            if total < _PROGRESS_BYTES_MIN:
                return
            if update is None:
                update = shown.enter_context(_bar())
            update(done, total)

        yield show


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("checking", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
