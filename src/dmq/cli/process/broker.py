"""`dmq broker`: one broker, as it runs in production; `dmq broker drain`: take a running one out of use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import DEFAULT_URL, ConfigFile, Format, Formatted, Settings, Url, connected, parse_seconds
from dmq.cli.process.server_process import (
    DataFolder,
    Host,
    Insecure,
    LogLevelOption,
    Logs,
    MetricsPort,
    Port,
    TelnetPort,
    log_flags,
    resolve,
    serve,
    set_up_logs,
)
from dmq.errors import TimedOut

if TYPE_CHECKING:
    from dmq.broker.server import BrokerServer
    from dmq.cli.process.child_process import ChildProcess
    from dmq.client.admin.reports import DrainReport
    from dmq.settings import ResolvedSettings

__all__ = ["app"]

_LOOK_SECONDS = 0.2

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Be a member of a shard: the cluster's registry, as dmq://127.0.0.1:9610 or zk://127.0.0.1:2181/dmq.",
    ),
]
MinInSync = Annotated[
    int | None,
    typer.Option(metavar="N", help="Members that must have a message, in a shard that it creates.  [default: 2]"),
]
Shards = Annotated[
    int,
    typer.Option(min=0, max=64, metavar="N", help="With --registry: run a member of each of N shards, for more cores."),
]

# Without arguments it runs a broker, so no help then; the callback's own text is the help.
app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def broker(
    context: typer.Context,
    data: DataFolder = None,
    host: Host = None,
    port: Port = None,
    metrics_port: MetricsPort = None,
    telnet_port: TelnetPort = None,
    console_port: Annotated[
        int | None, typer.Option(metavar="N", help="Serve a status page there; 0 takes any free port.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name.  [default: dmq]")] = None,
    auto_create: Annotated[
        bool | None, typer.Option("--auto-create/--no-auto-create", help="Create topics when they are first used.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    insecure: Insecure = False,
    registry: RegistryUrl = None,
    shard: Annotated[str | None, typer.Option(metavar="NAME", help="The shard to be a member of.")] = None,
    replication_port: Annotated[
        int | None, typer.Option(metavar="N", help="Port for other members; 0 takes any free one.  [default: 9613]")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(metavar="N", help="Members of a shard that it creates.  [default: 3]")
    ] = None,
    min_in_sync: MinInSync = None,
    shards: Shards = 0,
    log_level: LogLevelOption = None,
    log_format: Logs = None,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C, then finish what is under way and stop; or see the commands below.

    With --registry and --shard it is a member of a shard, which keeps every message on several brokers. Each member has
    a --name and a --data directory of its own.

    With --shards N it runs N processes: NAME-1 is a member of the shard SHARD-1 with its data in DIR/SHARD-1, NAME-2 of
    SHARD-2, and so on. Their ports are 10 apart, those of metrics and status page 1.

    Settings come from the file, from DMQ_* variables and from flags, the last being the strongest; `dmq config show`
    tells which are in force.
    """
    if context.invoked_subcommand is not None:
        return
    flags = {
        "broker.data": data,
        "broker.host": host,
        "broker.port": port,
        "broker.metrics_port": metrics_port,
        "broker.telnet_port": telnet_port,
        "broker.name": name,
        "broker.auto_create": auto_create,
        "shard.registry_url": registry,
        "shard.name": shard,
        "shard.replication_port": replication_port,
        "shard.replicas": replicas,
        "shard.min_in_sync": min_in_sync,
        **log_flags(log_level, log_format),
    }
    resolved = resolve(config, flags, settings)
    set_up_logs(resolved.settings.log)
    if shards:
        arguments = (*_handed_on(flags, config, settings), *(("--insecure",) if insecure else ()))
        _run_group(resolved, shards, console_port, arguments)
        return
    serve(resolved, insecure=insecure, status_port=console_port, on_ready=_announce)


