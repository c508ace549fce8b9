"""`dmq delay`: list, cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import moment, shard_fact, show_rows

__all__ = ["app"]

app = make_app("Look at delayed messages, and take them back.")


@app.command(name="list")
def list_delays(
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only those for this topic.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most this many, the next due first.")] = 100,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """List messages that wait for their time, the next due first."""
    with connected(url) as client:
        found = client.admin.delays(topic, limit=limit)
        names = client.admin.shard_names
    rows = [
        {
            "id": str(delay.id),
            "topic": delay.topic,
            **shard_fact(names, delay.shard),
            **({"due_at_ms": delay.due_at_ms} if form == Format.JSON else {"due": moment(delay.due_at_ms)}),
        }
        for delay in found
    ]
    show_rows(rows, form, empty="no message waits for its time", missing=found.missing)


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="MESSAGE_ID", help="As in the receipt, or in dmq delay list.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Take back delayed messages that are not delivered yet. The exit code is 1 if one of them no longer waits."""
    with connected(url) as client:
        for message_id in ids:
            client.admin.cancel_delay(message_id)
            typer.echo(f"{message_id} is cancelled")
