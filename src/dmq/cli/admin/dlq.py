"""`dmq dlq`: list, show, resend, delete dead letters."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.message.messages import body_facts, body_text
from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app, parse_moment, parse_past
from dmq.cli.output import cut, moment, show_facts, show_rows
from dmq.errors import UnknownMessage

if TYPE_CHECKING:
    from dmq.client.admin.admin import Admin
    from dmq.client.admin.dead_letters import DeadLetter, DeadLetterOutcome

__all__ = ["app"]

app = make_app("Look at dead letters, resend them, delete them.")


class Reason(StrEnum):
    """Why a message is a dead letter."""

    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    EXPIRED = "EXPIRED"
    RATE_LIMITED = "RATE_LIMITED"
    STORE_FAILED = "STORE_FAILED"
    REJECTED = "REJECTED"
    CORRUPT = "CORRUPT"


class State(StrEnum):
    """What has become of it."""

    WAITING = "waiting"
    RESENT = "resent"
    DELETED = "deleted"
    ANY = "any"


Topic = Annotated[str, typer.Option(metavar="TOPIC", help="Only of this topic.")]
Group = Annotated[str, typer.Option(metavar="GROUP", help="Only of this group.")]
ForReason = Annotated[Reason | None, typer.Option(case_sensitive=False, help="Only for this reason.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Numbers of dead letters, or ids of messages.")
]
Rate = Annotated[float | None, typer.Option(min=0.01, metavar="N", help="At most this many a second.")]
Execute = Annotated[
    bool, typer.Option("--execute", help="Do it; without this, letters chosen by filter are only counted.")
]


@app.command(name="list")
def list_letters(
    topic: Topic = "",
    group: Group = "",
    reason: ForReason = None,
    state: Annotated[State, typer.Option(help="What has become of them.")] = State.WAITING,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From then on: 10m back, or a moment.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before then.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most this many, the oldest first.")] = 100,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """List dead letters, the oldest first."""
    first, last = parse_past(since), parse_moment(until)
    with connected(url) as client:
        found = client.admin.dead_letters(
            topic,
            group,
            reason or "",
            state="" if state is State.ANY else state,
            since=first,
            until=last,
            limit=limit,
            bodies=form == Format.JSON,
        )
    show = _row if form == Format.TABLE else _facts
    show_rows([show(letter) for letter in found], form, empty="no dead letters")
    if form == Format.TABLE and len(found) == limit:
        typer.echo(f"\nthere may be more than {limit}: --limit shows them")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="The number of a dead letter, or the id of its message.")],
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Show everything about a dead letter. A message's id shows those of all groups."""
    with connected(url) as client:
        found = client.admin.dead_letters(state="", ids=[name])
    if not found:
        raise UnknownMessage(f"there is no dead letter {name}: dmq dlq list shows those that exist")
    if form == Format.JSON:
        show_rows([_facts(letter) for letter in found], form, empty="")
        return
    for index, letter in enumerate(found):
        if index:
            typer.echo("")
        facts = _facts(letter)
        facts.pop("body_base64", None)
        times = {"sent": "sent_at_ms", "dead": "dead_at_ms", "changed": "changed_at_ms"}
        for label, key in times.items():
            at_ms = facts.pop(key)
            facts[label] = moment(at_ms) if at_ms else None
        show_facts(facts | {"body": body_text(letter.body)}, form)


@app.command()
def resend(
    names: Names = None,
    topic: Topic = "",
    group: Group = "",
    reason: ForReason = None,
    rate: Rate = None,
    execute: Execute = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Send dead letters again, each under its own id, to its group alone.

    Name them, or choose them by --topic, --group and --reason; the latter is a dry run until --execute. The exit code
    is 1 if one of them could not be resent.
    """
    with connected(url) as client:
        if not _is_named(names, topic, group, reason) and not execute:
            _show_dry(client.admin, topic, group, reason, form=form)
            return
        outcomes = client.admin.resend_dead_letters(names, topic=topic, group=group, reason=reason or "", rate=rate)
    _show_outcomes(outcomes, "resent", form)


@app.command()
def delete(
    names: Names = None,
    topic: Topic = "",
    group: Group = "",
    reason: ForReason = None,
    rate: Rate = None,
    execute: Execute = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Delete dead letters: their content goes, the row that says they existed stays.

    Name them, or choose them by --topic, --group and --reason; the latter is a dry run until --execute. The exit code
    is 1 if one of them could not be deleted.
    """
    with connected(url) as client:
        if not _is_named(names, topic, group, reason) and not execute:
            _show_dry(client.admin, topic, group, reason, form=form)
            return
        outcomes = client.admin.delete_dead_letters(names, topic=topic, group=group, reason=reason or "", rate=rate)
    _show_outcomes(outcomes, "deleted", form)


def _is_named(names: list[str] | None, topic: str, group: str, reason: Reason | None) -> bool:
    """Whether the letters are named one by one, and not chosen by what they have in common."""
    if not names and not (topic or group or reason):
        raise typer.BadParameter("say which ones: their ids, or --topic, --group or --reason")
    return bool(names)


def _show_dry(admin: Admin, topic: str, group: str, reason: Reason | None, *, form: Format) -> None:
    """Show what would be done."""
    found = admin.dead_letters(topic, group, reason or "", bodies=False)
    show_rows([_row(letter) for letter in found[:20]], form, empty="no dead letters match")
    if form == Format.TABLE and found:
        more = f", {len(found) - 20} of them not shown" if len(found) > 20 else ""
        typer.echo(f"\nthis was a dry run of {len(found)}{more}: say --execute to do it")


def _show_outcomes(outcomes: list[DeadLetterOutcome], done: str, form: Format) -> None:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if form == Format.JSON:
        rows = [
            {
                "number": outcome.number,
                "outcome": done if outcome.error is None else outcome.error.code,
                "message": None if outcome.error is None else outcome.error.message,
            }
            for outcome in outcomes
        ]
        show_rows(rows, form, empty="")
    else:
        for outcome in failed:
            typer.echo(f"{outcome.number}: {outcome.error}", err=True)
        typer.echo(f"{len(outcomes) - len(failed)} {done}" + (f", {len(failed)} not" if failed else ""))
    if failed:
        raise typer.Exit(1)


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "number": letter.number,
        "topic": letter.topic,
        "group": letter.group or None,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "dead": moment(letter.dead_at_ms),
        "key": letter.key,
        "error": cut(letter.last_error, 60),
        "state": letter.state,
        "id": str(letter.id),
    }


def _facts(letter: DeadLetter) -> dict[str, Any]:
    """Everything; the body as `body_facts` has it."""
    facts: dict[str, Any] = {
        name: getattr(letter, name) for name in letter.__slots__ if name not in ("body", "id", "properties")
    }
    return facts | {"id": str(letter.id), "properties": dict(letter.properties)} | body_facts(letter.body)
