"""`dmq context`: names for brokers' URLs."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.contexts import Contexts
from dmq.cli.options import Format, Formatted, make_app
from dmq.cli.output import printable, show_rows

__all__ = ["app"]

app = make_app("Give names to brokers' URLs, and choose one.")

ContextName = Annotated[str, typer.Argument(metavar="CONTEXT", help="Its name.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name: letters, digits, '.', '_' and '-'.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the broker is, as in dmq://host:9611.")],
    use_it: Annotated[bool, typer.Option("--use", help="And use it from now on.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Change the URL of a context that exists.")] = False,
) -> None:
    """Give a URL a name."""
    contexts = Contexts()
    contexts.add(name, url, replace=replace)
    if use_it:
        contexts.current = name
    contexts.save()
    typer.echo(f"context {name} is {printable(url)}" + (" and is in use" if contexts.current == name else ""))


@app.command()
def use(
    name: Annotated[str | None, typer.Argument(metavar="CONTEXT", help="Its name.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Use no context.")] = False,
) -> None:
    """Have commands go to the broker of this context, unless --url, --context or DMQ_URL say otherwise."""
    if none == (name is not None):
        raise typer.BadParameter("name a context, or say --none")
    contexts = Contexts()
    url = None if name is None else contexts.url(name)
    contexts.current = name
    contexts.save()
    typer.echo("no context is in use" if url is None else f"context {name} is in use: {printable(url)}")


@app.command(name="list")
def list_contexts(form: Formatted = Format.TABLE) -> None:
    """List the contexts."""
    contexts = Contexts()
    rows = [{"context": name, "url": url, "in_use": name == contexts.current} for name, url in contexts.urls.items()]
    show_rows(rows, form, empty="no contexts yet: dmq context add NAME URL makes one")


@app.command()
def remove(name: ContextName) -> None:
    """Forget a context."""
    contexts = Contexts()
    was_current = contexts.remove(name)
    contexts.save()
    typer.echo(f"context {name} is forgotten" + ("; no context is in use now" if was_current else ""))
