"""`dmq send`: publish from arguments, files or stdin."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from dmq.cli.options import (
    APP,
    DEFAULT_URL,
    Format,
    Formatted,
    TopicName,
    Url,
    connected,
    make_app,
    parse_pairs,
    parse_seconds,
)
from dmq.cli.output import shard_fact, show_rows
from dmq.errors import DMQError, InvalidMessage

__all__ = ["app"]

app = make_app("Publish messages from arguments, files or stdin.")

_LISTED = 20


Safety = Literal["none", "stored", "flushed", "replicated"]  # "consumed" names a group as well


@app.command()
def send(
    topic: TopicName,
    bodies: Annotated[
        list[str] | None, typer.Argument(metavar="BODY", help="One message each; - for the lines of stdin.")
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", metavar="FILE", help="A file: one message, or see --lines.")
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="What comes from stdin, likewise.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of a file or stdin is a message.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Every line is a JSON object: body, key, tag, …, as dmq tail has them.")
    ] = False,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="To find it by.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="To filter by.")] = None,
    business_id: Annotated[str | None, typer.Option(metavar="ID", help="What it belongs to.")] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="In order with others of the same --business-id.")] = False,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Travels with it.")
    ] = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="9 comes first.")] = 4,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="Expires after this time, as in 1h.")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Delivered after this time, as in 90s, 2h or 7d.")
    ] = None,
    durability: Annotated[Safety, typer.Option(help="How safe before it counts.")] = "flushed",
    count: Annotated[int, typer.Option(min=1, help="Send each this many times.")] = 1,
    app_name: Annotated[str, typer.Option("--app", metavar="NAME", help="Send under this name.")] = APP,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Publish messages, and show where they are.

    --json-lines reads what dmq tail --format json prints: a text in "body" is sent as it is, anything else there as
    JSON; "body_base64" has bytes. What an object does not say is taken from the options.
    """
    if lines and json_lines:
        raise typer.BadParameter("--lines and --json-lines exclude each other")
    if bodies == ["-"]:
        bodies, stdin, lines = [], True, not json_lines
    if not (bodies or files or stdin):
        raise typer.BadParameter("nothing to send: give a BODY, --file or --stdin")
    if ordered and business_id is None and not json_lines:
        raise typer.BadParameter("--ordered needs --business-id")
    options: dict[str, Any] = {
        "key": key,
        "tag": tag,
        "business_id": business_id,
        "ordered": ordered,
        "priority": priority,
        "properties": dict(parse_pairs(properties)) or None,
        "ttl": None if ttl is None else parse_seconds(ttl),
        "delay": 0.0 if delay is None else parse_seconds(delay),
        "durability": durability,
    }
    sources = _messages(bodies or [], files or [], stdin, lines, json_lines=json_lines)
    repeated = (message for message in sources for _ in range(count))
    _publish(url, app_name, topic, repeated, options=options, form=form)


def _publish(
    url: str,
    app_name: str,
    topic: str,
    messages: Iterator[tuple[bytes, dict[str, Any]]],
    options: dict[str, Any],
    form: Format,
) -> None:
    from dmq.cli.message.stream import send_stream

    sent = size = 0
    listed: list[dict[str, Any]] = []
    began = time.monotonic()
    with connected(url, app_name) as client, client.producer() as producer:
        try:
            for receipt, body_bytes in send_stream(producer, topic, messages, options):
                sent += 1
                size += body_bytes
                row = {
                    "id": str(receipt.id),
                    "topic": receipt.topic,
                    **shard_fact(client.admin.shard_names, receipt.shard),
                    "queue": receipt.queue,
                    "offset": receipt.offset,
                    "durability": receipt.durability,
                }
                if form == Format.JSON:
                    typer.echo(json.dumps(row))
                elif len(listed) <= _LISTED:
                    listed.append(row)
        except DMQError as error:
            if listed and sent <= _LISTED:
                show_rows(listed, form, empty="")
            raise type(error)(_so_far(error.message, sent), **error.detail) from error
    if form == Format.JSON:
        return
    if 0 < sent <= _LISTED:
        show_rows(listed, form, empty="")
        return
    seconds = max(time.monotonic() - began, 1e-9)
    typer.echo(f"sent {sent:,} messages, {size:,} bytes, in {seconds:.2f} s ({sent / seconds:,.0f} a second)")


def _so_far(message: str, sent: int) -> str:
    return f"{message} ({sent:,} message{'s were' if sent > 1 else ' was'} sent before that)" if sent else message


# --- where messages come from -----------------------------------------------------------------------------------------


def _messages(
    bodies: list[str], files: list[Path], stdin: bool, lines: bool, json_lines: bool
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Bodies, and what the input itself says about them."""
    for body in bodies:
        # What the shell handed over as bytes that are no UTF-8 goes on as those bytes.
        yield body.encode("utf-8", "surrogateescape"), {}
    for file in files:
        try:
            stream = file.open("rb")
        except OSError as error:
            raise DMQError(f"{file} cannot be read: {error.strerror}") from None
        with stream:
            yield from _from_stream(stream, str(file), lines, json_lines)
    if stdin:
        yield from _from_stream(sys.stdin.buffer, "stdin", lines, json_lines)


def _from_stream(stream: IO[bytes], name: str, lines: bool, json_lines: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not (lines or json_lines):
        yield stream.read(), {}
        return
    from dmq.cli.message.stream import parse_json_line

    for number, line in enumerate(stream, 1):
        text = line.rstrip(b"\r\n")
        if lines:
            yield text, {}
        elif text.strip():
            try:
                yield parse_json_line(text)
            except ValueError as error:
                raise InvalidMessage(f"{name}, line {number}: {error}") from None
