"""`dmq group`: create, list, show, lag, reset, skip, delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import (
    DEFAULT_URL,
    Format,
    Formatted,
    GroupName,
    InTopic,
    Url,
    connected,
    make_app,
    parse_place,
)
from dmq.cli.output import missing_facts, shard_fact, show_facts, show_rows, tell_missing
from dmq.errors import UnknownGroup

if TYPE_CHECKING:
    from dmq.client.admin.admin import Admin
    from dmq.client.admin.reports import Lag, Move, ShardRows

__all__ = ["app"]

app = make_app("Look at consumer groups, and move them.")

Queue = Annotated[int | None, typer.Option(min=0, max=254, help="Only this queue.")]
Execute = Annotated[bool, typer.Option("--execute", help="Do it; without this, only show what would happen.")]


@app.command()
def create(group: GroupName, topic: InTopic, url: Url = DEFAULT_URL) -> None:
    """Give a group a position in a topic, at the earliest message, before its first member comes."""
    with connected(url) as client:
        client.admin.create_group(group, topic)
    typer.echo(f"group {group} exists, at the beginning of {topic}")


@app.command(name="list")
def list_groups(
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only those that consume it.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """List groups, and how far behind they are."""
    with connected(url) as client:
        found = client.admin.groups(topic)
    rows = [{"group": g.name, "topics": [*g.topics], "members": g.members, "lag": g.lag} for g in found]
    empty = "no groups yet: a group exists once a consumer uses it"
    show_rows(rows, form, empty=empty, missing=found.missing)


@app.command()
def show(group: GroupName, url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """Show a group, its members, and how far it is."""
    with connected(url) as client:
        report = client.admin.group(group)
        names = client.admin.shard_names
        queues = _queues(client.admin.lag("", group), names)
    facts = {"group": report.name, "topics": [*report.topics], "members": report.members, "lag": report.lag}
    facts["retrying"] = report.retrying
    members = [
        {
            "member": m.name,
            **shard_fact(names, m.shard),
            "topic": m.topic,
            "address": m.address,
            "tags": m.tags,
            "version": m.version,
            "leased": m.leased,
            "connected": m.is_connected,
            "silent": m.is_silent,
        }
        for m in report.details
    ]
    if form == Format.JSON:
        show_facts({**facts, "member_details": members, "queues": queues, **missing_facts(report.missing)}, form)
        return
    tell_missing(report.missing)
    show_facts(facts, form)
    typer.echo("")
    show_rows(members, form, empty="no members right now")
    typer.echo("")
    show_rows(queues, form, empty="no position in any topic")


@app.command()
def lag(
    group: GroupName,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="In this topic only.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Show how many messages a group has not settled yet, by queue."""
    with connected(url) as client:
        found = _lag(client.admin, topic, group)
        queues = _queues(found, client.admin.shard_names)
    if form == Format.JSON:
        facts = {"group": group, "lag": found.total, "retrying": found.retrying, "dropped": found.dropped}
        details = {"holds_retention": found.is_holding, "queues": queues, **missing_facts(found.missing)}
        show_facts({**facts, **details}, form)
        return
    show_rows(queues, form, empty="", missing=found.missing)
    typer.echo(f"\nlag {found.total:,}, retrying {found.retrying:,}")
    if found.dropped:
        typer.echo(f"retention dropped {found.dropped:,} messages before the group had consumed them")
    if found.is_holding:
        typer.echo("retention waits for this group: the journal keeps what is older than store.retention_hours for it")


@app.command()
def reset(
    group: GroupName,
    topic: InTopic,
    to: Annotated[str, typer.Option(metavar="PLACE", help="earliest, latest, an offset, 10m back, or a moment.")],
    queue: Queue = None,
    execute: Execute = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Move a group within a topic, back or forth. A dry run until --execute.

    PLACE is earliest, latest, an offset, a time back from now as in 10m, or a moment as in 2030-01-31T12:00:00Z.
    """
    place = parse_place(to)
    with connected(url) as client:
        _lag(client.admin, topic, group)
        moves = client.admin.reset(topic, group, place, queue=queue, dry_run=not execute)
        names = client.admin.shard_names
    _show_moves(moves, names, execute, form)


@app.command()
def skip(
    group: GroupName,
    topic: InTopic,
    by: Annotated[int | None, typer.Option(min=1, help="So many messages of each queue; all if left out.")] = None,
    queue: Queue = None,
    execute: Execute = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Move a group forth past messages it will then never get. A dry run until --execute."""
    from dmq.client.admin.reports import ShardRows

    with connected(url) as client:
        admin = client.admin
        found = _lag(admin, topic, group)
        names = admin.shard_names
        if by is None:
            moves = admin.reset(topic, group, "latest", queue=queue, dry_run=not execute)
        else:
            moves = ShardRows(missing=found.missing)
            for row in found.queues:
                if queue is None or row.queue == queue:
                    to, shard = min(row.floor + by, row.next_offset), row.shard or None
                    moves += admin.reset(topic, group, to, queue=row.queue, dry_run=not execute, shard=shard)
            if queue is not None and not moves:
                admin.reset(topic, group, "latest", queue=queue, dry_run=True)  # says which queues there are
    _show_moves(moves, names, execute, form)


@app.command()
def delete(
    group: GroupName,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only its position in this topic.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Yes, forget how far it is.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Forget a group, or its position in one topic."""
    if not yes:
        raise typer.BadParameter(f"group {group} would begin anew the next time: say --yes if that is meant")
    with connected(url) as client:
        client.admin.delete_group(group, topic)
    typer.echo(f"group {group} is forgotten" + (f" in {topic}" if topic else ""))


def _lag(admin: Admin, topic: str, group: str) -> Lag:
    """How far a group is.

    Raises:
        UnknownGroup: it has no position there. A move would quietly give it one, so a misspelt name must not pass.
    """
    found = admin.lag(topic, group)
    if not found.queues:
        where = f"topic {topic!r}" if topic else "any topic"
        raise UnknownGroup(
            f"group {group!r} has no position in {where}: check the name, dmq group list shows those that exist",
            group=group,
        )
    return found


def _queues(found: Lag, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "topic": row.topic,
            **shard_fact(names, row.shard),
            "queue": row.queue,
            "first_offset": row.first_offset,
            "next_offset": row.next_offset,
            "settled_below": row.floor,
            "leased": row.leased,
            "lag": row.lag,
            "retrying": row.retrying,
        }
        for row in found.queues
    ]


def _show_moves(moves: ShardRows[Move], names: Mapping[int, str], executed: bool, form: Format) -> None:
    rows = [
        {
            **shard_fact(names, m.shard),
            "queue": m.queue,
            "from": m.before,
            "to": m.after,
            "messages": m.after - m.before,
            "done": executed,
        }
        for m in moves
    ]
    show_rows(rows, form, empty="nothing to move", missing=moves.missing)
    if form == Format.TABLE and not executed:
        typer.echo("\nthis was a dry run: say --execute to do it")
