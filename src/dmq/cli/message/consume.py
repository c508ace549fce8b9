"""`dmq consume`: consume with a group; print each message, or run a program for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from dmq.cli.message.messages import message_facts, message_line
from dmq.cli.options import DEFAULT_URL, TopicName, Url, connected, make_app, parse_place, parse_seconds
from dmq.cli.output import sleep_while_read
from dmq.errors import DMQError

if TYPE_CHECKING:
    from dmq.client.admin.reports import StoredMessage
    from dmq.client.consumer.consumer import Consumer
    from dmq.client.consumer.message import ReceivedMessage

__all__ = ["app"]

app = make_app("Consume messages with a group; print them, or run a program for each.")

_BATCH = 100
_WAIT_SECONDS = 0.5
_UNREAD_SECONDS = 1
_FACT_BYTES_MAX = 100_000  # the system takes no longer variable


class BodyFormat(StrEnum):
    """How each message is shown."""

    TEXT = "text"
    JSON = "json"
    BODY = "body"


@app.command()
def consume(
    topic: TopicName,
    group: Annotated[
        str, typer.Option(metavar="GROUP", help="Consume with this group; it is made if it does not exist.")
    ],
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as messages arrive, until Ctrl-C.")] = False,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="COMMAND", help="Run this for each message, with its body on stdin."),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="Where a group begins that has never consumed the topic.")
    ] = "earliest",
    tags: Annotated[str, typer.Option(metavar="TAGS", help="Only these tags, as in 'a || b'.")] = "",
    lease: Annotated[str, typer.Option(metavar="TIME", help="How long a message is leased at a time.")] = "30s",
    max_attempts: Annotated[int, typer.Option(min=1, help="Deliveries before a message is a dead letter.")] = 16,
    form: Annotated[
        BodyFormat, typer.Option("--format", help="A line of text, a line of JSON, or the body alone.")
    ] = BodyFormat.TEXT,
    url: Url = DEFAULT_URL,
) -> None:
    """Consume what a group has not consumed yet: each message is printed, then acknowledged.

    Ends when no more messages come, unless --follow. PLACE is earliest, latest, a time back from now as in 10m, or a
    moment as in 2030-01-31T12:00:00Z. With --exec nothing is printed: the program gets the body on stdin and facts in
    its environment (MESSAGE_ID, MESSAGE_TOPIC, MESSAGE_KEY and so on); its exit code 0 acknowledges the message, any
    other has it delivered again later.
    """
    place, seconds = parse_place(start), parse_seconds(lease)
    if isinstance(place, int):
        raise typer.BadParameter("--from takes no offset: give earliest, latest, 10m or a moment")
    options: dict[str, Any] = {"tags": tags, "start_from": place, "lease": seconds, "max_attempts": max_attempts}
    failed = done = 0
    with (
        _Ending() as ending,
        connected(url) as client,
        client.consumer(topic, group=group, **options) as consumer,
    ):
        names = client.admin.shard_names
        for batch in _batches(consumer, count, follow, is_printed=command is None):
            if command is None:
                with ending.held():
                    _show(batch, form, names)
                    consumer.ack(batch)
            else:
                failed += not _run(batch[0], command, seconds, names)
            done += len(batch)
    if failed:
        raise DMQError(f"{failed} of {done} messages failed and are delivered again later: see what {command!r} said")


def _batches(consumer: Consumer, count: int | None, follow: bool, *, is_printed: bool) -> Iterator[Any]:
    left, size = count, _BATCH if is_printed else 1
    while left is None or left > 0:
        batch = consumer.pull(max_messages=size if left is None else min(size, left), wait=_WAIT_SECONDS)
        if batch:
            yield batch
            left = None if left is None else left - len(batch)
        elif not follow:
            return
        elif is_printed:
            sleep_while_read(0)


def _show(batch: Any, form: BodyFormat, names: Mapping[int, str]) -> None:
    """Print messages; returns when all of it is written, since an ack says that the reader has it."""
    sys.stdout.flush()
    for message in batch:
        if form is BodyFormat.BODY:
            line = message.body
        elif form is BodyFormat.JSON:
            line = json.dumps(_all_facts(message, names)).encode()
        else:
            line = message_line(_as_stored(message), names).encode(sys.stdout.encoding, "backslashreplace")
        _write_whole(line + b"\n")


def _write_whole(line: bytes) -> None:
    """Write past Python's buffer, which drops the rest of a write that a signal cut short."""
    output = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    left = memoryview(line)
    while left:
        left = left[output.write(left) :]


def _run(message: ReceivedMessage, command: str, lease: float, names: Mapping[int, str]) -> bool:
    """Run the program for a message and settle it; tells whether the program succeeded."""
    told = {**os.environ, **_facts(message, names)}
    running = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, env=told)
    try:
        code = _finish(running, message, lease)
    except KeyboardInterrupt:
        # The terminal has told the program as well: its own exit code still counts.
        running.wait()
        if running.returncode:
            message.nack(reason="interrupted")
        else:
            message.ack()
        raise
    if code == 0:
        message.ack()
    else:
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        message.nack(reason=f"{what} of {command}")
    return code == 0


def _finish(running: subprocess.Popen[bytes], message: ReceivedMessage, lease: float) -> int:
    """Wait for the program, and keep the message meanwhile."""
    assert running.stdin is not None
    threading.Thread(target=_feed, args=(running, message.raw), daemon=True).start()
    due = time.monotonic() + lease / 3
    while True:
        try:
            return running.wait(timeout=max(0.01, due - time.monotonic()))
        except subprocess.TimeoutExpired:
            message.extend(lease)
            due = time.monotonic() + lease / 3


def _feed(running: subprocess.Popen[bytes], body: bytes) -> None:
    assert running.stdin is not None
    with contextlib.suppress(BrokenPipeError), running.stdin:  # a program need not read it
        running.stdin.write(body)


def _facts(message: ReceivedMessage, names: Mapping[int, str]) -> dict[str, str]:
    """What the program is told about its message. Not DMQ_…: those are settings of ours."""
    facts = _all_facts(message, names)
    facts["properties"] = json.dumps(facts["properties"])
    named = {
        f"MESSAGE_{name.upper()}": str(value)
        for name, value in facts.items()
        if value is not None and not name.startswith("body")
    }
    return {name: value for name, value in named.items() if "\0" not in value and len(value) < _FACT_BYTES_MAX}


def _all_facts(message: ReceivedMessage, names: Mapping[int, str]) -> dict[str, Any]:
    return message_facts(_as_stored(message), names) | {"attempt": message.attempt}


def _as_stored(message: ReceivedMessage) -> StoredMessage:
    from dmq.client.admin.reports import StoredMessage

    return StoredMessage(
        id=message.id,
        topic=message.topic,
        queue=message.queue,
        offset=message.offset,
        body=message.raw,
        key=message.key,
        tag=message.tag,
        business_id=message.business_id,
        priority=message.priority,
        sent_at_ms=int(message.sent_at.timestamp() * 1000),
        stored_at_ms=int(message.stored_at.timestamp() * 1000),
        app=message.app,
        properties=message.properties,
        shard=message.shard,
    )


class _Ending:
    """SIGTERM and Ctrl-C end the command, but not between the print of messages and their ack: they would come again.

    A print that nobody reads ends a second after the signal, or at the next one.
    """

    def __init__(self) -> None:
        self._is_held = self._is_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _: object) -> None:
        if not self._is_held or self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        signal.alarm(_UNREAD_SECONDS)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait until this is done."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            signal.alarm(0)
        if self._is_asked:
            raise KeyboardInterrupt
