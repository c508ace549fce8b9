"""`dmq nameserver`: one name server, which serves a registry from a SQL database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import make_app, parse_seconds
from dmq.cli.process.server_process import Insecure, LogLevelOption, Logs, log_settings, set_up_logs
from dmq.errors import InvalidSettings

if TYPE_CHECKING:
    from dmq.registry.name_server.server import NameServer

__all__ = ["app"]

app = make_app("Run a name server.")

SESSION_SECONDS_MIN = 1.0
SESSION_SECONDS_MAX = 60.0


@app.command()
def nameserver(
    database: Annotated[str, typer.Option("--database", metavar="URL", help="Where it is kept, as sqlite:///FILE.")],
    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port to listen on; 0 takes any free one.")] = 9610,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", metavar="N", help="Serve metrics and health there; 0 takes any free port."),
    ] = None,
    session: Annotated[
        str, typer.Option("--session", metavar="TIME", help="How long a session lives without a sign of its client.")
    ] = "6s",
    insecure: Insecure = False,
    log_level: LogLevelOption = None,
    log_format: Logs = None,
) -> None:
    """Run a name server until SIGTERM or Ctrl-C.

    It keeps what the brokers of a cluster agree on, for `dmq broker --registry`. A file of SQLite takes one name
    server.
    """
    seconds = parse_seconds(session)
    if not SESSION_SECONDS_MIN <= seconds <= SESSION_SECONDS_MAX:
        raise InvalidSettings(
            f"--session is {seconds:g} s: choose {SESSION_SECONDS_MIN:g} to {SESSION_SECONDS_MAX:g} seconds"
        )
    set_up_logs(log_settings(log_level, log_format))
    from dmq.registry.name_server.server import NameServer
    from dmq.registry.name_server.sql_store import SqlStore

    async def main() -> None:
        store = SqlStore(database, session_seconds=seconds)
        server = NameServer(store, host=host, port=port, metrics_port=metrics_port, insecure=insecure)
        await server.serve(_announce)

    asyncio.run(main())


def _announce(server: NameServer) -> None:
    metrics = ""
    if server.metrics_port:
        metrics = f", metrics on http://{server.address.rpartition(':')[0]}:{server.metrics_port}/metrics"
    typer.echo(f"name server listening on dmq://{server.address}{metrics}")
    typer.get_text_stream("stdout").flush()
