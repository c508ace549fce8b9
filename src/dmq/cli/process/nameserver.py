"""`dmq nameserver`: one name server, which serves a registry from a SQL database, or one in ZooKeeper."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import ConfigFile, Settings, make_app, parse_seconds
from dmq.cli.process.server_process import Insecure, LogLevelOption, Logs, log_flags, resolve, set_up_logs
from dmq.errors import InvalidSettings

if TYPE_CHECKING:
    from dmq.registry.name_server.backend import Backend
    from dmq.registry.name_server.server import NameServer
    from dmq.settings import NameServerSettings

__all__ = ["app"]

app = make_app("Run a name server.")


@app.command()
def nameserver(
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="Where the registry is kept, as sqlite:///FILE or postgresql://user@host/dmq.",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="Serve a registry that is in ZooKeeper, as zk://h1:2181/dmq, and mirror it into the database.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="H", help="Address to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", help="Port to listen on; 0 takes any free one.  [default: 9610]"),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", metavar="N", help="Serve metrics and health there; 0 takes any free port."),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", metavar="TIME", help="How long a session lives without a sign of its broker.  [default: 6s]"
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    insecure: Insecure = False,
    log_level: LogLevelOption = None,
    log_format: Logs = None,
) -> None:
    """Run a name server until SIGTERM or Ctrl-C.

    It keeps what the brokers of a cluster agree on, for `dmq broker --registry`. A file of SQLite takes one name
    server; several share a PostgreSQL or a MariaDB, and brokers name all of them.

    With --registry the registry is in ZooKeeper, where brokers keep it: the name server answers clients that ask for
    routes, and mirrors topics, groups, limits and key-values into the database, if there is one, for people.
    """
    flags = {
        "nameserver.database_url": database,
        "nameserver.registry_url": registry,
        "nameserver.host": host,
        "nameserver.port": port,
        "nameserver.metrics_port": metrics_port,
        "nameserver.session_seconds": None if session is None else parse_seconds(session),
        **log_flags(log_level, log_format),
    }
    resolved = resolve(config, flags, settings)
    set_up_logs(resolved.settings.log)
    asyncio.run(_serve(resolved.settings.nameserver, insecure=insecure))


async def _serve(settings: NameServerSettings, *, insecure: bool) -> None:
    from dmq.broker.runtime.service_manager import ServiceManager
    from dmq.registry.name_server.server import NameServer

    server = NameServer(
        _backend(settings),
        host=settings.host,
        port=settings.port,
        metrics_port=settings.metrics_port,
        insecure=insecure,
    )
    manager = ServiceManager()

    def ready(server: NameServer) -> None:
        _announce(server)
        manager.ready()

    await server.serve(ready, manager.stopping)


def _backend(settings: NameServerSettings) -> Backend:
    from dmq.registry.name_server.sql_backend import SqlBackend
    from dmq.registry.name_server.sql_store import SqlStore

    if settings.registry_url is not None:
        return _front(settings.registry_url, settings)
    if settings.database_url is None:
        raise InvalidSettings(
            "a name server needs a database: give --database sqlite:///FILE, postgresql://user@host/dmq or "
            "mariadb://user@host/dmq, or set nameserver.database_url",
            keys=["nameserver.database_url"],
        )
    return SqlBackend(SqlStore(settings.database_url, session_seconds=settings.session_seconds))


def _front(url: str, settings: NameServerSettings) -> Backend:
    from dmq.registry.name_server.front_backend import FrontBackend
    from dmq.registry.name_server.mirror_store import MirrorStore
    from dmq.registry.url import check_registry_url, open_registry, shown_url

    root = check_registry_url(url)
    if not url.strip().lower().startswith("zk:"):
        raise InvalidSettings(
            f"{shown_url(url)!r}: a name server serves a registry in ZooKeeper, zk://host:2181/dmq, or its own "
            "database: leave --registry out",
            keys=["nameserver.registry_url"],
        )
    name = f"{socket.gethostname()}:{settings.port or os.getpid()}"[-64:]
    store = None if settings.database_url is None else MirrorStore(settings.database_url, name)
    return FrontBackend(lambda: open_registry(url, "name server"), root, shown_url(url), store)


def _announce(server: NameServer) -> None:
    metrics = ""
    if server.metrics_port:
        metrics = f", metrics on http://{server.address.rpartition(':')[0]}:{server.metrics_port}/metrics"
    typer.echo(f"name server listening on dmq://{server.address}{metrics}")
    typer.get_text_stream("stdout").flush()
