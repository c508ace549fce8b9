"""`dmq topic`: create, list, show, update, delete."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import (
    DEFAULT_URL,
    Format,
    Formatted,
    TopicName,
    Url,
    connected,
    make_app,
    parse_pairs,
    parse_seconds,
)
from dmq.cli.output import show_facts, show_rows
from dmq.errors import UnknownTopic

if TYPE_CHECKING:
    from dmq.client.admin.reports import Topic

__all__ = ["app"]

app = make_app("Create, list, show, change and delete topics.")

Properties = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Something to remember of it.")
]
NewTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="Its name: letters, digits, '.', '_' and '-'.")]


@app.command()
def create(
    name: NewTopic,
    queues: Annotated[int, typer.Option(min=1, max=255, help="Messages of one queue stay in order.")] = 4,
    priority: Annotated[bool, typer.Option("--priority", help="Deliver by priority; it then has ten queues.")] = False,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="Messages expire after this time, as in 7d.")] = None,
    carry_for: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Keep what this group has not consumed, whatever its age.")
    ] = None,
    properties: Properties = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Succeed if the same topic exists.")] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Create a topic."""
    settings: dict[str, Any] = {}
    if carry_for is not None:
        settings["carry_for"] = carry_for
    if properties:
        settings["properties"] = dict(parse_pairs(properties))
    seconds = None if ttl is None else parse_seconds(ttl)
    with connected(url) as client:
        made = client.admin.create_topic(
            name, queues, priority=priority, ttl=seconds, allow_existing=if_missing, **settings
        )
    if form == Format.JSON:
        show_facts(_facts(made), form)
    else:
        typer.echo(f"topic {made.name} exists, with {made.queues} queues")


