"""What the commands about the archive share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from dmq.errors import Unsupported

__all__ = ["Conf", "Master", "Since", "Tables", "Until", "needs_spark_extra"]

Tables = Annotated[
    str, typer.Option("--tables", envvar="DMQ_TABLES", metavar="URI", help="Where the archive's tables lie.")
]

Since = Annotated[str | None, typer.Option(metavar="TIME", help="Stored from then on: 10m back, or a moment.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Stored before then.")]
Master = Annotated[str | None, typer.Option(metavar="MASTER", help="Spark's master; local[*] if left out.")]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark.")]


@contextlib.contextmanager
def needs_spark_extra() -> Iterator[None]:
    """Imports of the pipeline go here: without its packages one sentence says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyarrow", "deltalake", "duckdb", "pyspark"):
            raise
        raise Unsupported(f'the archive needs {error.name}: pip install "dmq[spark]"') from error
