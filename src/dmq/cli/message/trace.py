"""`dmq trace`: the life of a message."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, MessageName, Url, checked_id, connected, make_app
from dmq.cli.output import missing_facts, moment, printable, show_rows

if TYPE_CHECKING:
    from dmq.client.admin.reports import TraceStep

__all__ = ["app"]

app = make_app("Show the life of a message.")


@app.command()
def trace(
    message_id: MessageName,
    group: Annotated[str, typer.Option(metavar="GROUP", help="Leave out what other groups did.")] = "",
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Show the life of a message: sent, stored, delivered, acked, and whatever else became of it.

    It comes from the records of the journal. What the journal does not hold is said below.
    """
    wanted = checked_id(message_id)
    with connected(url) as client:
        found = client.admin.trace(wanted, group)
    if form == Format.JSON:
        steps = [asdict(step) for step in found.steps]
        facts = {"id": str(found.id), "is_complete": found.is_complete, "steps": steps, "notes": list(found.notes)}
        typer.echo(json.dumps({**facts, **missing_facts(found.missing)}, indent=2))
        return
    show_rows([_row(step) for step in found.steps], form, empty="nothing is known of it", missing=found.missing)
    for note in found.notes:
        typer.echo(f"Note: {printable(note)}.")


def _row(step: TraceStep) -> dict[str, Any]:
    place = "" if step.queue is None else f"{step.topic} {step.queue}/{step.offset}"
    return {
        "at": moment(step.at_ms),
        "what": step.what,
        "where": place or step.topic,
        "group": step.group,
        "member": step.member,
        "attempt": step.attempt or None,
        "note": step.note,
    }
