"""Options that many commands take: the broker's address, the form of results, places in a queue, times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.contexts import choose_url
from dmq.duration import parse_duration

if TYPE_CHECKING:
    from dmq.client.client import Client

__all__ = [
    "APP",
    "ConfigFile",
    "Format",
    "Formatted",
    "GroupName",
    "InTopic",
    "MessageName",
    "Settings",
    "TopicName",
    "Url",
    "checked_id",
    "connected",
    "make_app",
    "parse_moment",
    "parse_pairs",
    "parse_past",
    "parse_place",
    "parse_seconds",
]

APP = "dmq-cli"
CALL_SECONDS = 30.0
DEFAULT_URL = "dmq://127.0.0.1:9611"


class Format(StrEnum):
    """How results are shown."""

    TABLE = "table"
    JSON = "json"


Url = Annotated[
    str, typer.Option("--url", envvar="DMQ_URL", metavar="URL", callback=choose_url, help="Where the broker is.")
]
Formatted = Annotated[Format, typer.Option("--format", help="How to show it.")]
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
MessageName = Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Its id, as `dmq find` and receipts show it.")]
InTopic = Annotated[str, typer.Option("--topic", metavar="TOPIC", help="In this topic.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="DMQ_CONFIG", metavar="FILE", help="Settings; ./dmq.toml if it exists."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in store.segment_bytes=64MiB.")
]


def make_app(help: str) -> typer.Typer:
    """A command, or a group of commands."""
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@contextlib.contextmanager
def connected(url: str, app: str = APP, *, any_member: bool = False) -> Iterator[Client]:
    """A connection to the broker for one command; of a shard, to its leader, unless any member will do."""
    from dmq.client.client import connect

    with connect(url, app=app, any_member=any_member) as client:
        client.admin.timeout = CALL_SECONDS  # a command that hangs tells its user nothing
        yield client


def parse_seconds(text: str) -> float:
    """The seconds of a duration: `30`, `1.5s`, `10m`, `2h`, `7d`."""
    seconds = parse_duration(text if text[-1:].isalpha() else f"{text}s")
    if seconds is None:
        raise typer.BadParameter(f"{text!r} is not a duration: write 30s, 10m, 2h or 7d")
    return seconds


def parse_place(text: str) -> str | int | datetime | timedelta:
    """A place in a queue: earliest, latest, an offset, a duration back from now (10m), or a moment (ISO 8601)."""
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    back = parse_duration(text)
    if back is not None:
        return timedelta(seconds=back)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a place in a queue: write earliest, latest, an offset, a duration back from now such as "
            "10m, or a moment such as 2030-01-31T12:00:00Z"
        ) from None
    # Without a zone it is local time.
    return moment.astimezone(UTC)


def parse_moment(text: str | None) -> datetime | None:
    """A moment, or a duration back from now."""
    if text is None:
        return None
    back = parse_duration(text)
    if back is not None:
        return datetime.now().astimezone() - timedelta(seconds=back)
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time: write 10m for ten minutes ago, or a moment such as 2030-01-31T12:00:00Z"
        ) from None


def parse_past(text: str | None) -> datetime | None:
    """A moment that is not in the future, or a duration back from now."""
    moment = parse_moment(text)
    if moment is not None and moment > datetime.now(UTC):
        raise typer.BadParameter(f"{text!r} lies in the future: write a time in the past")
    return moment


def checked_id(text: str) -> str:
    """The id of a message, if it is one."""
    from dmq.model import MessageId

    try:
        MessageId.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def parse_pairs(pairs: Sequence[str] | None) -> Mapping[str, str]:
    """Names and values, each as NAME=VALUE."""
    parsed: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE")
        parsed[name] = value
    return parsed
