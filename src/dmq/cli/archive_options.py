"""What the commands about the archive share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated

import typer

from dmq.cli.options import parse_place
from dmq.errors import Unsupported

__all__ = ["Tables", "needs_spark_extra", "parse_moment"]

Tables = Annotated[
    str, typer.Option("--tables", envvar="DMQ_TABLES", metavar="URI", help="Where the archive's tables lie.")
]


@contextlib.contextmanager
def needs_spark_extra() -> Iterator[None]:
    """Imports of the pipeline go here: without its packages one sentence says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyarrow", "deltalake", "duckdb", "pyspark"):
            raise
        raise Unsupported(f'the archive needs {error.name}: pip install "dmq[spark]"') from error


def parse_moment(text: str | None) -> datetime | None:
    """A moment, or one so long back from now."""
    if text is None:
        return None
    place = parse_place(text)
    if isinstance(place, timedelta):
        return datetime.now().astimezone() - place
    if isinstance(place, datetime):
        return place
    raise typer.BadParameter(f"{text!r} is no time: write 10m for so long back, or a moment as in 2030-01-31T12:00:00Z")
