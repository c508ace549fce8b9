"""Help and errors of every command use a person's words, and the same mistake has the same exit code everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dmq.cli import COMMANDS, exit_code, load, main
from dmq.errors import DiskFull, DMQError, InvalidName, InvalidRequest, InvalidSettings, MessageTooLarge, NotConnected

# Of Python, of pydantic, of Typer; a word in angle brackets is a choice only with a bar in it.
FOREIGN = re.compile(
    r"ValidationError|NoneType|_parsing|Traceback|<lambda>|Input should|Value error|pydantic|\bstr\b|\bint\b|\bTEXT\b"
    r"|\bINTEGER\b|<[^|>]*>|list\[|\bNone\b|x>=|<=x|\{[A-Z_]+\}|unable to parse"
)


def every_command() -> Iterator[tuple[list[str], Any]]:
    for name, (module, _) in COMMANDS.items():
        loaded = load(module)
        yield [name], loaded
        for word, subcommand in getattr(loaded, "commands", {}).items():
            yield [name, word], subcommand


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


def test_no_help_speaks_of_types(capsys: pytest.CaptureFixture[str]) -> None:
    count = 0
    for words, _ in every_command():
        code, shown = run(capsys, *words, "--help")
        assert code == 0
        # Names of our own settings are lower case with underscores; usage and options are all that is looked at.
        assert not (found := FOREIGN.findall(shown)), (words, found)
        count += 1
    assert count > 50


def test_no_wrong_value_is_answered_in_words_of_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    tried = 0
    for words, found in every_command():
        for parameter in found.params:
            shown_type = getattr(parameter, "metavar", None) or parameter.display_type(None)
            is_number = shown_type == "N"
            if parameter.param_type_name != "option" or parameter.is_flag or not (is_number or "|" in shown_type):
                continue
            others = [f"x{n}" for n, one in enumerate(found.params) if one.param_type_name == "argument"]
            code, shown = run(capsys, *words, parameter.opts[0], "wr-ong", *others)
            assert code == 2, (words, parameter.opts, shown)
            assert not FOREIGN.findall(shown), shown
            assert "wr-ong" in shown or "Missing option" in shown, shown
            tried += 1
    assert tried > 60


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("x", "Invalid value for --limit: 'x' is not a whole number from 1 to 10000"),
        ("0", "Invalid value for --limit: '0' is not a whole number from 1 to 10000"),
        ("1.5", "Invalid value for --limit: '1.5' is not a whole number from 1 to 10000"),
    ],
)
def test_a_number_out_of_its_range_is_told_with_the_range(
    capsys: pytest.CaptureFixture[str], value: str, told: str
) -> None:
    code, shown = run(capsys, "peek", "orders", "--limit", value)
    assert (code, shown.splitlines()[-1]) == (2, f"Error: {told}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidName(""), 2),
        (InvalidSettings(""), 2),
        (InvalidRequest(""), 2),
        (MessageTooLarge(""), 2),
        (NotConnected(""), 3),
        (DiskFull(""), 1),
        (DMQError(""), 1),
    ],
)
def test_a_call_that_makes_no_sense_is_exit_code_2_whoever_found_out(error: DMQError, code: int) -> None:
    assert exit_code(error) == code


def test_all_wrong_settings_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--set", "stroe.fragment=1", "--set", "store.segment_bytes=much", "--set", "broker.port=70000"]
    for command in (["config", "show"], ["broker"]):
        code, shown = run(capsys, *command, *wrong)
        assert code == 2
        assert shown.startswith("dmq: 3 settings are wrong: there is no setting stroe.fragment")
        assert "store.segment_bytes = 'much'" in shown
        assert "broker.port = '70000'" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dlq", "list", "--since", "tomorrow"], "'tomorrow' is not a time: write 10m"),
        (["dlq", "list", "--since", "2999-01-01"], "'2999-01-01' lies in the future"),
        (["topic", "list", "--url", "dmq://a", "--context", "b"], "--url and --context exclude each other"),
        (["topic", "list", "--context", "nosuch"], "there is no context 'nosuch': dmq context add"),
        (["topic", "list", "--url", "nowhere"], "'nowhere' is not a URL"),
    ],
)
def test_a_mistake_that_needs_no_broker_is_told_without_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, shown = run(capsys, *arguments)
    assert code == 2
    assert words in shown


def test_a_directory_that_is_no_spool_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert run(capsys, "spool", "list", str(tmp_path)) == (
        1,
        f"dmq: {tmp_path} is not a spool: name the directory that the producer has as spool=\n",
    )
    code, shown = run(capsys, "spool", "list", os.path.join(tmp_path, "nothing"))
    assert (code, "nothing does not exist" in shown) == (1, True)
