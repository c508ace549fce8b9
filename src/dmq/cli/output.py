"""Results as tables for people and JSON for programs.

What always holds: results go to stdout; what a stranger wrote into a name, key or body cannot steer the terminal; in a
pipe nothing is cut to fit a width.
"""

from __future__ import annotations

import errno
import io
import json
import os
import select
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from dmq.cli.options import Format

__all__ = [
    "cut",
    "missing_facts",
    "moment",
    "printable",
    "quantity",
    "shard_fact",
    "show_facts",
    "show_rows",
    "show_table",
    "sleep_while_read",
    "tell_missing",
]

_WIDE = 100_000


def sleep_while_read(seconds: float) -> None:
    """Wait for so long, or until nobody can read stdout any more: a write alone would tell that, at the next message.

    Raises:
        BrokenPipeError: the program that read our output is gone, as after `| head -1`.
    """
    try:
        output = sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):  # closed from the start, or caught by a test
        time.sleep(seconds)
        return
    poller = select.poll()
    poller.register(output, 0)  # errors and hang-ups are told whether they are asked for or not
    if poller.poll(seconds * 1000):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def show_rows(
    rows: Sequence[Mapping[str, Any]], form: Format, *, empty: str, title: str = "", missing: Sequence[str] = ()
) -> None:
    """A listing: the keys of a row are the heads of the columns.

    Parameters:
        empty: what to say if there are none, as a table.
        missing: shards that did not answer; in JSON, a last row names them.
    """
    tell_missing(missing, form)
    if form == Format.JSON:
        typer.echo(json.dumps([*rows, *([missing_facts(missing)] if missing else ())], indent=2))
    elif rows:
        heads = [*dict.fromkeys(head for row in rows for head in row)]  # some rows may say more than others
        show_table(heads, [[row.get(head) for head in heads] for row in rows], title=title)
    else:
        typer.echo(empty)


def missing_facts(missing: Sequence[str]) -> dict[str, Any]:
    """For JSON: which shards did not answer, if there are any."""
    return {"missing": [*missing]} if missing else {}


def tell_missing(missing: Sequence[str], form: Format = Format.TABLE) -> None:
    """Say beside a table which shards did not answer."""
    if missing and form == Format.TABLE:
        names = ", ".join(map(printable, missing))
        typer.echo(f"shard {names} did not answer, and is missing here: dmq shard list shows why", err=True)


def shard_fact(names: Mapping[int, str], shard: int) -> dict[str, str]:
    """What names the shard of a row; nothing without a cluster."""
    return {"shard": names.get(shard, str(shard))} if names else {}


def show_facts(facts: Mapping[str, Any], form: Format) -> None:
    """One thing: names and values."""
    if form == Format.JSON:
        typer.echo(json.dumps(dict(facts), indent=2))
        return
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        typer.echo(f"{_label(name):<{width}}  {_cell(value)}")


def show_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """A table, numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    table = Table(
        box=box.SIMPLE_HEAD if is_terminal else None, pad_edge=False, title=title or None, title_justify="left"
    )
    rows = [*rows]
    for index, head in enumerate(heads):
        is_number = all(isinstance(row[index], int | float | None) for row in rows)
        # On a terminal a long text wraps; in a pipe every row is one line.
        table.add_column(_label(head), justify="right" if is_number else "left", no_wrap=is_number or not is_terminal)
    for row in rows:
        cells = (str(value) if _is_place(head, value) else _cell(value) for head, value in zip(heads, row, strict=True))
        table.add_row(*map(Text, cells))
    if is_terminal:
        Console().print(table)
        return
    console = Console(width=_WIDE, soft_wrap=True)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def printable(text: str) -> str:
    """On one line, with everything that could steer a terminal written out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cut(text: str, chars: int) -> str:
    """A text of this many characters at most, and an ellipsis where it was longer."""
    return text if len(text) <= chars else f"{text[:chars]}…"


def moment(at_ms: int) -> str:
    """A moment for people, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def quantity(value: float) -> str:
    """A number for people: 1,234,567 or 12.3 or 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _is_place(head: str, value: object) -> bool:
    """An offset names a place: people copy it, so it has no commas."""
    return isinstance(value, int) and (head.endswith("offset") or head in ("from", "to", "settled_below"))


def _label(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return quantity(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{printable(key)}={_cell(item)}" for key, item in value.items()) or "-"
    return printable(str(value))
