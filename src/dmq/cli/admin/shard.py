"""`dmq shard`: list, show, create, set, add, remove, drain, leave, promote, handover, repair."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import printable, show_facts, show_rows
from dmq.errors import NotLeader, ShardConflict, UnknownEntry
from dmq.model import check_name
from dmq.registry.contents import ShardState

if TYPE_CHECKING:
    from dmq.client.admin.admin import Admin
    from dmq.client.admin.shards import ShardChange, ShardFinding, ShardMember, ShardReport
    from dmq.shard.admin.operations import Done, Operations

__all__ = ["RegistryUrl", "app", "hand_over", "shard_facts"]

app = make_app("Look at shards and their members, and operate them.")

ShardName = Annotated[
    str, typer.Argument(metavar="SHARD", help="The shard; that of the member that is asked if left out.")
]

ShardOption = Annotated[
    str, typer.Option("--shard", metavar="SHARD", help="Its shard; found by the member if left out.")
]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="The name of the broker.")]
RegistryUrl = Annotated[
    str | None,
    typer.Option("--registry", metavar="URL", help="Ask the registry itself, where no broker runs."),
]


@app.command(name="list")
def list_shards(url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """List the shards, their leaders and members, and what is wrong."""
    with connected(url, any_member=True) as client:
        found = client.admin.shards()
    if form == Format.JSON:
        show_rows([shard_facts(shard) for shard in found], form, empty="")
        return
    rows = [
        {
            "shard": shard.name,
            "leader": shard.leader,
            "epoch": shard.epoch,
            "members": [member.name for member in shard.members],
            "in_sync": list(shard.in_sync),
            "state": shard.state,
            "health": f"{shard.health}: {shard.findings[0].what}" if shard.health != "ok" else shard.health,
        }
        for shard in found
    ]
    show_rows(rows, form, empty="no shards")


@app.command()
def show(shard: ShardName = "", url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """Show a shard and its members: who leads, who is in sync, what is wrong and what to do about it."""
    with connected(url, any_member=True) as client:
        _show(client.admin.shard(shard), form)


@app.command()
def create(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="What it is called.")],
    replicas: Annotated[int, typer.Option(min=1, max=7, metavar="N", help="How many members it may have.")] = 3,
    min_in_sync: Annotated[
        int,
        typer.Option(min=1, max=7, metavar="N", help="So many members must have a message before it is acknowledged."),
    ] = 2,
    registry: RegistryUrl = None,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Make a shard before its members are started. The first member would make it as well, by its settings."""
    if registry is None:
        with connected(url, any_member=True) as client:
            changed = client.admin.create_shard(shard, replicas=replicas, min_in_sync=min_in_sync)
    else:
        changed = _visited(
            registry,
            lambda shards: shards.create(
                check_name(shard, "shard"), replicas=replicas, min_in_sync=min_in_sync, by="dmq-cli"
            ),
        )
    _show_change(changed, form)


