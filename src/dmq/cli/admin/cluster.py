"""`dmq cluster`: the brokers there are; show, check, balance, export, import, finalize."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.admin.balance import balance
from dmq.cli.admin.cluster_check import look_at_cluster, visited
from dmq.cli.admin.shard import RegistryUrl, shard_facts
from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected
from dmq.cli.output import printable, show_facts, show_rows
from dmq.errors import DMQError, InvalidSettings

if TYPE_CHECKING:
    from dmq.client.admin.cluster import ClusterReport
    from dmq.protocol.cluster.member import MemberState
    from dmq.shard.admin.cluster_operations import ClusterOperations

__all__ = ["app"]

_BY = "dmq-cli"

# Without arguments it lists the brokers.
app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)
app.command()(balance)


@app.callback()
def cluster(context: typer.Context, url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """List the brokers, the one that answered first; or see the commands below."""
    if context.invoked_subcommand is not None:
        return
    with connected(url, any_member=True) as client:
        rows = [
            {
                "broker": broker.name,
                "address": broker.address,
                "shard": broker.shard or None,
                "leader": broker.is_leader,
                "writable": broker.is_writable,
                "state": broker.state,
            }
            for broker in client.admin.cluster()
        ]
    show_rows(rows, form, empty="no brokers")


@app.command()
def show(registry: RegistryUrl = None, url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """Show the cluster: its shards with leader, epoch and members in sync, and its brokers."""
    seen = look_at_cluster(registry, url)
    report = seen.report
    if report is None:
        raise seen.errors[0]
    if form == Format.JSON:
        facts = _cluster_facts(report) | {
            "shards": [shard_facts(shard) for shard in seen.shards],
            "brokers": [_broker_facts(broker) for broker in report.brokers],
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    show_facts(_cluster_facts(report), form)
    typer.echo("")
    rows = [
        {
            "shard": shard.name,
            "number": shard.number,
            "leader": shard.leader,
            "epoch": shard.epoch,
            "in_sync": list(shard.in_sync),
            "members": len(shard.members),
            "lag": max((member.lag or 0 for member in shard.members), default=0),
            "state": shard.state,
            "health": shard.health,
        }
        for shard in seen.shards
    ]
    show_rows(rows, form, empty="no shards")
    typer.echo("")
    show_rows([_broker_facts(broker) for broker in report.brokers], form, empty="no brokers")


@app.command()
def check(registry: RegistryUrl = None, url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """Say what is wrong or risky with the cluster, and what to do about it.

    The exit code is 1 if there is anything, 0 if all is well.
    """
    rows = [found._asdict() for found in look_at_cluster(registry, url).wrong()]
    if form == Format.JSON:
        typer.echo(json.dumps({"ok": not rows, "findings": rows}, indent=2))
    else:
        for row in rows:
            advice = f": {row['advice']}" if row["advice"] else ""
            typer.echo(printable(f"{row['severity']}: {row['about']}: {row['what']}{advice}"))
        if not rows:
            typer.echo("all is well")
    if rows:
        raise typer.Exit(1)


@app.command(name="export")
def export_cluster(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; - writes to stdout.")],
    registry: RegistryUrl = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Write what the registry keeps of the cluster to a file: records of shards, topics, limits, keys."""
    if registry is None:
        with connected(url, any_member=True) as client:
            document = client.admin.export_cluster()
    else:
        document = visited(registry, _exported)
    text = json.dumps(document, indent=1)
    if str(file) == "-":
        typer.echo(text)
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise InvalidSettings(f"{file} cannot be written: {error.strerror}; its contents are unchanged") from error
    typer.echo(f"{len(document['entries'])} entries of cluster {document['cluster']} written to {file}")


