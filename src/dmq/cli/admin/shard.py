"""`dmq shard`: list, show, set, promote, handover, repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import printable, show_facts, show_rows
from dmq.errors import NotLeader, ShardConflict, UnknownEntry

if TYPE_CHECKING:
    from dmq.client.admin.admin import Admin
    from dmq.client.admin.shards import ShardChange, ShardFinding, ShardMember, ShardReport

__all__ = ["app"]

app = make_app("Look at shards and their members, and operate them.")

ShardName = Annotated[
    str, typer.Argument(metavar="SHARD", help="The shard; that of the member that is asked if left out.")
]


@app.command(name="list")
def list_shards(url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """List the shards, their leaders and members, and what is wrong."""
    with connected(url, any_member=True) as client:
        found = client.admin.shards()
    if form == Format.JSON:
        show_rows([_shard_facts(shard) for shard in found], form, empty="")
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
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Change a shard. What is left out stays as it is."""
    if min_in_sync is None and replicas is None and not remove:
        raise typer.BadParameter("there is nothing to change: give --min-in-sync, --replicas or --remove")
    with connected(url, any_member=True) as client:
        changed = client.admin.set_shard(shard, min_in_sync=min_in_sync, replicas=replicas, remove=remove)
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
    try:
        with connected(url, any_member=True) as client:
            changed = client.admin.hand_over(shard, to=to)
    except NotLeader as error:
        if not error.detail.get("leader"):
            raise
        with connected(f"dmq://{error.detail['leader']}", any_member=True) as client:
            changed = client.admin.hand_over(shard, to=to)
    _show_change(changed, form)


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


def _show_change(changed: ShardChange, form: Format) -> None:
    if form == Format.JSON:
        show_facts({"done": changed.done, **_shard_facts(changed.shard)}, form)
        return
    typer.echo(f"{printable(changed.done)}\n")
    _show(changed.shard, form)


def _show(shard: ShardReport, form: Format) -> None:
    facts = _shard_facts(shard)
    if form == Format.JSON:
        show_facts(facts, form)
        return
    for name in ("members", "findings", "health"):
        del facts[name]
    if not facts["unsafe_epoch"]:
        del facts["unsafe_epoch"]
    show_facts(facts, form)
    typer.echo("")
    rows = [
        {
            "member": member.name,
            "role": member.role,
            "in_sync": member.is_in_sync,
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


def _shard_facts(shard: ShardReport) -> dict[str, Any]:
    return {
        "shard": shard.name,
        "leader": shard.leader,
        "epoch": shard.epoch,
        "revision": shard.revision,
        "state": shard.state,
        "min_in_sync": shard.min_in_sync,
        "replicas": shard.replicas,
        "unsafe_epoch": shard.unsafe_epoch,
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
    }
