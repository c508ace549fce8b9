"""The command starts quickly, and ends with the exit code its reference promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import dmq
from dmq.cli import COMMANDS, command, load, main
from dmq.compiled import described
from dmq.errors import DiskFull, NotConnected

# The stand-in for a group of commands, found by the name of this module.
app = typer.Typer()


@app.command()
def greet(name: str) -> None:
    typer.echo(f"hello {name}")


@app.command()
def fill() -> None:
    """Write until there is no space left."""
    raise DiskFull("no space left: free some")


@app.command()
def dial() -> None:
    raise NotConnected("nobody is \x1b[31mthere: start a broker")


@app.command()
def crash() -> None:
    raise ZeroDivisionError


@app.command()
def interrupt() -> None:
    raise KeyboardInterrupt


STAND_IN = {"sample": (__name__, "A sample of commands.")}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments, STAND_IN)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version_is_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dmq {dmq.__version__}\n{described()}\n"


def test_help_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "sample" in shown
    assert "A sample of commands." in shown


def test_a_command_of_a_group_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "greet", "you") == 0
    assert capsys.readouterr().out == "hello you\n"


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: dmq sample" in shown
    assert "Write until there is no space left." in shown


def test_an_error_is_one_sentence_on_stderr_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "fill") == 1
    assert capsys.readouterr() == ("", "dmq: no space left: free some\n")


def test_no_broker_is_exit_code_3_and_nothing_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "dial") == 3
    assert capsys.readouterr() == ("", "dmq: nobody is \\x1b[31mthere: start a broker\n")


@pytest.mark.parametrize("arguments", [(), ("nosuch",), ("--nosuch",), ("sample", "nosuch"), ("sample", "greet")])
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


def test_an_interrupted_command_is_exit_code_130() -> None:
    assert run("sample", "interrupt") == 130


def test_an_error_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["sample", "crash"], STAND_IN)


def test_help_imports_little() -> None:
    program = """
import sys
before = set(sys.modules)
from dmq.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
loaded = set(sys.modules) - before
heavy = {"numpy", "rich", "asyncio", "ssl", "uvloop", "dmq.storage", "dmq.records", "dmq.client", "dmq.broker"} & loaded
assert not heavy, heavy
ours = sorted(name for name in loaded if name.startswith("dmq"))
assert ours == ["dmq", "dmq.cli", "dmq.duration", "dmq.errors", "dmq.model", "dmq.version"], ours
assert len(loaded) < 350, len(loaded)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_no_command_imports_numpy_or_the_broker() -> None:
    # Only `dmq journal` reads files itself.
    program = f"""
import sys
from dmq.cli import main
for name in {[name for name in COMMANDS if name != "journal"]}:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
    heavy = {{"numpy", "rich", "uvloop", "dmq.broker", "dmq.client"}} & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dmq jour", ["journal"]),
        ("dmq topic cr", ["create"]),
        ("dmq group reset --ex", ["--execute"]),
        ("dmq send --json", ["--json-lines"]),
        ("dmq peek --format j", ["json"]),
    ],
)
def test_commands_options_and_values_complete_in_the_shell(words: str, expected: list[str]) -> None:
    count = len(words.split()) - 1
    environ = {**os.environ, "_DMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    done = subprocess.run([sys.executable, "-m", "dmq.cli"], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.split() == expected


def every_command() -> Iterator[tuple[str, Any]]:
    """Each command that does something, by its whole name."""
    for name, (module, _) in COMMANDS.items():
        loaded = load(module)
        subcommands = getattr(loaded, "commands", None)
        if not subcommands:
            yield name, loaded
        for word, subcommand in (subcommands or {}).items():
            yield f"{name} {word}", subcommand


EVERY_COMMAND = dict(every_command())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_group_is_documented(name: str, root: Path) -> None:
    reference = (root / "docs" / "reference" / "cli.md").read_text()
    assert f"`dmq {name}`" in reference
    assert COMMANDS[name][1] in reference


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_command_and_each_of_its_options_is_documented(name: str, root: Path) -> None:
    reference = (root / "docs" / "reference" / "cli.md").read_text()
    # A chapter goes from its heading to the next one.
    found = re.search(rf"^## `dmq {name}\b[^\n]*\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL)
    assert found, f"give dmq {name} a chapter"
    everywhere = re.search(r"^## Options everywhere\n(.*?)(?=^## )", reference, re.MULTILINE | re.DOTALL)
    assert everywhere
    for parameter in EVERY_COMMAND[name].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            option = parameter.opts[0]
            assert f"`{option}" in found[1] or f"`{option}" in everywhere[1], option


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_command_says_what_it_does(name: str) -> None:
    assert EVERY_COMMAND[name].help
    for parameter in EVERY_COMMAND[name].params:
        assert getattr(parameter, "help", None), parameter.name


def test_the_whole_command_has_every_group() -> None:
    assert list(command().commands) == list(COMMANDS)
