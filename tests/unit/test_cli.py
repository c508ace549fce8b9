"""The command starts quickly, and ends with the exit code its reference promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import dmq
from dmq.cli import GROUPS, main
from dmq.errors import DiskFull

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
    assert capsys.readouterr().out == f"dmq {dmq.__version__}\n"


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


@pytest.mark.parametrize("arguments", [(), ("nosuch",), ("--nosuch",), ("sample", "nosuch"), ("sample", "greet")])
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


def test_an_interrupted_command_is_exit_code_130() -> None:
    assert run("sample", "interrupt") == 130


def test_an_error_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["sample", "crash"], STAND_IN)


def test_importing_the_command_and_showing_help_pull_in_neither_numpy_nor_the_store() -> None:
    program = """
import sys
from dmq.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"numpy", "dmq.storage", "dmq.records"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_group_completes_in_the_shell() -> None:
    environ = {**os.environ, "_DMQ_COMPLETE": "complete_bash", "COMP_WORDS": "dmq jour", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "dmq.cli"], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.split() == ["journal"]


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_is_documented(name: str, root: Path) -> None:
    reference = (root / "docs" / "reference" / "cli.md").read_text()
    assert f"`dmq {name}`" in reference
    assert GROUPS[name][1] in reference
