"""`dmq find`: messages by key or id."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.message.messages import message_facts, message_row
from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import show_rows, tell_missing
from dmq.errors import UnknownMessage

__all__ = ["app"]

app = make_app("Find messages by key or id.")


@app.command()
def find(
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Messages with this key.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="The message with this id.")] = None,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="In this topic; in all if left out.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many.")] = 100,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Find messages by --key or --id. The exit code is 1 if there is none."""
    if (key is None) == (message_id is None):
        raise typer.BadParameter("give --key or --id, one of them")
    if message_id is not None:
        from dmq.model import MessageId

        try:
            MessageId.parse(message_id)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    from dmq.client.admin.reports import ShardRows

    with connected(url) as client:
        admin = client.admin
        if key is None:
            found = admin.find(topic, id=message_id)
        else:
            topics = [topic] if topic else [one.name for one in admin.topics()]
            answers = [admin.find(name, key=key, limit=limit) for name in topics]
            missing = dict.fromkeys(shard for rows in answers for shard in rows.missing)
            found = ShardRows([message for rows in answers for message in rows][:limit], missing)
        names = admin.shard_names
    if not found:
        tell_missing(found.missing)
        what = f"key {key!r}" if key is not None else f"id {message_id}"
        where = f"in topic {topic!r}" if topic else "in any topic"
        raise UnknownMessage(f"no message with {what} is kept {where}: check it, retention may have taken it")
    show = message_row if form == Format.TABLE else message_facts
    show_rows([show(message, names) for message in found], form, empty="", missing=found.missing)
