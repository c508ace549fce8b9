"""`dmq bench`: produce, consume, latency, store, each beside what this machine can do without DMQ."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dmq.cli.options import Format, Formatted, make_app
from dmq.cli.output import show_facts, show_table

if TYPE_CHECKING:
    from dmq.testing.benchmark.benchmark import BrokerCpu, Figure, Load, Progress

__all__ = ["app"]

app = make_app("Measure, beside a raw baseline.")


class Body(StrEnum):
    """What bodies are made of."""

    JSON = "json"
    RANDOM = "random"
    TEXT = "text"


Messages = Annotated[int, typer.Option(min=1, max=100_000_000, help="So many messages in each round.")]
Size = Annotated[int, typer.Option(min=1, max=1_000_000, help="Bytes of a body.")]
Batch = Annotated[int, typer.Option(min=1, max=10_000, help="Messages at a time.")]
Safety = Literal["stored", "flushed"]
Durable = Annotated[Safety, typer.Option(help="How safe before it counts.")]
Bodies = Annotated[Body, typer.Option("--body", help="What bodies are made of; all are different.")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="Rounds after one that warms up; medians are shown.")]
Seed = Annotated[int, typer.Option(help="Seed of the random bodies.")]
BenchUrl = Annotated[
    str | None,
    typer.Option("--url", envvar="DMQ_URL", metavar="URL", help="A broker; one is started for the run if left out."),
]


@app.command()
def produce(
    messages: Messages = 100_000,
    size: Size = 200,
    batch: Batch = 500,
    durability: Durable = "stored",
    connections: Annotated[
        int,
        typer.Option(
            min=1,
            max=10_000,
            help="More than 1: each sends one message at a time, from a process of bare sockets instead of our client.",
        ),
    ] = 1,
    is_async: Annotated[bool, typer.Option("--async", help="send_async, with a future for each message.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="So many use one producer at once.")] = 1,
    body: Bodies = Body.JSON,
    rounds: Rounds = 3,
    seed: Seed = 1,
    url: BenchUrl = None,
    form: Formatted = Format.TABLE,
) -> None:
    """Publish: send_many by batches, send one at a time with --batch 1, or send_async with --async.

    Beside it stands the floor: a bare socket, and a server that appends the same bodies to a file and acks them.
    """
    if is_async and connections > 1:
        raise typer.BadParameter("--async and --connections exclude each other: connections send one at a time")
    if threads > 1 and connections > 1:
        raise typer.BadParameter("--threads and --connections exclude each other: connections have their own process")
    from dmq.testing.benchmark.benchmark import Load
    from dmq.testing.benchmark.throughput import produce as measure
    from dmq.testing.benchmark.throughput import produce_connections

    load = Load(messages, size, batch, durability, rounds=rounds, seed=seed, body=body.value)
    with _broker(url) as (at, cpu), _progress(messages * (rounds + 1)) as progress:
        if connections > 1:
            figure = produce_connections(at, load, connections, cpu, progress=progress)
        else:
            figure = measure(at, load, cpu, progress, is_async=is_async, threads=threads)
    _show([figure], load, form)


@app.command()
def consume(
    messages: Messages = 100_000,
    size: Size = 200,
    batch: Batch = 500,
    push: Annotated[bool, typer.Option("--push", help="A handler for each message, instead of pull and ack.")] = False,
    body: Bodies = Body.JSON,
    rounds: Rounds = 3,
    seed: Seed = 1,
    url: BenchUrl = None,
    form: Formatted = Format.TABLE,
) -> None:
    """Consume what was published before: pull and ack by batches, or with --push a handler for each message.

    Body and key of every message are touched. Beside it stands the floor: a bare socket, and a server that gives back
    what it appended to a file.
    """
    from dmq.testing.benchmark.benchmark import Load
    from dmq.testing.benchmark.throughput import consume as measure

    load = Load(messages, size, batch, "stored", rounds=rounds, seed=seed, body=body.value)
    with _broker(url) as (at, cpu), _progress(messages * (rounds + 1)) as progress:
        figure = measure(at, load, cpu, progress, is_push=push)
    _show([figure], load, form)


@app.command()
def latency(
    messages: Messages = 5_000,
    size: Size = 200,
    rate: Annotated[float, typer.Option(min=1, max=100_000, help="Messages a second for send to handler.")] = 1000.0,
    body: Bodies = Body.JSON,
    seed: Seed = 1,
    url: BenchUrl = None,
    form: Formatted = Format.TABLE,
) -> None:
    """One message at a time: send, and from send to a waiting handler.

    Beside it stand a blocking echo over loopback, an fdatasync and a relay through the floor. Flushed sends are a
    tenth of the messages.
    """
    from dmq.testing.benchmark.benchmark import Load
    from dmq.testing.benchmark.latency import latency as measure

    load = Load(messages, size, 1, "stored", rounds=1, seed=seed, body=body.value)
    with _broker(url) as (at, cpu), _progress(messages * 4) as progress:
        figures = measure(at, load, tempfile.gettempdir(), cpu, progress=progress, rate=rate)
    _show(figures, load, form)


@app.command()
def store(
    messages: Messages = 100_000,
    size: Size = 200,
    batch: Batch = 500,
    durability: Durable = "stored",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="On the disk of this directory; nothing is left there.")
    ] = None,
    body: Bodies = Body.JSON,
    rounds: Rounds = 3,
    seed: Seed = 1,
    form: Formatted = Format.TABLE,
) -> None:
    """The message store alone, without broker and network. Beside it stands a plain write of the same bytes."""
    if data is not None and not data.is_dir():
        raise typer.BadParameter(f"{data} is not a directory: choose one that exists")
    from dmq.testing.benchmark.benchmark import Load
    from dmq.testing.benchmark.store_load import store as measure

    load = Load(messages, size, batch, durability, rounds=rounds, seed=seed, body=body.value)
    with _progress(messages * (rounds + 1)) as progress:
        figure = measure(load, data or Path(tempfile.gettempdir()), progress)
    _show([figure], load, form)


@contextlib.contextmanager
def _broker(url: str | None) -> Iterator[tuple[str, BrokerCpu]]:
    """The broker asked for, or one of our own for as long as it is needed."""
    if url is not None:
        yield url, lambda: 0.0
        return
    from dmq.testing.processes import BrokerProcess

    # A kill must not leave the broker behind.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with BrokerProcess() as broker:
            yield broker.url, broker.cpu_seconds
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on the terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("measuring", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        advance: Callable[[int], None] = lambda count: bar.advance(task, count)  # noqa: E731
        yield advance


def _show(figures: Sequence[Figure], load: Load, form: Format) -> None:
    from dmq.testing.benchmark.benchmark import machine

    settings = {name: getattr(load, name) for name in load.__dataclass_fields__}
    if form == Format.JSON:
        result: dict[str, Any] = {
            "machine": machine(),
            "settings": settings,
            "figures": [figure.plain() for figure in figures],
        }
        typer.echo(json.dumps(result, indent=2))
        return
    if len(figures) == 1:
        # One figure has many values: a table of one row would not fit a terminal.
        typer.echo(figures[0].name)
        show_facts({f"  {name}": value for name, value in figures[0].values.items()}, form)
    else:
        heads = list(dict.fromkeys(name for figure in figures for name in figure.values))
        show_table(["what", *heads], [[figure.name, *map(figure.values.get, heads)] for figure in figures])
    for figure in figures:
        for name, values in figure.rounds.items():
            spread = ", ".join(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in values)
            typer.echo(f"  {name.replace('_', ' ')}, each round: {spread}")
