"""`dmq dev`: everything in one process, on embedded defaults; or a cluster of several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import ConfigFile, Format, Formatted, Settings, make_app, parse_seconds
from dmq.cli.output import show_rows
from dmq.cli.process.dev_cluster import SESSION, SHARDS_MAX, DevCluster, DevClusterOptions, DevPorts, check_lone
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
    shards: Annotated[
        int, typer.Option(min=0, max=SHARDS_MAX, metavar="N", help="Run a cluster of so many shards instead.")
    ] = 0,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=7, metavar="N", help="In a cluster: how many brokers a shard has.  [default: 3]"),
    ] = None,
    session: Annotated[
        str, typer.Option(metavar="TIME", help="In a cluster: how long until a dead broker is noticed.")
    ] = SESSION,
    form: Formatted = Format.TABLE,
) -> None:
    """Run a broker with a status page in one process, until Ctrl-C.

    Topics are created when they are first used. The data stays in DIR: the next start finds it again.

    With --shards it runs a cluster: of each shard --replicas brokers that keep every message, each a process, and a
    name server. One that dies is started again. Port 0 takes free ports; else the brokers have PORT, PORT + 10 and so
    on.
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
    if shards:
        broker = resolved.settings.broker
        pairs = (*(f"{key}={value}".lower() for key, value in own.items()), *(settings or ()))
        options = DevClusterOptions(
            folder=folder,
            host=broker.host,
            ports=DevPorts(broker.port, broker.metrics_port, broker.telnet_port, console_port),
            shards=shards,
            replicas=replicas or 3,
            session=parse_seconds(session),
            is_insecure=insecure,
            arguments=(*(("--config", str(config)) if config else ()), *(f"--set={pair}" for pair in pairs)),
        )
        DevCluster(options).run(lambda cluster, rows: _welcome_cluster(cluster, rows, form))
        typer.echo(f"stopped; the messages are kept in {folder}", err=form == Format.JSON)
        return
    if replicas is not None:
        raise typer.BadParameter("--replicas goes with --shards")
    check_lone(folder)
    serve(
        resolved,
        insecure=insecure,
        status_port=console_port,
        on_ready=lambda server: _welcome(server, folder),
    )
    typer.echo(f"stopped; the messages are kept in {folder}")


def _welcome_cluster(cluster: DevCluster, rows: list[dict[str, Any]], form: Format) -> None:
    if form == Format.TABLE:
        typer.echo(f"DMQ is ready: a cluster at {cluster.url}")
        # Ports and pids are names: people copy them, so they have no commas.
        processes = [*rows, {"name": "", "shard": "", "role": "nameserver", **cluster.registry_facts}]
        show_rows([{**row, "port": str(row["port"]), "pid": str(row["pid"])} for row in processes], form, empty="")
        leader = next(row["pid"] for row in rows if row["role"] == "leader")
        typer.echo(
            "In another terminal:\n"
            f"  export DMQ_URL={cluster.url}\n"
            '  dmq send hello "my first message" --durability replicated\n'
            "  dmq shard list\n"
            f"  kill -9 {leader}    # a leader: another member leads soon, and nothing is lost\n"
            "  dmq tail hello --from earliest\n"
            f"Logs are in {cluster.folder}. Ctrl-C stops it."
        )
    else:
        # On one line: a program that started this reads a line.
        typer.echo(json.dumps({"url": cluster.url, "members": rows, "registry": cluster.registry_facts}))
    typer.get_text_stream("stdout").flush()


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
