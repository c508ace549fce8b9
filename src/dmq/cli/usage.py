"""Help, wrong calls and completion in plain words: how a command's parameters show themselves.

Typer names Python's types in help, and its own checker's phrases in errors; a person at a shell knows neither.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from dmq.cli.completion import complete, completes
from dmq.cli.contexts import context_option
from dmq.model import check_name

__all__ = ["PlainArgument", "PlainOption", "make_plain", "plain_sentence"]


class PlainArgument(TyperArgument):
    """An argument, by its name alone."""

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        name = _name(self)
        piece = name if self.required else f"[{name}]"
        return [piece if self.nargs == 1 else f"{piece}..."]

    def display_type(self, ctx: Any) -> str:
        return ""

    def _rich_display_name(self) -> str:
        return _name(self)

    def _get_number_range_help_str(self) -> str | None:
        return _range(self.min, self.max)

    def get_error_hint(self) -> str:
        return _name(self)

    def process_value(self, ctx: Any, value: Any) -> Any:
        try:
            return _checked(self, super().process_value(ctx, value))
        except typer.BadParameter as error:
            error.message = plain_sentence(error, self)
            raise

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return _completed(self, ctx, incomplete) or super().shell_complete(ctx, incomplete)


class PlainOption(TyperOption):
    """An option; a number is N."""

    def display_type(self, ctx: Any) -> str:
        shown = super().display_type(ctx)
        return shown if "|" in shown else "FILE" if shown == "<path>" else "N"

    def _get_number_range_help_str(self) -> str | None:
        return None if self.count else _range(self.min, self.max)

    def get_error_hint(self) -> str:
        return " / ".join(self.opts)

    def process_value(self, ctx: Any, value: Any) -> Any:
        try:
            return _checked(self, super().process_value(ctx, value))
        except typer.BadParameter as error:
            error.message = plain_sentence(error, self)
            raise

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return _completed(self, ctx, incomplete) or super().shell_complete(ctx, incomplete)


def make_plain(command: Any) -> Any:
    """Have a command, and all below it, speak plainly; with a `--url` or `--broker` it takes a `--context` too."""
    for subcommand in command.commands.values() if isinstance(command, TyperGroup) else ():
        make_plain(subcommand)
    assert isinstance(command, TyperGroup | TyperCommand)
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            parameter.__class__ = PlainArgument
        elif isinstance(parameter, TyperOption):
            parameter.__class__ = PlainOption
    at = next(
        (n for n, p in enumerate(command.params) if "--broker" in p.opts or ("--url" in p.opts and p.default)), None
    )
    if at is not None:
        option = context_option()
        option.__class__ = PlainOption
        command.params.insert(at + 1, option)
    return command


def plain_sentence(error: typer.BadParameter, parameter: Any) -> str:
    """What is wrong with a call: what was given, and what is expected."""
    from pydantic import ValidationError

    if not isinstance(error.__cause__, ValidationError):
        return str(error.message)
    found = error.__cause__.errors()[0]
    given, kind = found["input"], found["type"]
    if kind == "value_error":
        return str(found["msg"]).removeprefix("Value error, ").rstrip(".")
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    bounds = [bound for bound in (low, high) if bound is not None]
    is_whole = kind.startswith("int") or (bool(bounds) and all(isinstance(bound, int) for bound in bounds))
    if kind.startswith(("int", "float", "greater", "less")):
        expected = f"{'a whole number' if is_whole else 'a number'}{_bounds(low, high)}"
    else:
        expected = f"what {_name(parameter)} takes"
    return f"{given!r} is not {expected}"


def _checked(parameter: Any, value: Any) -> Any:
    """A name that nothing of its kind can have is a wrong call, before anybody is asked."""
    what = _name(parameter)
    if what in ("TOPIC", "GROUP", "SHARD", "MEMBER") and isinstance(value, str) and value:
        check_name(value, what.lower(), system=True)
    return value


def _name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper()).strip("[].")


def _range(low: float | None, high: float | None) -> str | None:
    return _bounds(low, high).strip() or None


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""


def _completed(parameter: Any, ctx: Any, incomplete: str) -> list[Any]:
    from typer._click.shell_completion import CompletionItem

    metavar = _name(parameter)
    if not completes(metavar):
        return []
    return [CompletionItem(name) for name in complete(metavar, incomplete, ctx.params)]
