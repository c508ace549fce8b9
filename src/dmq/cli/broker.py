"""`dmq broker`: one broker, as it runs in production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import ConfigFile, Settings, make_app
from dmq.cli.serving import Insecure, LogFormat, LogLevel, LogLevelOption, Logs, resolve, serve, set_up_logs

if TYPE_CHECKING:
    from dmq.broker.server import BrokerServer

__all__ = ["app"]

app = make_app("Run a broker.")


@app.command()
def broker(
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Where the data goes.  [default: dmq-data]")] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Port for clients; 0 takes any free one.  [default: 9611]")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="N", help="Port for metrics and health; 0 takes any.  [default: 9690]")
    ] = None,
    console_port: Annotated[
        int | None, typer.Option(metavar="N", help="Serve a status page there; 0 takes any free port.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What it calls itself.  [default: dmq]")] = None,
    auto_create: Annotated[
        bool | None, typer.Option("--auto-create/--no-auto-create", help="Create topics when they are first used.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    insecure: Insecure = False,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: Logs = LogFormat.TEXT,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C, then finish what is under way and stop.

    Settings come from the file, from DMQ_* variables and from flags, the last being the strongest; `dmq config show`
    tells which are in force.
    """
    flags = {
        "broker.data": data,
        "broker.host": host,
        "broker.port": port,
        "broker.metrics_port": metrics_port,
        "broker.name": name,
        "broker.auto_create": auto_create,
    }
    resolved = resolve(config, flags, settings)
    set_up_logs(log_level, log_format)
    serve(resolved.settings, insecure=insecure, status_port=console_port, on_ready=_announce)


def _announce(server: BrokerServer) -> None:
    address = server.broker.address
    host = address.rpartition(":")[0]
    parts = [f"listening on dmq://{address}", f"metrics on http://{host}:{server.metrics_port}/metrics"]
    if server.status_port:
        parts.append(f"status page on http://{host}:{server.status_port}/")
    typer.echo(", ".join(parts))
    typer.get_text_stream("stdout").flush()
