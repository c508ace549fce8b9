"""`dmq tail`: follow a topic without consuming it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from dmq.cli.message.messages import message_facts, message_line
from dmq.cli.options import DEFAULT_URL, TopicName, Url, connected, make_app, parse_place
from dmq.cli.output import printable, sleep_while_read

__all__ = ["app"]

app = make_app("Follow a topic as messages arrive, without consuming.")


class LineFormat(StrEnum):
    """How each message is shown."""

    TEXT = "text"
    JSON = "json"


@app.command()
def tail(
    topic: TopicName,
    start: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="earliest, latest, an offset, 10m back, or a moment.")
    ] = "latest",
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    queue: Annotated[int | None, typer.Option(min=0, max=254, help="Only this queue.")] = None,
    tags: Annotated[str, typer.Option(metavar="TAGS", help="Only these tags, as in 'a || b'.")] = "",
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Stop at the end of what is stored.")] = False,
    form: Annotated[
        LineFormat, typer.Option("--format", help="How to show each message: a line of text, or of JSON.")
    ] = LineFormat.TEXT,
    url: Url = DEFAULT_URL,
) -> None:
    """Follow a topic as messages arrive, until Ctrl-C. Nothing is consumed, and no group is made.

    PLACE is earliest, latest, an offset, a time back from now as in 10m, or a moment as in 2030-01-31T12:00:00Z. A
    line has when the message was stored, its queue/offset, in a cluster with the shard before them, id, key, tag and
    properties, and its body. A shard that does not answer is named on stderr; what it has comes when it is back.
    """
    place = parse_place(start)
    from dmq.client.consumer.follow import FollowOptions, follow

    with connected(url) as client:
        names = client.admin.shard_names
        options = FollowOptions(queue, tags, ends=no_follow)
        arriving = follow(client.admin, topic, place, options, sleep=sleep_while_read, on_missing=_tell_missing)
        for message in islice(arriving, limit):
            is_json = form == LineFormat.JSON
            typer.echo(json.dumps(message_facts(message, names)) if is_json else message_line(message, names))


def _tell_missing(missing: Sequence[str]) -> None:
    if missing:
        names = ", ".join(map(printable, missing))
        typer.echo(f"shard {names} does not answer, and is left out until it does: dmq shard list shows why", err=True)
    else:
        typer.echo("all shards answer again", err=True)
