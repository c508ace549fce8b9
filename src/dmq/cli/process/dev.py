"""`dmq dev`: everything in one process, on embedded defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import ConfigFile, Settings, make_app
from dmq.cli.process.server_process import (
    DataFolder,
    Host,
    Insecure,
    MetricsPort,
    Port,
    TelnetPort,
    resolve,
    serve,
    set_up_logs,
)

if TYPE_CHECKING:
    from dmq.broker.server import BrokerServer

__all__ = ["app"]

app = make_app("Run everything in one process, to try things out.")


@app.command()
def dev(
    data: DataFolder = None,
    host: Host = None,
    port: Port = None,
    console_port: Annotated[int, typer.Option(metavar="N", help="Port of the status page; 0 takes any.")] = 9680,
    metrics_port: MetricsPort = None,
    telnet_port: TelnetPort = None,
    config: ConfigFile = None,
    settings: Settings = None,
    insecure: Insecure = False,
) -> None:
    """Run a broker with a status page in one process, until Ctrl-C.

    Topics are created when they are first used. The data stays in DIR: the next start finds it again.
    """
    flags = {
        "broker.data": data,
        "broker.host": host,
        "broker.port": port,
        "broker.metrics_port": metrics_port,
        "broker.telnet_port": telnet_port,
    }
    resolved = resolve(config, flags, settings)
    # Defaults of its own, where nobody said otherwise.
    own = {"broker.auto_create": True, "log.level": "warning"}
    own = {key: value for key, value in own.items() if resolved.source_of(key) == "default"}
    resolved = resolve(config, {**flags, **own}, settings)
    set_up_logs(resolved.settings.log)
    folder = Path(resolved.settings.broker.data).resolve()
    serve(
        resolved,
        insecure=insecure,
        status_port=console_port,
        on_ready=lambda server: _welcome(server, folder),
    )
    typer.echo(f"stopped; the messages are kept in {folder}")


def _welcome(server: BrokerServer, folder: Path) -> None:
    address = server.address
    host = address.rpartition(":")[0]
    url = f"dmq://{address}"
    # A default needs no saying.
    flag = "" if address == "127.0.0.1:9611" else f" --url {url}"
    typer.echo(
        f"DMQ is ready at {url}\n"
        f"  status page  http://{host}:{server.status_port}/\n"
        f"  metrics      http://{host}:{server.metrics_port}/metrics\n"
        f"{_telnet(host, server.telnet_port)}"
        f"  data         {folder}\n"
        "In another terminal:\n"
        f'  dmq send hello "my first message"{flag}\n'
        f"  dmq tail hello --from earliest{flag}\n"
        "Ctrl-C stops it.",
    )
    typer.get_text_stream("stdout").flush()


def _telnet(host: str, port: int) -> str:
    return f"  telnet       telnet {host} {port}\n" if port else ""
