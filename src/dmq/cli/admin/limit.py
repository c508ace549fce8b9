"""`dmq limit`: show, set."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import show_facts, show_rows

if TYPE_CHECKING:
    from dmq.client.admin.reports import LimitReport

__all__ = ["app"]

app = make_app("Limit what producers may send a second.")

TopicOption = Annotated[str, typer.Option("--topic", metavar="TOPIC", help="Of this topic.")]
AppOption = Annotated[str, typer.Option("--app", metavar="APP", help="Of this producing app.")]


class Policy(StrEnum):
    """What becomes of messages over the limit."""

    REFUSE = "refuse"
    DEAD_LETTER = "dead-letter"


@app.command()
def show(
    topic: TopicOption = "", app_name: AppOption = "", url: Url = DEFAULT_URL, form: Formatted = Format.TABLE
) -> None:
    """Show the limits in force: all, or those of a topic or an app."""
    with connected(url) as client:
        found = client.admin.limits(topic, app_name)
    show_rows([_facts(limit) for limit in found], form, empty="there are no limits: dmq limit set makes one")


@app.command(name="set")
def set_limit(
    topic: TopicOption = "",
    app_name: AppOption = "",
    messages: Annotated[int | None, typer.Option(metavar="N", min=1, help="Messages a second.")] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="Bytes a second, as in 500000 or 8MiB.")
    ] = None,
    policy: Annotated[Policy, typer.Option(help="What happens to messages over the limit.")] = Policy.REFUSE,
    none: Annotated[bool, typer.Option("--none", help="Take the limit away.")] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Set the limit of a topic or of an app, in place of the one before; it holds at once and outlives the broker."""
    if bool(topic) == bool(app_name):
        raise typer.BadParameter("give --topic or --app, one of them")
    if none == (messages is not None or size is not None):
        raise typer.BadParameter("give --messages, --bytes or both; or --none, to take the limit away")
    with connected(url) as client:
        limit = client.admin.set_limit(
            topic=topic, app=app_name, messages=messages, bytes=_parse_size(size), policy=policy.value
        )
    if limit is not None:
        show_facts(_facts(limit), form)
    elif form == Format.JSON:
        show_facts({}, form)
    else:
        typer.echo(f"{f'topic {topic}' if topic else f'app {app_name}'} has no limit")


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    from dmq.settings import parse_size

    size = parse_size(text)
    if size is None or size < 1:
        raise typer.BadParameter(f"{text!r} is not a size: write bytes, such as 500000, or 64KiB, 8MiB, 1GiB")
    return size


def _facts(limit: LimitReport) -> dict[str, Any]:
    return {
        "topic": limit.topic or None,
        "app": limit.app or None,
        "messages_per_second": limit.messages,
        "bytes_per_second": limit.bytes,
        "policy": limit.policy,
    }