@app.command(name="import")
def import_cluster(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What dmq cluster export wrote; - reads stdin.")
    ] = None,
    from_members: Annotated[
        bool,
        typer.Option(
            "--from-members", help="Rebuild the records of shards from what the brokers of --url, all of them, say."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="It may be another cluster's: topics, limits and keys are taken.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Yes, what was acknowledged by members that do not answer may be lost."),
    ] = False,
    registry: RegistryUrl = None,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Put what a file has and the registry lacks, or has in an older revision. Nothing newer is replaced.

    With --from-members, after a registry was restored from an old backup or lost: name every broker with --url.
    """
    if from_members == (file is not None):
        raise typer.BadParameter("give a file, or --from-members")
    if from_members:
        if foreign:
            raise typer.BadParameter("--foreign goes with a file")
        rows = _rebuilt(registry, url, dry_run=dry_run, accept_loss=accept_loss)
    else:
        assert file is not None
        rows = _imported(registry, url, _document(file), dry_run=dry_run, foreign=foreign)
    show_rows([{"entry": path, "outcome": what} for path, what in rows], form, empty="nothing to import")
    if dry_run and form == Format.TABLE:
        typer.echo("\nnothing was written: leave out --dry-run to do it")


@app.command()
def finalize(registry: RegistryUrl = None, url: Url = DEFAULT_URL) -> None:
    """Raise the format of the cluster to what all its members know, after an upgrade of all of them."""
    if registry is None:
        with connected(url, any_member=True) as client:
            typer.echo(client.admin.finalize_cluster())
        return

    async def work(operations: ClusterOperations) -> str:
        return (await operations.finalize(by=_BY))[1]

    typer.echo(visited(registry, work))


def _cluster_facts(report: ClusterReport) -> dict[str, Any]:
    return {
        "cluster": report.id,
        "format": report.format,
        "registry": report.registry or None,
        "session_seconds": report.session,
        "topics": report.topics,
    }


def _broker_facts(broker: Any) -> dict[str, Any]:
    return {
        "name": broker.name,
        "shard": broker.shard or None,
        "address": broker.address,
        "replication_address": broker.replication_address or None,
        "zone": broker.zone or None,
        "version": broker.version or None,
        "weight": broker.weight,
        "load": dict(broker.load) or None,
    }


# --- out and in -----------------------------------------------------------------------------------------------------


async def _exported(operations: ClusterOperations) -> dict[str, Any]:
    from dmq.client.admin.cluster import document_of

    rows, after = await operations.export()
    while after:
        more, after = await operations.export(after)
        rows += more
    return document_of(rows)


def _document(file: Path) -> dict[str, Any]:
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise InvalidSettings(f"{file} is not an export of a cluster: dmq cluster export writes one")
    return document


def _imported(
    registry: str | None, url: str, document: dict[str, Any], *, dry_run: bool, foreign: bool
) -> list[tuple[str, str]]:
    from dmq.client.admin.cluster import entries_of

    if registry is None:
        with connected(url, any_member=True) as client:
            found = client.admin.import_cluster(document, dry_run=dry_run, foreign=foreign)
            return [(outcome.path, outcome.what) for outcome in found]

    async def work(operations: ClusterOperations) -> list[tuple[str, str]]:
        owner, rows = entries_of(document)
        taken = await operations.take_in(owner, rows, dry_run=dry_run, foreign=foreign, by=_BY)
        return [(outcome.path, outcome.what) for outcome in taken]

    return visited(registry, work)


def _rebuilt(registry: str | None, url: str, *, dry_run: bool, accept_loss: bool) -> list[tuple[str, str]]:
    states = [*_states(url)]
    if registry is None:
        with connected(url, any_member=True) as client:
            found = client.admin.rebuild_records(states, dry_run=dry_run, accept_loss=accept_loss)
            return [(outcome.path, outcome.what) for outcome in found]

    async def work(operations: ClusterOperations) -> list[tuple[str, str]]:
        done = await operations.rebuild(states, dry_run=dry_run, accept_loss=accept_loss, by=_BY)
        return [(outcome.path, outcome.what) for outcome in done]

    return visited(registry, work)


def _states(url: str) -> Iterator[MemberState]:
    """What each broker of a URL says of itself; who does not answer is told, and left out."""
    from dmq.client.connection.url import OneBroker

    for address in OneBroker.at(url).url:
        try:
            with connected(f"dmq://{address}", any_member=True) as client:
                yield client.admin.member_state()
        except DMQError as error:
            typer.echo(printable(f"{address} is left out: {error.message}"), err=True)