def _handed_on(flags: Mapping[str, object], config: Path | None, pairs: Sequence[str] | None) -> tuple[str, ...]:
    """What was given and is the same for each process; the environment reaches them as it reaches this one."""
    same = ("broker.auto_create", "broker.host", "shard.registry_url", "shard.replicas", "shard.min_in_sync")
    given = {key: flags[key] for key in (*same, "log.level", "log.format") if flags[key] is not None}
    texts = {key: json.dumps(value) if isinstance(value, bool) else value for key, value in given.items()}
    return (
        *(("--config", str(config)) if config else ()),
        *(f"--set={pair}" for pair in pairs or ()),
        *(f"--set={key}={text}" for key, text in texts.items()),
    )


def _run_group(resolved: ResolvedSettings, count: int, console_port: int | None, arguments: tuple[str, ...]) -> None:
    from dmq.cli.process.broker_group import BrokerGroup, GroupOptions

    def announce(children: list[ChildProcess]) -> None:
        typer.echo(f"listening on dmq://{','.join(child.address for child in children)}")
        typer.get_text_stream("stdout").flush()

    BrokerGroup(GroupOptions(resolved.settings, count, console_port, arguments)).run(announce)


def _announce(server: BrokerServer) -> None:
    address = server.address
    host = address.rpartition(":")[0]
    parts = [f"listening on dmq://{address}", f"metrics on http://{host}:{server.metrics_port}/metrics"]
    if server.telnet_port:
        parts.append(f"telnet on {host} {server.telnet_port}")
    if server.status_port:
        parts.append(f"status page on http://{host}:{server.status_port}/")
    if server.member is not None:
        parts.append(
            f"member {server.member.broker} of shard {server.member.shard}, on {server.member.network.address}"
        )
    typer.echo(", ".join(parts))
    typer.get_text_stream("stdout").flush()


@app.command()
def drain(
    stop: Annotated[bool, typer.Option("--stop", help="Then stop it.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put it back in use instead.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until nothing is leased.")] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Wait no longer than this.")] = "5m",
    reason: Annotated[str, typer.Option(metavar="REASON", help="What its clients are told.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Take a running broker out of use, and wait until it is safe to stop.

    It takes no messages and hands none out any more; consumers settle what they have. Its clients are told, and use
    another broker if they know one. What it stores stays, and --undo puts it back in use.
    """
    limit = parse_seconds(timeout)
    if undo and (stop or no_wait):
        raise typer.BadParameter("--undo goes with neither --stop nor --no-wait")
    if "," in url:
        raise typer.BadParameter("--url must name the one broker that is meant: its clients go to the others")
    with connected(url, any_member=True) as client:
        admin = client.admin
        if undo:
            admin.undrain()
            _say("in use again", admin.drain_progress(), form)
            return
        found = admin.drain(reason=reason)
        if not no_wait:
            found = _wait_until_idle(admin.drain_progress, limit, form)
        if stop:
            _say("stopping", admin.stop_broker(reason=reason), form)
        elif found.is_idle:
            _say("drained: it is safe to stop it, or to put it back in use with --undo", found, form)
        else:
            _say("drained, but not everything is settled: look again before you stop it", found, form)


def _wait_until_idle(look: Callable[[], DrainReport], seconds: float, form: Format) -> DrainReport:
    """Look until nothing is out and nothing waits.

    Raises:
        TimedOut: that took too long.
    """
    deadline = time.monotonic() + seconds
    shown = ""
    while not (found := look()).is_idle:
        line = f"{found.out} messages are out, {found.waiting_bytes} bytes and {found.waiting} requests wait"
        if line != shown and form == Format.TABLE:
            typer.echo(line, err=True)
            shown = line
        if time.monotonic() >= deadline:
            raise TimedOut(
                f"after {seconds:g} s {found.out} messages are still leased: wait for their consumers, or stop the "
                "broker anyway, and they are handed out again when it is back"
            )
        time.sleep(_LOOK_SECONDS)
    return found


def _say(words: str, found: DrainReport, form: Format) -> None:
    if form == Format.JSON:
        typer.echo(json.dumps({"state": found.state, "out": found.out, "clients": found.clients, "note": words}))
    else:
        typer.echo(words)