@app.command()
def add(
    member: MemberName,
    shard: ShardOption = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Have a place for one more broker in a shard, or for one that was removed. It joins when it is started."""
    with connected(url, any_member=True) as client:
        changed = client.admin.add_member(member, shard=shard)
    _show_change(changed, form)


@app.command()
def remove(
    member: MemberName,
    shard: ShardOption = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Take a member out of its shard, whether it runs or not. A leader hands over first."""
    with connected(url, any_member=True) as client:
        changed = client.admin.remove_member(member, shard=shard)
    _show_change(changed, form)


@app.command()
def drain(
    member: MemberName,
    undo: Annotated[bool, typer.Option("--undo", help="Let it lead again instead.")] = False,
    shard: ShardOption = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Let a member lead no more until --undo: it hands over if it leads, and goes on following."""
    with connected(url, any_member=True) as client:
        changed = client.admin.drain_member(member, shard=shard, undo=undo)
    _show_change(changed, form)


@app.command()
def leave(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The data directory; no broker runs on it.")],
    form: Formatted = Format.TABLE,
) -> None:
    """Make the directory of a shard's member that of a broker by itself. It keeps all its messages."""
    from dmq.shard.admin.departure import depart
    from dmq.storage.files import OsFiles

    left = depart(OsFiles(directory, create=False))
    facts = {
        "left": left.member.shard,
        "cluster": left.member.cluster,
        "committed": left.committed,
        "end": left.end,
        "note": "start it without --registry; dmq shard remove tells the shard, if it has not been told yet",
    }
    show_facts(facts, form)


@app.command(name="set")
def set_shard(
    shard: ShardName = "",
    min_in_sync: Annotated[
        int | None,
        typer.Option(min=1, max=7, metavar="N", help="So many members must have a message before it is acknowledged."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=7, metavar="N", help="How many members it may have.")
    ] = None,
    remove: Annotated[
        str, typer.Option(metavar="MEMBER", help="Forget a member that is gone for good; it must not run.")
    ] = "",
    asynchronous: Annotated[
        bool | None,
        typer.Option("--async/--no-async", help="Acknowledge what the leader alone has; failover is by command then."),
    ] = None,
    state: Annotated[
        ShardState | None, typer.Option(metavar="STATE", help="open, read-only or leaving: only open takes messages.")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            min=0, max=10_000, metavar="W", help="Its share of the messages that may go to any shard; 100 is usual."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Change a shard. What is left out stays as it is."""
    if not remove and all(given is None for given in (min_in_sync, replicas, asynchronous, state, weight)):
        raise typer.BadParameter(
            "there is nothing to change: give --min-in-sync, --replicas, --weight, --state, --async or --remove"
        )
    with connected(url, any_member=True) as client:
        changed = client.admin.set_shard(
            shard,
            min_in_sync=min_in_sync,
            replicas=replicas,
            remove=remove,
            asynchronous=asynchronous,
            state="" if state is None else state,
            weight=weight,
        )
    _show_change(changed, form)


@app.command()
def promote(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="The member that is to lead.")],
    shard: Annotated[str, typer.Option(metavar="SHARD", help="Its shard; found by the member if left out.")] = "",
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Yes, what was acknowledged and has not reached it may be lost.")
    ] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Let a member lead that may lack acknowledged messages, when nobody who has them comes back.

    Without --accept-loss nothing is done: it says what would be lost, and the exit code is 1.
    """
    with connected(url, any_member=True) as client:
        changed = client.admin.promote(member, shard=shard, accept_loss=accept_loss)
    _show_change(changed, form)


@app.command()
def handover(
    shard: ShardName = "",
    to: Annotated[str, typer.Option(metavar="MEMBER", help="To whom; the best follower if left out.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Let another member lead: nothing is lost, and sends wait for about a second."""
    _show_change(hand_over(url, shard, to), form)


@app.command()
def repair(
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="Whose journal; that of the member that is asked if left out.")
    ] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Look through a member's journal, and mend what is damaged with the bytes of the other members.

    The exit code is 1 if some of it is left.
    """
    with connected(url, any_member=True) as client:
        address = _address_of(client.admin, member) if member else ""
        report = None if address else client.admin.repair()
    if report is None:
        with connected(f"dmq://{address}", any_member=True) as client:
            report = client.admin.repair()
    if form == Format.JSON:
        ranges = {"mended": [*map(list, report.mended)], "left": [*map(list, report.left)]}
        show_facts({"member": report.member, **ranges, "reason": report.reason or None}, form)
    elif not (report.mended or report.left):
        typer.echo(f"nothing is damaged in the journal of {report.member}")
    else:
        for start, end in report.mended:
            typer.echo(f"{start} to {end} is mended")
        for start, end in report.left:
            typer.echo(f"{start} to {end} is left: {printable(report.reason)}")
    if report.left:
        raise typer.Exit(1)


def _visited(registry: str, work: Callable[[Operations], Awaitable[Done]]) -> ShardChange:
    """Do something through the registry, where no broker runs."""
    from dmq.client.admin.shards import ShardChange, ShardReport
    from dmq.shard.admin.overview import shard_header
    from dmq.shard.admin.visitor import visit

    done = asyncio.run(visit(registry, work))
    return ShardChange(done.what, ShardReport.of(shard_header(done.shard)))


def _address_of(admin: Admin, name: str) -> str:
    """Where clients reach a member."""
    members = [member for shard in admin.shards() for member in shard.members]
    found = next((member for member in members if member.name == name), None)
    if found is None:
        known = ", ".join(member.name for member in members) or "none"
        raise UnknownEntry(f"no shard has a member {name!r}: those there are: {known}")
    if not found.address:
        raise ShardConflict(f"{name} does not run: start it, and ask again")
    return found.address


def hand_over(url: str, shard: str, to: str) -> ShardChange:
    """Have the leader of a shard hand over, wherever it is.

    Raises:
        DMQError: as of `Admin.hand_over`.
    """
    try:
        with connected(url, any_member=True) as client:
            return client.admin.hand_over(shard, to=to)
    except NotLeader as error:
        if not error.detail.get("leader"):
            raise
        with connected(f"dmq://{error.detail['leader']}", any_member=True) as client:
            return client.admin.hand_over(shard, to=to)


def _show_change(changed: ShardChange, form: Format) -> None:
    if form == Format.JSON:
        show_facts({"done": changed.done, **shard_facts(changed.shard)}, form)
        return
    typer.echo(f"{printable(changed.done)}\n")
    _show(changed.shard, form)


def _show(shard: ShardReport, form: Format) -> None:
    facts = shard_facts(shard)
    if form == Format.JSON:
        show_facts(facts, form)
        return
    for name in ("members", "findings", "health"):
        del facts[name]
    for name, usual in (("unsafe_epoch", 0), ("asynchronous", False), ("weight", 100)):
        if facts[name] == usual:
            del facts[name]
    show_facts(facts, form)
    typer.echo("")
    rows = [
        {
            "member": member.name,
            "role": member.role,
            "in_sync": member.is_in_sync,
            **({"drained": member.is_drained} if any(one.is_drained for one in shard.members) else {}),
            "epoch": member.epoch,
            "committed_offset": member.committed,
            "lag": member.lag,
            "address": member.address or None,
            "zone": member.zone or None,
            "replica": member.replica,
            "promise": None if not member.promise else f"{member.promise:.1f} s",
        }
        for member in shard.members
    ]
    show_rows(rows, form, empty="no members")
    typer.echo("")
    for finding in shard.findings:
        typer.echo(_sentence(finding))


def _sentence(finding: ShardFinding) -> str:
    advice = f": {finding.advice}" if finding.advice else ""
    return printable(f"{finding.severity}: {finding.what}{advice}")


def shard_facts(shard: ShardReport) -> dict[str, Any]:
    return {
        "shard": shard.name,
        "number": shard.number,
        "leader": shard.leader,
        "epoch": shard.epoch,
        "revision": shard.revision,
        "state": shard.state,
        "min_in_sync": shard.min_in_sync,
        "replicas": shard.replicas,
        "unsafe_epoch": shard.unsafe_epoch,
        "weight": shard.weight,
        "asynchronous": shard.is_asynchronous,
        "health": shard.health,
        "members": [_member_facts(shard.name, member) for member in shard.members],
        "findings": [
            {"severity": found.severity, "what": found.what, "advice": found.advice or None} for found in shard.findings
        ],
    }


def _member_facts(shard: str, member: ShardMember) -> dict[str, Any]:
    return {
        "name": member.name,
        "shard": shard,
        "role": member.role,
        "epoch": member.epoch,
        "in_sync": member.is_in_sync,
        "committed": member.committed,
        "lag": member.lag,
        "end": member.end,
        "electable": member.is_electable,
        "registered": member.is_registered,
        "reached": member.is_reached,
        "replica": member.replica,
        "address": member.address or None,
        "replication_address": member.replication_address or None,
        "zone": member.zone or None,
        "version": member.version or None,
        "promise_seconds": member.promise,
        "clock_skew_seconds": member.clock_skew,
        "obstacle": member.obstacle or None,
        "damaged": member.damaged,
        "drained": member.is_drained,
        "doubtful": member.is_doubtful,
    }
