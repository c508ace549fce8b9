"""The `dmq` command: arguments only, no logic.

In reading order: `options` and `output` are what commands share; `contexts` has the names of brokers, `completion` what
a shell completes, `usage` how help and wrong calls are told; `process` has the commands that run a broker, `message`
those about messages, `admin` those that operate a broker, `local` those that need none, `archive` those on the archive;
`__main__` is `python -m dmq.cli`.

What always holds: a command is imported when it is called and not before, so that `dmq --help` is quick; an error DMQ
raises on purpose ends as one sentence on stderr and an exit code: 2 if the call makes no sense, to the command or to
the broker, 3 if no broker answered, 1 otherwise.
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
from dmq.errors import (
    DMQError,
    InvalidMessage,
    InvalidName,
    InvalidRequest,
    InvalidSettings,
    NotConnected,
    RegistryDown,
)

__all__ = ["COMMANDS", "LazyCommand", "command", "exit_code", "load", "main"]

# Name of a command or a group of them: the module that has it as `app`, and the line `dmq --help` shows for it.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "dev": ("dmq.cli.process.dev", "Run everything in one process, to try things out."),
    "broker": ("dmq.cli.process.broker", "Run a broker."),
    "nameserver": ("dmq.cli.process.nameserver", "Run a name server."),
    "topic": ("dmq.cli.admin.topic", "Create, list, show, change and delete topics."),
    "group": ("dmq.cli.admin.group", "Look at consumer groups, and move them."),
    "send": ("dmq.cli.message.send", "Publish messages from arguments, files or stdin."),
    "consume": ("dmq.cli.message.consume", "Consume messages with a group; print them, or run a program for each."),
    "tail": ("dmq.cli.message.tail", "Follow a topic as messages arrive, without consuming."),
    "peek": ("dmq.cli.message.peek", "Look at stored messages, without consuming."),
    "find": ("dmq.cli.message.find", "Find messages by key or id."),
    "trace": ("dmq.cli.message.trace", "Show the life of a message."),
    "why": ("dmq.cli.message.why", "Tell why a message is not consumed."),
    "delay": ("dmq.cli.admin.delay", "Look at delayed messages, and take them back."),
    "tx": ("dmq.cli.admin.tx", "Look at open transactions."),
    "dlq": ("dmq.cli.admin.dlq", "Look at dead letters, resend them, delete them."),
    "limit": ("dmq.cli.admin.limit", "Limit what producers may send a second."),
    "archive": ("dmq.cli.archive.commands", "Archive everything a broker has, and look things up in it."),
    "outbox": ("dmq.cli.local.outbox", "Relay what an outbox has to send, and look at what waits in it."),
    "spool": ("dmq.cli.local.spool", "Look at what a spool's broker refused; send it again or drop it."),
    "shard": ("dmq.cli.admin.shard", "Look at shards and their members, and operate them."),
    "cluster": ("dmq.cli.admin.cluster", "Look at the cluster as a whole, and operate it."),
    "top": ("dmq.cli.admin.top", "Watch rates, topics and lag live."),
    "bench": ("dmq.cli.process.bench", "Measure, beside a raw baseline."),
    "doctor": ("dmq.cli.admin.doctor", "Find what is wrong here, and how to mend it."),
    "context": ("dmq.cli.local.context", "Give names to brokers' URLs, and choose one."),
    "config": ("dmq.cli.local.config", "Show the settings in force."),
    "backup": ("dmq.cli.local.backup", "Back up a data directory, also of a running broker."),
    "restore": ("dmq.cli.local.restore", "Make a data directory of a backup."),
    "journal": ("dmq.cli.local.journal", "Look into a data directory and check it, offline."),
}

_FAILED = 1
_WRONG_CALL = 2
_NOT_CONNECTED = 3


def load(module: str) -> Any:
    """The real command, or group of commands, that a module has as `app`."""
    app: typer.Typer = importlib.import_module(module).app
    app.rich_markup_mode = None  # plain help: drawing boxes takes longer than everything else together
    is_group = app.registered_callback is not None or len(app.registered_commands) != 1
    from dmq.cli.usage import make_plain

    return make_plain(get_group(app) if is_group else get_command(app))


class LazyCommand(TyperGroup):
    """Stands in for a command or a group of commands until it is called."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name=name, help=summary, rich_markup_mode=None)
        self._module = module

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        # Everything that goes into the command, help and completion included, starts here.
        return load(self._module).make_context(*args, **kwargs)


def command(commands: Mapping[str, tuple[str, str]] = COMMANDS) -> TyperGroup:
    """The whole command, with these below it."""
    app = typer.Typer(name="dmq", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_top)
    top = get_command(app)  # unlike get_group, with shell completion
    assert isinstance(top, TyperGroup)
    for name, (module, summary) in commands.items():
        top.add_command(LazyCommand(name, module, summary))
    return top


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, tuple[str, str]] = COMMANDS) -> NoReturn:
    """Run one command and leave the process with its exit code.

    Parameters:
        arguments: what follows `dmq`; None takes the process's own.
        commands: the commands there are.
    """
    code = _FAILED
    try:
        command(commands).main(args=arguments, prog_name="dmq")
    except DMQError as error:
        from dmq.cli.output import printable

        print(f"dmq: {printable(error.message)}", file=sys.stderr)
        code = exit_code(error)
    sys.exit(code)


def exit_code(error: DMQError) -> int:
    """The exit code of an error; a call that makes no sense has the same, whether the command or the broker says so."""
    if isinstance(error, NotConnected | RegistryDown):
        return _NOT_CONNECTED
    is_wrong_call = isinstance(error, InvalidMessage | InvalidName | InvalidRequest | InvalidSettings)
    return _WRONG_CALL if is_wrong_call else _FAILED


def _show_version(wanted: bool) -> None:
    if wanted:
        from dmq.compiled import described

        typer.echo(f"dmq {dmq.__version__}\n{described()}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """DMQ, a distributed message queue."""
