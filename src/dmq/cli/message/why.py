"""`dmq why`: why is a message not consumed?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, MessageName, Url, checked_id, connected, make_app
from dmq.cli.output import missing_facts, printable, tell_missing

__all__ = ["app"]

app = make_app("Tell why a message is not consumed.")


@app.command()
def why(
    message_id: MessageName,
    group: Annotated[str, typer.Option(metavar="GROUP", help="Only this group.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Tell in one paragraph why a message is not consumed; or that it was, by whom and when."""
    wanted = checked_id(message_id)
    with connected(url) as client:
        found = client.admin.why(wanted, group)
    if form == Format.JSON:
        groups = [asdict(reason) for reason in found.groups]
        facts = {"id": str(found.id), "state": found.state, "text": found.text, "is_complete": found.is_complete}
        typer.echo(json.dumps({**facts, "groups": groups, **missing_facts(found.missing)}, indent=2))
        return
    tell_missing(found.missing)
    typer.echo(printable(found.text))