@app.command(name="list")
def list_topics(
    prefix: Annotated[str, typer.Option(metavar="PREFIX", help="Only those whose name begins so.")] = "",
    system: Annotated[bool, typer.Option("--system", help="DMQ's own, too.")] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """List topics."""
    with connected(url) as client:
        rows = [_facts(topic) for topic in client.admin.topics(prefix, system=system)]
    show_rows(rows, form, empty="no topics yet: dmq topic create NAME makes one")


@app.command()
def show(name: TopicName, url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """Show a topic, its queues, and the groups that consume it."""
    with connected(url) as client:
        topic = _find(client.admin.topics(name, system=True), name)
        named = {slot.number: slot.shard for slot in topic.slots}
        queues = [
            {
                **({"shard": named.get(row.shard, row.shard)} if named else {}),
                "queue": row.queue,
                "first_offset": row.first_offset,
                "next_offset": row.next_offset,
                "messages": row.next_offset - row.first_offset,
            }
            for row in client.admin.offsets(name)
        ]
        groups = [
            {"group": group.name, "members": group.members, "lag": client.admin.lag(name, group.name).total}
            for group in client.admin.groups(name)
        ]
    if form == Format.JSON:
        show_facts({**_facts(topic), **_slot_facts(topic), "queue_offsets": queues, "groups": groups}, form)
        return
    show_facts(_facts(topic), form)
    typer.echo("")
    if topic.slots:
        show_rows(_slots(topic), form, empty="no shards")
        typer.echo("")
    show_rows(queues, form, empty="no queues")
    typer.echo("")
    show_rows(groups, form, empty="no group consumes it")


@app.command()
def update(
    name: TopicName,
    queues: Annotated[int | None, typer.Option(min=1, max=255, help="As many queues; never fewer than before.")] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Messages expire after this time; none: never.")
    ] = None,
    carry_for: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Keep what this group has not consumed; none: do not.")
    ] = None,
    properties: Properties = None,
    produce: Annotated[
        bool | None, typer.Option("--produce/--no-produce", help="Let producers send to it, or refuse them.")
    ] = None,
    consume: Annotated[
        bool | None, typer.Option("--consume/--no-consume", help="Let consumers have its messages, or let them wait.")
    ] = None,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Change some settings of a topic; the others stay."""
    changes: dict[str, Any] = {}
    if queues is not None:
        changes["queues"] = queues
    if ttl is not None:
        changes["ttl"] = None if ttl == "none" else parse_seconds(ttl)
    if carry_for is not None:
        changes["carry_for"] = None if carry_for == "none" else carry_for
    if properties:
        changes["properties"] = dict(parse_pairs(properties))
    if produce is not None:
        changes["can_produce"] = produce
    if consume is not None:
        changes["can_consume"] = consume
    if not changes:
        raise typer.BadParameter(
            "nothing to change: give at least one of --queues, --ttl, --carry-for, --property, --no-produce, "
            "--no-consume"
        )
    with connected(url) as client:
        changed = client.admin.update_topic(name, **changes)
    show_facts(_facts(changed), form)


@app.command()
def place(
    name: TopicName,
    add: Annotated[str, typer.Option(metavar="SHARD", help="Give the topic queues in this shard.")] = "",
    remove: Annotated[
        str, typer.Option(metavar="SHARD", help="Send nothing more to this shard; its queues go when they are empty.")
    ] = "",
    queues: Annotated[
        int | None,
        typer.Option(min=1, max=255, help="With --add: as many queues; those of the other shards if left out."),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="Hold ordered messages until those before them are consumed, so that order is kept."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --remove: the queues go at once, with their messages.")
    ] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Change the shards of a topic: give it queues in one more, or take those of one away. Messages never move."""
    if bool(add) == bool(remove):
        raise typer.BadParameter("say one shard: --add SHARD or --remove SHARD")
    with connected(url) as client:
        topic = client.admin.place_topic(name, add=add, remove=remove, queues=queues or 0, drain=drain, force=force)
    if form == Format.JSON:
        show_facts({**_facts(topic), **_slot_facts(topic)}, form)
        return
    show_rows(_slots(topic), form, empty="no shards")
    for shard in topic.lacking:
        typer.echo(f"shard {shard} has no leader: it follows when it has one")


@app.command()
def delete(
    name: TopicName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete a topic, its messages, and the positions of all groups in it."""
    with connected(url) as client:
        kept = _find(client.admin.topics(name, system=True), name).messages
        if not yes:
            if not sys.stdin.isatty():
                raise typer.BadParameter(f"this deletes {kept:,} messages for good: say --yes if that is meant")
            typer.confirm(f"Delete topic {name} and its {kept:,} messages for good?", abort=True)
        client.admin.delete_topic(name)
    typer.echo(f"topic {name} and its {kept:,} messages are deleted")


def _find(topics: list[Topic], name: str) -> Topic:
    """Asking for a topic by name could create it; looking it up among all of them does not."""
    for topic in topics:
        if topic.name == name:
            return topic
    raise UnknownTopic(f"there is no topic {name!r}: dmq topic list shows those that exist", topic=name)


def _slots(topic: Topic) -> list[dict[str, Any]]:
    return [
        {"shard": slot.shard, "number": slot.number, "queues": slot.queues, "takes_messages": slot.is_writable}
        for slot in topic.slots
    ]


def _slot_facts(topic: Topic) -> dict[str, Any]:
    """What `--format json` tells of a topic's place in a cluster."""
    if not topic.slots:
        return {}
    return {"slots": _slots(topic), "slots_version": topic.slots_version, "lacking": [*topic.lacking]}


def _facts(topic: Topic) -> dict[str, Any]:
    in_cluster = {"shards": ", ".join(slot.shard for slot in topic.slots)} if topic.slots else {}
    return {
        "topic": topic.name,
        "queues": topic.queues,
        "messages": topic.messages,
        "priority": topic.priority,
        "ttl_seconds": topic.ttl,
        "carry_for": topic.carry_for,
        "properties": dict(topic.properties),
        "can_produce": topic.can_produce,
        "can_consume": topic.can_consume,
        **in_cluster,
    }
