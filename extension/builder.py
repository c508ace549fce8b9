"""Builds the optional extension `_dmq_speed` from the sources beside this file: Cython, then the C compiler.

The build hook calls it (`extension/hook.py`), and so does who works on the extension:
    python extension/builder.py DIRECTORY              as it is installed
    python extension/builder.py DIRECTORY --checked    with GCC's sanitizers of addresses and undefined behaviour

What always holds: nothing is written outside the directory asked for; whatever is missing or fails is one `CannotBuild`
whose text is one line and says what to install.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = "_dmq_speed"
SOURCES = Path(__file__).resolve().parent
FLAGS = (
    "-O3",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wall",
    "-Werror=implicit-function-declaration",
)
CHECKED_FLAGS = (
    "-O1",
    "-g",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fsanitize=address,undefined",
    "-fno-omit-frame-pointer",
)


class CannotBuild(Exception):
    """Why there is no extension, in one line."""


def source_digest(folder: Path = SOURCES) -> str:
    """What the extension is made of, as a number. `dmq.compiled` compares it with what was built."""
    made_of = sorted(path for path in folder.iterdir() if path.suffix in (".pyx", ".pxi", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in made_of)).hexdigest()[:16]


def missing() -> str | None:
    """What this machine lacks for a build; None if nothing."""
    compiler = compiler_command()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler}): on Debian, apt install gcc libc6-dev"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"Python's headers are not there: on Debian, apt install python{version}-dev"
    return None


def compiler_command() -> list[str]:
    """The C compiler that made this Python, or cc where that one is not there."""
    told = shlex.split(sysconfig.get_config_var("CC") or "cc")
    return told if shutil.which(told[0]) else ["cc"]


def build(folder: Path, *, is_checked: bool = False) -> Path:
    """The extension, built in a folder that exists.

    Raises:
        CannotBuild: something is missing, or a compiler refuses.
    """
    lacks = missing()
    if lacks:
        raise CannotBuild(lacks)
    code = folder / f"{MODULE}.c"
    options = ["-3", "-X", "boundscheck=True", "-X", "wraparound=False", "-X", "cdivision=True"]
    _run([sys.executable, "-m", "cython", *options, str(SOURCES / f"{MODULE}.pyx"), "-o", str(code)])
    target = folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [
        *compiler_command(),
        *(CHECKED_FLAGS if is_checked else FLAGS),
        *("-shared", "-fPIC", f'-DDMQ_SOURCES="{source_digest()}"', f"-I{SOURCES}"),
        *(f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")),
        *(str(code), "-o", str(target)),
    ]
    _run(command)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next(
            (line for line in lines if "rror:" in line or ".px" in line or ".pyx" in line),
            lines[-1] if lines else "it says nothing",
        )
        raise CannotBuild(f"{Path(command[0]).name} fails: {said.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the extension into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checked", action="store_true", help="with GCC's sanitizers")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        print(build(arguments.folder, is_checked=arguments.checked))
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
