"""Which way is in use: the compiled loops where they were built, and why not where they are not used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmq import compiled
from dmq.broker.diagnostics.doctor import State, diagnose_machine
from dmq.records import check
from dmq.settings import Settings
from tests.unit.compiled.extension import speed

SHOW = """
from dmq import compiled
from dmq.records import check
print(check.are_right is check.are_right_plain)
print(compiled.described())
"""
ROOT = Path(__file__).resolve().parents[3]


def shown(path: Path | str = "", **environ: str) -> list[str]:
    """Whether another process uses plain Python, and what it says of it."""
    kept = {key: value for key, value in os.environ.items() if key != "DMQ_PURE"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**kept, "PYTHONPATH": str(path), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_what_was_built_from_these_sources_is_used() -> None:
    assert compiled.source_digest(ROOT / "extension") == speed.SOURCES, "run ./scripts/setup: the sources have changed"
    assert shown() == ["False", "with compiled loops"]


def test_a_variable_chooses_plain_python() -> None:
    assert shown(DMQ_PURE="1") == ["True", "in pure Python, without compiled loops: DMQ_PURE is set"]
    assert shown(DMQ_PURE="0") == shown(DMQ_PURE="") == ["False", "with compiled loops"]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ModuleNotFoundError", "they were not built when DMQ was installed"),
        ("raise ImportError('no symbol x')", "they cannot be loaded: no symbol x"),
        ("SOURCES = '1234'", "they were built from other sources"),
    ],
)
def test_loops_that_cannot_be_used_are_not_and_it_says_why(module: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "_dmq_speed.py").write_text(module)
    assert shown(tmp_path) == ["True", f"in pure Python, without compiled loops: {says}"]


def test_both_ways_can_be_had_in_one_process() -> None:
    assert check.are_right_plain is not speed.are_right
    assert check.are_right is (speed.are_right if compiled.IS_COMPILED else check.are_right_plain)


def test_the_doctor_tells(tmp_path: Path) -> None:
    (finding,) = (each for each in diagnose_machine(Settings()) if each.check == "compiled loops")
    assert finding.state is State.OK
    if compiled.IS_COMPILED:
        assert finding.what == "in use"
    else:
        assert (finding.what, finding.advice) == (
            "pure Python does their work, more slowly: DMQ_PURE is set",
            "unset DMQ_PURE to use them",
        )
