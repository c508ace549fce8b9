"""`dmq outbox`: status, relay, compensate, purge."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app, parse_seconds
from dmq.cli.output import show_rows
from dmq.cli.process.server_process import LogLevelOption, Logs, log_settings, set_up_logs

if TYPE_CHECKING:
    from dmq.outbox.engines import Engine
    from dmq.outbox.repair.compensator import Compensator
    from dmq.outbox.schema import OutboxTables
    from dmq.outbox.sender.relay import Relay

__all__ = ["app"]

DATABASE = "--database"
Database = Annotated[
    str,
    typer.Option(DATABASE, envvar="DMQ_DATABASE", metavar="URL", help="The database with the outbox's tables."),
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="PREFIX", help="What the tables' names begin with.")]

app = make_app("Relay what an outbox has to send, and look at what waits in it.")


@app.callback()
def top() -> None:
    """Relay what an outbox has to send, and look at what waits in it."""


def opened(database: str, prefix: str) -> tuple[Engine, OutboxTables]:
    """The database of a command, and the tables in it."""
    from dmq.outbox.engines import open_engine
    from dmq.outbox.schema import tables

    return open_engine(database, DATABASE), tables(prefix)


def _check(engine: Engine, wanted: tuple[Any, ...]) -> None:
    """A name that does not exist is not a wrong call."""
    from dmq.errors import DatabaseDown, InvalidSettings
    from dmq.outbox.schema import check_tables

    try:
        check_tables(engine, wanted)
    except InvalidSettings as error:
        raise DatabaseDown(error.message) from None


@app.command()
def status(database: Database, prefix: Prefix = "m_", form: Formatted = Format.TABLE) -> None:
    """Show, by topic, what is not sent yet and what waits for its results."""
    from dmq.outbox.engines import usable
    from dmq.outbox.metrics import status as look

    engine, tables = opened(database, prefix)
    with usable(engine):
        _check(engine, (tables.send,))
        found = look(engine, tables, time.time_ns() // 1_000_000)
    rows = [
        {
            "topic": topic.topic,
            "new": topic.new,
            "failing": topic.failing,
            "sent": topic.sent,
            "alerted": topic.alerted,
            "oldest_seconds": round(topic.oldest_ms / 1000, 1),
            "last_error": topic.last_error,
        }
        for topic in found
    ]
    show_rows(rows, form, empty="nothing waits: every message is sent and has its results")


@app.command()
def relay(
    database: Database,
    prefix: Prefix = "m_",
    url: Url = DEFAULT_URL,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="Rows claimed at a time.")] = 1000,
    poll: Annotated[str, typer.Option(metavar="TIME", help="How often to look for rows to send.")] = "200ms",
    result_after: Annotated[
        str, typer.Option(metavar="TIME", help="A row without a result for this time is the compensator's.")
    ] = "10m",
    log_level: LogLevelOption = None,
    log_format: Logs = None,
) -> None:
    """Send what was committed and is not sent yet, until SIGTERM or Ctrl-C.

    Several may run side by side, and beside the processes that insert.
    """
    from dmq.outbox.engines import usable
    from dmq.outbox.sender.relay import Relay

    engine, tables = opened(database, prefix)
    seconds = parse_seconds(poll)
    after = parse_seconds(result_after)
    set_up_logs(log_settings(log_level, log_format))
    with usable(engine):
        _check(engine, (tables.send,))
        with connected(url, app="dmq-outbox-relay") as client:
            running = Relay(engine, client, tables=tables, batch=batch, poll=seconds, result_after=after)
            _run_until_signal(running, f"relaying from {prefix}msgsend to {url}")


@app.command()
def compensate(
    database: Database,
    prefix: Prefix = "m_",
    url: Url = DEFAULT_URL,
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on until SIGTERM or Ctrl-C.")] = False,
    tries: Annotated[int, typer.Option(min=1, help="Checks of a message before it is reported.")] = 10,
    again: Annotated[str, typer.Option(metavar="TIME", help="How long until a message is checked again.")] = "1m",
    poll: Annotated[str, typer.Option(metavar="TIME", help="How often to look, with --continuous.")] = "5s",
    form: Formatted = Format.TABLE,
    log_level: LogLevelOption = None,
    log_format: Logs = None,
) -> None:
    """Ask consumers what became of messages without a result, and write it down, or have them sent again.

    Several may run side by side. A refusal goes to the results topic, for the service that knows the reverse business.
    """
    from dmq.outbox.engines import usable
    from dmq.outbox.repair.compensator import Compensator
    from dmq.outbox.sender.service import MessageService

    engine, tables = opened(database, prefix)
    again_seconds, poll_seconds = parse_seconds(again), parse_seconds(poll)
    set_up_logs(log_settings(log_level, log_format))
    with usable(engine):
        _check(engine, (tables.send, tables.result))
        with connected(url, app="dmq-outbox-compensate") as client:
            service = MessageService(engine, client, tables=tables, relay=False, results=False)
            running = Compensator(service, again=again_seconds, tries=tries, poll=poll_seconds, passes_on=True)
            if not continuous:
                show_rows([running.run_once()._asdict()], form, empty="")
                running.close()
                return
            _run_until_signal(running, f"compensating {prefix}msgsend with {url}")


def _run_until_signal(running: Relay | Compensator, words: str) -> None:
    """Run it until SIGTERM or Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: running.stop())
    typer.echo(words)
    typer.get_text_stream("stdout").flush()
    running.run()
    running.close()


@app.command()
def purge(
    database: Database,
    prefix: Prefix = "m_",
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Ended, or consumed, this long ago; a day at least.")
    ] = "30d",
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this, rows are only counted.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="Rows of one transaction.")] = 1000,
    form: Formatted = Format.TABLE,
) -> None:
    """Delete rows of messages that have ended, or were consumed, long ago.

    What has not ended stays, and so do the counters of strict sequences. Keep rows for longer than the broker keeps
    messages: without its row, a message that comes again has its effect again.
    """
    from dmq.outbox.engines import usable
    from dmq.outbox.repair.purge import purge as purge_tables

    engine, tables = opened(database, prefix)
    seconds = parse_seconds(older_than)
    with usable(engine):
        found = purge_tables(engine, seconds, tables=tables, execute=execute, batch=batch)
    rows = [{"table": one.table, "deleted" if execute else "would_delete": one.rows} for one in found]
    show_rows(rows, form, empty="")
    if not execute and form == Format.TABLE:
        typer.echo("\nthis was a dry run: say --execute to do it")
