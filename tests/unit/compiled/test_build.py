"""Wheels: with compiled loops where they can be compiled, pure and with a line that says why where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dmq import compiled

ROOT = Path(__file__).resolve().parents[3]
EXTENSION = f"_dmq_speed{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(folder: Path, **environ: str) -> tuple[str, set[str], str]:
    """The name of the wheel, the files in it, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "DMQ_PURE": "0", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel.name, set(zipfile.ZipFile(wheel).namelist()), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"PATH": "/nowhere"}, "without compiled loops, pure Python does the work: there is no C compiler"),
        ({"PATH": "{broken}"}, "without compiled loops, pure Python does the work: gcc fails: fatal error: no disk"),
        ({"DMQ_PURE": "1"}, "DMQ_PURE is set: without compiled loops"),
    ],
)
def test_a_wheel_is_pure_where_nothing_can_be_compiled(environ: dict[str, str], says: str, tmp_path: Path) -> None:
    for name in ("gcc", "cc"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'fatal error: no disk' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    told = {key: value.format(broken=tmp_path) for key, value in environ.items()}
    (tmp_path / "made").mkdir()
    name, files, said = build(tmp_path / "made", **told)
    assert name.endswith("-py3-none-any.whl")
    assert "dmq/compiled.py" in files
    assert EXTENSION not in files
    if "broken" in str(environ) and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return  # that is what is said first
    assert [line for line in said.splitlines() if says in line], said


def test_a_wheel_has_the_loops_where_they_can_be_compiled(tmp_path: Path) -> None:
    if not compiled.IS_COMPILED and not compiled.is_declined():
        pytest.skip(compiled.described())
    name, files, _ = build(tmp_path, DMQ_PURE="0")
    assert f"-cp3{sys.version_info[1]}-cp3{sys.version_info[1]}-" in name
    assert EXTENSION in files
    assert not [file for file in files if file.endswith((".pyx", ".c", ".h"))]
    assert not [*ROOT.glob("extension/*.so"), *ROOT.glob("extension/*.c")]
