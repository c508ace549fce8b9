"""The `dmq` command: arguments only, no logic.

What always holds: a group of commands is imported when it is called and not before, so that `dmq --help` is quick; an
error DMQ raises on purpose ends as one sentence on stderr and exit code 1, a wrong call as exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

import dmq
from dmq.errors import DMQError

__all__ = ["GROUPS", "LazyGroup", "command", "main"]

# Name of a group: the module that has it as `app`, and the line `dmq --help` shows for it.
GROUPS: Mapping[str, tuple[str, str]] = {
    "journal": ("dmq.cli.journal", "Look into a data directory and check it, offline."),
}


class LazyGroup(TyperGroup):
    """Stands in for a group of commands until one of them is called."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name=name, help=summary)
        self._module = module

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        # Everything that goes into the group, help and completion included, starts here.
        app: typer.Typer = importlib.import_module(self._module).app
        return get_group(app).make_context(*args, **kwargs)


def command(groups: Mapping[str, tuple[str, str]] = GROUPS) -> TyperGroup:
    """The whole command, with these groups below it."""
    app = typer.Typer(name="dmq", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_top)
    top = get_command(app)  # unlike get_group, with shell completion
    assert isinstance(top, TyperGroup)
    for name, (module, summary) in groups.items():
        top.add_command(LazyGroup(name, module, summary))
    return top


def main(arguments: Sequence[str] | None = None, groups: Mapping[str, tuple[str, str]] = GROUPS) -> NoReturn:
    """Run one command and leave the process with its exit code.

    Parameters:
        arguments: what follows `dmq`; None takes the process's own.
        groups: the groups of commands there are.
    """
    try:
        command(groups).main(args=arguments, prog_name="dmq")
    except DMQError as error:
        print(f"dmq: {error}", file=sys.stderr)
    sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dmq {dmq.__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """DMQ, a distributed message queue."""
