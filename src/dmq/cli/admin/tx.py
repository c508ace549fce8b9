"""`dmq tx`: list."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import moment, shard_fact, show_rows

__all__ = ["app"]

app = make_app("Look at open transactions.")


@app.callback()
def top() -> None:
    """Look at open transactions."""


@app.command(name="list")
def list_transactions(
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only those for this topic.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most this many, the oldest first.")] = 100,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """List transactions that are neither committed nor rolled back, the oldest first."""
    with connected(url) as client:
        found = client.admin.transactions(topic, limit=limit)
        names = client.admin.shard_names
    rows = [
        {
            "id": str(one.id),
            "topic": one.topic,
            **shard_fact(names, one.shard),
            "group": one.group,
            **({"begun_at_ms": one.begun_at_ms} if form == Format.JSON else {"begun": moment(one.begun_at_ms)}),
            "checks": one.checks,
        }
        for one in found
    ]
    show_rows(rows, form, empty="no transaction is open", missing=found.missing)
