"""`dmq archive report`: what is in the archive and what it tells, on one page."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.archive.options import Tables, needs_spark_extra
from dmq.cli.options import parse_moment
from dmq.errors import StorageError

if TYPE_CHECKING:
    from dmq.pipeline.report.model import Report

__all__ = ["report"]


class ReportFormat(StrEnum):
    """How a report is written."""

    TEXT = "text"
    HTML = "html"
    JSON = "json"


def report(
    tables: Tables,
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="From then on: 10m back, or a moment.")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Before then.")] = None,
    form: Annotated[
        ReportFormat | None, typer.Option("--format", help="How to write it; text, or what FILE ends with.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it instead of stdout.")] = None,
) -> None:
    """Report on the archive: what is in it, throughput, latency and lag, retries, dead letters, slow messages.

    The period is the last 24 hours that the archive has, unless --from and --to say otherwise.
    """
    with needs_spark_extra():
        from dmq.pipeline.report.collector import collect

    found = collect(tables, datetime.now(UTC), parse_moment(since), parse_moment(until))
    text = _written(found, form or _form_of(output), to_terminal=output is None and sys.stdout.isatty())
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the report cannot be written to {output}: {error.strerror}") from error
    typer.echo(f"{output} written", err=True)


def _form_of(output: Path | None) -> ReportFormat:
    endings = {".html": ReportFormat.HTML, ".htm": ReportFormat.HTML, ".json": ReportFormat.JSON}
    return ReportFormat.TEXT if output is None else endings.get(output.suffix.lower(), ReportFormat.TEXT)


def _written(found: Report, form: ReportFormat, *, to_terminal: bool) -> str:
    if form == ReportFormat.HTML:
        from dmq.pipeline.report.html import as_html

        return as_html(found)
    if form == ReportFormat.JSON:
        return json.dumps(dataclasses.asdict(found), indent=2, default=_plain) + "\n"
    from dmq.pipeline.report.text import as_text

    width = shutil.get_terminal_size().columns if to_terminal else None
    return as_text(found, width=width, color=to_terminal and "NO_COLOR" not in os.environ)


def _plain(value: Any) -> Any:
    """Moments as ISO 8601, lengths of time in seconds."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
