"""`dmq peek`: look at stored messages without consuming them."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.message.messages import message_facts, message_row
from dmq.cli.options import DEFAULT_URL, Format, Formatted, TopicName, Url, connected, make_app, parse_place
from dmq.cli.output import show_rows

__all__ = ["app"]

app = make_app("Look at stored messages, without consuming.")


@app.command()
def peek(
    topic: TopicName,
    start: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="earliest, latest, an offset, 10m back, or a moment.")
    ] = "earliest",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many.")] = 10,
    queue: Annotated[int | None, typer.Option(min=0, max=254, help="Only this queue.")] = None,
    tags: Annotated[str, typer.Option(metavar="TAGS", help="Only these tags, as in 'a || b'.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Look at stored messages from a place on, queue by queue.

    PLACE is earliest, latest, an offset, a time back from now as in 10m, or a moment as in 2030-01-31T12:00:00Z.
    """
    place = parse_place(start)
    with connected(url) as client:
        found = client.admin.peek(topic, queue=queue, at=place, limit=limit, tags=tags)
        names = client.admin.shard_names
    show = message_row if form == Format.TABLE else message_facts
    rows = [show(message, names) for message in found]
    show_rows(rows, form, empty="no messages there", missing=found.missing)
