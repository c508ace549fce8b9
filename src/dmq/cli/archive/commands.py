"""`dmq archive`: fill the archive, and ask it. Here is `run`; the other commands have modules of their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.archive.options import Conf, Master, Tables, needs_spark_extra
from dmq.cli.archive.query import query
from dmq.cli.archive.replay import replay
from dmq.cli.archive.report import report
from dmq.cli.contexts import choose_urls
from dmq.cli.options import make_app, parse_pairs, parse_seconds

if TYPE_CHECKING:
    from dmq.pipeline.jobs.job import Progress

__all__ = ["app"]

app = make_app("Archive everything a broker has, and look things up in it.")
app.command()(query)
app.command()(replay)
app.command()(report)


@app.command()
def run(
    tables: Tables,
    broker: Annotated[
        list[str] | None,
        typer.Option(
            "--broker",
            envvar="DMQ_URL",
            metavar="URL",
            callback=choose_urls,
            help="Broker to archive; several if given again.",
        ),
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option("--job", metavar="NAME", help="Only this job; several if given again.")
    ] = None,
    master: Master = None,
    conf: Conf = None,
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on until SIGTERM or Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often to look for more, with --continuous.")] = "10s",
    derive: Annotated[
        str, typer.Option(metavar="TIME", help="How often to make the other tables anew, with --continuous.")
    ] = "5m",
    outbox: Annotated[
        list[str] | None, typer.Option("--outbox", metavar="URL", help="A database to reconcile with.")
    ] = None,
    resend: Annotated[
        bool, typer.Option("--resend", help="Have what reconcile finds lost or not consumed sent again.")
    ] = False,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of a job, as in retain.days=90.")
    ] = None,
    batch_bytes: Annotated[
        int | None, typer.Option(min=1 << 16, metavar="N", help="How much of the journal goes into one commit.")
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on where retention took what was not archived.")
    ] = False,
) -> None:
    """Run the archive's jobs with Spark: all in their order, or those named by --job.

    Everything the brokers have now is archived, exactly once, however often the run was killed before; then the tables
    that are made of it are brought up to date.
    """
    with needs_spark_extra():
        from dmq.pipeline.archive.run import Run, RunOptions, result_lines

    chosen = RunOptions(
        tables,
        tuple(broker or ()),
        tuple(job or ()),
        master,
        conf=parse_pairs(conf),
        outbox_urls=tuple(outbox or ()),
        options={**parse_pairs(options), **({"reconcile.resend": "true"} if resend else {})},
        is_continuous=continuous,
        every_seconds=parse_seconds(every),
        derive_seconds=parse_seconds(derive),
        batch_bytes=batch_bytes,
        accept_loss=accept_loss,
    )
    with _shown() as show:
        results = Run(chosen, show).run()
    for line in result_lines(results):
        typer.echo(line)


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Progress on the terminal: a bar where there is one, lines where there is none."""
    from dmq.pipeline.archive.run import progress_line

    began: dict[str, float] = {}
    heard_at = time.monotonic()

    def line(progress: Progress) -> str:
        nonlocal heard_at
        # A job begins when the one before it was last heard of: its own first word may come with its first rows.
        since, heard_at = began.setdefault(progress.job, heard_at), time.monotonic()
        return progress_line(progress, heard_at - since)

    if not sys.stderr.isatty():
        yield lambda progress: typer.echo(line(progress), err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    with Bars(
        BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
    ) as bars:
        tasks = {}

        def show(progress: Progress) -> None:
            if progress.job not in tasks:
                tasks[progress.job] = bars.add_task(progress.job, total=None)
            bars.update(
                tasks[progress.job],
                description=line(progress),
                completed=progress.done,
                total=progress.total or None,
            )

        yield show
