"""`dmq config`: the settings in force, and where each came from."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.contexts import url_source
from dmq.cli.options import DEFAULT_URL, ConfigFile, Format, Formatted, Settings, Url, make_app
from dmq.cli.output import show_rows
from dmq.cli.process.server_process import resolve

__all__ = ["app"]

app = make_app("Show the settings in force.")


@app.callback()
def config() -> None:
    """Show the settings in force."""


@app.command()
def show(
    context: typer.Context,
    config: ConfigFile = None,
    settings: Settings = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only those that are not at their default.")] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Show every setting a broker started here would have, and where each came from; and the URL of commands here."""
    resolved = resolve(config, {}, settings)
    rows = [
        {"key": key, "value": value, "source": source}
        for key, value, source in resolved.rows()
        if not changed or source != "default"
    ]
    found = url_source(context)
    if not changed or found.source != "default":
        rows.append({"key": "url", "value": url, "source": found.source})
    show_rows(rows, form, empty="every setting is at its default")
