"""`dmq config`: the settings in force, and where each came from."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.options import ConfigFile, Format, Formatted, Settings, make_app
from dmq.cli.output import show_rows
from dmq.cli.process.server_process import resolve

__all__ = ["app"]

app = make_app("Show the settings in force.")


@app.callback()
def config() -> None:
    """Show the settings in force."""


@app.command()
def show(
    config: ConfigFile = None,
    settings: Settings = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only those that are not at their default.")] = False,
    form: Formatted = Format.TABLE,
) -> None:
    """Show every setting a broker started here would have, and where each came from."""
    resolved = resolve(config, {}, settings)
    rows = [
        {"key": key, "value": value, "source": source}
        for key, value, source in resolved.rows()
        if not changed or source != "default"
    ]
    show_rows(rows, form, empty="every setting is at its default")
